// Programs: one token of a model, operation by operation, by a team of threads.

#include <algorithm>
#include <utility>

#include "guarded.h"
#include "job.h"
#include "pool.h"

namespace {

std::int64_t padded(std::int64_t n, std::int64_t of = 16) { return (n + of - 1) / of * of; }

bool sized(const hr_layer& p) {
    const bool learned = p.feature_map >= kinds::feature_map::learned_softmax;
    for (const std::int64_t size : {p.H, p.Hq, p.Hk, p.Hv, p.K, p.V})
        if (size < 1) return false;
    if (p.H % p.Hq || p.Hq % p.Hk || p.H % p.Hv || p.F != (learned ? 2 * p.K : p.K)) return false;
    if (p.turned < 0 || p.turned > p.K || p.turned % 2 || (p.rotary && !(p.frequencies && p.tokens))) return false;
    const bool more = p.read || p.write || p.skip || p.norm != kinds::norm::sum;
    return p.window == 0 || (p.window > 0 && !more && p.window_factor && p.tokens && p.k_window && p.v_window);
}

bool known(const hr_layer& p) {
    const auto below = [](int kind, int count) { return kind >= 0 && kind < count; };
    return (p.dtype == HR_FLOAT32 || p.dtype == HR_BFLOAT16) && below(p.feature_map, kinds::feature_map::count) &&
           below(p.head_norm, kinds::head_norm::count) && below(p.qk_norm, kinds::qk_norm::count) &&
           below(p.rotary, kinds::rotary::count) && below(p.decay, kinds::decay::count) &&
           below(p.rule, kinds::rule::count) && below(p.beta, kinds::beta::count) &&
           below(p.norm, kinds::norm::count) && below(p.gate, kinds::gate::count) &&
           below(p.order, kinds::order::count) && below(p.read, kinds::read::count) &&
           below(p.write, kinds::write::count) && below(p.source, kinds::source::count) &&
           below(p.activation, kinds::activation::count) && below(p.gate_scale, kinds::gate_scale::count) &&
           (p.activation != kinds::activation::sigmoid || p.gate_range >= 1) && sized(p);
}

bool known(const hr_attention& p, const hr_program& program) {
    const std::int64_t added = program.in_order ? program.rows : 1;
    for (const int dtype : {p.dtype, p.sinks_dtype})
        if (dtype != HR_FLOAT32 && dtype != HR_BFLOAT16) return false;
    if (p.d < 1 || p.Hkv < 1 || p.H < 1 || p.H % p.Hkv || p.turned < 0 || p.turned > p.d || p.turned % 2) return false;
    if ((p.turned && !p.frequencies) || p.first < 0 || p.window < 0 || (p.room && !(p.k && p.v))) return false;
    if (p.window) return p.seen && !p.valid && p.room == p.first + p.window - 1;
    return !p.first && p.length >= added && p.length <= p.room;
}
// Logits of a query.
std::int64_t score_row(const hr_attention& p) { return padded(p.window ? p.first + p.window : p.length); }

// A token through a layer: its numbers as float32, side by side, and the recurrence's problem over them.
class LayerStep {
public:
    // Over a null pointer it only counts floats.
    LayerStep(const hr_layer& p, std::int64_t rows, float* memory) : p_(p), rows_(rows), next_(memory) {
        job.layer = &p;
        job.columns = p.V + (p.norm == kinds::norm::sum);
        job.key_row = padded(p.Hq * p.F), job.value_row = padded(p.H * job.columns);
        job.decay_row = padded(decay_shape() == HR_DECAY_VECTOR ? p.H * p.F : p.H), job.head_row = padded(p.H);
        const auto normed = p.head_norm == kinds::head_norm::joint ? p.Hq * p.K : p.K;
        job.low_row = padded(std::max({p.decay_reads, p.gate_reads, p.H, 2 * padded(p.K), normed, p.window}));
        job.wide_row = padded(p.H * p.V);
        job.near_row = p.window ? padded(std::max(p.Hk * p.K, p.H * job.columns) + 16) : 0;
        take(job.q, job.key_row), take(job.k, job.key_row);
        take(job.v, job.value_row), take(job.out, job.value_row);
        take(job.decay, job.decay_row);
        take(job.beta, job.head_row), take(job.read, job.head_row), take(job.write, job.head_row);
        take(job.low, job.low_row), take(job.wide, job.wide_row), take(job.near, job.near_row);
        floats += padded(p.H * p.F);
        job.bonus = p.bonus ? next_ : nullptr;
        step = {{job.out, job.value_row, 0, job.columns}, p.memory, job.bonus};
        problem = recurrence();
    }
    LayerStep(const LayerStep&) = delete;

