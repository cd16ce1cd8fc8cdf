// What a token of a linear layer and one of softmax attention have in common: their row, and rotary positions.

#pragma once

#include "elementwise.h"

namespace HR_ISA {

template <class Job, class Description>
struct TokenRow {
    const Job& job;
    const Description& p;
    const std::int64_t row, sequence;  // sequence: whose state it has

    TokenRow(const Job& job, const Description& p, std::int64_t row)
        : job(job), p(p), row(row), sequence(job.in_order ? 0 : row) {}

    // Rotates heads of d channels: channel i with i + turned/2. Angles are double: a float's is wrong by 0.004 at position
    // 100 000.
    void rotate(std::int64_t position, int d, float* q, std::int64_t heads_of_q, float* k,
                std::int64_t heads_of_k) const {
        const int half = static_cast<int>(p.turned) / 2;
        const auto turn = [&](float* x, std::int64_t heads, int i, float c, float s) {
            for (float* head = x; head < x + heads * d; head += d) {
                const float a = head[i], b = head[i + half];
                head[i] = a * c - b * s;
                head[i + half] = b * c + a * s;
            }
        };
        for (int i = 0; i < half; i++) {
            const double angle = static_cast<double>(position) * p.frequencies[i];
            const float c = static_cast<float>(p.amplitude * cos(angle)),
                        s = static_cast<float>(p.amplitude * sin(angle));
            turn(q, heads_of_q, i, c, s);
            turn(k, heads_of_k, i, c, s);
        }
    }
};

}  // namespace HR_ISA
