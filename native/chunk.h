// One chunk of one head: its inputs as tiles, and the parts of the rule that the forward and the backward share.
//
//     add:    E = w v
//     delta:  (I + M) E = w v − rows(k) S,   M_ij = A_ij β_j, A = scores(k), for j < i
//     U = β E          S ← end S + cols(k)ᵀ U
//
// Dimensions: C tokens, K key, V value; capitals here are sizes padded to multiples of 16.

#pragma once

#include "ahead.h"
#include "decay_vector.h"

namespace HR_ISA {

// One head's inputs where they lie.
struct Inputs {
    View q, k, v, log_decay, beta, write, read;

    Inputs(const Plan& plan, const Unit& unit) {
        const hr_problem& p = *plan.problem;
        const bool half = p.dtype == HR_BFLOAT16;
        const std::int64_t shared = p.Hq > p.H ? unit.head : unit.head / (p.H / p.Hq);
        const int delay = plan.delay();
        q = view(p.q, plan, unit, shared, half);
        k = view(p.k, plan, unit, shared, half, 0, delay);
        v = view(p.v, plan, unit, unit.head, half, unit.column, delay);
        log_decay = decay_view(p, plan, unit);
        beta = view(p.beta, plan, unit, unit.head, false, 0, delay);
        write = view(p.write_gate, plan, unit, unit.head, false, 0, delay);
        read = view(p.read_gate, plan, unit, unit.head, false);
    }

    static View decay_view(const hr_problem& p, const Plan& plan, const Unit& unit) {
        hr_tensor g = p.log_decay;
        if (p.decay == HR_DECAY_FIXED) g.batch = g.token = 0;
        return view(g, plan, unit, unit.head, false, 0, plan.delay());
    }
};

inline std::int64_t chunks(const Plan& plan, const Unit& unit) {
    return (plan.length(unit.sequence) + plan.chunk - 1) / plan.chunk;
}

inline Span span_of(const Plan& plan, const Unit& unit, std::int64_t chunk) {
    const std::int64_t first = chunk * plan.chunk, left = plan.length(unit.sequence) - first;
    const int n = static_cast<int>(left < plan.chunk ? left : plan.chunk);
    return {first, n, padded(n)};
}

// A state of this unit's columns in an array [sequences or slots, H, K, V].
inline std::int64_t state_at(const Plan& plan, std::int64_t index, const Unit& unit) {
    const hr_problem& p = *plan.problem;
    return (index * p.H + unit.head) * p.K * plan.columns() + unit.column;
}

inline float* kept_state(const Plan& plan, float* kept, const Unit& unit, std::int64_t run) {
    return kept + state_at(plan, plan.kept_at[unit.sequence] + run - 1, unit);
}

// The normalizer z, [K], a state's column for values of 1.
struct Normalizer {
    const float epsilon;
    const int key, K, value;
    const Stride stride;             // of the states in memory
    float* z;                        // in the forward
    float *written, *share, *slope;  // [C]: β w, 1 / (q z + epsilon), the gradient to q z

    Normalizer(Arena& arena, const Plan& plan, int key, int value)
        : epsilon(plan.problem->normalizer), key(key), K(padded(key)), value(value), stride(plan.columns()),
          z(arena.floats(K)), written(arena.floats(plan.chunk)), share(arena.floats(plan.chunk)),
          slope(arena.floats(plan.chunk)) {}

    explicit operator bool() const { return epsilon > 0; }

    // From a state, and into one.
    void load(float* column, const float* from) const {
        for (int i = 0; epsilon > 0 && i < K; i++) column[i] = from && i < key ? from[i * stride + value] : 0;
    }
    void store(float* into, const float* column) const {
        for (int i = 0; epsilon > 0 && i < key; i++) into[i * stride + value] = column[i];
    }

    // share, from what queries read of z and of the chunk's own writes.
    void divide(Tile q_rows, Tile A, const float* column, int rows) {
        for (int i = 0; i < rows; i++)
            share[i] = 1 / (dot(q_rows.row(i), column, K) + up_to(A.row(i), written, i) + epsilon);
    }
    // Σ x y over the tokens up to i.
    static float up_to(const float* x, const float* y, int i) {
        vf total{};
        for (int j = 0; j <= i; j += W)
            total += lane_numbers() <= (vi{} + (i - j)) ? HR_ISA::load(x + j) * HR_ISA::load(y + j) : vf{};
        return sum(total);
    }
    // column ← end before + xᵀ y
    void pass(float* column, const float* before, const float* end, Tile x, const float* y, int rows) const {
        for (int j = 0; j < K; j += W) {
            vf total = HR_ISA::load(before + j) * HR_ISA::load(end + j);
            for (int i = 0; i < rows; i++) total += HR_ISA::load(x.row(i) + j) * splat(y[i]);
            HR_ISA::store(column + j, total);
        }
    }
};

// What a token reads of its own write under a bonus u: q diag(u) kᵀ β (w v).
struct Own {
    const Inputs& in;
    const int key, value;
    float *u, *q, *k, *v;  // [K], [K], [K], [V]; of a token, after `load`: q is scale · r q
    float beta = 0, write = 0;

    Own(Arena& arena, const Plan& plan, const Unit& unit, const Inputs& in, int key, int value)
        : in(in), key(key), value(value), u(arena.floats(padded(key))), q(arena.floats(padded(key))),
          k(arena.floats(padded(key))), v(arena.floats(padded(value))), scale_(plan.problem->scale) {
        if (u && plan.problem->bonus) load_row(u, plan.problem->bonus + unit.head * key, key, 1);
    }

