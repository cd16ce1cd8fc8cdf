// Decay inside a chunk of C tokens: none, and one number a token (a fixed one is the same number for every token).
//
// With G_i the sum of log_decay over the chunk's tokens up to and including i:
//
//     rows(x)      x_i e^{G_i}                how much of the incoming state token i still sees
//     cols(x)      x_i e^{G_C − G_i}          how much of token i is left at the end of the chunk
//     end          e^{G_C}, [K]               how much of the incoming state is left at the end
//     scores(x)    Σ_k x_ik k_jk e^{G_i−G_j}  for j ≤ i (j < i: strict), zero elsewhere; k: last given to keys()
//
// G is summed in double, no exponent is positive, and nothing is divided by a decay. The gradient to a token's
// log_decay sums what passes from a writer before it to a reader at or after it. These crossing pairs are summed as
// such: differences of larger sums would leave rounding errors where a strong decay lets nothing pass.
//
// Tiles: A, X, P [C, C]; x, k, dx [C, K]; S [K, V].

#pragma once

#include "factor.h"

namespace HR_ISA {

HR_INLINE vi lane_numbers() {
    vi x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}

// A_ij ← f(i, j) at and below the diagonal (strict: below), zero above it.
template <class F>
HR_INLINE void lower(Tile A, int rows, bool strict, F f) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < rows; j += W) {
            const int limit = i - strict - j;
            store(A.row(i) + j, limit < 0 ? vf{} : lane_numbers() <= (vi{} + limit) ? f(i, j) : vf{});
        }
}

class NoDecay {
public:
    static constexpr bool none = true;

    NoDecay(Arena& arena, int C, int K, bool)
        : end(arena.floats(K)), K_(K), k_t_(transposed_factor(arena, C, K)), x_(left_factor(arena, C, K)) {}

    float* const end;

    void prepare(const View&, Span span, int) {
        rows_ = span.rows;
        for (int i = 0; i < K_; i++) end[i] = 1;
    }
    Tile rows(Tile x, Tile) const { return x; }
    Tile cols(Tile x, Tile) const { return x; }
    void keys(Tile k) { k_t_ = pack_transposed(k, k_t_, rows_, K_); }

    void scores(Tile x, Tile, Tile A, bool strict) const {
        multiply_lower(A, rows_, Zero{}, Plus{pack_left(x, x_, rows_, K_), k_t_, K_, Part::all});
        lower(A, rows_, strict, [&](int i, int j) { return load(A.row(i) + j); });
    }

    // Given X, the gradient to A = scores(x, y), zero above the diagonal: adds the gradients to x and y. X is spent.
    void scores_backward(Tile X, Tile x, Tile y, Tile, Tile dx, Tile dy) const {
        multiply(dx, rows_, K_, Itself{}, Nothing{}, Plus{X, y, rows_, Part::up_to});
        multiply(dy, rows_, K_, Itself{}, Nothing{}, PlusT{X, x, rows_, Part::from});
    }

    void note_reads(Tile, Tile) {}
    void note_writes(Tile, Tile) {}
    void note_passing(Tile, Tile, int) {}
    void store_gradient(const View&, Span, double*) {}

private:
    int K_, rows_ = 0;
    Factor k_t_, x_;  // x_: the rows that scores() compares with the keys
};

class ScalarDecay {
public:
    static constexpr bool none = false;
    static constexpr float LEAST = -1000;  // e^LEAST is 0; differences of sums with −∞ in them would be NaN

    ScalarDecay(Arena& arena, int C, int K, bool gradient)
        : end(arena.floats(K)), K_(K), plain_(arena, C, K, false), P_(arena.tile(C, C)), G_(arena.array<double>(C)),
          seen_(arena.floats(C)), g_(arena.floats(C)), gradient_(gradient), dg_(arena.floats(C)),
          passing_(arena.floats(C)) {}

    float* const end;

