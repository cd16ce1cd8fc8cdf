// Vectors of W floats by the compiler's vector extension: the same source for AVX-512, AVX2, SSE2 and NEON.
//
// What includes this is compiled once per instruction set, each time inside its own namespace and without templates of
// the standard library: a linker that merged two copies of one of those would put AVX-512 into the portable path.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "job.h"

namespace HR_ISA {

#if defined(__AVX512F__)
constexpr int W = 16, TILE_ROWS = 8;
#elif defined(__AVX2__)
constexpr int W = 8, TILE_ROWS = 4;
#else
constexpr int W = 4, TILE_ROWS = 4;
#endif
constexpr int LANES = 16;  // sizes of tiles are multiples of this, whatever W

using Stride = std::ptrdiff_t;

typedef float vf __attribute__((vector_size(W * 4)));
typedef std::int32_t vi __attribute__((vector_size(W * 4)));
typedef std::uint32_t vu __attribute__((vector_size(W * 4)));
typedef std::uint16_t vh __attribute__((vector_size(W * 2)));
typedef std::int8_t vc __attribute__((vector_size(W)));
typedef float vf_anywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef std::uint16_t vh_anywhere __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef std::int8_t vc_anywhere __attribute__((vector_size(W), aligned(1), may_alias));

// Not `vf{} + x`, which is +0 for −0: the compiler would have to add.
HR_INLINE vf splat(float x) { return x - vf{}; }
HR_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }
HR_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_anywhere*>(p) = x; }
HR_INLINE vf bits(vu x) { return reinterpret_cast<vf>(x); }
HR_INLINE vu bits(vf x) { return reinterpret_cast<vu>(x); }
HR_INLINE vf magnitude(vf x) { return x < vf{} ? -x : x; }

HR_INLINE float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

// e^x to about an ulp for x <= 88; 0 below −87, where floats would be denormal. NaN stays NaN.
HR_INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    const vi gone = x < splat(-87.0f);
    x = x > splat(88.0f) ? splat(88.0f) : x;
    const vf shifted = x * splat(1.44269504f) + magic;
    const vf n = shifted - magic;
    const vf r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    constexpr float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    vf p = splat(1.0f / 5040);
    for (float c : coefficients) p = p * r + splat(c);
    const vf power = bits((bits(shifted) << 23) + (std::uint32_t{127} << 23));
    return gone ? vf{} : p * power;
}

// A sum and what its rounding has left out so far (Knuth's two-sum).
struct Sum {
    vf total{}, rest{};

    HR_INLINE void add(vf x) {
        const vf before = total, now = total + x, added = now - before;
        rest += (before - (now - added)) + (x - added);
        total = now;
    }
    HR_INLINE Sum negative() const { return {-total, -rest}; }
    // An infinite total has a NaN for a rest.
    HR_INLINE vf exponential() const {
        const vf power = HR_ISA::exponential(total);
        return power > vf{} ? power + power * rest : power;
    }
};

HR_INLINE vf load(const std::uint16_t* p) {
    const vh x = *reinterpret_cast<const vh_anywhere*>(p);
    return bits(__builtin_convertvector(x, vu) << 16);
}

HR_INLINE vf load(const std::int8_t* p) {
    typedef std::int16_t twice __attribute__((vector_size(W * 2)));  // GCC 12 takes a step of four times lane by lane
    const twice x = __builtin_convertvector(vc(*reinterpret_cast<const vc_anywhere*>(p)), twice);
    return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
}

// Rounds to the nearest, ties to even; NaN is made quiet, not rounded into an infinity.
HR_INLINE void store(std::uint16_t* p, vf x) {
    const vu u = bits(x);
    const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
    *reinterpret_cast<vh_anywhere*>(p) = __builtin_convertvector(x == x ? rounded : quiet, vh);
}

// Up to W numbers, zeros after the last.
template <class T>
HR_INLINE vf load_some(const T* p, int left) {
    if (left >= W) return load(p);
    T last[W] = {};
    std::memcpy(last, p, left * sizeof(T));
    return load(last);
}

// Up to W numbers.
HR_INLINE void store_some(float* p, vf x, int left) {
    if (left >= W) return store(p, x);
    std::memcpy(p, &x, left * sizeof(float));
}

// Lanes in turn from a and from b: from their lower halves (start 0) or their upper ones (start W / 2).
template <int start, int... lane>
HR_INLINE vf interleaved(vf a, vf b, std::integer_sequence<int, lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (start + lane / 2 + lane % 2 * W)...);
#else
    return __builtin_shuffle(a, b, vi{(start + lane / 2 + lane % 2 * W)...});
#endif
}

// W rows of W lanes, in place: interleaving row i with row i + W/2, log2(W) times.
HR_INLINE void transpose(vf (&x)[W]) {
    const auto lanes = std::make_integer_sequence<int, W>();
    for (int stage = 1; stage < W; stage *= 2) {
        vf y[W];
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = interleaved<0>(x[i], x[i + W / 2], lanes);
            y[2 * i + 1] = interleaved<W / 2>(x[i], x[i + W / 2], lanes);
        }
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

}  // namespace HR_ISA
