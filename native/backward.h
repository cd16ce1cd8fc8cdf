// The backward of one unit. Runs of chunks from last to first: the states before a run's chunks are recomputed from
// the one kept at its start, then its chunks are walked in reverse, dS, the gradient to the state, going from one to the
// next.
//
// The formulas are those of the forward transposed. Under the delta rule k also reads, as q does: it finds out what
// memory holds before it writes. Nothing is divided by β, a gate or a decay.
//
// Tiles: d_out, E, U, dU, dP [C, V]; q, k, dq, dk [C, K]; A, X [C, C]; S, dS [K, V]; names with _t: transposes. The
// additive rule uses S transposed alone, and finds it so.

#pragma once

#include "chunk.h"

namespace HR_ISA {

template <class Decay, bool delta>
struct BackwardUnit {
    const Plan& plan;
    const Backward& job;
    const Unit& unit;
    Chunk<Decay, delta> chunk;
    const int key, value, K, V;
    View d_out_from, dq_into, dk_into, dv_into, d_decay_into, d_beta_into, d_write_into, d_read_into;
    Tile *S, *S_t, *E;  // before each chunk of a run (the delta rule: S_t is one tile), of each chunk of a run
    Tile dS, dS_t, E_t;
    // In products: S_t, dS_t, dS, …
    Factor before_t, after_t, after, k_left, q_right, d_out_left, d_out_right, wide_left;
    Tile q, q_rows, dq, dk, read;
    Tile d_out, dU, A, X;
    float *strength, *numbers, *read_out;
    Own own;
    Ahead ahead;

    BackwardUnit(Arena& arena, const Plan& plan, const Backward& job, const Unit& unit)
        : plan(plan), job(job), unit(unit),
          chunk(arena, plan, unit, job.gradients[unit.part].log_decay.data || job.fixed_decay), key(chunk.key),
          value(chunk.value), K(chunk.K), V(chunk.V), own(arena, plan, unit, chunk.in, key, value) {
        const int C = plan.chunk, run = static_cast<int>(plan.run);
        find_tensors();
        S = arena.array<Tile>(run), S_t = arena.array<Tile>(run), E = arena.array<Tile>(run);
        const Tile one = arena.tile(delta ? V : K, delta ? K : V);
        for (int i = 0; i < run; i++) {
            const Tile state = delta ? arena.tile(K, V) : arena.tile(V + 1, K),
                       errors = delta ? arena.tile(C, V) : chunk.E;
            if (S) S[i] = delta ? state : one, S_t[i] = delta ? one : state, E[i] = errors;
        }
        dS = arena.tile(K, V), dS_t = arena.tile(V + 1, K), E_t = arena.tile(V, C);
        before_t = right_factor(arena, V, K), after_t = right_factor(arena, V, K), after = right_factor(arena, K, V);
        k_left = left_factor(arena, C, K), q_right = right_factor(arena, C, K);
        d_out_left = left_factor(arena, C, V), d_out_right = right_factor(arena, C, V);
        wide_left = left_factor(arena, C, V);
        q = arena.tile(C, K), q_rows = Decay::none ? q : arena.tile(C, K);
        dq = arena.tile(C, K), dk = arena.tile(C, K), read = arena.tile(C, K);
        d_out = arena.tile(C, V), dU = arena.tile(C, V);
        A = arena.tile(C, C), X = arena.tile(C, C);
        strength = arena.floats(C), numbers = arena.floats(C), read_out = arena.floats(V);
    }

    void find_tensors() {
        const hr_gradients& g = job.gradients[unit.part];
        const bool half = plan.problem->dtype == HR_BFLOAT16;
        const int delay = plan.delay();
        const std::int64_t head = job.by_head ? unit.head : unit.head / (plan.problem->H / plan.problem->Hq);
        d_out_from = view(job.d_out, plan, unit, unit.head, half, unit.column);
        dq_into = view(g.q, plan, unit, head, half && !job.by_head);
        dk_into = view(g.k, plan, unit, head, half && !job.by_head, 0, delay);
        dv_into = view(g.v, plan, unit, unit.head, half, unit.column, delay);
        if (!job.fixed_decay) d_decay_into = view(g.log_decay, plan, unit, unit.head, false, 0, delay);
        d_beta_into = view(g.beta, plan, unit, unit.head, false, 0, delay);
        d_write_into = view(g.write_gate, plan, unit, unit.head, false, 0, delay);
        d_read_into = view(g.read_gate, plan, unit, unit.head, false);
    }

