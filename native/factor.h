// The factors of products: tiles packed as the instructions read them (bf16.h), each number that was not bfloat16 rounded.
// Without such instructions a factor is the tile itself, or its transpose.

#pragma once

#include "tile.h"

namespace HR_ISA {

#if defined(__AVX512BF16__)

using Factor = Pairs;

inline Pairs left_factor(Arena& arena, int rows, int width) {
    const Stride ld = leading(padded(width / 2));
    return {arena.array<std::uint32_t>(rows * ld), ld};
}
inline Pairs right_factor(Arena& arena, int rows, int width) {
    const Stride ld = leading(width);
    return {arena.array<std::uint32_t>(rows / 2 * ld), ld};
}
inline Pairs transposed_factor(Arena& arena, int rows, int width) { return right_factor(arena, width, rows); }

inline Pairs pack_left(Tile x, Pairs into, int rows, int width) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j += 2 * W)
            store(into.row(i) + j / 2, side_by_side(load(x.row(i) + j), j + W < width ? load(x.row(i) + j + W) : vf{}));
    return into;
}

inline Pairs pack_right(Tile x, Pairs into, int rows, int width) {
    for (int i = 0; i < rows; i += 2)
        for (int j = 0; j < width; j += W)
            store(into.row(i / 2) + j, interleaved(load(x.row(i) + j), load(x.row(i + 1) + j)));
    return into;
}

inline Pairs pack_transposed(Tile x, Pairs into, int rows, int width) {
    for (int i = 0; i < rows; i += W)
        for (int j = 0; j < width; j += 2 * W) {
            vf pairs[W];
            for (int r = 0; r < W; r++) {
                const float* p = x.row(i + r) + j;
                pairs[r] = bits(side_by_side(load(p), j + W < width ? load(p + W) : vf{}));
            }
            transpose(pairs);
            for (int r = 0; r < W && j / 2 + r < width / 2; r++) store(into.row(j / 2 + r) + i, bits(pairs[r]));
        }
    return into;
}

#else

using Factor = Tile;

inline Tile left_factor(Arena&, int, int) { return {}; }
inline Tile right_factor(Arena&, int, int) { return {}; }
inline Tile transposed_factor(Arena& arena, int rows, int width) { return arena.tile(width, rows); }

inline Tile pack_left(Tile x, Tile, int, int) { return x; }
inline Tile pack_right(Tile x, Tile, int, int) { return x; }
inline Tile pack_transposed(Tile x, Tile into, int rows, int width) {
    transpose(into, x, rows, width);
    return into;
}

#endif

}  // namespace HR_ISA
