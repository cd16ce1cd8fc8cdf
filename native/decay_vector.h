// Decay by key channel: log_decay [C, K]. The interface is ScalarDecay's.
//
// A chunk is cut into blocks. With s_b and e_b the sums at a block's start and end,
//
//     in_i  = e^{G_i − s_b}        out_j = e^{r − G_j}        whole_b = e^{e_b − s_b}
//
// every factor is a product of these: between blocks e^{G_i − G_j} = in_i · whole_{b−1} … whole_{a+1} · out_j with
// r = e_a. A block whose channels' log_decay sum to at most STEEP in magnitude is gentle: its r is s_a, so that within it
// the factor is in_i out_j, and to later blocks whole_a is one more. In any other, each pair's exponential is taken by
// itself. A gentle chunk is one block; of any other, a block is BLOCK tokens. Sums run over a block's tokens only: nothing
// cancels.

#pragma once

#include "decay.h"

namespace HR_ISA {

class VectorDecay {
public:
    static constexpr bool none = false;
    static constexpr int BLOCK = LANES;
    static constexpr float STEEP = 8;  // e^8: gradients of 1e-30 keep their digits while they are divided by it

    VectorDecay(Arena& arena, int C, int K, bool gradient)
        : end(arena.floats(K)), K_(K), g_(arena.tile(C, K)), in_(arena.tile(C, K)), out_(arena.tile(C, K)),
          whole_(arena.tile(C / BLOCK, K)), gentle_(arena.array<bool>(C / BLOCK)), y_(arena.tile(C, K)),
          y_t_(transposed_factor(arena, C, K)), x_(arena.tile(C, K)), left_(left_factor(arena, C, K)),
          fade_(arena.tile(BLOCK, K)), channel_(arena.floats(K)), diagonal_(arena.floats(C)), gradient_(gradient),
          dg_(arena.tile(C, K)), dx_(arena.tile(C, K)), dy_(arena.tile(C, K)), part_(arena.tile(BLOCK, K)) {}

    float* const end;

    void prepare(const View& log_decay, Span span, int width) {
        rows_ = span.rows;
        width_ = width;
        load_tile(g_, log_decay, span, width);
        const bool one_block = gentle(0, rows_);
        block_ = one_block ? rows_ : BLOCK;
        for (int b = 0; b < rows_; b += block_) {
            gentle_[b / BLOCK] = one_block || gentle(b, BLOCK);
            gentle_[b / BLOCK] ? prepare_gentle(b) : prepare_steep(b);
        }
        for (int j = 0; j < K_; j += W) {
            vf all = splat(1);
            for (int b = 0; b < rows_; b += block_) all *= whole(b, j);
            store(end + j, all);
        }
    }
    Tile rows(Tile x, Tile into) const {
        for (int j = 0; j < K_; j += W) {
            vf enter = splat(1);
            for (int b = 0; b < rows_; enter *= whole(b, j), b += block_)
                for (int i = b; i < b + block_; i++)
                    store(into.row(i) + j, load(x.row(i) + j) * load(in_.row(i) + j) * enter);
        }
        return into;
    }
    Tile cols(Tile x, Tile into) const {
        for (int j = 0; j < K_; j += W) {
            vf leave = splat(1);
            for (int b = rows_ - block_; b >= 0; b -= block_) {
                const vf past = leave * whole(b, j), factor = gentle_[b / BLOCK] ? past : leave;
                for (int i = b; i < b + block_; i++)
                    store(into.row(i) + j, load(x.row(i) + j) * load(out_.row(i) + j) * factor);
                leave = past;
            }
        }
        return into;
    }
    void keys(Tile k) {
        map(y_, rows_, K_, [&](int i, int j) { return load(k.row(i) + j) * load(out_.row(i) + j); });
        y_t_ = pack_transposed(y_, y_t_, rows_, K_);
    }