    void run() {
        const std::int64_t own = state_at(plan, unit.sequence, unit), count = chunks(plan, unit);
        const float* d_final = job.d_final ? job.d_final + own : nullptr;
        load_state(dS, d_final, plan.columns(), key, value);
        chunk.normalizer.load(dS_t.row(V), d_final);
        for (std::int64_t run = (count + plan.run - 1) / plan.run - 1; run >= 0; run--) {
            const std::int64_t first = run * plan.run, end = first + plan.run < count ? first + plan.run : count;
            replay(run, first, end);
            for (std::int64_t i = end - 1; i >= first; i--)
                step(span_of(plan, unit, i), i ? span_of(plan, unit, i - 1) : Span{}, static_cast<int>(i - first));
        }
        float* d_initial = job.gradients[unit.part].initial_state;
        if (!d_initial) return;
        store_state(d_initial + own, dS, plan.columns(), key, value);
        chunk.normalizer.store(d_initial + own, dS_t.row(V));
    }

    // Fills S_t or, under the delta rule, S and E for chunks first … end − 1.
    void replay(std::int64_t run, std::int64_t first, std::int64_t end) {
        const hr_problem& p = *plan.problem;
        const float* initial = p.initial_state ? p.initial_state + state_at(plan, unit.sequence, unit) : nullptr;
        float* kept = const_cast<float*>(job.kept);
        const float* before = run ? kept_state(plan, kept, unit, run) : initial;
        load_state(S[0], before, plan.columns(), key, value);
        if (!delta) chunk.normalizer.load(S_t[0].row(V), before);
        if (!delta) transpose(S_t[0], S[0], K, V);
        const int last = static_cast<int>(end - first) - 1;
        for (int i = 0; i < last + delta; i++) {
            const Span span = span_of(plan, unit, first + i);
            chunk.load_keys(span);
            fetch_inputs(i == last ? Span{} : span_of(plan, unit, first + i + 1));
            find_values(span, i);
            if (i == last) return;
            chunk.strengthen();
            if constexpr (delta)
                chunk.write(S[i + 1], S[i], Fetch{&ahead});
            else
                chunk.write_transposed(S_t[i + 1], S_t[i], Fetch{&ahead}),
                    chunk.write_normalizer(S_t[i + 1].row(V), S_t[i].row(V));
        }
    }
    void find_values(Span span, int i) {
        chunk.load_values();
        if constexpr (delta) {
            chunk.decay.keys(chunk.k);
            chunk.compare_keys();
            chunk.hold(S[i]);
            chunk.correct();
            copy(E[i], chunk.E, span.rows, V);
        }
    }

    void fetch_inputs(Span span) {
        ahead.clear();
        ahead.add(chunk.in.k, span, key);
        ahead.add(chunk.in.v, span, value);
        if (plan.problem->decay == HR_DECAY_VECTOR) ahead.add(chunk.in.log_decay, span, key);
    }
    void fetch(Span span, Span next) {
        fetch_inputs(next);
        ahead.add(chunk.in.q, next, key);
        ahead.add(d_out_from, next, value);
        ahead.add(dv_into, span, value);
        ahead.add(dk_into, span, key);
        ahead.add(dq_into, span, key);
        if (plan.problem->decay == HR_DECAY_VECTOR) ahead.add(d_decay_into, span, key);
    }

    // Of chunk i of the run.
    void step(Span span, Span next, int i) {
        fetch(span, next);
        begin(span, E[i]);
        if (delta) transpose(S_t[i], S[i], K, V);
        transpose(dS_t, dS, K, V);
        transpose(E_t, chunk.E, span.rows, V);
        to_writes(span, S_t[i]);
        to_reads_and_keys(span, S_t[i]);
        for (int t = 0; d_beta_into && t < span.rows; t++) numbers[t] = dot(dU.row(t), chunk.E.row(t), V);
        if (chunk.in.beta)
            map(dU, span.rows, V, [&](int t, int j) { return load(dU.row(t) + j) * splat(chunk.beta[t]); });
        if constexpr (delta) through_memory(span);
        to_state(span);
        finish(span);
        Normalizer& normalizer = chunk.normalizer;
        float* dz = dS_t.row(V);
        if (normalizer) normalizer.pass(dz, dz, chunk.decay.end, q_rows, normalizer.slope, span.rows);
    }