    Plan plan() const { return {&problem, 16, 1, nullptr, 0}; }
    Unit unit(std::int64_t i) const { return {i / p_.H, i % p_.H, 0, 0, job.columns}; }

    Layer job{};
    Step step{};
    hr_problem problem{};
    std::int64_t floats = 0;

private:
    void take(float*& pointer, std::int64_t row) {
        pointer = next_;
        floats += rows_ * row;
        if (next_) next_ += rows_ * row;
    }
    hr_decay decay_shape() const { return kinds::shape(static_cast<kinds::decay::kind>(p_.decay)); }
    hr_problem recurrence() const {
        const auto per_head = [&](bool there, float* x) { return hr_tensor{there ? x : nullptr, job.head_row, 0, 1}; };
        const bool vector = decay_shape() == HR_DECAY_VECTOR, plain = p_.norm != kinds::norm::sum;
        hr_problem r{};
        r.abi = HR_ABI, r.dtype = HR_FLOAT32, r.threads = 1, r.scale = p_.scale;
        r.decay = decay_shape();
        r.delta = p_.rule == kinds::rule::delta;
        r.B = r.sequences = rows_, r.T = 1, r.H = p_.H, r.Hq = p_.Hq, r.K = p_.F, r.V = job.columns;
        r.q = {job.q, job.key_row, 0, p_.F}, r.k = {job.k, job.key_row, 0, p_.F};
        r.v = {job.v, job.value_row, 0, job.columns};
        r.log_decay = {p_.decay ? job.decay : nullptr, job.decay_row, 0, vector ? p_.F : 1};
        r.beta = per_head(p_.beta != kinds::beta::one, job.beta);
        r.write_gate = per_head(p_.write == kinds::write::value, job.write);
        r.read_gate = per_head(p_.read && read_inside(p_) && plain, job.read);
        return r;
    }

    const hr_layer& p_;
    const std::int64_t rows_;
    float* next_;
};

class Program {
public:
    Program(const hr_program& p, const hr_operation* operations, const hr_layer* layers, const hr_attention* attentions)
        : p_(p), operations_(operations), layers_(layers), attentions_(attentions),
          working_{&p, nullptr, p.width, nullptr, nullptr, 0, 0, nullptr} {
        for (std::int64_t i = 0; i < p.layers && known(layers[i]); i++) {
            const LayerStep layer(layers[i], p.rows, nullptr);
            layer_floats_ = std::max(layer_floats_, layer.floats);
            step_bytes_ = std::max(step_bytes_, kernels().step.measure(layer.plan(), layer.step, layer.unit(0)));
        }
        for (std::int64_t i = 0; i < p.attentions && known(attentions[i], p); i++) {
            const std::int64_t logits = attentions[i].H * score_row(attentions[i]);
            products_ += 2.0 * static_cast<double>(attentions[i].d * logits);
            step_bytes_ = std::max<std::size_t>(step_bytes_, 4 * logits / attentions[i].Hkv);
        }
        for (const hr_operation& op : *this) {
            if (op.kind != HR_LINEAR) continue;
            products_ += static_cast<double>(op.inputs * op.outputs);
            if (working_.many())
                transposed_ = std::max(transposed_, padded(op.inputs) * padded(p.rows, PANEL));
            else if (op.weight_dtype == HR_INT8)
                widest_ = std::max(widest_, padded(op.inputs, INT8_BLOCK));
        }
        working_.integer_row = widest_, working_.scale_row = padded(widest_ / INT8_BLOCK);
    }
    const hr_operation* begin() const { return operations_; }
    const hr_operation* end() const { return operations_ + p_.operations; }

