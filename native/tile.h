// Tiles: what a chunk needs of the tensors, in float32, side by side and padded with zeros; and what is done by row.

#pragma once

#include <cstring>

#include "gemm.h"

namespace HR_ISA {

// Hands out pieces of a thread's memory; over a null pointer it only counts.
class Arena {
public:
    explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <class T>
    T* array(std::size_t n) {
        char* p = memory_ ? memory_ + used_ : nullptr;
        used_ += (n * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(p);
    }
    float* floats(std::size_t n) { return array<float>(n); }
    Tile tile(int rows, int width) {
        const Stride ld = leading(width);
        return {floats(static_cast<std::size_t>(rows) * ld), ld};
    }
    std::size_t used() const { return used_; }

private:
    char* memory_;
    std::size_t used_ = 0;
};

// One head of one sequence of a tensor: row t at p + t · token, in elements of its dtype, for first ≤ t < end. Other rows are
// read as zeros and not written.
struct View {
    char* p = nullptr;
    Stride token = 0;
    bool half = false;
    std::int64_t first = 0, end = 0;

    explicit operator bool() const { return p != nullptr; }
    bool has(std::int64_t t) const { return first <= t && t < end; }
    char* row(std::int64_t t) const { return p + t * token * size(half); }
    static Stride size(bool half) { return half ? 2 : 4; }
};

// Its first row is `delay`.
inline View view(const hr_tensor& x, const Plan& plan, const Unit& unit, std::int64_t head, bool half,
                 std::int64_t column = 0, int delay = 0) {
    if (!x.data) return {};
    const std::int64_t at =
        x.batch * plan.row(unit.sequence) + x.token * (plan.start(unit.sequence) - delay) + x.head * head + column;
    return {static_cast<char*>(x.data) + at * View::size(half), static_cast<Stride>(x.token), half, delay,
            plan.tokens(unit.sequence) + delay};
}

// The tokens of one chunk: `n` of them from `first` on, padded to `rows`.
struct Span {
    std::int64_t first;
    int n, rows;
};

template <class F>
HR_INLINE void map(Tile into, int rows, int width, F f) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j += W) store(into.row(i) + j, f(i, j));
}

inline void clear(Tile x, int rows, int width) {
    map(x, rows, width, [](int, int) { return vf{}; });
}

inline void copy(Tile into, Tile from, int rows, int width) {
    map(into, rows, width, [&](int i, int j) { return load(from.row(i) + j); });
}

inline float dot(const float* x, const float* y, int width) {
    vf total{};
    for (int j = 0; j < width; j += W) total += load(x + j) * load(y + j);
    return sum(total);
}

template <class T>
void load_row(float* into, const T* from, int width, float factor) {
    int j = 0;
    for (; j + W <= width; j += W) store(into + j, load(from + j) * splat(factor));
    if (j == width) return;
    T last[W] = {};
    std::memcpy(last, from + j, (width - j) * sizeof(T));
    store(into + j, load(last) * splat(factor));
}

template <class T>
void store_row(T* into, const float* from, int width, float factor) {
    int j = 0;
    for (; j + W <= width; j += W) store(into + j, load(from + j) * splat(factor));
    if (j == width) return;
    T last[W];
    store(last, load(from + j) * splat(factor));
    std::memcpy(into + j, last, (width - j) * sizeof(T));
}

inline void load_row(float* into, const View& from, std::int64_t t, int width, float factor = 1) {
    if (!from.has(t))
        for (int j = 0; j < width; j += W) store(into + j, vf{});
    else if (from.half)
        load_row(into, reinterpret_cast<const std::uint16_t*>(from.row(t)), width, factor);
    else
        load_row(into, reinterpret_cast<const float*>(from.row(t)), width, factor);
}

inline void store_row(const View& into, std::int64_t t, const float* from, int width, float factor = 1) {
    if (!into.has(t)) return;
    if (into.half)
        store_row(reinterpret_cast<std::uint16_t*>(into.row(t)), from, width, factor);
    else
        store_row(reinterpret_cast<float*>(into.row(t)), from, width, factor);
}

// A tile of the span's tokens, each times its factor (null: 1). Its padding rows and columns become zero; W may be
// less than what columns are padded to.
inline void load_tile(Tile into, const View& from, Span span, int width, const float* factor = nullptr) {
    for (int i = 0; i < span.n; i++) {
        for (int j = width / W * W; j < padded(width); j += W) store(into.row(i) + j, vf{});
        load_row(into.row(i), from, span.first + i, width, factor ? factor[i] : 1);
    }
    clear(into.below(span.n), span.rows - span.n, padded(width));
}

inline void store_tile(const View& into, Tile from, Span span, int width, const float* factor = nullptr) {
    for (int i = 0; i < span.n; i++) store_row(into, span.first + i, from.row(i), width, factor ? factor[i] : 1);
}

// A token's number; 1 where there is no tensor.
inline float number(const View& from, std::int64_t t) {
    return !from ? 1 : from.has(t) ? *reinterpret_cast<const float*>(from.row(t)) : 0;
}

// One number a token, times `scale`; 0 for the padding.
inline void load_numbers(float* into, const View& from, Span span, float scale = 1) {
    for (int i = 0; i < span.n; i++) into[i] = scale * number(from, span.first + i);
    for (int i = span.n; i < span.rows; i++) into[i] = 0;
}

inline void store_numbers(const View& into, const float* from, Span span) {
    for (int i = 0; i < span.n; i++)
        if (into.has(span.first + i)) *reinterpret_cast<float*>(into.row(span.first + i)) = from[i];
}

// A state, or some columns of one, from contiguous rows of `stride` floats.
inline void load_state(Tile into, const float* from, Stride stride, int K, int V) {
    clear(into, padded(K), padded(V));
    if (from)
        for (int i = 0; i < K; i++) load_row(into.row(i), from + i * stride, V, 1);
}

inline void store_state(float* into, Tile from, Stride stride, int K, int V) {
    for (int i = 0; i < K; i++) store_row(into + i * stride, from.row(i), V, 1);
}

inline void transpose(Tile into, Tile from, int rows, int columns) {
    for (int i = 0; i < rows; i += W)
        for (int j = 0; j < columns; j += W) {
            vf x[W];
            for (int r = 0; r < W; r++) x[r] = load(from.row(i + r) + j);
            transpose(x);
            for (int r = 0; r < W; r++) store(into.row(j + r) + i, x[r]);
        }
}

}  // namespace HR_ISA
