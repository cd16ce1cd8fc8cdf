// The forward of one unit, chunk by chunk, the state going from one to the next:
//
//     out = rows(q') S + scores(q') U,   q' = scale · r q

#pragma once

#include "chunk.h"

namespace HR_ISA {

template <class Decay, bool delta>
struct ForwardUnit {
    const Plan& plan;
    const Forward& job;
    const Unit& unit;
    Chunk<Decay, delta> chunk;
    Tile q, q_rows, A, out, S;
    Factor q_left, A_left;
    float* strength;  // scale · r
    View out_into;
    Own own;
    Ahead ahead;

    ForwardUnit(Arena& arena, const Plan& plan, const Forward& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), chunk(arena, plan, unit, false),
          own(arena, plan, unit, chunk.in, chunk.key, chunk.value) {
        const int C = plan.chunk;
        q = arena.tile(C, chunk.K);
        q_rows = Decay::none ? q : arena.tile(C, chunk.K);
        A = arena.tile(C, C);
        out = arena.tile(C, chunk.V);
        S = arena.tile(chunk.K, chunk.V);
        q_left = left_factor(arena, C, chunk.K), A_left = left_factor(arena, C, C);
        strength = arena.floats(C);
        out_into = view(job.out, plan, unit, unit.head, plan.problem->dtype == HR_BFLOAT16, unit.column);
    }

    void run() {
        const hr_problem& p = *plan.problem;
        const std::int64_t own = state_at(plan, unit.sequence, unit);
        Normalizer& normalizer = chunk.normalizer;
        const float* initial = p.initial_state ? p.initial_state + own : nullptr;
        load_state(S, initial, plan.columns(), chunk.key, chunk.value);
        normalizer.load(normalizer.z, initial);
        for (std::int64_t i = 0; i < chunks(plan, unit); i++) {
            if (job.kept && i && i % plan.run == 0) store(kept_state(plan, job.kept, unit, i / plan.run));
            step(span_of(plan, unit, i), span_of(plan, unit, i + 1));
        }
        store(job.final_state + own);
    }
    void store(float* state) const {
        store_state(state, S, plan.columns(), chunk.key, chunk.value);
        chunk.normalizer.store(state, chunk.normalizer.z);
    }

    void step(Span span, Span next) {
        fetch(span, next);
        chunk.begin(span);
        chunk.load_values();
        chunk.hold(S);
        if constexpr (delta) {
            chunk.compare_keys();
            chunk.correct();
        } else {
            chunk.strengthen();
        }
        read(span);
        chunk.write(S, S, Fetch{&ahead});
        chunk.write_normalizer(chunk.normalizer.z, chunk.normalizer.z);
    }

    void fetch(Span span, Span next) {
        ahead.clear();
        ahead.add(out_into, span, chunk.value);
        ahead.add(chunk.in.k, next, chunk.key);
        ahead.add(chunk.in.v, next, chunk.value);
        ahead.add(chunk.in.q, next, chunk.key);
        if (plan.problem->decay == HR_DECAY_VECTOR) ahead.add(chunk.in.log_decay, next, chunk.key);
    }

    void read(Span span) {
        load_numbers(strength, chunk.in.read, span, plan.problem->scale);
        load_tile(q, chunk.in.q, span, chunk.key, strength);
        chunk.decay.scores(q, chunk.k, A, false);
        q_rows = chunk.decay.rows(q, q_rows);
        const Plus before{pack_left(q_rows, q_left, span.rows, chunk.K), chunk.memory, chunk.K, Part::all};
        if constexpr (delta)
            multiply(out, span.rows, chunk.V, Zero{}, Fetch{&ahead}, before, Plus{A, chunk.U, span.rows, Part::up_to});
        else
            multiply(out, span.rows, chunk.V, Zero{}, Fetch{&ahead}, before,
                     Plus{pack_left(A, A_left, span.rows, span.rows), chunk.writes, span.rows, Part::up_to});
        for (int i = 0; plan.delay() && i < span.n; i++) {
            own.load(span.first + i);
            add_row(out.row(i), own.v, own.score() * own.beta * own.write, chunk.value);
        }
        Normalizer& normalizer = chunk.normalizer;
        if (normalizer) normalizer.divide(q_rows, A, normalizer.z, span.rows);
        store_tile(out_into, out, span, chunk.value, normalizer ? normalizer.share : nullptr);
    }
};

}  // namespace HR_ISA