    void begin(Span span, Tile errors) {
        chunk.begin(span);
        if (delta) {
            copy(chunk.E, errors, span.rows, V);
            chunk.compare_keys();
            chunk.weigh_keys();
        } else {
            chunk.load_values();
        }
        chunk.strengthen();
        chunk.k_cols = chunk.decay.cols(chunk.k, chunk.k_cols);
        load_numbers(strength, chunk.in.read, span, plan.problem->scale);
        load_tile(q, chunk.in.q, span, key, strength);
        q_rows = chunk.decay.rows(q, q_rows);
        if (d_out_from)
            load_tile(d_out, d_out_from, span, value);
        else
            clear(d_out, span.rows, V);
    }

    // dU from what is read in the chunk and from the state after it.
    void to_writes(Span span, Tile S_before_t) {
        chunk.decay.scores(q, chunk.k, A, false);
        if (chunk.normalizer) {
            chunk.normalizer.divide(q_rows, A, S_before_t.row(V), span.rows);
            map(d_out, span.rows, V,
                [&](int t, int j) { return load(d_out.row(t) + j) * splat(chunk.normalizer.share[t]); });
        }
        const PlusT within{A, d_out, span.rows, Part::from};
        if constexpr (delta) {
            multiply(dU, span.rows, V, Zero{}, Fetch{&ahead}, within, Plus{chunk.k_cols, dS, K, Part::all});
        } else {
            k_left = pack_left(chunk.k_cols, k_left, span.rows, K), after = pack_right(dS, after, K, V);
            multiply(dU, span.rows, V, Zero{}, Fetch{&ahead}, within, Plus{k_left, after, K, Part::all});
        }
    }

    void to_reads_and_keys(Span span, Tile S_before_t) {
        Decay& decay = chunk.decay;
        decay.note_passing(S_before_t, dS_t, chunk.normalizer ? V + 1 : V);
        before_t = pack_right(S_before_t, before_t, V, K), after_t = pack_right(dS_t, after_t, V, K);
        d_out_left = pack_left(d_out, d_out_left, span.rows, V),
        wide_left = pack_left(chunk.U, wide_left, span.rows, V);
        multiply(dq, span.rows, K, Zero{}, Fetch{&ahead}, Plus{d_out_left, before_t, V, Part::all});
        multiply(dk, span.rows, K, Zero{}, Fetch{&ahead}, Plus{wide_left, after_t, V, Part::all});
        multiply_lower(X, span.rows, Zero{}, Plus{d_out, E_t, V, Part::all});
        lower(X, span.rows, false, [&](int i, int j) { return load(X.row(i) + j) * load(chunk.beta + j); });
        if (chunk.normalizer) through_normalizer(span.rows, S_before_t.row(V));
        dq = decay.rows(dq, dq);
        dk = decay.cols(dk, dk);
        decay.note_reads(q, dq);
        decay.note_writes(chunk.k, dk);
        decay.scores_backward(X, q, chunk.k, A, dq, dk);
    }

    // The gradients to q z and, through it, to q and k, before decays apply.
    void through_normalizer(int rows, const float* z) {
        const float* written = chunk.normalizer.written;
        float* slope = chunk.normalizer.slope;
        for (int i = 0; i < rows; i++) {
            const float read = dot(q_rows.row(i), dq.row(i), K) + Normalizer::up_to(A.row(i), X.row(i), i);
            slope[i] = -read * chunk.normalizer.share[i];
            add_row(dq.row(i), z, slope[i], K);
            add_row(dk.row(i), dS_t.row(V), written[i], K);
        }
        lower(X, rows, false, [&](int i, int j) { return load(X.row(i) + j) + splat(slope[i]) * load(written + j); });
    }
    // numbers += the gradient to β w, as it weighs in q z, times `factor`.
    void through_written(int rows, const float* factor) {
        for (int j = 0; chunk.normalizer && j < rows; j++) {
            float total = dot(chunk.k_cols.row(j), dS_t.row(V), K);
            for (int i = j; i < rows; i++) total += A.row(i)[j] * chunk.normalizer.slope[i];
            numbers[j] += total * factor[j];
        }
    }

