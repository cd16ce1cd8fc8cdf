// Mamba's selective scan: every channel has S numbers with decays of their own, and all channels share B and C.
//
//     h_t = exp(dt_t A) h_{t−1} + dt_t u_t B_t          y_t = C_t h_t
//
// A unit is some channels of a sequence. It goes chunk by chunk, and through a chunk W channels at a time. The state before
// each chunk is kept for the backward, which computes the states within a chunk again.
//
// In the problem, q is C, k is B, v is u, K is S, and V the number of channels.

#pragma once

#include "tile.h"

namespace HR_ISA {

// 2^x to about an ulp for x <= 0; 0 below −126, where floats would be denormal. NaN stays NaN.
HR_INLINE vf power_of_two(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    const vf shifted = x + magic, r = x - (shifted - magic);
    constexpr float coefficients[] = {1.33983e-3f, 9.6180e-3f, 5.550332e-2f, 0.24022650f, 0.69314718f, 1.0f};
    vf p = splat(1.5469e-4f);
    for (float c : coefficients) p = p * r + splat(c);
    const vf power = bits((bits(shifted) << 23) + (std::uint32_t{127} << 23));
    return x < splat(-126.0f) ? vf{} : p * power;
}

struct ScanUnit {
    static constexpr float LOG2_E = 1.44269504f;
    static constexpr int CHUNK = HR_SCAN_CHUNK;

    const Plan& plan;
    const Scan& job;
    const Unit& unit;
    const View u, dt, B, C, out, d_u, d_dt;  // out: in the backward the gradient to it
    const int numbers, channels, width;      // S, this unit's channels, and padded
    const std::int64_t tokens;
    Tile xs, steps, b, c, ys;              // [CHUNK, width], [CHUNK, width], [CHUNK, S], [CHUNK, S], [CHUNK, width]
    float *A, *h, *d_A, *decays, *states;  // [S, width] three times, [CHUNK, S, W], [CHUNK + 1, S, W]
    float *d_b, *d_c;                      // [CHUNK, S, W], of which the lanes have to be added up
    Span span{};

    ScanUnit(Arena& arena, const Plan& plan, const Scan& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), u(own(plan.problem->v, unit.column)), dt(own(job.dt, unit.column)),
          B(own(plan.problem->k)), C(own(plan.problem->q)), out(own(job.out, unit.column)),
          d_u(own(job.d_u, unit.column)), d_dt(own(job.d_dt, unit.column)), numbers(static_cast<int>(plan.problem->K)),
          channels(static_cast<int>(unit.columns)), width(padded(channels)), tokens(plan.length(unit.sequence)),
          xs(arena.tile(CHUNK, width)), steps(arena.tile(CHUNK, width)), b(arena.tile(CHUNK, padded(numbers))),
          c(arena.tile(CHUNK, padded(numbers))), ys(arena.tile(CHUNK, width)), A(arena.floats(numbers * width)),
          h(arena.floats(numbers * width)) {
        if (!job.d_dt.data) return;
        d_A = arena.floats(numbers * width);
        decays = arena.floats(CHUNK * numbers * W);
        states = arena.floats((CHUNK + 1) * numbers * W);
        d_b = arena.floats(CHUNK * numbers * W);
        d_c = arena.floats(CHUNK * numbers * W);
    }
    View own(const hr_tensor& x, std::int64_t column = 0) const { return view(x, plan, unit, 0, false, column); }

    void run() {
        load_columns(A, job.A);
        for (int i = 0; i < numbers * width; i += W) store(A + i, load(A + i) * splat(LOG2_E));
        job.d_dt.data ? backward() : forward();
    }
    // This unit's channels of a contiguous matrix [S, V], or of the n-th of several.
    void load_columns(float* into, const float* from, std::int64_t n = 0) const {
        for (int s = 0; s < numbers; s++) load_row(into + s * width, from + at(n, s), channels, 1);
    }
    void store_columns(float* into, const float* from, std::int64_t n) const {
        for (int s = 0; s < numbers; s++) store_row(into + at(n, s), from + s * width, channels, 1);
    }
    std::int64_t at(std::int64_t n, int s) const { return (n * numbers + s) * plan.problem->V + unit.column; }

    std::int64_t chunks() const { return (tokens + CHUNK - 1) / CHUNK; }
    // Where the state before a chunk is kept: chunks of sequences that were before are at most as many as this counts.
    std::int64_t slot(std::int64_t chunk) const { return plan.start(unit.sequence) / CHUNK + unit.sequence + chunk; }
    void begin(std::int64_t chunk) {
        const std::int64_t first = chunk * CHUNK, left = tokens - first;
        const int n = static_cast<int>(left < CHUNK ? left : CHUNK);
        span = {first, n, n};
        load_tile(xs, u, span, channels), load_tile(steps, dt, span, channels);
        load_tile(b, B, span, numbers), load_tile(c, C, span, numbers);
    }
    void end(const View& into, Tile from) const {
        for (int t = 0; t < span.n; t++) store_row(into, span.first + t, from.row(t), channels);
    }

