// The short convolution: each channel with its own few weights over the latest tokens, then SiLU.
//
//     z_t = b + Σ_i w_i x_{t − width + 1 + i}          y_t = z_t σ(z_t)
//
// Token by token, with the last `width` rows in a ring. The backward finds z again.

#pragma once

#include "elementwise.h"

namespace HR_ISA {

struct ConvolutionUnit {
    static constexpr int SHORT = 256;  // tokens whose products are added up before they join the sum of all

    const Plan& plan;
    const Convolution& job;
    const Unit& unit;
    const View x, out;  // out: in the backward the gradient to it
    const int channels, C, width;
    const std::int64_t tokens;
    float *weight, *bias, *window, *row;  // [width + 1, C] of which the bias is the last, [width, C], [C]
    float *errors = nullptr, *sums = nullptr, *total = nullptr;  // [width, C], and like weight

    ConvolutionUnit(Arena& arena, const Plan& plan, const Convolution& job, const Unit& unit)
        : plan(plan), job(job), unit(unit), x(view(plan.problem->v, plan, unit, 0, half(plan), unit.column)),
          out(view(job.out, plan, unit, 0, half(plan), unit.column)), channels(static_cast<int>(unit.columns)),
          C(padded(channels)), width(static_cast<int>(job.given.width)), tokens(plan.length(unit.sequence)),
          weight(arena.floats((width + 1) * C)), bias(weight + width * C), window(arena.floats(width * C)),
          row(arena.floats(C)) {
        if (!job.d_weight) return;
        errors = arena.floats(width * C);
        sums = arena.floats((width + 1) * C);
        total = arena.floats((width + 1) * C);
    }
    static bool half(const Plan& plan) { return plan.problem->dtype == HR_BFLOAT16; }

    void run() {
        const hr_convolution& given = job.given;
        for (int i = 0; i <= width; i++) load_own(weight + i * C, given.weight, i);
        for (int i = 1; i < width; i++) load_own(slot(window, i - width), given.history, history_row(i));
        job.d_weight ? backward() : forward();
    }
    // This unit's channels of row i of a contiguous matrix.
    void load_own(float* into, const float* from, std::int64_t i) const {
        load_row(into, from + i * plan.problem->V + unit.column, channels, 1);
    }
    std::int64_t history_row(int i) const { return unit.sequence * (width - 1) + i - 1; }

    // Where token t is in a ring, t > −width.
    float* slot(float* ring, std::int64_t t) const { return ring + (t + width) % width * C; }

    // What a token adds up: the rows of the window, or of the errors, that meet weights 0, 1, …
    struct Taps {
        const float* at[HR_WIDEST];

        HR_INLINE vf meet(const float* weight, int C, int width, int j, vf z) const {
            for (int i = 0; i < width; i++) z += load(weight + i * C + j) * load(at[i] + j);
            return z;
        }
    };
    Taps read(std::int64_t t) {
        load_row(slot(window, t), x, t, channels);
        Taps taps;
        for (int i = 0; i < width; i++) taps.at[i] = slot(window, t - width + 1 + i);
        return taps;
    }

    void forward() {
        for (std::int64_t t = 0; t < tokens; t++) {
            const Taps taps = read(t);
            for (int j = 0; j < C; j += W) store(row + j, silu(taps.meet(weight, C, width, j, load(bias + j))));
            store_row(out, t, row, channels);
        }
    }

    void backward() {
        clear(errors, width), clear(sums, width + 1), clear(total, width + 1);
        for (std::int64_t t = 0; t < tokens + width - 1; t++) {
            if (t < tokens)
                find_error(t);
            else
                clear(slot(errors, t), 1);
            spread(t);
            if (t % SHORT == SHORT - 1) flush();
        }
        flush();
        float* into = job.d_weight + unit.sequence * (width + 1) * plan.problem->V + unit.column;
        for (int i = 0; i <= width; i++) store_row(into + i * plan.problem->V, total + i * C, channels, 1);
    }
    // The gradient to z_t, and its products with what z_t was made of.
    void find_error(std::int64_t t) {
        const Taps taps = read(t);
        float* error = slot(errors, t);
        load_row(row, out, t, channels);
        for (int j = 0; j < C; j += W) {
            const vf z = taps.meet(weight, C, width, j, load(bias + j)), s = sigmoid(z);
            const vf e = load(row + j) * s * (splat(1) + z * (splat(1) - s));
            store(error + j, e);
            for (int i = 0; i < width; i++) add(sums + i * C + j, e * load(taps.at[i] + j));
            add(sums + width * C + j, e);
        }
    }
    // The gradient to the oldest token of the window, which nothing after t reads.
    void spread(std::int64_t t) {
        Taps taps;
        for (int i = 0; i < width; i++) taps.at[i] = slot(errors, t - i);
        for (int j = 0; j < C; j += W) store(row + j, taps.meet(weight, C, width, j, vf{}));
        const std::int64_t oldest = t - width + 1;
        if (oldest >= 0)
            store_row(view(job.d_x, plan, unit, 0, half(plan), unit.column), oldest, row, channels);
        else
            store_row(job.d_history + history_row(static_cast<int>(t + 1)) * plan.problem->V + unit.column, row,
                      channels, 1);
    }
    void flush() {
        for (int j = 0; j < (width + 1) * C; j += W) add(total + j, load(sums + j));
        clear(sums, width + 1);
    }

    void clear(float* p, int rows) const {
        for (int j = 0; j < rows * C; j += W) store(p + j, vf{});
    }
    static HR_INLINE void add(float* p, vf x) { store(p, load(p) + x); }
};

}  // namespace HR_ISA
