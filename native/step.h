// One token: the state is read from memory once and written back once. The delta rule compares it with what is to be
// written, then it is decayed, written to and read; further queries of a group read it in the cache. Meanwhile the next
// head's state comes into the second cache, an equal share in each pass, so that memory is never idle and both passes find
// their state there.

#pragma once

#include "chunk.h"

namespace HR_ISA {

template <class Decay, bool delta>
struct StepUnit {
    static constexpr int WIDEST = 8;  // vectors of columns at a time
    static constexpr int ROWS = 32;  // whose columns are all visited before the next rows: near in memory, near in time
    static constexpr int EARLY = 24;  // rows that the first head's state is fetched ahead of its use

    const Plan& plan;
    const Step& job;
    const Unit& unit;
    const Inputs in;
    const int key, value;
    const std::int64_t queries;           // of each state
    float *q, *k, *decay, *target, *out;  // [K], [K], [K], [V], [V]; q is scale · r q, target is w v
    float beta = 1;

    StepUnit(Arena& arena, const Plan& plan, const Step& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), in(plan, unit), key(static_cast<int>(plan.problem->K)),
          value(static_cast<int>(unit.columns)), queries(plan.queries()), q(arena.floats(padded(key))),
          k(arena.floats(padded(key))), decay(arena.floats(padded(key))), target(arena.floats(padded(value))),
          out(arena.floats(padded(value))) {}

    void run() {
        load_token();
        float* S = job.state + state_at(plan, unit.sequence, unit);
        if (job.bonus)
            all_columns<true>(S);
        else
            all_columns<false>(S);
    }

    // before: q reads the state as it was, and what is written now with a weight of its own.
    template <bool before>
    void all_columns(float* S) {
        if (delta) panels<&StepUnit::template compare<WIDEST>, &StepUnit::template compare<1>>(S);
        for (int j = 0; j < value; j += W) store(target + j, load(target + j) * splat(beta));
        if (before) other_queries<true>(S);
        load_query(0, before);
        panels<&StepUnit::template update<WIDEST, before>, &StepUnit::template update<1, before>>(S);
        store_out(0);
        if (!before) other_queries<false>(S);
    }
    // All but the first of a group, which reads while it writes.
    template <bool before>
    void other_queries(float* S) {
        for (std::int64_t query = 1; query < queries; query++) {
            load_query(query, before);
            panels<&StepUnit::template look<WIDEST>, &StepUnit::template look<1>>(S);
            store_out(query);
        }
    }
    using Pass = void (StepUnit::*)(float* S, int begin, int j, int width);
    template <Pass wide, Pass narrow>
    void panels(float* S) {
        for (int i = 0; i < key; i += ROWS) {
            int j = 0;
            for (; j + WIDEST * W <= value; j += WIDEST * W) (this->*wide)(S, i, j, W);
            for (; j < value; j += W) (this->*narrow)(S, i, j, value - j < W ? value - j : W);
        }
    }
    float bonus_weight() const {
        const float* u = job.bonus + unit.head * key;
        float total = 0;
        for (int i = 0; i < key; i++) total += q[i] * u[i] * k[i];
        return total;
    }

