// A linear layer of a few rows: y = x Wᵀ + b, W [outputs, inputs] read where the module holds it, in float32, bfloat16,
// or int8 with a scale per row.
//
// For few rows, and int8, sums run along the inputs: of R rows of W with M rows of x at a time, and then over
// their lanes. One row of x is bound by memory: the next rows of W are fetched into the second cache meanwhile. For many
// rows x is transposed, so that a vector has the same input of several rows.
//
// int8: x is rounded to 16-bit integers with a scale for each BLOCK of inputs; sums over a block are exact in 32 bits.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "elementwise.h"

namespace HR_ISA {

constexpr int SUMS = W < 8 ? 8 : W;
constexpr int BLOCK = INT8_BLOCK;
constexpr int ROUNDED = 32767;  // the largest integer of x
static_assert(BLOCK / W * 127.0 * ROUNDED < 2147483647.0, "a sum of a block could overflow");

constexpr int padded_pairs(int n) { return (n + 2 * W - 1) / (2 * W) * 2 * W; }

typedef std::int8_t vb __attribute__((vector_size(2 * W)));
typedef std::int16_t vs __attribute__((vector_size(4 * W)));
typedef std::int8_t vb_anywhere __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef std::int16_t vs_anywhere __attribute__((vector_size(4 * W), aligned(2), may_alias));

HR_INLINE vs widened(const std::int8_t* p) {
    return __builtin_convertvector(vb(*reinterpret_cast<const vb_anywhere*>(p)), vs);
}

// sum + a b, products of neighbours added.
HR_INLINE vi add_pairs(vi sum, vs a, vs b) {
#if defined(__AVX512BW__)
    return sum + vi(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
    return sum + vi(_mm256_madd_epi16(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
    return sum + vi(_mm_madd_epi16(__m128i(a), __m128i(b)));
#else
    typedef std::int32_t wide __attribute__((vector_size(8 * W)));
    const wide product = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide);
    for (int i = 0; i < W; i++) sum[i] += product[2 * i] + product[2 * i + 1];
    return sum;
#endif
}

// Sums of the lanes of W vectors, which it spends.
HR_INLINE vf totals(vf (&x)[W]) {
    transpose(x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// A product's operands: some rows of x, all of W.
struct Rows {
    const float* x;
    const std::int16_t* integers;  // for int8: x rounded, [·, padded inputs], and its scales [·, blocks]
    const float* scales;
    Stride x_row, integer_row, scale_row;
    int inputs;
    Stride weight_row;
    const float* transposed;  // for many rows: x [inputs, ·] with rows `wide` apart; `wide` is 0 for few
    Stride wide;

    Rows from(std::int64_t m) const {
        Rows r = *this;
        r.x += m * x_row, r.integers += m * integer_row, r.scales += m * scale_row;
        return r;
    }
};

template <int M, int R, class T>
HR_INLINE void dots(vf* sums, const T* const (&w)[R], const Rows& rows) {
    vf total[R][M] = {};
    const auto add = [&](int k, auto get) {
        vf right[M];
        for (int m = 0; m < M; m++) right[m] = get(rows.x + m * rows.x_row + k);
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(w[r] + R * rows.weight_row + k, 0, 2);
            const vf left = get(w[r] + k);
            for (int m = 0; m < M; m++) total[r][m] += left * right[m];
        }
    };
    int k = 0;
    for (; k + W <= rows.inputs; k += W) add(k, [](auto p) { return load(p); });
    if (k < rows.inputs) add(k, [&](auto p) { return load_some(p, rows.inputs - k); });
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[r * M + m] = total[r][m];
}

template <int M, int R>
HR_INLINE void dots(vf* sums, const std::int8_t* const (&w)[R], const Rows& rows) {
    vf all[R][M] = {};
    for (int first = 0, block = 0; first < rows.inputs; first += BLOCK, block++) {
        const int last = first + BLOCK < rows.inputs ? first + BLOCK : rows.inputs;
        vi total[R][M] = {};
        const auto add = [&](int k, auto get) {
            vs right[M];
            for (int m = 0; m < M; m++)
                right[m] = *reinterpret_cast<const vs_anywhere*>(rows.integers + m * rows.integer_row + k);
            for (int r = 0; r < R; r++) {
                __builtin_prefetch(w[r] + R * rows.weight_row + k, 0, 2);
                const vs left = get(w[r] + k);
                for (int m = 0; m < M; m++) total[r][m] = add_pairs(total[r][m], left, right[m]);
            }
        };
        int k = first;
        for (; k + 2 * W <= last; k += 2 * W) add(k, [](const std::int8_t* p) { return widened(p); });
        if (k < last)
            add(k, [&](const std::int8_t* p) {
                std::int8_t some[2 * W] = {};
                std::memcpy(some, p, last - k);
                return widened(some);
            });
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++)
                all[r][m] += __builtin_convertvector(total[r][m], vf) * splat(rows.scales[m * rows.scale_row + block]);
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[r * M + m] = all[r][m];
}

// Where a product's results go: y (+)= factor_n Σ + bias_n.
struct Results {
    float* out;
    Stride row;
    const hr_operation* op;

    HR_INLINE void put(int m, std::int64_t n, float sum) const {
        float* y = out + m * row + n;
        if (op->scale) sum *= op->scale[n];
        if (op->bias) sum += number_of(op->bias, n);
        *y = op->add ? *y + sum : sum;
    }
    float number_of(const void* p, std::int64_t n) const {
        if (op->dtype == HR_FLOAT32) return static_cast<const float*>(p)[n];
        return load_some(static_cast<const std::uint16_t*>(p) + n, 1)[0];
    }
};

// M rows of x with the rows first … last − 1 of W.
template <int M, class T>
void some_rows(const T* weight, const Rows& rows, const Results& results, std::int64_t first, std::int64_t last) {
    constexpr int GROUP = SUMS / M, R = M > 4 ? GROUP : 8 / M;  // rows of W until sums are added up, and at a time
    for (std::int64_t n = first; n < last; n += GROUP) {
        const int count = static_cast<int>(last - n < GROUP ? last - n : GROUP);
        vf sums[SUMS];
        for (int g = 0; g < GROUP; g += R) {
            const T* w[R];
            for (int r = 0; r < R; r++) w[r] = weight + (n + (g + r < count ? g + r : count - 1)) * rows.weight_row;
            dots<M, R>(sums + g * M, w, rows);
        }
        for (int s = 0; s < SUMS; s += W) {
            const vf found = totals(reinterpret_cast<vf(&)[W]>(sums[s]));
            for (int i = 0; i < W && s + i < count * M; i++) results.put((s + i) % M, n + (s + i) / M, found[i]);
        }
    }
}

// NV vectors of rows of x, of which `count` rows count, with the rows first … last − 1 of W.
template <int NV, class T>
void many_rows(const T* weight, const Rows& rows, const Results& results, int count, std::int64_t first,
               std::int64_t last) {
    constexpr int R = W < 16 ? 3 : 6, DEPTH = 256;
    float wide[R][DEPTH];
    for (std::int64_t n = first; n < last; n += R) {
        const int some = static_cast<int>(last - n < R ? last - n : R);
        vf total[R][NV] = {};
        for (int k = 0; k < rows.inputs; k += DEPTH) {
            const int depth = rows.inputs - k < DEPTH ? rows.inputs - k : DEPTH;
            const float* w[R];
            for (int r = 0; r < R; r++) {
                const T* row = weight + (n + (r < some ? r : some - 1)) * rows.weight_row + k;
                if constexpr (sizeof(T) == sizeof(float)) {
                    w[r] = row;
                } else {
                    load_row(wide[r], row, depth, 1);
                    w[r] = wide[r];
                }
            }
            const float* x = rows.transposed + k * rows.wide;
            for (int i = 0; i < depth; i++, x += rows.wide) {
                vf right[NV];
                for (int v = 0; v < NV; v++) right[v] = load(x + v * W);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < NV; v++) total[r][v] += splat(w[r][i]) * right[v];
            }
        }
        for (int r = 0; r < some; r++)
            for (int m = 0; m < count; m++) results.put(m, n + r, total[r][m / W][m % W]);
    }
}

template <class T>
void all_rows(const T* weight, Rows rows, Results results, std::int64_t count, std::int64_t first, std::int64_t last) {
    std::int64_t m = 0;
    const auto advance = [&](int done) { m += done, results.out += done * results.row, rows.transposed += done; };
    if constexpr (sizeof(T) > 1) {
        const auto many = [&](auto vectors) {
            constexpr int NV = decltype(vectors)::value;
            const int some = static_cast<int>(count - m < NV * W ? count - m : NV * W);
            many_rows<NV>(weight, rows, results, some, first, last);
            advance(some);
        };
        while (rows.wide && count - m > 2 * W) many(std::integral_constant<int, 4>());
        while (rows.wide && m < count) many(std::integral_constant<int, 2>());
    }
    if constexpr (W == 16)
        for (; m + 8 <= count; advance(8)) some_rows<8>(weight, rows.from(m), results, first, last);
    for (; m + 4 <= count; advance(4)) some_rows<4>(weight, rows.from(m), results, first, last);
    for (; m + 2 <= count; advance(2)) some_rows<2>(weight, rows.from(m), results, first, last);
    for (; m < count; advance(1)) some_rows<1>(weight, rows.from(m), results, first, last);
}

// Inputs first … first + W − 1 of `count` rows of x, transposed, with zeros for the rows that there are not.
inline void transpose_columns(float* into, Stride wide, const float* x, Stride x_row, int count) {
    for (int m = 0; m < wide; m += W) {
        vf block[W];
        for (int i = 0; i < W; i++) block[i] = m + i < count ? load(x + (m + i) * x_row) : vf{};
        transpose(block);
        for (int i = 0; i < W; i++) store(into + i * wide + m, block[i]);
    }
}

// x rounded for int8: integers, padded with zeros, and scales of one row. Where x is not finite, neither is the scale.
inline void round_row(std::int16_t* integers, float* scales, const float* x, int inputs) {
    typedef std::int16_t narrow __attribute__((vector_size(2 * W), aligned(2), may_alias));
    const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    for (int first = 0; first < inputs; first += BLOCK, scales++) {
        const int count = inputs - first < BLOCK ? inputs - first : BLOCK;
        vf most{};
        for (int i = 0; i < count; i += W) {
            const vf size = magnitude(load_some(x + first + i, count - i));
            most = size > most || size != size ? size : most;
        }
        float largest = 0;
        for (int i = 0; i < W; i++) largest = most[i] > largest || most[i] != most[i] ? most[i] : largest;
        *scales = largest / ROUNDED;
        const float factor = *scales > 0 && largest < INFINITY ? 1 / *scales : 0;
        if (!(largest < INFINITY)) *scales = NAN;
        for (int i = 0; i < padded_pairs(count); i += W) {
            const vf y = factor > 0 && i < count ? load_some(x + first + i, count - i) * splat(factor) : vf{};
            const vi rounded = __builtin_convertvector((y + magic) - magic, vi);
            *reinterpret_cast<narrow*>(integers + first + i) = __builtin_convertvector(rounded, narrow);
        }
    }
}

}  // namespace HR_ISA
