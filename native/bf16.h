// Products of bfloat16 numbers with sums in float32, where there are instructions for them: a word holds two numbers
// along the sum, the earlier one in its lower half.
//
//     left         a row's numbers side by side: pair d of row i at row(i)[d]
//     right        two rows interleaved: pair d of column j at row(d)[j]; also what a product reads transposed

#pragma once

#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace HR_ISA {

struct Pairs {
    static constexpr int STEP = 2;  // terms of a sum in one number
    std::uint32_t* p;
    Stride ld;
    std::uint32_t* row(int i) const { return p + i * ld; }
    Pairs right(int j) const { return {p + j, ld}; }
};

typedef std::uint32_t vu_anywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));

HR_INLINE vu broadcast(const std::uint32_t* p) { return vu{} + *p; }
HR_INLINE vu load(const std::uint32_t* p) { return *reinterpret_cast<const vu_anywhere*>(p); }
HR_INLINE void store(std::uint32_t* p, vu x) { *reinterpret_cast<vu_anywhere*>(p) = x; }
HR_INLINE vu only_first(vu x) { return x & 0xffff; }

HR_INLINE vf fused(vf sum, vu x, vu y) {
    return reinterpret_cast<vf>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y)));
}

HR_INLINE vf reduced(vf sum, vu x, vu y) { return fused(sum, x ^ 0x80008000, y); }

// The numbers of a, then those of b, rounded to the nearest.
HR_INLINE vu side_by_side(vf a, vf b) {
    return reinterpret_cast<vu>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a)));
}

HR_INLINE vf rounded(vf x) {
    return bits(__builtin_convertvector(reinterpret_cast<vh>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x))), vu)
                << 16);
}

// Those of a and b in turn.
HR_INLINE vu interleaved(vf a, vf b) {
    typedef std::uint16_t halves __attribute__((vector_size(W * 4)));
    halves order;
    for (int i = 0; i < 2 * W; i++) order[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * W);
    return reinterpret_cast<vu>(
        _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(side_by_side(a, b))));
}

}  // namespace HR_ISA

#endif
