// A linear layer of a few rows: y = x Wᵀ + b, W [outputs, inputs] read where the module holds it, in float32, bfloat16,
// or int8 with a scale per row.
//
// For few rows, R rows of W meet M rows of x at a time: vectors of products are added up along the inputs, then their
// lanes. One row of x is bound by memory: the next rows of W are fetched into the second cache meanwhile. With int8 weights
// x is rounded to 16-bit integers with a scale for each BLOCK of inputs; sums over a block are exact in 32 bits.
//
// For many rows x is transposed, so that a vector has the same input of several rows, and rows of W become float32.

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

// Sums of the lanes of W vectors, in their order. Halving their number adds halves of two vectors lane by lane.
HR_INLINE vf totals(const vf* vectors) {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
    vf x[W];
    for (int i = 0; i < W; i++) x[i] = vectors[i];
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = interleaved<0>(x[i], x[i + half], lanes) + interleaved<W / 2>(x[i], x[i + half], lanes);
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
    const float* transposed;  // of many rows: panels [inputs, PANEL] of x, `panel` apart; NULL for few
    Stride panel;

    Rows from(std::int64_t m) const {
        Rows r = *this;
        r.x += m * x_row, r.integers += m * integer_row, r.scales += m * scale_row;
        return r;
    }
    const float* column(std::int64_t m) const { return transposed + m / PANEL * panel + m % PANEL; }
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
        for (int m = 0; m < M; m++) sums[m * SUMS + r] = total[r][m];
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
        for (int m = 0; m < M; m++) sums[m * SUMS + r] = all[r][m];
}

// Where a product's results go: y (+)= factor_n Σ + bias_n.
struct Results {
    float* out;
    Stride row;
    const hr_operation* op;

    // Up to W neighbours of row m.
    HR_INLINE void put(int m, std::int64_t n, vf sums, int count) const {
        float* y = out + m * row + n;
        if (op->scale) sums *= load_some(op->scale + n, count);
        if (op->bias) sums += bias(n, count);
        if (op->add) sums += load_some(y, count);
        store_some(y, sums, count);
    }
    vf bias(std::int64_t n, int count) const {
        if (op->dtype == HR_FLOAT32) return load_some(static_cast<const float*>(op->bias) + n, count);
        return load_some(static_cast<const std::uint16_t*>(op->bias) + n, count);
    }
};

// M rows of x with the rows first … last − 1 of W.
template <int M, class T>
void some_rows(const T* weight, const Rows& rows, const Results& results, std::int64_t first, std::int64_t last) {
    constexpr int R = M > 4 ? 2 : 8 / M;  // rows of W at a time
    for (std::int64_t n = first; n < last; n += SUMS) {
        const int count = static_cast<int>(last - n < SUMS ? last - n : SUMS);
        vf sums[M][SUMS];
        for (int g = 0; g < SUMS; g += R) {
            const T* w[R];
            for (int r = 0; r < R; r++) w[r] = weight + (n + (g + r < count ? g + r : count - 1)) * rows.weight_row;
            dots<M, R>(&sums[0][g], w, rows);
        }
        for (int m = 0; m < M; m++)
            for (int s = 0; s < count; s += W) results.put(m, n + s, totals(sums[m] + s), count - s);
    }
}

// total_rv += Σ_i w_ri x_iv, of NV vectors of transposed rows.
template <int NV, int R>
HR_INLINE void add_products(vf (&total)[R][NV], const float* const (&w)[R], const float* x, int depth) {
    for (int i = 0; i < depth; i++, x += PANEL) {
        vf right[NV];
        for (int v = 0; v < NV; v++) right[v] = load(x + v * W);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++) total[r][v] += splat(w[r][i]) * right[v];
    }
}

// NV vectors of transposed rows x, of which `count` rows count, with the rows first … last − 1 of W.
template <int NV, class T>
void many_rows(const T* weight, const Rows& rows, const float* x, const Results& results, int count, std::int64_t first,
               std::int64_t last) {
    constexpr int R = W < 16 ? 12 / NV : 12, GROUP = 3 * W, DEPTH = 256;  // rows of W at a time, and until sums are put
    static_assert(GROUP % R == 0, "");
    float wide[R][DEPTH];
    vf sums[NV][GROUP];
    for (std::int64_t n = first; n < last; n += GROUP) {
        const int some = static_cast<int>(last - n < GROUP ? last - n : GROUP);
        for (int g = 0; g < some; g += R) {
            vf total[R][NV] = {};
            for (int k = 0; k < rows.inputs; k += DEPTH) {
                const int depth = rows.inputs - k < DEPTH ? rows.inputs - k : DEPTH;
                const float* w[R];
                for (int r = 0; r < R; r++) {
                    const T* row = weight + (n + (g + r < some ? g + r : some - 1)) * rows.weight_row + k;
                    if constexpr (sizeof(T) == sizeof(float)) {
                        w[r] = row;
                    } else {
                        load_row(wide[r], row, depth, 1);
                        w[r] = wide[r];
                    }
                }
                add_products<NV, R>(total, w, x + k * PANEL, depth);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < NV; v++) sums[v][g + r] = total[r][v];
        }
        for (int v = 0; v < NV; v++)
            for (int g = 0; g < some; g += W) {
                vf block[W];
                for (int i = 0; i < W; i++) block[i] = g + i < some ? sums[v][g + i] : vf{};
                transpose(block);
                for (int i = 0; i < W && v * W + i < count; i++) results.put(v * W + i, n + g, block[i], some - g);
            }
    }
}

template <class T>
void all_rows(const T* weight, const Rows& rows, Results results, std::int64_t count, std::int64_t first,
              std::int64_t last) {
    std::int64_t m = 0;
    const auto advance = [&](std::int64_t done) { m += done, results.out += done * results.row; };
    const auto few = [&](auto number) {
        constexpr int N = decltype(number)::value;
        some_rows<N>(weight, rows.from(m), results, first, last);
        advance(N);
    };
    const auto many = [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        const int some = static_cast<int>(count - m < NV * W ? count - m : NV * W);
        many_rows<NV>(weight, rows, rows.column(m), results, some, first, last);
        advance(some);
    };
    constexpr int MOST = W < 16 ? 4 : 2;
    while (rows.transposed && count - m > MOST / 2 * W) many(std::integral_constant<int, MOST>());
    while (rows.transposed && m < count) many(std::integral_constant<int, MOST / 2>());
    if constexpr (W == 16)
        while (m + 8 <= count) few(std::integral_constant<int, 8>());
    while (m + 4 <= count) few(std::integral_constant<int, 4>());
    while (m + 2 <= count) few(std::integral_constant<int, 2>());
    while (m < count) few(std::integral_constant<int, 1>());
}

// Inputs first … first + W − 1 of `count` rows of x, into panels `panel` apart, with zeros for the rows that there are not.
inline void transpose_columns(float* into, Stride panel, const float* x, Stride x_row, int count) {
    for (int m = 0; m < (count + PANEL - 1) / PANEL * PANEL; m += W) {
        vf block[W];
        for (int i = 0; i < W; i++) block[i] = m + i < count ? load(x + (m + i) * x_row) : vf{};
        transpose(block);
        for (int i = 0; i < W; i++) store(into + m / PANEL * panel + m % PANEL + i * PANEL, block[i]);
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
