// One token of one row of the batch through a layer: what comes before the recurrence, and what comes after it.

#pragma once

#include "token_row.h"

namespace HR_ISA {

// T: the dtype of weights and of the convolution's history.
template <class T>
class LayerRow : TokenRow<Layer, hr_layer> {
public:
    LayerRow(const Layer& job, std::int64_t row)
        : TokenRow(job, *job.layer, row), H(static_cast<int>(p.H)), Hq(static_cast<int>(p.Hq)),
          K(static_cast<int>(p.K)), F(static_cast<int>(p.F)), V(static_cast<int>(p.V)),
          columns(static_cast<int>(job.columns)), values(H * V), x(job.projected + row * job.row),
          q(job.q + row * job.key_row), k(job.k + row * job.key_row), v(job.v + row * job.value_row),
          decay(job.decay + row * job.decay_row), beta(job.beta + row * job.head_row),
          read(job.read + row * job.head_row), write(job.write + row * job.head_row),
          out(job.out + row * job.value_row), low(job.low + row * job.low_row), wide(job.wide + row * job.wide_row),
          near(job.near + row * job.near_row) {}

    void enter() {
        const std::int64_t position = p.tokens ? p.tokens[sequence]++ : 0;
        const int own_k = static_cast<int>(p.Hk), heads_of_k = p.window ? own_k : Hq;
        const auto rotate = [&](int when) {
            if (p.rotary == when) TokenRow::rotate(position, when == kinds::rotary::last ? F : K, q, Hq, k, heads_of_k);
        };
        load_inputs();
        if (p.bonus && row == 0) fill(job.bonus, weights(p.bonus), H * F);
        if (p.conv_weight) convolve();
        if (columns > V) add_ones();
        if (!p.window) share_keys_and_values();
        if (p.read) compete(read, q, p.read_scores);
        if (p.write) compete(write, k, p.write_scores);
        if (p.head_norm) normalize_heads(q, Hq, Hq, p.q_norm), normalize_heads(k, heads_of_k, own_k, p.k_norm);
        rotate(kinds::rotary::first);
        make_decay();
        make_beta();
        if (p.window) move_window(position + 1);
        shape(q, p.map_q), shape(k, p.map_k);
        rotate(kinds::rotary::last);
        if (p.read) open(read);
        if (p.write) open(write);
    }

    void leave() {
        const bool inside = read_inside(p), late = p.norm == kinds::norm::rms || p.norm == kinds::norm::group;
        if (p.window) each(out, H * columns, [&](vf far, int i) { return far + load(near + i); });
        if (columns > V) divide_by_sums();
        if (p.read && inside && columns > V) gate_heads();
        if (p.skip) add_skip();
        if (p.read && !inside && !late) gate_heads();
        if (p.gate && p.order == kinds::order::gate_norm) gate_out();
        normalize();
        if (p.read && !inside && late) gate_heads();
        if (p.gate && p.order == kinds::order::norm_gate) gate_out();
        store_row(job.result + row * job.row, out, values, 1);
    }

private:
    static const T* weights(const void* w) { return static_cast<const T*>(w); }
    static float number(const void* w, int i) { return load_some(weights(w) + i, 1)[0]; }
    std::int64_t parts() const {
        return channels() + p.decay_reads + (p.beta == kinds::beta::sigmoid ? p.H : 0) + p.gate_reads;
    }
    int keys() const { return static_cast<int>(p.Hk * p.K); }
    Stride channels() const { return (p.Hq + p.Hk) * p.K + p.Hv * p.V; }
    const float* decay_part() const { return x + channels(); }
    const float* beta_part() const { return decay_part() + p.decay_reads; }
    const float* gate_part() const { return x + parts() - p.gate_reads; }

    // n numbers as float32; `into` has room for whole vectors.
    template <class N>
    static void fill(float* into, const N* from, int n) {
        each(into, n, [&](vf, int i) { return load_some(from + i, n - i); });
    }

    void load_inputs() {
        fill(q, x, Hq * K);
        fill(k, x + Hq * K, keys());
        fill(v, x + Hq * K + keys(), static_cast<int>(p.Hv * p.V));
    }
    void share_keys_and_values() {
        share(k, static_cast<int>(p.Hk), Hq, K);
        share(v, static_cast<int>(p.Hv), H, columns);
    }
    // Repeats each of `given` heads, so that there are `wanted` ones.
    static void share(float* y, int given, int wanted, int size) {
        for (int h = wanted - 1; given < wanted && h >= 0; h--)
            std::memmove(y + h * size, y + h / (wanted / given) * size, size * sizeof(float));
    }

