// What a program's operations do, but for layers: by row of the batch, or for linear layers by rows of the weight.

#pragma once

#include "linear.h"

namespace HR_ISA {

// How far apart the panels of a linear layer's input are.
inline Stride panel_of(const hr_operation& op) { return PANEL * static_cast<Stride>(padded(op.inputs)); }

struct Operation {
    const Working& working;
    const hr_operation& op;
    const std::int64_t row;
    float* const in = working.at(row, op.in);
    float* const out = working.at(row, op.out);

    void run() const {
        switch (static_cast<hr_kind>(op.kind)) {  // no default: -Werror=switch refuses a kind without a case
            case HR_EMBED: return op.dtype == HR_FLOAT32 ? take<float>(token()) : take<std::uint16_t>(token());
            case HR_LOAD: return op.dtype == HR_FLOAT32 ? load_state<float>() : load_state<std::uint16_t>();
            case HR_TRANSPOSED: return op.dtype == HR_FLOAT32 ? transposed<float>() : transposed<std::uint16_t>();
            case HR_STORE: return op.dtype == HR_FLOAT32 ? give<float>() : give<std::uint16_t>();
            case HR_NORM: return op.dtype == HR_FLOAT32 ? normalize<float>() : normalize<std::uint16_t>();
            case HR_MIX: return op.dtype == HR_FLOAT32 ? mix<float>() : mix<std::uint16_t>();
            case HR_ACTIVATE: return activate();
            case HR_CAP: return cap();
            case HR_LINEAR: return working.many() ? transpose_input() : round_input();
            case HR_LAYER:
            case HR_ATTEND:
            case HR_KINDS_OF_OPERATIONS: return;
        }
    }

private:
    void round_input() const {
        round_row(working.integers_of(row), working.scales_of(row), in, static_cast<int>(op.inputs));
    }
    // `row` counts vectors of inputs.
    void transpose_input() const {
        transpose_columns(working.transposed + row * W * PANEL, panel_of(op), working.at(0, op.in) + row * W,
                          static_cast<Stride>(working.width), static_cast<int>(working.program->rows));
    }
    std::int64_t token() const { return working.program->tokens[row]; }
    template <class T>
    const T* weight() const {
        return static_cast<const T*>(op.weight);
    }

    template <class T>
    void take(std::int64_t from) const {
        fill(weight<T>() + from * op.outputs, op.number);
    }
    template <class T>
    void load_state() const {
        fill(static_cast<const T*>(op.state) + row * op.outputs, 1);
    }
    template <class T>
    void fill(const T* p, float factor) const {
        const int n = static_cast<int>(op.outputs);
        each(out, n, [&](vf, int i) { return load_some(p + i, n - i) * splat(factor); });
    }
    template <class T>
    void transposed() const {
        const int n = static_cast<int>(op.outputs);
        each(out, n, [](vf, int) { return vf{}; });
        add_transposed_product(out, weight<T>(), in, n, static_cast<int>(op.inputs));
    }
    template <class T>
    void give() const {
        const std::int64_t last = working.program->rows - 1;
        if (in_order() && row < last) return;
        store_row(static_cast<T*>(op.state) + (in_order() ? 0 : row) * op.inputs, in, static_cast<int>(op.inputs), 1);
    }
    bool in_order() const { return working.program->in_order != 0; }

