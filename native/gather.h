// Grouped heads: the gradients to q and k of the heads that share them, added up. The unit's head is one of Hq.

#pragma once

#include "chunk.h"

namespace HR_ISA {

struct GatherUnit {
    const Plan& plan;
    const Gather& job;
    const Unit& unit;
    const int key;
    float *part, *total;

    GatherUnit(Arena& arena, const Plan& plan, const Gather& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), key(static_cast<int>(plan.problem->K)), part(arena.floats(padded(key))),
          total(arena.floats(padded(key))) {}

    void run() {
        const hr_problem& p = *plan.problem;
        const std::int64_t shared = p.H / p.Hq;
        const hr_tensor every{const_cast<float*>(job.by_head), p.T * p.H * p.K, p.H * p.K, p.K};
        const View into = view(job.into, plan, unit, unit.head, p.dtype == HR_BFLOAT16);
        for (std::int64_t t = 0; t < plan.length(unit.sequence); t++) {
            load_row(total, view(every, plan, unit, unit.head * shared, false), t, key);
            for (std::int64_t h = 1; h < shared; h++) {
                load_row(part, view(every, plan, unit, unit.head * shared + h, false), t, key);
                for (int j = 0; j < key; j += W) store(total + j, load(total + j) + load(part + j));
            }
            store_row(into, t, total, key);
        }
    }
};

}  // namespace HR_ISA