    // --- the short convolution -------------------------------------------------------------------------------------
    void convolve() {
        T* before = static_cast<T*>(p.conv) + sequence * (p.conv_width - 1) * channels();
        convolve_some(q, before, 0, Hq * K);
        convolve_some(k, before, Hq * K, keys());
        convolve_some(v, before, Hq * K + keys(), static_cast<int>(p.Hv * p.V));
        const Stride kept = (p.conv_width - 2) * channels();
        std::memmove(before, before + channels(), kept * sizeof(T));
        store_row(before + kept, x, static_cast<int>(channels()), 1);
    }

    // `count` channels from `first` on; y holds this token's.
    void convolve_some(float* y, const T* before, int first, int count) {
        const int width = static_cast<int>(p.conv_width);
        const T* w = weights(p.conv_weight) + Stride{first} * width;
        each(y, count, [&](vf now, int i) {
            const int left = count - i;
            vf total = p.conv_bias ? load_some(weights(p.conv_bias) + first + i, left) : vf{};
            for (int t = 0; t < width - 1; t++)
                total += tap(w + i * width + t, width, left) * load_some(before + t * channels() + first + i, left);
            return silu(total + tap(w + i * width + width - 1, width, left) * now);
        });
    }
    // The same tap of W channels, `width` numbers apart.
    static HR_INLINE vf tap(const T* w, int width, int left) {
        T found[W] = {};
        for (int i = 0; i < W && i < left; i++) found[i] = w[i * width];
        return load(found);
    }

    // --- competing heads: logarithms of their gates -------------------------------------------------------------------
    void compete(float* gate, const float* heads, const void* scores) {
        const int shared = static_cast<int>(p.H / p.Hq);
        const T* w = weights(scores);
        if (p.source == kinds::source::query) product(low, w, heads, H, Hq * K);
        if (p.source == kinds::source::hidden) {
            product(low, w, job.hidden + row * job.row, H, static_cast<int>(p.D));
        }
        for (int h = 0; p.source == kinds::source::head && h < H; h++)
            low[h] = dot_of(heads + h / shared * K, w + h * K, K);
        if (p.source != kinds::source::diag) log_gates(gate, 0, H);
        for (int h = 0; p.source == kinds::source::diag && h < H; h++) {
            each(low, H, [](vf, int) { return vf{}; });
            add_transposed_product(low, w, heads + h / shared * K, H, K);
            log_gates(gate, h, 1);
        }
    }
    // Of some heads, by the scores of all in `low`, which they spend.
    void log_gates(float* gate, int first, int count) {
        const bool null = p.activation == kinds::activation::null;
        scale_some(low, H, 1 / p.temperature);
        const bool sigmoid = p.activation == kinds::activation::sigmoid;
        const float slots = sigmoid ? p.gate_range : static_cast<float>(H + null);
        const float all = sigmoid ? logf(slots - 1) : log_sum(null);
        const float shift = p.gate_scale == kinds::gate_scale::one ? 0 : logf(slots);
        for (int h = first; h < first + count; h++)
            gate[h] = shift + (sigmoid ? -softplus(splat(all - low[h]))[0] : low[h] - all);
    }
    float log_sum(bool null) const {
        float most = null ? 0 : low[0];
        for (int h = 0; h < H; h++) most = low[h] > most ? low[h] : most;
        float total = null ? expf(-most) : 0;
        for (int h = 0; h < H; h++) total += expf(low[h] - most);
        return most + logf(total);
    }
    void open(float* gate) const {
        each(gate, H, [](vf y, int) { return exponential(y); });
    }

    // --- q and k ------------------------------------------------------------------------------------------------------
    // A joint norm has weights for `given` heads, which y may repeat.
    void normalize_heads(float* y, int heads, int given, const void* weight) {
        const bool joint = p.head_norm == kinds::head_norm::joint;
        const int width = joint ? heads * K : K;
        fill(low, weights(weight), joint ? given * K : K);
        if (joint) share(low, given, heads, K);
        for (float* part = y; part < y + heads * K; part += width) rms(part, low, width, p.head_eps);
    }
    void shape(float* y, const void* learned) {
        const int keys = Hq * K;
        switch (p.feature_map) {
            case kinds::feature_map::learned_softmax:
            case kinds::feature_map::learned_exp: learned_features(y, weights(learned)); break;
            case kinds::feature_map::elu_plus_one:
                each(y, keys, [](vf a, int) { return a > vf{} ? a + splat(1) : exponential(a); });
                break;
            case kinds::feature_map::relu: each(y, keys, [](vf a, int) { return a < vf{} ? vf{} : a; }); break;
            case kinds::feature_map::silu: each(y, keys, [](vf a, int) { return silu(a); }); break;
            default: break;
        }
        for (float* head = y; p.qk_norm == kinds::qk_norm::l2 && head < y + Hq * F; head += F)
            scale_some(head, F, 1 / sqrtf(dot_of(head, head, F) + 1e-6f));
    }
    // The last head first, as its features lie behind the numbers of all.
    void learned_features(float* y, const T* w) {
        const float root = sqrtf(p.logit_scale);
        float* half = low + padded(K);
        for (int h = Hq - 1; h >= 0; h--) {
            product(low, w + Stride{h} * K * K, y + h * K, K, K);
            float* into = y + h * F;
            for (const float factor : {root, -root}) {
                float total = 1;
                if (p.feature_map == kinds::feature_map::learned_softmax) {
                    each(half, K, [&](vf, int i) { return load(low + i) * splat(factor); });
                    total = soften(half, K);
                } else {
                    each(half, K, [&](vf, int i) { return exponential(within(load(low + i) * splat(factor))); });
                }
                store_row(into, half, K, 1 / total);
                into += K;
            }
        }
    }
    static HR_INLINE vf within(vf x) {
        const vf most = splat(kinds::FARTHEST);
        x = x > most ? most : x;
        return x < -most ? -most : x;
    }

