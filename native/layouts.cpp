// The layouts of the structs that a caller packs. It compares them with its own before its first call.

#include <string>
#include <type_traits>

#include "headrace.h"

namespace {

// As the module struct of Python writes it; T: hr_tensor.
template <class Field>
constexpr char code = std::is_pointer_v<Field>              ? 'P'
                      : std::is_same_v<Field, hr_tensor>    ? 'T'
                      : std::is_same_v<Field, std::int32_t> ? 'i'
                      : std::is_same_v<Field, std::int64_t> ? 'q'
                      : std::is_same_v<Field, float>        ? 'f'
                      : std::is_same_v<Field, double>       ? 'd'
                                                            : '?';

// "name field:code@offset … end@size"
template <class Struct>
class Layout {
public:
    explicit Layout(const char* name) : text_(name) {}
    template <class Field>
    Layout& field(const char* name, Field Struct::* member) {
        static const Struct any{};
        const auto at = reinterpret_cast<const char*>(&(any.*member)) - reinterpret_cast<const char*>(&any);
        text_ += std::string(" ") + name + ":" + code<Field> + "@" + std::to_string(at);
        return *this;
    }
    operator std::string() const { return text_ + " end@" + std::to_string(sizeof(Struct)) + "\n"; }

private:
    std::string text_;
};

// clang-format off
#define STRUCT(S, fields) [] { using Struct = S; return std::string(Layout<S>(#S) fields); }()
#define F(name) .field(#name, &Struct::name)

std::string layouts() {
    return
        STRUCT(hr_tensor, F(data) F(batch) F(token) F(head)) +
        STRUCT(hr_problem,
            F(abi) F(dtype) F(decay) F(delta) F(chunk) F(threads) F(scale) F(B) F(T) F(H) F(Hq) F(K) F(V) F(sequences)
            F(cu_seqlens) F(q) F(k) F(v) F(log_decay) F(beta) F(write_gate) F(read_gate) F(initial_state) F(bonus)
            F(normalizer)) +
        STRUCT(hr_gradients,
            F(q) F(k) F(v) F(log_decay) F(beta) F(write_gate) F(read_gate) F(initial_state) F(bonus)) +
        STRUCT(hr_convolution, F(width) F(weight) F(history)) +
        STRUCT(hr_scan, F(A) F(dt) F(kept)) +
        STRUCT(hr_scan_gradients, F(u) F(dt) F(A) F(B) F(C) F(initial)) +
        STRUCT(hr_layer,
            F(dtype) F(feature_map) F(head_norm) F(qk_norm) F(rotary) F(decay) F(rule) F(beta) F(norm) F(gate) F(order) F(read) F(write)
            F(source) F(activation) F(gate_scale) F(scale) F(logit_scale) F(head_eps) F(norm_eps) F(group_eps) F(sum_eps)
            F(temperature) F(gate_range) F(amplitude) F(D) F(H) F(Hq) F(Hk) F(Hv) F(K) F(F) F(V) F(turned) F(window) F(conv_width)
            F(decay_reads) F(gate_reads) F(frequencies) F(conv_weight) F(conv_bias) F(q_norm) F(k_norm) F(map_q) F(map_k)
            F(window_factor) F(decay_up) F(decay_bias) F(decay_log) F(bonus) F(read_scores) F(write_scores) F(skip)
            F(gate_up) F(gate_bias) F(norm_weight) F(norm_bias) F(memory) F(conv) F(tokens) F(k_window) F(v_window)
            F(decay_window)) +
        STRUCT(hr_attention,
            F(dtype) F(sinks_dtype) F(null) F(scale) F(amplitude) F(H) F(Hkv) F(d) F(turned) F(first) F(window) F(length) F(room)
            F(frequencies) F(sinks) F(k) F(v) F(valid) F(seen)) +
        STRUCT(hr_operation,
            F(kind) F(what) F(dtype) F(weight_dtype) F(add) F(layer) F(in) F(other) F(out) F(inputs) F(outputs)
            F(number) F(weight) F(bias) F(scale) F(state)) +
        STRUCT(hr_program,
            F(abi) F(threads) F(rows) F(width) F(operations) F(layers) F(vocabulary) F(tokens) F(in_order)
            F(attentions));
}
// clang-format on

}  // namespace

const char* hr_structs(void) {
    static const std::string text = layouts();
    return text.c_str();
}
