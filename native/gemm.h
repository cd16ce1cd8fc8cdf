// Small matrix products on tiles that lie in cache: C (+)= Σ A B, TILE_ROWS rows by up to two vectors at a time.
//
// Sizes are multiples of 16 (tiles are padded with zeros), so nothing has tails. Rows of a tile are an odd number of
// cache lines apart: a power of two would map a column of them onto a few cache sets.

#pragma once

#include "bf16.h"

namespace HR_ISA {

struct Tile {
    static constexpr int STEP = 1;  // terms of a sum in one number
    float* p;
    Stride ld;
    float* row(int i) const { return p + i * ld; }
    Tile below(int i) const { return {p + i * ld, ld}; }
    Tile right(int j) const { return {p + j, ld}; }
};

constexpr int padded(std::int64_t n) { return static_cast<int>((n + LANES - 1) / LANES * LANES); }
constexpr Stride leading(int width) { return (width / LANES | 1) * LANES; }

// Which of a product's terms a block of rows m … m + TILE_ROWS − 1 of the result has: all, or what a triangle leaves.
enum class Part { all, up_to, before, from, after };

template <bool transposed_, bool minus_, class Factor>
struct Term {
    static constexpr bool transposed = transposed_, minus = minus_;
    static constexpr int STEP = Factor::STEP;
    Factor left, right;
    int depth;
    Part part;

    int first(int m) const { return part == Part::from ? m : part == Part::after ? m + TILE_ROWS : 0; }
    int last(int m) const { return part == Part::up_to || part == Part::before ? m : depth; }
};

template <class F>
struct Plus : Term<false, false, F> {  // left right
    Plus(F left, F right, int depth, Part part) : Term<false, false, F>{left, right, depth, part} {}
};
template <class F>
struct PlusT : Term<true, false, F> {  // leftᵀ right
    PlusT(F left, F right, int depth, Part part) : Term<true, false, F>{left, right, depth, part} {}
};
template <class F>
struct Minus : Term<false, true, F> {  // −left right
    Minus(F left, F right, int depth, Part part) : Term<false, true, F>{left, right, depth, part} {}
};
template <class F>
struct MinusT : Term<true, true, F> {  // −leftᵀ right
    MinusT(F left, F right, int depth, Part part) : Term<true, true, F>{left, right, depth, part} {}
};

HR_INLINE vf broadcast(const float* p) { return splat(*p); }
HR_INLINE vf fused(vf sum, vf x, vf y) { return sum + x * y; }
HR_INLINE vf reduced(vf sum, vf x, vf y) { return sum - x * y; }
HR_INLINE vf only_first(vf x) { return x; }
#if !defined(__AVX512BF16__)
HR_INLINE vf rounded(vf x) { return x; }
#endif

template <int NV>
using Block = vf[TILE_ROWS][NV];

// acc += a column of left times a row of right, from the block's row `top` on; its first row takes one term alone.
template <int top, bool corner, int NV, class T, class Number>
HR_INLINE void one_more(Block<NV>& acc, const T& t, const Number* a, const Number* b) {
    decltype(load(b)) right[NV];
    for (int j = 0; j < NV; j++) right[j] = load(b + j * W);
    for (int i = top; i < TILE_ROWS; i++) {
        const auto left = broadcast(a + (T::transposed ? i : i * t.left.ld));
        for (int j = 0; j < NV; j++) {
            const auto term = corner && i == top ? only_first(right[j]) : right[j];
            acc[i][j] = T::minus ? reduced(acc[i][j], left, term) : fused(acc[i][j], left, term);
        }
    }
}

// The block on the diagonal: what lies above it is not looked at, since 0 times a later token's NaN would be NaN.
template <int NV, class T, class Number, int... d>
HR_INLINE void diagonal(Block<NV>& acc, const T& t, const Number* a, const Number* b,
                        std::integer_sequence<int, d...>) {
    (one_more<d * T::STEP, true>(acc, t, a + d * (T::transposed ? t.left.ld : 1), b + d * t.right.ld), ...);
}

template <int NV, class T>
HR_INLINE void accumulate(Block<NV>& acc, const T& t, int m, int n) {
    const int first = t.first(m) / T::STEP, last = t.last(m) / T::STEP;
    auto a = T::transposed ? t.left.row(first) + m : t.left.row(m) + first;
    auto b = t.right.row(first) + n;
    for (int i = first; i < last; i++) {
        one_more<0, false>(acc, t, a, b);
        a += T::transposed ? t.left.ld : 1;
        b += t.right.ld;
    }
    if (t.part == Part::up_to) diagonal(acc, t, a, b, std::make_integer_sequence<int, TILE_ROWS / T::STEP>());
}

// What a result starts from.
struct Zero {
    template <int NV>
    HR_INLINE void operator()(Block<NV>& acc, Tile, int, int) const {
        for (auto& row : acc)
            for (vf& x : row) x = vf{};
    }
};

struct Itself {
    template <int NV>
    HR_INLINE void operator()(Block<NV>& acc, Tile C, int m, int n) const {
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < NV; j++) acc[i][j] = load(C.row(m + i) + n + j * W);
    }
};