    // From dP = β dU, the gradient to what was to be written, to what was read to find it: dU becomes (I + Mᵀ)⁻¹ dP.
    void through_memory(Span span) {
        Decay& decay = chunk.decay;
        const int rows = span.rows;
        multiply<Order::up>(dU, rows, V, Itself{}, SolveUpper{chunk.M}, MinusT{chunk.M, dU, rows, Part::after});
        multiply_lower(X, rows, Zero{}, Minus{dU, E_t, V, Part::all});
        lower(X, rows, true, [&](int i, int j) { return load(X.row(i) + j); });
        for (int j = 0; d_beta_into && j < rows; j += W) {
            vf total = load(numbers + j);
            for (int i = j; i < rows; i++) total += load(X.row(i) + j) * load(chunk.A.row(i) + j);
            store(numbers + j, total);
        }
        map(X, rows, rows, [&](int i, int j) { return load(X.row(i) + j) * load(chunk.beta + j); });
        decay.scores_backward(X, chunk.k, chunk.k, chunk.A, dk, dk);
        wide_left = pack_left(dU, wide_left, rows, V);
        multiply(read, rows, K, Zero{}, Nothing{}, Minus{wide_left, before_t, V, Part::all});
        read = decay.rows(read, read);
        decay.note_reads(chunk.k, read);
        map(dk, rows, K, [&](int i, int j) { return load(dk.row(i) + j) + load(read.row(i) + j); });
    }

    // dS from the state after the chunk to the one before it.
    void to_state(Span span) {
        const RowsScaled scaled{dS, chunk.decay.end};
        if constexpr (delta) {
            multiply(dS, K, V, scaled, Fetch{&ahead}, PlusT{q_rows, d_out, span.rows, Part::all},
                     MinusT{chunk.k_rows, dU, span.rows, Part::all});
        } else {
            q_right = pack_right(q_rows, q_right, span.rows, K),
            d_out_right = pack_right(d_out, d_out_right, span.rows, V);
            multiply(dS, K, V, scaled, Fetch{&ahead}, PlusT{q_right, d_out_right, span.rows, Part::all});
        }
    }

    // Row i has the query of token `first + i` and the write of the token before.
    void through_bonus(Span span) {
        double* du = job.bonus ? job.bonus + unit_number() * key : nullptr;
        for (int i = 0; i < span.n; i++) {
            own.load(span.first + i);
            const float to_q = dot(d_out.row(i), own.v, value) * own.beta * own.write;
            own.add_weighted(dq.row(i), own.k, to_q);
            own.load(span.first + i - 1);
            load_row(read_out, d_out_from, span.first + i - 1, value);
            const float score = own.score(), to_write = dot(read_out, own.v, value);
            const float to_k = to_write * own.beta * own.write;
            add_row(dU.row(i), read_out, score * own.beta, value);
            numbers[i] += score * own.write * to_write;
            own.add_weighted(dk.row(i), own.q, to_k);
            for (int j = 0; du && j < key; j++) du[j] += static_cast<double>(to_k) * own.q[j] * own.k[j];
        }
    }

    void finish(Span span) {
        if (plan.delay()) through_bonus(span);
        chunk.decay.store_gradient(d_decay_into, span, job.fixed_decay ? job.fixed_decay + unit_number() : nullptr);
        if (d_beta_into) {
            through_written(span.rows, chunk.write_gate);
            store_numbers(d_beta_into, numbers, span);
        }
        if (d_write_into) {
            dots(chunk.in.v, dU, chunk.E, span, value, 1);
            through_written(span.rows, chunk.beta);
            store_numbers(d_write_into, numbers, span);
        }
        if (d_read_into) {
            dots(chunk.in.q, dq, q, span, key, plan.problem->scale);
            store_numbers(d_read_into, numbers, span);
        }
        if (dq_into) store_tile(dq_into, dq, span, key, strength);
        if (dk_into) store_tile(dk_into, dk, span, key);
        if (dv_into) store_tile(dv_into, dU, span, value, chunk.in.write ? chunk.write_gate : nullptr);
    }
    std::int64_t unit_number() const {
        const hr_problem& p = *plan.problem;
        return (unit.part * p.sequences + unit.sequence) * p.H + unit.head;
    }

    // numbers ← Σ x · gradient by token, x as it was before a gate scaled it; `reloaded` is overwritten with it.
    void dots(const View& x, Tile gradient, Tile reloaded, Span span, int width, float scale) {
        load_tile(reloaded, x, span, width);
        for (int i = 0; i < span.n; i++) numbers[i] = scale * dot(reloaded.row(i), gradient.row(i), padded(width));
    }
};

}  // namespace HR_ISA