    void load(std::int64_t token) {
        load_row(q, in.q, token, key, scale_ * number(in.read, token));
        load_row(k, in.k, token + 1, key);
        load_row(v, in.v, token + 1, value);
        beta = number(in.beta, token + 1), write = number(in.write, token + 1);
    }
    float score() const {
        vf total{};
        for (int j = 0; j < key; j += W) total += HR_ISA::load(q + j) * HR_ISA::load(u + j) * HR_ISA::load(k + j);
        return sum(total);
    }
    // x [K] += factor · y diag(u)
    void add_weighted(float* x, const float* y, float factor) const {
        for (int j = 0; j < key; j += W)
            store(x + j, HR_ISA::load(x + j) + HR_ISA::load(y + j) * HR_ISA::load(u + j) * splat(factor));
    }

private:
    const float scale_;
};

// x += factor · y
HR_INLINE void add_row(float* x, const float* y, float factor, int width) {
    for (int j = 0; j < width; j += W) store(x + j, load(x + j) + load(y + j) * splat(factor));
}

template <class Decay, bool delta>
struct Chunk {
    const Plan& plan;
    const Inputs in;
    const int key, value, K, V;  // sizes, and padded
    Span span{};
    Decay decay;
    Tile k, k_cols, k_rows;  // [C, K]; k_cols and k_rows once `write` and `correct` have run
    Tile E, U;               // [C, V]; without β they are the same
    Tile A, M;               // [C, C], of keys with keys
    Normalizer normalizer;
    Factor memory, writes, k_left, k_right;  // in products: the state, U, k_rows, k_cols
    float *beta, *write_gate;

    Chunk(Arena& arena, const Plan& plan, const Unit& unit, bool decay_gradient)
        : plan(plan), in(plan, unit), key(static_cast<int>(plan.problem->K)), value(static_cast<int>(unit.columns)),
          K(padded(key)), V(padded(value)), decay(arena, plan.chunk, K, decay_gradient),
          normalizer(arena, plan, key, value) {
        const int C = plan.chunk;
        k = arena.tile(C, K);
        k_cols = Decay::none ? k : arena.tile(C, K);
        k_rows = Decay::none || !delta ? k : arena.tile(C, K);
        E = arena.tile(C, V);
        U = in.beta || delta ? arena.tile(C, V) : E;
        if (delta) A = arena.tile(C, C), M = in.beta ? arena.tile(C, C) : A;
        memory = right_factor(arena, K, V), writes = right_factor(arena, C, V);
        if (delta) k_left = left_factor(arena, C, K);
        k_right = right_factor(arena, C, K);
        beta = arena.floats(C);
        write_gate = arena.floats(C);
    }

    void begin(Span next) {
        load_keys(next);
        decay.keys(k);
    }
    void load_keys(Span next) {
        span = next;
        load_tile(k, in.k, span, key);
        load_numbers(beta, in.beta, span);
        load_numbers(write_gate, in.write, span);
        for (int i = 0; normalizer && i < span.rows; i++) normalizer.written[i] = beta[i] * write_gate[i];
        decay.prepare(in.log_decay, span, key);
    }
    void load_values() { load_tile(E, in.v, span, value, in.write ? write_gate : nullptr); }

    // A, and with it rows(k): what the delta rule reads.
    void compare_keys() {
        k_rows = decay.rows(k, k_rows);
        decay.scores(k, k, A, true);
    }
    void weigh_keys() {
        if (in.beta) map(M, span.rows, span.rows, [&](int i, int j) { return load(A.row(i) + j) * load(beta + j); });
    }
    // What `correct` and the readers of the chunk find in memory.
    void hold(Tile S) { memory = pack_right(S, memory, K, V); }
    // E and U, from w v in E.
    void correct() {
        k_left = pack_left(k_rows, k_left, span.rows, K);
        multiply(E, span.rows, V, Itself{}, SolveLower{A, U, beta}, Minus{k_left, memory, K, Part::all},
                 Minus{A, U, span.rows, Part::before});
        writes = pack_right(U, writes, span.rows, V);
    }
    // U from E.
    void strengthen() {
        if (U.p != E.p) map(U, span.rows, V, [&](int i, int j) { return load(E.row(i) + j) * splat(beta[i]); });
        writes = pack_right(U, writes, span.rows, V);
    }
    void write_normalizer(float* z, const float* before) const {
        if (normalizer) normalizer.pass(z, before, decay.end, k_cols, normalizer.written, span.rows);
    }
    // S from the state before the chunk, which may be S itself.
    template <class Finish>
    void write(Tile S, Tile before, Finish finish) {
        k_cols = decay.cols(k, k_cols);
        if constexpr (delta && !Decay::none) {
            multiply(S, K, V, RowsScaled{before, decay.end}, finish, PlusT{k_cols, U, span.rows, Part::all});
        } else {
            k_right = pack_right(k_cols, k_right, span.rows, K);
            multiply(S, K, V, RowsScaled{before, decay.end}, finish, PlusT{k_right, writes, span.rows, Part::all});
        }
    }
    // The same of the transposes, of the additive rule.
    template <class Finish>
    void write_transposed(Tile S_t, Tile before_t, Finish finish) {
        k_cols = decay.cols(k, k_cols);
        k_right = pack_right(k_cols, k_right, span.rows, K);
        multiply(S_t, V, K, ColumnsScaled{before_t, decay.end}, finish, PlusT{writes, k_right, span.rows, Part::all});
    }
};

}  // namespace HR_ISA
