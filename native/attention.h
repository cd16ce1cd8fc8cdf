// One token of one row of the batch through softmax attention, between its projections: rotation of q and k, the cache, and
// what each head of k and v gives the queries that share it.
//
// A cache is either all columns so far, with those of padding marked, or that of a sliding window: `first` columns for
// the first tokens, and window − 1 for the last ones, which end with the last token and move by one for every new one.

#pragma once

#include "linear.h"
#include "token_row.h"

namespace HR_ISA {

// T: the dtype of the cache.
template <class T>
class AttentionRow : TokenRow<Attention, hr_attention> {
public:
    AttentionRow(const Attention& job, std::int64_t row)
        : TokenRow(job, *job.attention, row), d(static_cast<int>(p.d)), shared(static_cast<int>(p.H / p.Hkv)),
          stride(static_cast<Stride>(p.Hkv * p.d)), q(job.q + row * job.row), k(job.k + row * job.row),
          v(job.v + row * job.row), out(job.out + row * job.row),
          keys(static_cast<T*>(p.k) + sequence * p.room * stride),
          values(static_cast<T*>(p.v) + sequence * p.room * stride) {}

    void enter() {
        if (p.turned) rotate(position(), d, q, p.H, k, p.Hkv);
        scale_some(q, static_cast<int>(p.H) * d, p.scale);
        if (!p.window) keep(own());
    }

    // The queries of one head of k and v. scores: [shared, score_row], which it spends.
    void attend(std::int64_t head, float* scores) const {
        const Parts parts = all_parts();
        std::int64_t count = 0;
        for (const Part& part : parts.of) count += score(head, part, scores + count);
        if (p.window) count += score_own(head, scores + count);
        float factors[4];
        for (int m = 0; m < shared; m += 4) {
            const int some = shared - m < 4 ? shared - m : 4;
            for (int i = 0; i < some; i++)
                factors[i] = weigh(scores + (m + i) * job.score_row, count, head * shared + m + i);
            const float* weights = scores + m * job.score_row;
            switch (some) {
                case 4: mix<4>(head, m, parts, weights, factors); break;
                case 3: mix<3>(head, m, parts, weights, factors); break;
                case 2: mix<2>(head, m, parts, weights, factors); break;
                default: mix<1>(head, m, parts, weights, factors);
            }
        }
    }

    // A window moves on.
    void leave() {
        const std::int64_t token = p.seen[sequence]++, kept = p.window - 1;
        if (token < p.first) keep(token);
        if (!kept) return;
        for (T* cache : {keys, values}) {
            T* near = cache + p.first * stride;
            std::memmove(near, near + stride, (kept - 1) * stride * sizeof(T));
        }
        keep(p.first + kept - 1);
    }

private:
    struct Part {
        std::int64_t first, count;  // columns of the cache
    };
    struct Parts {
        Part of[2];
    };

    // The token's column where all are kept.
    std::int64_t own() const { return p.length - (job.in_order ? job.rows - row : 1); }
    std::int64_t position() const {
        if (p.window) return p.seen[sequence];
        if (!p.valid) return own();
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < own(); i++) count += p.valid[sequence * p.length + i] != 0;
        return count;
    }
    Parts all_parts() const {
        if (!p.window) return {{{0, own() + 1}, {0, 0}}};
        const std::int64_t token = p.seen[sequence], left = token - p.window + 1,
                           near = token < p.window - 1 ? token : p.window - 1;
        const std::int64_t far = left < 0 ? 0 : left < p.first ? left : p.first;
        return {{{0, far}, {p.first + p.window - 1 - near, near}}};
    }
    void keep(std::int64_t column) const {
        store_row(keys + column * stride, k, static_cast<int>(stride), 1);
        store_row(values + column * stride, v, static_cast<int>(stride), 1);
    }

    // Logits of the columns of a part, whose number it returns.
    std::int64_t score(std::int64_t head, const Part& part, float* scores) const {
        constexpr std::int64_t BLOCK = 64;  // columns that the first cache holds for the queries of a head
        static const hr_operation plain{};
        const Rows rows{q + head * shared * d, nullptr, nullptr, d, 0, 0, d, stride, nullptr, 0};
        const Results results{scores, static_cast<Stride>(job.score_row), &plain};
        const T* from = keys + part.first * stride + head * d;
        for (std::int64_t i = 0; i < part.count; i += BLOCK)
            all_rows(from, rows, results, shared, i, i + BLOCK < part.count ? i + BLOCK : part.count);
        for (std::int64_t i = 0; p.valid && i < part.count; i++)
            for (int m = 0; m < shared && !p.valid[sequence * p.length + i]; m++)
                scores[m * job.score_row + i] = -INFINITY;
        return part.count;
    }
    std::int64_t score_own(std::int64_t head, float* scores) const {
        for (int m = 0; m < shared; m++)
            scores[m * job.score_row] = dot_of(q + (head * shared + m) * d, k + head * d, d);
        return 1;
    }

    // Logits to e^(logit − the largest). Returns the factor of the sum of values with these weights.
    float weigh(float* scores, std::int64_t count, std::int64_t query) const {
        const float gate = job.gate ? sigmoid(splat(job.gate[row * job.row + query]))[0] : 1;
        return gate / soften(scores, count, p.null ? sink(query) : -INFINITY);
    }

    float sink(std::int64_t query) const {
        if (!p.sinks) return 0;
        return p.sinks_dtype == HR_FLOAT32 ? static_cast<const float*>(p.sinks)[query]
                                           : load_some(static_cast<const std::uint16_t*>(p.sinks) + query, 1)[0];
    }

    // The weighted sums of the values of a head, for Q of its queries from the m-th on.
    template <int Q>
    void mix(std::int64_t head, int m, const Parts& parts, const float* weights, const float* factors) const {
        constexpr int NV = W < 16 ? 2 : 4;
        float* into = out + (head * shared + m) * d;
        int c = 0;
        for (; c + NV * W <= d; c += NV * W)
            mix_some<Q, NV>(head, c, parts, weights, factors, into, [](auto p) { return load(p); });
        for (; c < d; c += W)
            mix_some<Q, 1>(head, c, parts, weights, factors, into, [&](auto p) { return load_some(p, d - c); });
    }
    // NV vectors of channels from c on.
    template <int Q, int NV, class Get>
    HR_INLINE void mix_some(std::int64_t head, int c, const Parts& parts, const float* weights, const float* factors,
                            float* into, Get get) const {
        vf total[Q][NV] = {};
        std::int64_t at = 0;
        const auto add = [&](auto value) HR_INLINE_LAMBDA {
            vf x[NV];
            for (int n = 0; n < NV; n++) x[n] = get(value + n * W);
            for (int i = 0; i < Q; i++)
                for (int n = 0; n < NV; n++) total[i][n] += splat(weights[i * job.score_row + at]) * x[n];
            at++;
        };
        for (const Part& part : parts.of)
            for (std::int64_t j = 0; j < part.count; j++)
                add(const_cast<const T*>(values + (part.first + j) * stride + head * d + c));
        if (p.window) add(const_cast<const float*>(v + head * d + c));
        for (int i = 0; i < Q; i++)
            for (int n = 0; n < NV; n++) {
                float some[W];
                store(some, total[i][n] * splat(factors[i]));
                const int left = d - c - n * W;
                std::memcpy(into + i * d + c + n * W, some, (left < W ? left : W) * sizeof(float));
            }
    }

    const int d, shared;
    const Stride stride;
    float *const q, *const k, *const v, *const out;
    T *const keys, *const values;
};

}  // namespace HR_ISA