    void scores(Tile x, Tile k, Tile A, bool strict) const {
        for (int b = 0; b < rows_; b += block_) {
            read_block(x, b);
            if (gentle_[b / BLOCK])
                multiply_lower(A.below(b).right(b), block_, Zero{},
                               Plus{pack_left(x_, left_, block_, K_), y_t_.right(b), K_, Part::all});
            else
                scores_by_pair(x, k, A, b);
            for (int a = b - BLOCK; a >= 0; a -= BLOCK) {
                if (gentle_[a / BLOCK]) fade_over(a);
                multiply(A.below(b).right(a), BLOCK, BLOCK, Zero{}, Nothing{},
                         Plus{pack_left(x_, left_, BLOCK, K_), y_t_.right(a), K_, Part::all});
                if (!gentle_[a / BLOCK]) fade_over(a);
            }
        }
        lower(A, rows_, strict, [&](int i, int j) { return load(A.row(i) + j); });
    }

    // y is the tile last given to keys().
    void scores_backward(Tile X, Tile x, Tile y, Tile, Tile dx, Tile dy) {
        if (block_ < rows_) {
            clear(dx_, rows_, K_);
            clear(dy_, rows_, K_);
            for (int b = BLOCK; b < rows_; b += BLOCK) between_blocks(X, x, b);
            if (gradient_) note_between_blocks(x);
            add(dx, dx_, in_);
            add(dy, dy_, out_);
        }
        for (int b = 0; b < rows_; b += block_)
            if (gentle_[b / BLOCK])
                within_block(X, x, y, dx, dy, b);
            else
                by_pair(X, x, y, dx, dy, b);
    }

    void note_reads(Tile x, Tile dx) {
        if (gradient_) sum_after(0, rows_, [&](int i, int j) { return load(x.row(i) + j) * load(dx.row(i) + j); });
    }
    void note_writes(Tile y, Tile dy) {
        if (gradient_) sum_before(0, rows_, [&](int i, int j) { return load(y.row(i) + j) * load(dy.row(i) + j); });
    }
    void note_passing(Tile S_t, Tile dS_t, int V) {
        if (!gradient_) return;
        for (int j = 0; j < K_; j += W) {
            vf through{};
            for (int v = 0; v < V; v++) through += load(S_t.row(v) + j) * load(dS_t.row(v) + j);
            through *= load(end + j);
            for (int i = 0; i < rows_; i++) store(dg_.row(i) + j, through);
        }
    }
    void store_gradient(const View& into, Span span, double*) {
        if (into) store_tile(into, dg_, span, width_);
    }

private:
    vf whole(int b, int j) const { return load(whole_.row(b / BLOCK) + j); }

    // False for NaN too: pair by pair it reaches no earlier token.
    bool gentle(int first, int count) const {
        vi within = vi{} == vi{};
        for (int j = 0; j < K_; j += W) {
            vf total{};
            for (int i = first; i < first + count; i++) total += magnitude(load(g_.row(i) + j));
            within &= total <= splat(STEEP);
        }
        bool all = true;
        for (int i = 0; i < W; i++) all &= within[i] != 0;
        return all;
    }
    void prepare_gentle(int b) {
        for (int j = 0; j < K_; j += W) {
            Sum before;
            vf fade{};
            for (int i = b; i < b + block_; i++) {
                before.add(load(g_.row(i) + j));
                fade = before.exponential();
                store(in_.row(i) + j, fade);
                store(out_.row(i) + j, splat(1) / fade);
            }
            store(whole_.row(b / BLOCK) + j, fade);
        }
    }
    void prepare_steep(int b) {
        for (int j = 0; j < K_; j += W) {
            Sum before, after;
            for (int i = 0; i < BLOCK; i++) {
                const int last = b + BLOCK - 1 - i;
                store(out_.row(last) + j, after.exponential());
                after.add(load(g_.row(last) + j));
                before.add(load(g_.row(b + i) + j));
                store(in_.row(b + i) + j, before.exponential());
            }
            store(whole_.row(b / BLOCK) + j, before.exponential());
        }
    }