    // The first reason to refuse it.
    int refused() const {
        if (p_.rows < 0 || p_.width < 0 || p_.width % 16 || p_.threads < 1) return HR_UNSUPPORTED;
        for (std::int64_t i = 0; i < p_.layers; i++)
            if (!known(layers_[i])) return HR_UNSUPPORTED;
        for (std::int64_t i = 0; i < p_.attentions; i++)
            if (!known(attentions_[i], p_)) return HR_UNSUPPORTED;
        for (const hr_operation& op : *this) {
            if (op.kind < 0 || op.kind >= HR_KINDS_OF_OPERATIONS) return HR_UNSUPPORTED;
            if (op.kind == HR_LAYER && (op.layer < 0 || op.layer >= p_.layers)) return HR_UNSUPPORTED;
            if (op.kind == HR_ATTEND && (op.layer < 0 || op.layer >= p_.attentions)) return HR_UNSUPPORTED;
            for (std::int64_t row = 0; op.kind == HR_EMBED && row < p_.rows; row++)
                if (p_.tokens[row] < 0 || p_.tokens[row] >= p_.vocabulary) return HR_NO_TOKEN;
        }
        return HR_OK;
    }

    void run() {
        // Waking a thread takes as long as a million products.
        const int threads = static_cast<int>(std::clamp(p_.rows * products_ / 1e6, 1.0, double(p_.threads)));
        step_bytes_ = static_cast<std::size_t>(padded(static_cast<std::int64_t>(step_bytes_), 64));
        const std::int64_t floats =
            p_.rows * p_.width + padded(p_.rows * working_.scale_row) + layer_floats_ + transposed_;
        char* next = static_cast<char*>(own_memory(4 * floats + 2 * p_.rows * widest_ + threads * step_bytes_));
        if (!next) throw std::bad_alloc();
        const auto take = [&](std::int64_t bytes) { return std::exchange(next, next + bytes); };
        working_.rows = reinterpret_cast<float*>(take(4 * p_.rows * p_.width));
        layer_memory_ = reinterpret_cast<float*>(take(4 * layer_floats_));
        if (working_.many()) working_.transposed = reinterpret_cast<float*>(take(4 * transposed_));
        working_.scales = reinterpret_cast<float*>(take(4 * padded(p_.rows * working_.scale_row)));
        working_.integers = reinterpret_cast<std::int16_t*>(take(2 * p_.rows * widest_));
        steps_ = next;
        run_team(threads, [&](Team& team, int member) {
            for (const hr_operation& op : *this) operate(op, team, member);
        });
        release_own_memory();
    }

private:
    void operate(const hr_operation& op, Team& team, int member) const {
        if (op.kind == HR_LAYER) return layer(op, team, member);
        if (op.kind == HR_ATTEND) return attend(op, team, member);
        const bool product = op.kind == HR_LINEAR;
        if (product && working_.many())
            team.each(padded(op.inputs) / kernels().width, [&](std::int64_t i) { kernels().operate(working_, op, i); });
        else if (!product || op.weight_dtype == HR_INT8)
            team.each(p_.rows, [&](std::int64_t row) { kernels().operate(working_, op, row); });
        if (!product) return;
        const std::int64_t share =
            padded(std::clamp<std::int64_t>((1 << 17) / std::max<std::int64_t>(op.inputs, 1), 16, 256));
        team.each((op.outputs + share - 1) / share, [&](std::int64_t i) {
            kernels().linear(working_, op, i * share, std::min((i + 1) * share, op.outputs));
        });
    }
    void layer(const hr_operation& op, Team& team, int member) const {
        const hr_layer& p = layers_[op.layer];
        LayerStep layer(p, p_.rows, layer_memory_);
        layer.job.projected = working_.at(0, op.in),
        layer.job.hidden = op.other < 0 ? nullptr : working_.at(0, op.other);
        layer.job.result = working_.at(0, op.out), layer.job.row = working_.width;
        const Plan plan = layer.plan();
        void* memory = steps_ + member * step_bytes_;
        if (p_.in_order) {
            in_order(layer, plan, team, memory);
        } else {
            team.each(p_.rows, [&](std::int64_t row) { kernels().enter(layer.job, row); });
            team.each(p_.rows * p.H,
                      [&](std::int64_t i) { kernels().step.run(plan, layer.step, layer.unit(i), memory); });
        }
        team.each(p_.rows, [&](std::int64_t row) { kernels().leave(layer.job, row); });
    }