struct RowsScaled {
    Tile from;
    const float* rows;
    template <int NV>
    HR_INLINE void operator()(Block<NV>& acc, Tile, int m, int n) const {
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < NV; j++) acc[i][j] = load(from.row(m + i) + n + j * W) * splat(rows[m + i]);
    }
};

struct ColumnsScaled {
    Tile from;
    const float* columns;
    template <int NV>
    HR_INLINE void operator()(Block<NV>& acc, Tile, int m, int n) const {
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < NV; j++) acc[i][j] = load(from.row(m + i) + n + j * W) * load(columns + n + j * W);
    }
};

// What is done to a block of results before it is stored.
struct Nothing {
    template <int NV>
    HR_INLINE void operator()(Block<NV>&, int, int) const {}
};

// f(0), f(1) … f(TILE_ROWS − 1), unrolled: a block that a loop indexes would not stay in registers.
template <class F, int... i>
HR_INLINE void each_row(F f, std::integer_sequence<int, i...>) {
    (f(i), ...);
}
template <class F>
HR_INLINE void each_row(F f) {
    each_row(f, std::make_integer_sequence<int, TILE_ROWS>());
}

// x ← x − A U for the block's own rows of U, A strictly lower, where U = β x as products read it: by substitution. U is
// stored. So what a factor's rounding changes in U, later rows correct.
struct SolveLower {
    Tile A, U;
    const float* beta;
    template <int NV>
    HR_INLINE void operator()(Block<NV>& x, int m, int n) const {
        each_row([&](int j) HR_INLINE_LAMBDA {
            vf u[NV];
            for (int c = 0; c < NV; c++) store(U.row(m + j) + n + c * W, u[c] = rounded(x[j][c] * splat(beta[m + j])));
            each_row([&](int i) HR_INLINE_LAMBDA {
                for (int c = 0; i > j && c < NV; c++) x[i][c] -= splat(A.row(m + i)[m + j]) * u[c];
            });
        });
    }
};

// x ← (I + Mᵀ)⁻¹ x.
struct SolveUpper {
    Tile M;
    template <int NV>
    HR_INLINE void operator()(Block<NV>& x, int m, int) const {
        each_row([&](int n) HR_INLINE_LAMBDA {
            const int j = TILE_ROWS - 1 - n;
            each_row([&](int i) HR_INLINE_LAMBDA {
                for (int c = 0; i < j && c < NV; c++) x[i][c] -= splat(M.row(m + j)[m + i]) * x[j][c];
            });
        });
    }
};

template <int NV, class Start, class Finish, class... Terms>
HR_INLINE void block(Tile C, int m, int n, Start start, Finish finish, const Terms&... terms) {
    Block<NV> acc;
    start(acc, C, m, n);
    (accumulate(acc, terms, m, n), ...);
    finish(acc, m, n);
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < NV; j++) store(C.row(m + i) + n + j * W, acc[i][j]);
}

enum class Order { down, up };

template <int NV, Order order, class... Rest>
HR_INLINE void panel(Tile C, int first, int M, int n, const Rest&... rest) {
    for (int m = first; m < M; m += TILE_ROWS)
        block<NV>(C, order == Order::down ? m : first + M - TILE_ROWS - m, n, rest...);
}

// C [M, N] ← finish(start(C) + Σ terms). The order of the row blocks matters to `finish` alone.
template <Order order = Order::down, class Start, class Finish, class... Terms>
void multiply(Tile C, int M, int N, Start start, Finish finish, const Terms&... terms) {
    int n = 0;
    for (; n + 2 * W <= N; n += 2 * W) panel<2, order>(C, 0, M, n, start, finish, terms...);
    if (n < N) panel<1, order>(C, 0, M, n, start, finish, terms...);
}

// The same for the lower triangle of a square C, in whole blocks: above the diagonal something may be left or not.
template <class Start, class... Terms>
void multiply_lower(Tile C, int M, Start start, const Terms&... terms) {
    int n = 0;
    for (; n + 2 * W <= M; n += 2 * W) {
        panel<1, Order::down>(C, n, n + W, n, start, Nothing{}, terms...);
        panel<2, Order::down>(C, n + W, M, n, start, Nothing{}, terms...);
    }
    if (n < M) panel<1, Order::down>(C, n, M, n, start, Nothing{}, terms...);
}

}  // namespace HR_ISA
