// Gradients that several units found parts of, added up. The unit's head is one of H / shared.

#pragma once

#include "tile.h"

namespace HR_ISA {

struct GatherUnit {
    const Plan& plan;
    const Gather& job;
    const Unit& unit;
    const int width;
    float *one, *total;

    GatherUnit(Arena& arena, const Plan& plan, const Gather& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), width(static_cast<int>(job.width)), one(arena.floats(padded(width))),
          total(arena.floats(padded(width))) {}

    void run() {
        const View into = view(job.into, plan, unit, unit.head, job.half);
        for (std::int64_t t = 0; t < plan.tokens(unit.sequence); t++) {
            for (int j = 0; j < width; j += W) store(total + j, vf{});
            for (std::int64_t part = 0; part < job.parts; part++)
                for (std::int64_t h = 0; h < job.shared; h++) add(found_by(part, unit.head * job.shared + h), t);
            store_row(into, t, total, width);
        }
    }

    View found_by(std::int64_t part, std::int64_t head) const {
        const hr_problem& p = *plan.problem;
        const std::int64_t token = p.H * width, batch = p.T * token;
        const hr_tensor x{const_cast<float*>(job.from) + part * p.B * batch, batch, token, width};
        return view(x, plan, unit, head, false);
    }
    void add(const View& x, std::int64_t t) {
        load_row(one, x, t, width);
        for (int j = 0; j < width; j += W) store(total + j, load(total + j) + load(one + j));
    }
};

}  // namespace HR_ISA