    // x_ ← x in block b as it sees writes at the block's start, the end of the block before.
    void read_block(Tile x, int b) const {
        map(x_, block_, K_, [&](int i, int j) { return load(x.row(b + i) + j) * load(in_.row(b + i) + j); });
    }
    // … and as it sees those at the start of block a.
    void fade_over(int a) const {
        map(x_, BLOCK, K_, [&](int i, int j) { return load(x_.row(i) + j) * whole(a, j); });
    }

    // What is left of each token of block b at the next, into fade_.
    void find_fades(int b) const {
        map(fade_, BLOCK, K_, [&](int i, int j) { return exponential(load(g_.row(b + i) + j)); });
    }
    // f(i, e^{G_i − G_j}) from writer j on, for i = j … the end of the block that fade_ is of.
    template <class F>
    HR_INLINE void from_writer(int j, int column, F f) const {
        vf left = splat(1);
        for (int i = j; i < BLOCK; i++) {
            if (i > j) left *= load(fade_.row(i) + column);
            f(i, left);
        }
    }
    void scores_by_pair(Tile x, Tile k, Tile A, int b) const {
        find_fades(b);
        for (int j = 0; j < BLOCK; j++) {
            vf totals[BLOCK] = {};
            for (int c = 0; c < K_; c += W) {
                const vf y = load(k.row(b + j) + c);
                from_writer(j, c, [&](int i, vf e) { totals[i] += load(x.row(b + i) + c) * y * e; });
            }
            for (int i = j; i < BLOCK; i++) A.row(b + i)[b + j] = sum(totals[i]);
        }
    }

