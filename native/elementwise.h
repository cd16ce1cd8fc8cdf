// Functions of single numbers, by the vector; and products with a matrix that is read once.

#pragma once

#include <math.h>  // not cmath, whose functions the linker might merge between instruction sets

#include "tile.h"

namespace HR_ISA {

HR_INLINE vf sigmoid(vf x) { return splat(1) / (splat(1) + exponential(-x)); }
HR_INLINE vf silu(vf x) { return x * sigmoid(x); }

// log(1 + y) for y from 0 to 1, as 2 artanh(y / (2 + y)): small numbers keep their digits.
HR_INLINE vf log_one_plus(vf y) {
    const vf s = y / (splat(2) + y), square = s * s;
    vf p = splat(2.0f / 17);
    for (int i = 15; i > 0; i -= 2) p = p * square + splat(2.0f / static_cast<float>(i));
    return p * s;
}
HR_INLINE vf softplus(vf x) { return (x < vf{} ? vf{} : x) + log_one_plus(exponential(-magnitude(x))); }

// x_i ← f(x_i, i) by the vector; x has room for whole ones.
template <class F>
HR_INLINE void each(float* x, int n, F f) {
    for (int i = 0; i < n; i += W) store(x + i, f(load(x + i), i));
}

template <class T>
float dot_of(const float* x, const T* y, int n) {
    vf total{};
    for (int i = 0; i < n; i += W) total += load_some(x + i, n - i) * load_some(y + i, n - i);
    return sum(total);
}

// x ← factor x + shift, n numbers between others.
inline void scale_some(float* x, int n, float factor, float shift = 0) {
    int i = 0;
    for (; i + W <= n; i += W) store(x + i, load(x + i) * splat(factor) + splat(shift));
    for (; i < n; i++) x[i] = x[i] * factor + shift;
}

// x_i ← e^(x_i − m), where m is the largest of n numbers and `other`; x has room for whole vectors. Returns the sum of these
// and of e^(other − m).
inline float soften(float* x, std::int64_t n, float other = -INFINITY) {
    for (std::int64_t i = n; i % W; i++) x[i] = -INFINITY;
    vf largest = splat(other), total{};
    for (std::int64_t i = 0; i < n; i += W) {
        const vf now = load(x + i);
        largest = now > largest ? now : largest;
    }
    float most = other;
    for (int i = 0; i < W; i++) most = largest[i] > most ? largest[i] : most;
    for (std::int64_t i = 0; i < n; i += W) {
        const vf weight = exponential(load(x + i) - splat(most));
        store(x + i, weight);
        total += weight;
    }
    return sum(total) + exponential(splat(other - most))[0];
}

// y_r = Σ_j A_rj x_j for A [rows, depth]. W rows at a time, so that sums over lanes are sums of vectors.
template <class T>
void product(float* y, const T* A, const float* x, int rows, int depth) {
    for (int r = 0; r < rows; r += W) {
        const int count = rows - r < W ? rows - r : W;
        vf total[W] = {};
        for (int j = 0; j < depth; j += W) {
            const vf xs = load_some(x + j, depth - j);
            for (int i = 0; i < count; i++)
                total[i] += load_some(A + static_cast<Stride>(r + i) * depth + j, depth - j) * xs;
        }
        transpose(total);
        for (int i = 1; i < W; i++) total[0] += total[i];
        store(y + r, total[0]);
    }
}

// y_r += Σ_j x_j A_jr for A [depth, rows].
template <class T>
void add_transposed_product(float* y, const T* A, const float* x, int rows, int depth) {
    for (int j = 0; j < depth; j++)
        each(y, rows, [&](vf sum, int r) { return sum + splat(x[j]) * load_some(A + Stride{j} * rows + r, rows - r); });
}

}  // namespace HR_ISA
