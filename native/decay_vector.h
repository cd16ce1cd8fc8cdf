// Decay by key channel: log_decay [C, K]. The interface is ScalarDecay's.
//
// A chunk is cut into blocks of BLOCK tokens. With s_b and e_b the sums at a block's start and end,
//
//     in_i  = e^{G_i − s_b} ≤ 1        out_j = e^{e_a − G_j} ≤ 1        whole_b = e^{e_b − s_b} ≤ 1
//
// every factor is a product of these: between blocks e^{G_i − G_j} = in_i · whole_{b−1} … whole_{a+1} · out_j. Within a
// block it is in_i out_j / whole_b; a block in which no channel loses more than e^STEEP multiplies by e^{s_b − e_b},
// any other takes each pair's exponential by itself. Sums run over a block's tokens only: nothing cancels.

#pragma once

#include "decay.h"

namespace HR_ISA {

class VectorDecay {
public:
    static constexpr bool none = false;
    static constexpr int BLOCK = LANES;
    static constexpr float STEEP = 20;

    VectorDecay(Arena& arena, int C, int K, bool gradient)
        : end(arena.floats(K)), K_(K), g_(arena.tile(C, K)), in_(arena.tile(C, K)), out_(arena.tile(C, K)),
          whole_(arena.tile(C / BLOCK, K)), back_(arena.tile(C / BLOCK, K)), steep_(arena.array<bool>(C / BLOCK)),
          y_(arena.tile(C, K)), y_t_(transposed_factor(arena, C, K)), x_(arena.tile(BLOCK, K)), left_(left_factor(arena, BLOCK, K)), fade_(arena.tile(BLOCK, K)), channel_(arena.floats(K)),
          gradient_(gradient), dg_(arena.tile(C, K)), dx_(arena.tile(C, K)), dy_(arena.tile(C, K)),
          part_(arena.tile(BLOCK, K)) {}

    float* const end;

    void prepare(const View& log_decay, Span span, int width) {
        rows_ = span.rows;
        width_ = width;
        load_tile(g_, log_decay, span, width);
        for (int b = 0; b < rows_; b += BLOCK) prepare_block(b);
        for (int j = 0; j < K_; j += W) {
            vf all = splat(1);
            for (int b = 0; b < rows_ / BLOCK; b++) all *= load(whole_.row(b) + j);
            store(end + j, all);
        }
    }
    Tile rows(Tile x, Tile into) const {
        for (int j = 0; j < K_; j += W) {
            vf enter = splat(1);
            for (int i = 0; i < rows_; i++) {
                if (i && i % BLOCK == 0) enter *= load(whole_.row(i / BLOCK - 1) + j);
                store(into.row(i) + j, load(x.row(i) + j) * load(in_.row(i) + j) * enter);
            }
        }
        return into;
    }
    Tile cols(Tile x, Tile into) const {
        for (int j = 0; j < K_; j += W) {
            vf leave = splat(1);
            for (int i = rows_ - 1; i >= 0; i--) {
                store(into.row(i) + j, load(x.row(i) + j) * load(out_.row(i) + j) * leave);
                if (i % BLOCK == 0) leave *= load(whole_.row(i / BLOCK) + j);
            }
        }
        return into;
    }
    void keys(Tile k) {
        map(y_, rows_, K_, [&](int i, int j) { return load(k.row(i) + j) * load(out_.row(i) + j); });
        y_t_ = pack_transposed(y_, y_t_, rows_, K_);
    }

    void scores(Tile x, Tile k, Tile A, bool strict) const {
        for (int b = 0; b < rows_; b += BLOCK) {
            if (steep_[b / BLOCK])
                scores_by_pair(x, k, A, b);
            else
                score_block(read_within(x, b), A, b, b);
            read_before(x, b);
            for (int a = b - BLOCK; a >= 0; a -= BLOCK) {
                score_block(x_, A, b, a);
                one_block_more(a);
            }
        }
        lower(A, rows_, strict, [&](int i, int j) { return load(A.row(i) + j); });
    }

    // y is the tile last given to keys().
    void scores_backward(Tile X, Tile x, Tile y, Tile, Tile dx, Tile dy) {
        clear(dx_, rows_, K_);
        clear(dy_, rows_, K_);
        for (int b = BLOCK; b < rows_; b += BLOCK) between_blocks(X, x, b);
        if (gradient_) note_between_blocks(x);
        add(dx, dx_, in_, rows_);
        add(dy, dy_, out_, rows_);
        for (int b = 0; b < rows_; b += BLOCK)
            if (steep_[b / BLOCK])
                by_pair(X, x, y, dx, dy, b);
            else
                within_block(X, x, y, dx, dy, b);
    }

    void begin_gradient() { clear(dg_, rows_, K_); }
    void note_reads(Tile x, Tile dx) {
        if (gradient_) sum_after(0, rows_, [&](int i, int j) { return load(x.row(i) + j) * load(dx.row(i) + j); });
    }
    void note_writes(Tile y, Tile dy) {
        if (gradient_) sum_before(0, rows_, [&](int i, int j) { return load(y.row(i) + j) * load(dy.row(i) + j); });
    }
    void note_passing(Tile S, Tile dS, int V) {
        if (!gradient_) return;
        for (int i = 0; i < K_; i++) channel_[i] = end[i] * dot(S.row(i), dS.row(i), V);
        map(dg_, rows_, K_, [&](int i, int j) { return load(dg_.row(i) + j) + load(channel_ + j); });
    }
    void store_gradient(const View& into, Span span, double*) {
        if (into) store_tile(into, dg_, span, width_);
    }

private:
    void prepare_block(int b) {
        bool steep = false;
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
            store(back_.row(b / BLOCK) + j, before.negative().exponential());
            // NaN too: pair by pair it reaches no earlier token.
            for (int i = 0; i < W; i++) steep |= !(before.total[i] >= -STEEP);
        }
        steep_[b / BLOCK] = steep;
    }