    // Rows of one sequence one after another: a window's cache is that of the row before.
    void attend(const hr_operation& op, Team& team, int member) const {
        const hr_attention& p = attentions_[op.layer];
        const std::int64_t k = op.in + padded(p.H * p.d), v = k + padded(p.Hkv * p.d);
        const Attention job{&p,
                            working_.at(0, op.in),
                            working_.at(0, k),
                            working_.at(0, v),
                            working_.at(0, op.out),
                            op.other < 0 ? nullptr : working_.at(0, op.other),
                            working_.width,
                            p_.rows,
                            score_row(p),
                            p_.in_order != 0};
        float* scores = reinterpret_cast<float*>(steps_ + member * step_bytes_);
        const std::int64_t together = p_.in_order ? 1 : p_.rows;
        for (std::int64_t row = 0; row < p_.rows; row += together) {
            team.each(together, [&](std::int64_t i) { kernels().enter_attention(job, row + i); });
            team.each(together * p.Hkv,
                      [&](std::int64_t i) { kernels().attend(job, row + i / p.Hkv, i % p.Hkv, scores); });
            if (p.window) team.each(together, [&](std::int64_t i) { kernels().leave_attention(job, row + i); });
        }
    }

    // The rows one after another, from one state.
    void in_order(LayerStep& layer, const Plan& plan, Team& team, void* memory) const {
        const std::int64_t heads = layer.job.layer->H, state = layer.job.layer->F * layer.job.columns * heads;
        layer.job.in_order = true;
        team.each(1, [&](std::int64_t) {
            for (std::int64_t row = 0; row < p_.rows; row++) kernels().enter(layer.job, row);
        });
        team.each(heads, [&](std::int64_t h) {
            for (std::int64_t row = 0; row < p_.rows; row++) {
                Step step = layer.step;
                step.state -= row * state;  // the kernel adds that of its row
                kernels().step.run(plan, step, layer.unit(row * heads + h), memory);
            }
        });
    }

    const hr_program& p_;
    const hr_operation* operations_;
    const hr_layer* layers_;
    const hr_attention* attentions_;
    Working working_;
    float* layer_memory_ = nullptr;
    char* steps_ = nullptr;
    std::int64_t layer_floats_ = 0, transposed_ = 0, widest_ = 0;
    std::size_t step_bytes_ = 0;
    double products_ = 0;
};

}  // namespace

const char* hr_kinds(void) { return HR_KINDS; }

const char* hr_operations(void) { return HR_OPERATIONS; }

int hr_run(const hr_program* p, const hr_operation* operations, const hr_layer* layers,
           const hr_attention* attentions) {
    if (p->abi != HR_ABI) return HR_WRONG_ABI;
    return guarded([&] {
        Program program(*p, operations, layers, attentions);
        const int status = program.refused();
        if (status == HR_OK && p->rows) program.run();
        return status;
    });
}