    void prepare(const View& log_decay, Span span, int width) {
        plain_.prepare(log_decay, span, width);
        rows_ = span.rows;
        load_numbers(g_, log_decay, span);
        double G = 0;
        for (int i = 0; i < rows_; i++) G_[i] = G += g_[i] < LEAST ? LEAST : g_[i];
        for (int i = 0; i < rows_; i++) {
            float* p = P_.row(i);
            for (int j = 0; j < rows_; j++) p[j] = static_cast<float>(G_[i] - G_[j]);
            seen_[i] = static_cast<float>(G_[i]);
        }
        lower(P_, rows_, false, [&](int i, int j) { return exponential(load(P_.row(i) + j)); });
        for (int i = 0; i < rows_; i += W) store(seen_ + i, exponential(load(seen_ + i)));
        for (int i = 0; i < K_; i++) end[i] = seen_[rows_ - 1];
    }
    Tile rows(Tile x, Tile into) const {
        map(into, rows_, K_, [&](int i, int j) { return load(x.row(i) + j) * splat(seen_[i]); });
        return into;
    }
    Tile cols(Tile x, Tile into) const {
        const float* left = P_.row(rows_ - 1);
        map(into, rows_, K_, [&](int i, int j) { return load(x.row(i) + j) * splat(left[i]); });
        return into;
    }
    void keys(Tile k) { plain_.keys(k); }

    void scores(Tile x, Tile k, Tile A, bool strict) const {
        plain_.scores(x, k, A, strict);
        weigh(A);
    }
    void scores_backward(Tile X, Tile x, Tile y, Tile A, Tile dx, Tile dy) {
        if (gradient_) note_pairs(X, A);
        weigh(X);
        plain_.scores_backward(X, x, y, A, dx, dy);
    }

    // dx: what reading the incoming state with rows(x) sends back to x.
    void note_reads(Tile x, Tile dx) {
        if (!gradient_) return;
        float after = 0;
        for (int i = rows_ - 1; i >= 0; i--) dg_[i] += after += dot(x.row(i), dx.row(i), K_);
    }
    // dy: what being in the outgoing state as cols(y) sends back to y.
    void note_writes(Tile y, Tile dy) {
        if (!gradient_) return;
        float before = 0;
        for (int i = 0; i < rows_; i++) {
            dg_[i] += before;
            before += dot(y.row(i), dy.row(i), K_);
        }
    }
    // S comes in, dS is the gradient to the outgoing state; noted first.
    void note_passing(Tile S_t, Tile dS_t, int V) {
        if (!gradient_) return;
        float through = 0;
        for (int v = 0; v < V; v++) through += dot(S_t.row(v), dS_t.row(v), K_);
        for (int i = 0; i < rows_; i++) dg_[i] = end[0] * through;
    }
    void store_gradient(const View& into, Span span, double* fixed) {
        if (into) store_numbers(into, dg_, span);
        for (int i = 0; fixed && i < span.n; i++) *fixed += dg_[i];
    }

private:
    void weigh(Tile A) const {
        lower(A, rows_, false, [&](int i, int j) { return load(A.row(i) + j) * load(P_.row(i) + j); });
    }
    // dg_t += Σ_{i ≥ t} Σ_{j < t} X_ij A_ij
    void note_pairs(Tile X, Tile A) {
        for (int j = 0; j < rows_; j++) passing_[j] = 0;
        for (int i = rows_ - 1; i >= 0; i--) {
            vf crossing{};
            for (int j = 0; j <= i; j += W) {
                const vf pairs = load(passing_ + j) + load(X.row(i) + j) * load(A.row(i) + j);
                store(passing_ + j, pairs);
                crossing += lane_numbers() < (vi{} + (i - j)) ? pairs : vf{};
            }
            dg_[i] += sum(crossing);
        }
    }

    int K_, rows_ = 0;
    NoDecay plain_;
    Tile P_;  // e^{G_i − G_j}, zero above the diagonal
    double* G_;
    float *seen_, *g_;
    bool gradient_;
    float *dg_, *passing_;
};

}  // namespace HR_ISA
