// One token: the state is read from memory once and written back once. Some value columns with all their keys are compared
// with what is to be written, then decayed, written to and read; meanwhile the next head's state comes into the second
// cache, so that both passes find theirs there.

#pragma once

#include "chunk.h"

namespace HR_ISA {

template <class Decay, bool delta>
struct StepUnit {
    static constexpr int WIDEST = 8;  // vectors of columns at a time
    static constexpr int EARLY = 8;   // rows that the first head's state is fetched ahead of its use

    const Plan& plan;
    const Step& job;
    const Unit& unit;
    const Inputs in;
    const int key, value;
    float *q, *k, *decay, *target, *out;  // [K], [K], [K], [V], [V]; q is scale · r q, target is w v
    float beta = 1;

    StepUnit(Arena& arena, const Plan& plan, const Step& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), in(plan, unit), key(static_cast<int>(plan.problem->K)),
          value(static_cast<int>(unit.columns)), q(arena.floats(padded(key))), k(arena.floats(padded(key))),
          decay(arena.floats(padded(key))), target(arena.floats(padded(value))), out(arena.floats(padded(value))) {}

    void run() {
        load_token();
        const hr_problem& p = *plan.problem;
        float* S = job.state + state_at(plan, unit.sequence, unit);
        if (job.bonus)
            all_columns<true>(S);
        else
            all_columns<false>(S);
        store_row(view(job.out, plan, unit, unit.head, p.dtype == HR_BFLOAT16, unit.column), 0, out, value);
    }

    // before: q reads the state as it was, and what is written now with a weight of its own.
    template <bool before>
    void all_columns(float* S) {
        const float own = before ? bonus_weight() : 0;
        int j = 0;
        for (; j + WIDEST * W <= value; j += WIDEST * W) columns<WIDEST, before>(S, j, W, own);
        for (; j + W <= value; j += W) columns<1, before>(S, j, W, own);
        if (j < value) columns<1, before>(S, j, value - j, own);
    }
    float bonus_weight() const {
        const float* u = job.bonus + unit.head * key;
        float total = 0;
        for (int i = 0; i < key; i++) total += q[i] * u[i] * k[i];
        return total;
    }

    void load_token() {
        const Span one{0, 1, 1};
        float strength, write;
        load_numbers(&strength, in.read, one, plan.problem->scale);
        load_numbers(&write, in.write, one);
        load_numbers(&beta, in.beta, one);
        load_row(q, in.q, 0, key, strength);
        load_row(k, in.k, 0, key);
        load_row(target, in.v, 0, value, write);
        load_decay(one);
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

    // NV vectors of columns from j on, `width` lanes of the last one. Pointers are copied: stores might change the members.
    template <int NV, bool before>
    HR_INLINE void columns(float* S, int j, int width, float own) {
        const Stride stride = plan.problem->V;
        const float *keys = k, *queries = q, *left = decay;
        const bool first = unit.head == 0;
        const int rows = key;
        vf write[NV], read[NV] = {};
        for (int c = 0; c < NV; c++) write[c] = load(target + j + c * W);
        for (int i = 0; delta && i < rows; i++) {
            const float* s = S + i * stride + j;
            if (first) fetch<NV>(s + EARLY * stride);
            const vf ki = splat(keys[i] * left[i]);
            for (int c = 0; c < NV; c++) write[c] -= ki * some(s + c * W, width);
        }
        for (int c = 0; c < NV; c++) write[c] *= splat(beta);
        const float* next = S + rows * (stride + j);
        for (int i = 0; i < rows; i++, next += NV * W) {
            float* s = S + i * stride + j;
            if (!delta && first) fetch<NV>(s + EARLY * stride);
            fetch<NV>(next);
            const vf di = splat(left[i]), ki = splat(keys[i]), qi = splat(queries[i]);
            for (int c = 0; c < NV; c++) {
                const vf now = some(s + c * W, width), after = di * now + ki * write[c];
                read[c] += qi * (before ? now : after);
                store_some(s + c * W, after, width);
            }
        }
        for (int c = 0; c < NV; c++) store(out + j + c * W, before ? read[c] + splat(own) * write[c] : read[c]);
    }

    template <int NV>
    static HR_INLINE void fetch(const float* p) {
        for (int c = 0; c < NV; c++) __builtin_prefetch(p + c * W, 0, 2);
    }
    static HR_INLINE vf some(const float* p, int width) {
        if (width == W) return load(p);
        vf x{};
        std::memcpy(&x, p, width * sizeof(float));
        return x;
    }
    static HR_INLINE void store_some(float* p, vf x, int width) {
        if (width == W)
            store(p, x);
        else
            std::memcpy(p, &x, width * sizeof(float));
    }
};

}  // namespace HR_ISA
