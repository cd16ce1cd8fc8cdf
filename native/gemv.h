// A few rows of float32 times a matrix of int8 with a scale per row of it: what a decoder's linear layers do. Bound by
// memory, so a weight is read once, widened in registers, and meets every row of x while it is there.

#pragma once

#include <cstring>

#include "simd.h"

namespace HR_ISA {

typedef std::int8_t vb __attribute__((vector_size(W)));
typedef std::int16_t vs __attribute__((vector_size(2 * W)));

HR_INLINE vf widened(const std::int8_t* p) {
    vb x;
    std::memcpy(&x, p, W);
    const vs twice = __builtin_convertvector(x, vs);  // GCC takes a step of four apart, lane by lane
    return __builtin_convertvector(__builtin_convertvector(twice, vi), vf);
}

// Rows first … last − 1 of the weight.
inline void int8_rows(const hr_int8_product& p, std::int64_t first, std::int64_t last) {
    constexpr int SUMS = 4;  // as many as hide an addition's latency
    for (std::int64_t n = first; n < last; n++) {
        const std::int8_t* weight = p.weight + n * p.inputs;
        for (std::int64_t r = 0; r < p.rows; r++) {
            const float* x = p.x + r * p.inputs;
            vf sums[SUMS] = {};
            std::int64_t i = 0;
            for (; i + SUMS * W <= p.inputs; i += SUMS * W)
                for (int s = 0; s < SUMS; s++) sums[s] += widened(weight + i + s * W) * load(x + i + s * W);
            float rest = 0;
            for (; i < p.inputs; i++) rest += static_cast<float>(weight[i]) * x[i];
            p.out[r * p.outputs + n] = p.scale[n] * (sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest);
        }
    }
}

}  // namespace HR_ISA