    // --- a window of softmax attention --------------------------------------------------------------------------------
    // The token enters it, and k, v and the decay become those of the token that leaves it: zeros, where there is none.
    void move_window(std::int64_t tokens) {
        const int n = static_cast<int>(p.Hv) * columns;
        exchange(p.k_window, k, keys()), exchange(p.v_window, v, n);
        if (p.decay_window) exchange(p.decay_window, decay, H);
        const std::int64_t count = tokens < p.window ? tokens : p.window, first = (sequence + 1) * p.window - count;
        for (int h = 0; h < H; h++) {
            const float* some_k = p.k_window + first * keys() + h / (H / p.Hk) * K;
            const float* some_v = p.v_window + first * n + h / (H / p.Hv) * columns;
            for (std::int64_t j = 0; j < count; j++) low[j] = p.logit_scale * dot_of(q + h * K, some_k + j * keys(), K);
            soften(low, count);
            vf factor = sigmoid(splat(number(p.window_factor, h)));
            factor = factor > splat(0x1p-63f) ? factor : splat(0x1p-63f);  // a smaller one may divide 0 by 0
            for (int c = 0; c < columns; c += W) {
                vf total{};
                for (std::int64_t j = 0; j < count; j++)
                    total += splat(low[j]) * load_some(some_v + j * n + c, columns - c);
                store(near + h * columns + c, factor * total);
            }
        }
        share_keys_and_values();
    }
    // n numbers of each token.
    void exchange(float* window, float* y, int n) {
        float *first = window + sequence * p.window * n, *last = first + (p.window - 1) * n;
        std::memcpy(near, first, n * sizeof(float));
        std::memmove(first, first + n, (p.window - 1) * n * sizeof(float));
        std::memcpy(last, y, n * sizeof(float));
        std::memcpy(y, near, n * sizeof(float));
    }

    // --- decay and write strength -------------------------------------------------------------------------------------
    void make_decay() {
        const int reads = static_cast<int>(p.decay_reads);
        fill(low, decay_part(), reads);
        switch (static_cast<kinds::decay::kind>(p.decay)) {  // no default: -Werror=switch refuses a kind without a case
            case kinds::decay::retnet:
                for (int h = 0; h < H; h++) decay[h] = static_cast<float>(log1p(-exp2(-5.0 - h)));
                break;
            case kinds::decay::softplus:
                each(decay, H, [&](vf, int i) { return load(low + i) + bias(i, H); });
                if (p.beta == kinds::beta::dt) each(beta, H, [&](vf, int i) { return softplus(load(decay + i)); });
                decay_at_rates(1);
                break;
            case kinds::decay::sigmoid_head:
                fill(decay, low, H);
                decay_by_sigmoid(H);
                break;
            case kinds::decay::sigmoid:
                product(decay, weights(p.decay_up), low, H * F, reads);
                decay_by_sigmoid(H * F);
                break;
            case kinds::decay::exp:
                for (int i = 0; i < reads; i++) low[i] = tanhf(low[i]);
                fill(decay, weights(p.decay_bias), H * F);
                add_transposed_product(decay, weights(p.decay_up), low, H * F, reads);
                each(decay, H * F, [](vf y, int) { return -exponential(y); });
                break;
            case kinds::decay::softplus_vector:
                product(decay, weights(p.decay_up), low, H * F, reads);
                each(decay, H * F, [&](vf y, int i) { return y + bias(i, H * F); });
                decay_at_rates(F);
                break;
            case kinds::decay::none:
            case kinds::decay::count: break;
        }
    }
    // y ← −e^A softplus(y) for the n numbers of each head, whose rate is A. Below A = 40, what softplus loses is less than
    // e^−47 of the logarithm of a decay; above, neither factor is 0 or infinite, as in PyTorch.
    void decay_at_rates(int n) {
        const float far = -40, most = 80;
        bool fast = false;
        for (int h = 0; h < H; h++) fast = fast || number(p.decay_log, h) > -far;
        if (!fast) {
            each(decay, H * n, [](vf y, int) { return softplus(y); });
            for (int h = 0; h < H; h++) scale_some(decay + h * n, n, -expf(number(p.decay_log, h)));
            return;
        }
        for (int i = 0; i < H * n; i++) {
            const float near = decay[i] < far ? far : decay[i],
                        exponent = number(p.decay_log, i / n) + (decay[i] - near);
            decay[i] = -expf(exponent > most ? most : exponent) * softplus(splat(near))[0];
        }
    }
    void decay_by_sigmoid(int n) {
        each(decay, n, [&](vf y, int i) { return softplus(-y - bias(i, n)) * splat(-1 / kinds::SIGMOID_TEMPERATURE); });
    }
    HR_INLINE vf bias(int i, int n) const { return load_some(weights(p.decay_bias) + i, n - i); }