    // x_ ← x in block b as it sees writes of its own block, as it sees those at the end of the block before.
    Tile read_within(Tile x, int b) const {
        const float* back = back_.row(b / BLOCK);
        map(x_, BLOCK, K_, [&](int i, int j) {
            return load(x.row(b + i) + j) * load(in_.row(b + i) + j) * load(back + j);
        });
        return x_;
    }
    void read_before(Tile x, int b) const {
        map(x_, BLOCK, K_, [&](int i, int j) { return load(x.row(b + i) + j) * load(in_.row(b + i) + j); });
    }
    // … and as it sees those at the end of the block before a.
    void one_block_more(int a) const {
        map(x_, BLOCK, K_, [&](int i, int j) { return load(x_.row(i) + j) * load(whole_.row(a / BLOCK) + j); });
    }
    void score_block(Tile x, Tile A, int b, int a) const {
        multiply(A.below(b).right(a), BLOCK, BLOCK, Zero{}, Nothing{}, 
                 Plus{pack_left(x, left_, BLOCK, K_), y_t_.right(a), K_, Part::all});
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
        read_before(x, b);
        for (int j = 0; j < K_; j++) channel_[j] = 1;
        for (int a = b - BLOCK; a >= 0; a -= BLOCK) {
            const Tile pairs = X.below(b).right(a), dx = dx_.below(b), dy = dy_.below(a);
            multiply(dy, BLOCK, K_, Itself{}, Nothing{}, PlusT{pairs, x_, BLOCK, Part::all});
            multiply(part_, BLOCK, K_, Zero{}, Nothing{}, Plus{pairs, y_.below(a), BLOCK, Part::all});
            map(dx, BLOCK, K_, [&](int i, int j) {
                return load(dx.row(i) + j) + load(part_.row(i) + j) * load(channel_ + j);
            });
            if (gradient_ && b - a > BLOCK) note_over_blocks(a + BLOCK, b);
            for (int j = 0; j < K_; j += W) store(channel_ + j, load(channel_ + j) * load(whole_.row(a / BLOCK) + j));
            one_block_more(a);
        }
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
            sum_after(b, b + BLOCK, [&](int i, int j) {
                return load(x.row(i) + j) * load(in_.row(i) + j) * load(dx_.row(i) + j);
            });
            sum_before(b, b + BLOCK, [&](int i, int j) { return load(y_.row(i) + j) * load(dy_.row(i) + j); });
        }
    }
    // Pairs in one block that is not steep. What crosses a token is here a difference of sums: none is large. A token
    // with itself crosses nothing and is kept out of it.
    void within_block(Tile X, Tile x, Tile y, Tile dx, Tile dy, int b) {
        const Tile pairs = X.below(b).right(b), dx_in = dx_.below(b), dy_out = dy_.below(b);
        const float* back = back_.row(b / BLOCK);
        for (int i = 0; i < BLOCK; i++) {
            add_row(dx.row(b + i), y.row(b + i), pairs.row(i)[i]);
            add_row(dy.row(b + i), x.row(b + i), pairs.row(i)[i]);
            pairs.row(i)[i] = 0;
        }
        multiply(dy_out, BLOCK, K_, Zero{}, Nothing{}, PlusT{pairs, read_within(x, b), BLOCK, Part::from});
        multiply(dx_in, BLOCK, K_, Zero{}, Nothing{}, Plus{pairs, y_.below(b), BLOCK, Part::up_to});
        map(dx_in, BLOCK, K_, [&](int i, int j) { return load(dx_in.row(i) + j) * load(back + j); });
        if (gradient_)
            sum_after(b, b + BLOCK, [&](int i, int j) {
                return load(x.row(i) + j) * load(in_.row(i) + j) * load(dx_.row(i) + j) -
                       load(y_.row(i) + j) * load(dy_.row(i) + j);
            });
        add(dx.below(b), dx_in, in_.below(b), BLOCK);
        add(dy.below(b), dy_out, out_.below(b), BLOCK);
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

    void add(Tile into, Tile x, Tile factor, int rows) const {
        map(into, rows, K_, [&](int i, int j) {
            return load(into.row(i) + j) + load(x.row(i) + j) * load(factor.row(i) + j);
        });
    }
    void add_row(float* into, const float* x, float factor) const {
        for (int j = 0; j < K_; j += W) store(into + j, load(into + j) + load(x + j) * splat(factor));
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

    int K_, rows_ = 0, width_ = 0;
    Tile g_, in_, out_, whole_, back_;
    bool* steep_;
    Tile y_;          // y out_ for the tile y last given to keys()
    Factor y_t_;      // and its transpose
    Tile x_;          // a block of x, scaled
    Factor left_;     // x_, in products
    Tile fade_;       // [BLOCK, K], e^{log_decay}
    float* channel_;  // [K], in passing
    bool gradient_;
    Tile dg_, dx_, dy_, part_;
};

}  // namespace HR_ISA