    void load_token() {
        const Span one{0, 1, 1};
        float write;
        load_numbers(&write, in.write, one);
        load_numbers(&beta, in.beta, one);
        load_row(k, in.k, 0, key);
        load_row(target, in.v, 0, value, write);
        load_decay(one);
    }
    // A query of the group, and in `out` what it reads of the token's own write.
    void load_query(std::int64_t query, bool before) {
        const hr_problem& p = *plan.problem;
        const std::int64_t head = unit.head * queries + query;
        float strength;
        load_numbers(&strength, view(p.read_gate, plan, unit, head, false), {0, 1, 1}, p.scale);
        load_row(q, queries == 1 ? in.q : view(p.q, plan, unit, head, p.dtype == HR_BFLOAT16), 0, key, strength);
        const vf own = splat(before ? bonus_weight() : 0);
        for (int j = 0; j < value; j += W) store(out + j, own * load(target + j));
    }
    void store_out(std::int64_t query) {
        const bool half = plan.problem->dtype == HR_BFLOAT16;
        store_row(view(job.out, plan, unit, unit.head * queries + query, half, unit.column), 0, out, value);
    }
    void load_decay(Span one) {
        float g = 0;
        if (plan.problem->decay == HR_DECAY_VECTOR)
            load_row(decay, in.log_decay, 0, key);
        else if (!Decay::none)
            load_numbers(&g, in.log_decay, one);
        for (int i = 0; i < padded(key); i += W)
            store(decay + i, exponential(plan.problem->decay == HR_DECAY_VECTOR ? load(decay + i) : splat(g)));
    }

    // Both passes: rows from `begin` on, NV vectors of columns from j on, `width` lanes of the last one. Pointers are copied:
    // stores might change the members.
    template <int NV>
    HR_INLINE void compare(float* S, int begin, int j, int width) {
        const Stride stride = plan.problem->V;
        const float *keys = k, *left = decay, *next = S + key * stride + j;
        const bool first = unit.head == 0;
        const int end = begin + ROWS < key ? begin + ROWS : key;
        vf write[NV];
        for (int c = 0; c < NV; c++) write[c] = load(target + j + c * W);
        for (int i = begin; i < end; i++) {
            const float* s = S + i * stride + j;
            if (first) fetch<NV>(s + EARLY * stride);
            fetch<NV / 2>(next + i * stride);
            const vf ki = splat(keys[i] * left[i]);
            for (int c = 0; c < NV; c++) write[c] -= ki * load_some(s + c * W, width);
        }
        for (int c = 0; c < NV; c++) store(target + j + c * W, write[c]);
    }
    template <int NV, bool before>
    HR_INLINE void update(float* S, int begin, int j, int width) {
        constexpr int COMPARED = delta ? NV / 2 : 0;  // vectors of the next head that the other pass has fetched
        const Stride stride = plan.problem->V;
        const float *keys = k, *queries = q, *left = decay, *next = S + key * stride + j + COMPARED * W;
        const bool first = !delta && unit.head == 0;
        const int end = begin + ROWS < key ? begin + ROWS : key;
        vf write[NV], read[NV];
        for (int c = 0; c < NV; c++) write[c] = load(target + j + c * W), read[c] = load(out + j + c * W);
        for (int i = begin; i < end; i++) {
            float* s = S + i * stride + j;
            if (first) fetch<NV>(s + EARLY * stride);
            fetch<NV - COMPARED>(next + i * stride);
            const vf di = splat(left[i]), ki = splat(keys[i]), qi = splat(queries[i]);
            for (int c = 0; c < NV; c++) {
                const vf now = load_some(s + c * W, width), after = di * now + ki * write[c];
                read[c] += qi * (before ? now : after);
                store_some(s + c * W, after, width);
            }
        }
        for (int c = 0; c < NV; c++) store(out + j + c * W, read[c]);
    }

    template <int NV>
    HR_INLINE void look(float* S, int begin, int j, int width) {
        const Stride stride = plan.problem->V;
        const float* numbers = q;
        const int end = begin + ROWS < key ? begin + ROWS : key;
        vf read[NV];
        for (int c = 0; c < NV; c++) read[c] = load(out + j + c * W);
        for (int i = begin; i < end; i++) {
            const vf qi = splat(numbers[i]);
            for (int c = 0; c < NV; c++) read[c] += qi * load_some(S + i * stride + j + c * W, width);
        }
        for (int c = 0; c < NV; c++) store(out + j + c * W, read[c]);
    }

    template <int NV>
    static HR_INLINE void fetch(const float* p) {
        for (int c = 0; c < NV; c++) __builtin_prefetch(p + c * W, 0, 2);
    }
};

}  // namespace HR_ISA