    void forward() {
        load_columns(h, plan.problem->initial_state, unit.sequence);
        for (std::int64_t i = 0; i < chunks(); i++) {
            begin(i);
            if (job.kept) store_columns(job.kept, h, slot(i));
            for (int j = 0; j < channels; j += W)
                for (int t = 0; t < span.n; t++) advance(t, j);
            end(out, ys);
        }
        store_columns(job.state, h, unit.sequence);
    }
    HR_INLINE void advance(int t, int j) {
        const float *decay = A + j, *bs = b.row(t), *cs = c.row(t);
        float* state = h + j;
        const vf step = load(steps.row(t) + j), x = step * load(xs.row(t) + j);
        vf y{};
        for (int s = 0; s < numbers; s++, state += width, decay += width) {
            const vf now = power_of_two(step * load(decay)) * load(state) + x * splat(bs[s]);
            store(state, now);
            y += now * splat(cs[s]);
        }
        store(ys.row(t) + j, y);
    }

    // h is the gradient to the state after the tokens that are still to come.
    void backward() {
        load_columns(h, job.state, unit.sequence);
        for (int i = 0; i < numbers * width; i += W) store(d_A + i, vf{});
        for (std::int64_t i = chunks(); i-- > 0;) {
            begin(i), load_tile(ys, out, span, channels);
            for (int i = 0; i < span.n * numbers * W; i += W) store(d_b + i, vf{}), store(d_c + i, vf{});
            for (int j = 0; j < channels; j += W) chunk_gradients(i, j);
            end(d_u, xs), end(d_dt, steps);
            add_lanes(job.d_B, d_b), add_lanes(job.d_C, d_c);
        }
        store_columns(job.d_A, d_A, unit.sequence);
        store_columns(job.d_initial, h, unit.sequence);
    }
    void chunk_gradients(std::int64_t chunk, int j) {
        const int left = channels - j;
        for (int s = 0; s < numbers; s++)
            load_row(states + s * W, job.kept + at(slot(chunk), s) + j, left < W ? left : W, 1);
        for (int t = 0; t < span.n; t++) again(t, j);
        for (int t = span.n; t-- > 0;) gradients(t, j);
    }
    HR_INLINE void again(int t, int j) {
        const float *bs = b.row(t), *before = states + t * numbers * W;
        float *after = states + (t + 1) * numbers * W, *decay = decays + t * numbers * W;
        const vf step = load(steps.row(t) + j), x = step * load(xs.row(t) + j);
        for (int s = 0; s < numbers; s++) {
            const vf a = power_of_two(step * load(A + s * width + j));
            store(decay + s * W, a);
            store(after + s * W, a * load(before + s * W) + x * splat(bs[s]));
        }
    }
    HR_INLINE void gradients(int t, int j) {
        const float *bs = b.row(t), *cs = c.row(t), *decay = decays + t * numbers * W;
        const float *before = states + t * numbers * W, *after = before + numbers * W;
        float *into_b = d_b + t * numbers * W, *into_c = d_c + t * numbers * W;
        const vf step = load(steps.row(t) + j), x = load(xs.row(t) + j), d_y = load(ys.row(t) + j);
        vf written{}, d_step{};
        for (int s = 0; s < numbers; s++) {
            const int k = s * width + j;
            const vf d_h = load(h + k) + d_y * splat(cs[s]), d_before = d_h * load(decay + s * W);
            const vf d_log = d_before * load(before + s * W);
            add(into_c + s * W, d_y * load(after + s * W));
            add(into_b + s * W, d_h * (step * x));
            written += d_h * splat(bs[s]);
            d_step += d_log * load(A + k);
            add(d_A + k, d_log * step);
            store(h + k, d_before);
        }
        store(xs.row(t) + j, written * step);
        store(steps.row(t) + j, d_step * splat(1 / LOG2_E) + written * x);
    }
    static HR_INLINE void add(float* p, vf x) { store(p, load(p) + x); }

    // Adds up the lanes into [parts, T, S].
    void add_lanes(float* into, const float* from) const {
        const std::int64_t first = unit.part * plan.problem->T + plan.start(unit.sequence) + span.first;
        for (int i = 0; i < span.n * numbers; i++) into[first * numbers + i] = sum(load(from + i * W));
    }
};

}  // namespace HR_ISA