    // Pairs of a reader in block b and a writer in an earlier one: gradients to x in_ and y out_, into dx_ and dy_.
    void between_blocks(Tile X, Tile x, int b) {
        read_block(x, b);
        for (int j = 0; j < K_; j++) channel_[j] = 1;
        for (int a = b - BLOCK; a >= 0; a -= BLOCK) {
            const Tile pairs = X.below(b).right(a), dx = dx_.below(b), dy = dy_.below(a);
            if (gentle_[a / BLOCK]) fade_all_over(a);
            multiply(dy, BLOCK, K_, Itself{}, Nothing{}, PlusT{pairs, x_, BLOCK, Part::all});
            multiply(part_, BLOCK, K_, Zero{}, Nothing{}, Plus{pairs, y_.below(a), BLOCK, Part::all});
            map(dx, BLOCK, K_,
                [&](int i, int j) { return load(dx.row(i) + j) + load(part_.row(i) + j) * load(channel_ + j); });
            if (gradient_ && b - a > BLOCK) note_over_blocks(a + BLOCK, b);
            if (!gentle_[a / BLOCK]) fade_all_over(a);
        }
    }
    void fade_all_over(int a) {
        for (int j = 0; j < K_; j += W) store(channel_ + j, load(channel_ + j) * whole(a, j));
        fade_over(a);
    }
    // What passes over the tokens from first to last, from the pairs whose readers' part is in x_ and part_.
    void note_over_blocks(int first, int last) {
        for (int j = 0; j < K_; j += W) {
            vf over{};
            for (int i = 0; i < BLOCK; i++) over += load(x_.row(i) + j) * load(part_.row(i) + j);
            for (int t = first; t < last; t++) store(dg_.row(t) + j, load(dg_.row(t) + j) + over);
        }
    }
    void note_between_blocks(Tile x) {
        for (int b = 0; b < rows_; b += BLOCK) {
            sum_after(b, b + BLOCK,
                      [&](int i, int j) { return load(x.row(i) + j) * load(in_.row(i) + j) * load(dx_.row(i) + j); });
            sum_before(b, b + BLOCK, [&](int i, int j) { return load(y_.row(i) + j) * load(dy_.row(i) + j); });
        }
    }
    // Pairs in one gentle block. What crosses a token is here a difference of sums: none is large. A token with itself
    // crosses nothing and is kept out of it.
    void within_block(Tile X, Tile x, Tile y, Tile dx, Tile dy, int b) {
        const Tile pairs = X.below(b).right(b), dx_in = dx_.below(b), dy_out = dy_.below(b);
        for (int i = 0; i < block_; i++) diagonal_[i] = pairs.row(i)[i], pairs.row(i)[i] = 0;
        read_block(x, b);
        multiply(dy_out, block_, K_, Zero{}, Nothing{}, PlusT{pairs, x_, block_, Part::from});
        multiply(dx_in, block_, K_, Zero{}, Nothing{}, Plus{pairs, y_.below(b), block_, Part::up_to});
        for (int j = 0; j < K_; j += W) {
            vf crossing{};
            for (int i = b + block_ - 1; i >= b; i--) {
                const vf x_i = load(x.row(i) + j), y_i = load(y.row(i) + j), itself = splat(diagonal_[i - b]);
                const vf to_x = load(dx_.row(i) + j) * load(in_.row(i) + j);
                const vf to_y = load(dy_.row(i) + j) * load(out_.row(i) + j);
                store(dx.row(i) + j, load(dx.row(i) + j) + to_x + itself * y_i);
                store(dy.row(i) + j, load(dy.row(i) + j) + to_y + itself * x_i);
                crossing += x_i * to_x - y_i * to_y;
                store(dg_.row(i) + j, load(dg_.row(i) + j) + crossing);
            }
        }
    }
    void by_pair(Tile X, Tile x, Tile y, Tile dx, Tile dy, int b) {
        find_fades(b);
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < K_; c += W) {
                const vf y_j = load(y.row(b + j) + c);
                vf passing[BLOCK], dy_j{};
                from_writer(j, c, [&](int i, vf e) {
                    const vf weight = e * splat(X.row(b + i)[b + j]), x_i = load(x.row(b + i) + c);
                    dy_j += weight * x_i;
                    store(dx.row(b + i) + c, load(dx.row(b + i) + c) + weight * y_j);
                    passing[i] = weight * x_i * y_j;
                });
                store(dy.row(b + j) + c, load(dy.row(b + j) + c) + dy_j);
                vf crossing{};
                for (int i = BLOCK - 1; gradient_ && i > j; i--) {
                    crossing += passing[i];
                    store(dg_.row(b + i) + c, load(dg_.row(b + i) + c) + crossing);
                }
            }
    }

    void add(Tile into, Tile x, Tile factor) const {
        map(into, rows_, K_,
            [&](int i, int j) { return load(into.row(i) + j) + load(x.row(i) + j) * load(factor.row(i) + j); });
    }
    // dg_t += Σ f(i) over the tokens first ≤ i < last at and after t, before t.
    template <class F>
    HR_INLINE void sum_after(int first, int last, F f) {
        for (int j = 0; j < K_; j += W) {
            vf after{};
            for (int i = last - 1; i >= first; i--) store(dg_.row(i) + j, load(dg_.row(i) + j) + (after += f(i, j)));
        }
    }
    template <class F>
    HR_INLINE void sum_before(int first, int last, F f) {
        for (int j = 0; j < K_; j += W) {
            vf before{};
            for (int i = first; i < last; i++) {
                store(dg_.row(i) + j, load(dg_.row(i) + j) + before);
                before += f(i, j);
            }
        }
    }

    int K_, rows_ = 0, width_ = 0, block_ = BLOCK;
    Tile g_, in_, out_, whole_;
    bool* gentle_;
    Tile y_;                      // y out_ for the tile y last given to keys()
    Factor y_t_;                  // and its transpose
    Tile x_;                      // a block of x, scaled
    Factor left_;                 // x_, in products
    Tile fade_;                   // [BLOCK, K], e^{log_decay}
    float *channel_, *diagonal_;  // [K], [C], in passing
    bool gradient_;
    Tile dg_, dx_, dy_, part_;
};

}  // namespace HR_ISA