    // w ⊙ x / rms(x), (1 + w) ⊙ x / rms(x), or w ⊙ (x − mean) / deviation + b.
    template <class T>
    void normalize() const {
        for (std::int64_t first = 0; first == 0 || first < op.outputs; first += op.inputs)
            normalize<T>(in + first, out + first);
    }
    template <class T>
    void normalize(const float* in, float* out) const {
        const T *w = weight<T>(), *b = static_cast<const T*>(op.bias);
        const int n = static_cast<int>(op.inputs);
        const bool centred = op.what == HR_LAYER_NORM;
        vf total{}, squares{};
        for (int i = 0; centred && i < n; i += W) total += load_some(in + i, n - i);
        const vf mean = splat(sum(total) / static_cast<float>(n));
        for (int i = 0; i < n; i += W) {
            const vf x = load_some(in + i, n - i), y = n - i < W ? some_of(x - mean, n - i) : x - mean;
            squares += y * y;
        }
        const vf factor = splat(1 / sqrtf(sum(squares) / static_cast<float>(n) + op.number));
        const vf offset = splat(op.what == HR_RMS_OFFSET_NORM ? 1 : 0);
        each(out, n, [&](vf before, int i) {
            vf y = (load(in + i) - mean) * factor;
            if (w) y *= offset + load_some(w + i, n - i);
            if (b) y += load_some(b + i, n - i);
            return op.add ? before + y : y;
        });
    }
    static vf some_of(vf x, int count) {
        for (int i = count; i < W; i++) x[i] = 0;
        return x;
    }
    void activate() const {
        const int n = static_cast<int>(op.inputs);
        const float* factor = op.other < 0 ? nullptr : working.at(row, op.other);
        each(out, n, [&](vf, int i) {
            const vf y = activated(load(in + i));
            return factor ? y * load(factor + i) : y;
        });
    }
    HR_INLINE vf activated(vf x) const {
        switch (static_cast<hr_activation>(op.what)) {
            case HR_SILU: return silu(x);
            case HR_SIGMOID: return sigmoid(x);
            case HR_RELU: return x < vf{} ? vf{} : x;
            case HR_RELU_SQUARED: return x < vf{} ? vf{} : x * x;
            case HR_TANH: return by_lane(x, [](float a) { return tanhf(a); });
            case HR_GELU: return by_lane(x, [](float a) { return 0.5f * a * (1 + erff(a * 0.70710678f)); });
            case HR_GELU_TANH:
                return by_lane(
                    x, [](float a) { return 0.5f * a * (1 + tanhf(0.79788456f * (a + 0.044715f * a * a * a))); });
            case HR_ACTIVATIONS: break;
        }
        return x;
    }
    template <class F>
    static HR_INLINE vf by_lane(vf x, F f) {
        for (int i = 0; i < W; i++) x[i] = f(x[i]);
        return x;
    }
    // x_t + (x_{t−1} − x_t) ⊙ (w + y).
    template <class T>
    void mix() const {
        const int n = static_cast<int>(op.inputs);
        const float* previous = in_order() && row ? working.at(row - 1, op.in) : nullptr;
        const T* before = static_cast<const T*>(op.state) + (in_order() ? 0 : row) * op.inputs;
        const float* more = op.other < 0 ? nullptr : working.at(row, op.other);
        each(out, n, [&](vf, int i) {
            const vf x = load(in + i), share = load_some(weight<T>() + i, n - i);
            const vf past = previous ? load(previous + i) : load_some(before + i, n - i);
            return x + (past - x) * (more ? share + load(more + i) : share);
        });
    }
    void cap() const {
        float* logits = static_cast<float*>(op.state) + row * op.outputs;
        for (std::int64_t i = 0; i < op.outputs; i++) logits[i] = op.number * tanhf(logits[i] / op.number);
    }
};

inline void operate(const Working& working, const hr_operation& op, std::int64_t row) {
    Operation{working, op, row}.run();
}

// The rows first … last − 1 of a linear layer's weight, for all rows of the batch.
inline void linear(const Working& working, const hr_operation& op, std::int64_t first, std::int64_t last) {
    const Rows rows{working.at(0, op.in),
                    working.integers,
                    working.scales,
                    working.width,
                    working.integer_row,
                    working.scale_row,
                    static_cast<int>(op.inputs),
                    static_cast<Stride>(op.inputs),
                    working.transposed,
                    panel_of(op)};
    const Results results{op.state ? static_cast<float*>(op.state) : working.at(0, op.out),
                          op.state ? op.outputs : working.width, &op};
    const std::int64_t B = working.program->rows;
    switch (op.weight_dtype) {
        case HR_FLOAT32: return all_rows(static_cast<const float*>(op.weight), rows, results, B, first, last);
        case HR_BFLOAT16: return all_rows(static_cast<const std::uint16_t*>(op.weight), rows, results, B, first, last);
        case HR_INT8: return all_rows(static_cast<const std::int8_t*>(op.weight), rows, results, B, first, last);
    }
}

}  // namespace HR_ISA