    void make_beta() {
        if (p.beta != kinds::beta::sigmoid) return;
        fill(beta, beta_part(), H);
        for (int h = 0; p.write == kinds::write::beta && h < H; h++) beta[h] += write[h];
        each(beta, H, [](vf y, int) { return sigmoid(y); });
    }

    // --- the normalizer: a column of ones in v, by whose sum the others are divided ----------------------------------
    void add_ones() {
        for (int h = static_cast<int>(p.Hv) - 1; h >= 0; h--) {
            std::memmove(v + h * columns, v + h * V, V * sizeof(float));
            v[h * columns + V] = 1;
        }
    }
    void divide_by_sums() {
        for (int h = 0; h < H; h++) {
            const float sum = out[h * columns + V] + p.sum_eps;
            for (int i = 0; i < V; i++) out[h * V + i] = out[h * columns + i] / sum;
        }
    }

    // --- from memory to the output ------------------------------------------------------------------------------------
    void add_skip() {
        for (int h = 0; h < H; h++) {
            const float D = number(p.skip, h);
            for (int i = 0; i < V; i++) out[h * V + i] += D * v[h * columns + i];
        }
    }
    void gate_heads() {
        for (int h = 0; h < H; h++) scale_some(out + h * V, V, read[h]);
    }
    void gate_out() {
        const int reads = static_cast<int>(p.gate_reads);
        if (p.gate == kinds::gate::sigmoid_low_rank) {
            fill(low, gate_part(), reads);
            product(wide, weights(p.gate_up), low, values, reads);
            each(wide, values, [&](vf y, int i) { return y + load_some(weights(p.gate_bias) + i, values - i); });
        } else {
            fill(wide, gate_part(), values);
        }
        if (p.gate == kinds::gate::silu)
            each(out, values, [&](vf y, int i) { return y * silu(load(wide + i)); });
        else
            each(out, values, [&](vf y, int i) { return y * sigmoid(load(wide + i)); });
    }
    void normalize() {
        switch (p.norm) {
            case kinds::norm::rms:
                fill(wide, weights(p.norm_weight), V);
                for (int h = 0; h < H; h++) rms(out + h * V, wide, V, p.norm_eps);
                break;
            case kinds::norm::rms_joint:
                fill(wide, weights(p.norm_weight), values);
                rms(out, wide, values, p.norm_eps);
                break;
            case kinds::norm::group:
                for (int h = 0; h < H; h++) centre(out + h * V);
                each(out, values, [&](vf y, int i) {
                    return y * load_some(weights(p.norm_weight) + i, values - i) +
                           load_some(weights(p.norm_bias) + i, values - i);
                });
                break;
            default: break;
        }
    }
    static void rms(float* y, const float* weight, int n, float eps) {
        const float factor = 1 / sqrtf(dot_of(y, y, n) / static_cast<float>(n) + eps);
        for (int i = 0; i < n; i++) y[i] *= factor * weight[i];
    }
    void centre(float* y) const {
        float mean = 0;
        for (int i = 0; i < V; i++) mean += y[i];
        scale_some(y, V, 1, -mean / static_cast<float>(V));
        scale_some(y, V, 1 / sqrtf(dot_of(y, y, V) / static_cast<float>(V) + p.group_eps));
    }

    const int H, Hq, K, F, V, columns, values;
    const float* const x;
    float *const q, *const k, *const v, *const decay, *const beta, *const read, *const write, *const out;
    float *const low, *const wide, *const near;
};

}  // namespace HR_ISA
