// The C ABI: what is refused, which instruction set runs, how a problem is cut into units for the threads.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "denormals.h"
#include "job.h"
#include "pool.h"

namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#if defined(HR_AVX512BF16)
namespace avx512bf16 { extern const Kernels kernels; }  // only forward and backward, of bfloat16
#endif
#endif

namespace {

struct Choice {
    const Kernels &kernels, &bfloat16;  // bfloat16: the forward and the backward of such problems

    const Kernels& of(const hr_problem& p) const { return p.dtype == HR_BFLOAT16 ? bfloat16 : kernels; }
};

// The best that the machine has; HEADRACE_ISA=avx512, avx2 or portable asks for less.
Choice choose() {
#if defined(__x86_64__)
    const char* asked = std::getenv("HEADRACE_ISA");
    const std::string_view limit = asked ? asked : "avx512bf16";
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(HR_AVX512BF16)
    if (wide && __builtin_cpu_supports("avx512bf16") && limit == "avx512bf16")
        return {avx512::kernels, avx512bf16::kernels};
#endif
    if (wide && (limit == "avx512bf16" || limit == "avx512")) return {avx512::kernels, avx512::kernels};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && limit != "portable")
        return {avx2::kernels, avx2::kernels};
#endif
    return {portable::kernels, portable::kernels};
}

const Choice& choice() {
    static const Choice chosen = choose();
    return chosen;
}

const Kernels& kernels() { return choice().kernels; }

int refused(const hr_problem& p) {
    if (p.abi != HR_ABI) return HR_WRONG_ABI;
    const bool sizes = p.B >= 0 && p.T >= 0 && p.H >= 1 && p.Hq >= 1 && p.H % p.Hq == 0 && p.K >= 1 && p.V >= 1 &&
                       p.K <= 1 << 16 && p.V <= 1 << 16 && p.sequences >= 0 && p.threads >= 1;
    const bool kinds = (p.dtype == HR_FLOAT32 || p.dtype == HR_BFLOAT16) && p.decay >= HR_DECAY_NONE &&
                       p.decay <= HR_DECAY_VECTOR && (p.cu_seqlens ? p.B == 1 : p.sequences == p.B);
    return sizes && kinds ? HR_OK : HR_UNSUPPORTED;
}

// Tokens a chunk. The C×C work inside chunks grows with C, the cost of reading and writing the state between them
// falls: these balance where states are large late, where they are small early. The delta rule has more work inside.
int chunk_of(const hr_problem& p) {
    if (p.chunk > 0) return std::clamp((p.chunk + 15) / 16 * 16, 16, 128);
    return p.K + p.V < 96 ? 16 : p.K + p.V < 768 || p.delta ? 32 : 64;
}

// Threads for which there is work: waking one takes as long as a million products.
int threads_for(double products, int most) {
    return static_cast<int>(std::clamp(products / 1e6, 1.0, static_cast<double>(most)));
}

// Chunks from one kept state to the next. By the first bound the kept states weigh a tenth of the inputs; the backward
// finds those between again, side by side: where they would take more than AGAIN, as many are kept as found again.
std::int64_t run_of(const hr_problem& p, int chunk, std::int64_t tokens) {
    constexpr double AGAIN = 64 << 20;
    const double state = static_cast<double>(p.K) * static_cast<double>(p.V), chunks = std::ceil(tokens / double(chunk));
    const double per_token = static_cast<double>(2 * p.K + p.V) / (p.dtype == HR_BFLOAT16 ? 2 : 1);
    const double tenth = std::ceil(10 * state / (chunk * per_token));
    const double most = std::max(AGAIN / (sizeof(float) * state), std::ceil(std::sqrt(chunks)));
    return static_cast<std::int64_t>(std::max(1.0, std::min({tenth, most, chunks})));
}

class Cut {
public:
    explicit Cut(const hr_problem& p) : plan{&p, chunk_of(p), 1, nullptr, 0}, kept_at_(p.sequences) {
        std::int64_t longest = 0;
        for (std::int64_t n = 0; n < p.sequences; n++) longest = std::max(longest, plan.length(n));
        plan.run = run_of(p, plan.chunk, longest);
        for (std::int64_t n = 0; n < p.sequences; n++) {
            kept_at_[n] = plan.kept_states;
            plan.kept_states += std::max<std::int64_t>(plan.length(n) - 1, 0) / (plan.run * plan.chunk);
        }
        plan.kept_at = kept_at_.data();
    }

    int threads() const {
        const hr_problem& p = *plan.problem;
        return threads_for(2.0 * p.B * p.T * p.H * p.K * p.V, p.threads);
    }

    // Into how many blocks of columns a head is cut, multiples of 16, so that there is a unit for every thread.
    std::int64_t parts() const {
        const std::int64_t whole = std::max<std::int64_t>(plan.problem->sequences * plan.problem->H, 1);
        return std::min((threads() + whole - 1) / whole, (plan.problem->V + 15) / 16);
    }

    // One for each head (of `heads`), sequence and part of the head (of at most `parts`).
    std::vector<Unit> units(std::int64_t heads, std::int64_t parts) const {
        const hr_problem& p = *plan.problem;
        const std::int64_t width = parts == 1 ? p.V : ((p.V + parts - 1) / parts + 15) / 16 * 16;
        std::vector<Unit> found;
        for (std::int64_t n = 0; n < p.sequences; n++)
            for (std::int64_t h = 0; h < heads; h++)
                for (std::int64_t i = 0; i * width < p.V; i++)
                    found.push_back({n, h, i, i * width, std::min(width, p.V - i * width)});
        return found;
    }

    Plan plan;

private:
    std::vector<std::int64_t> kept_at_;
};

template <class Job>
int run(const Work<Job>& work, const Cut& cut, const Job& job, const std::vector<Unit>& units) {
    if (units.empty()) return HR_OK;
    const std::size_t bytes = work.measure(cut.plan, job, units[0]);
    const auto body = [&](std::int64_t i, void* memory) { work.run(cut.plan, job, units[i], memory); };
    const auto count = static_cast<std::int64_t>(units.size());
    return run_units(count, cut.threads(), bytes, body) ? HR_OK : HR_NO_MEMORY;
}

// A backward, and what its units find for themselves until that is added up: heads may share q and k, and the parts of
// a head share all but v and the state.
class SharedBackward {
public:
    SharedBackward(const hr_problem& p, const Backward& job, const hr_gradients& wanted)
        : p_(p), cut_(p), units_(cut_.units(p.H, cut_.parts())), job_(job), wanted_(wanted) {
        const std::int64_t count = units_.empty() ? 1 : units_.back().part + 1, shared = p.H / p.Hq;
        parts_.resize(count, wanted);
        job_.gradients = parts_.data();
        job_.by_head = shared > 1 || count > 1;
        if (job_.by_head) {
            separate(&hr_gradients::q, p.K, shared, p.dtype == HR_BFLOAT16);
            separate(&hr_gradients::k, p.K, shared, p.dtype == HR_BFLOAT16);
        }
        if (count > 1) {
            separate(&hr_gradients::beta, 1);
            separate(&hr_gradients::write_gate, 1);
            separate(&hr_gradients::read_gate, 1);
            if (p.decay != HR_DECAY_FIXED) separate(&hr_gradients::log_decay, p.decay == HR_DECAY_VECTOR ? p.K : 1);
        }
        if (fixed_decay_wanted()) {
            fixed_decay_.resize(count * p.sequences * p.H);
            job_.fixed_decay = fixed_decay_.data();
        }
    }

    int run_all() {
        if (const int status = run(choice().of(p_).backward, cut_, job_, units_)) return status;
        for (const Gather& gather : gathers_)
            if (const int status = run(kernels().gather, cut_, gather, cut_.units(p_.H / gather.shared, 1)))
                return status;
        if (fixed_decay_wanted()) add_up_decay();
        return HR_OK;
    }

private:
    bool fixed_decay_wanted() const { return p_.decay == HR_DECAY_FIXED && wanted_.log_decay.data; }
    void separate(hr_tensor hr_gradients::* which, std::int64_t width, std::int64_t shared = 1, bool half = false) {
        if (!(wanted_.*which).data) return;
        const std::int64_t token = p_.H * width, batch = p_.T * token, size = p_.B * batch;
        const auto count = static_cast<std::int64_t>(parts_.size());
        float* own = found_.emplace_back(new float[count * size]).get();
        for (std::int64_t i = 0; i < count; i++) parts_[i].*which = {own + i * size, batch, token, width};
        gathers_.push_back({own, count, shared, width, wanted_.*which, half});
    }
    void add_up_decay() const {
        for (std::int64_t h = 0; h < p_.H; h++) {
            double total = 0;
            for (std::size_t i = h; i < fixed_decay_.size(); i += p_.H) total += fixed_decay_[i];
            static_cast<float*>(wanted_.log_decay.data)[h * wanted_.log_decay.head] = static_cast<float>(total);
        }
    }

    const hr_problem& p_;
    const Cut cut_;
    const std::vector<Unit> units_;
    Backward job_;
    const hr_gradients wanted_;
    std::vector<hr_gradients> parts_;
    std::vector<std::unique_ptr<float[]>> found_;
    std::vector<Gather> gathers_;
    std::vector<double> fixed_decay_;
};

bool known(const hr_layer& p) {
    const auto below = [](int kind, int count) { return kind >= 0 && kind < count; };
    return (p.dtype == HR_FLOAT32 || p.dtype == HR_BFLOAT16) && below(p.feature_map, kinds::feature_map::count) &&
           below(p.qk_norm, kinds::qk_norm::count) && below(p.decay, kinds::decay::count) &&
           below(p.rule, kinds::rule::count) && below(p.beta, kinds::beta::count) &&
           below(p.norm, kinds::norm::count) && below(p.gate, kinds::gate::count) &&
           below(p.order, kinds::order::count) && below(p.read, kinds::read::count) &&
           below(p.write, kinds::write::count) && below(p.source, kinds::source::count) &&
           below(p.activation, kinds::activation::count) && below(p.gate_scale, kinds::gate_scale::count);
}

// A token through a layer: its numbers as float32, side by side, and the recurrence's problem over them.
class LayerStep {
public:
    explicit LayerStep(const hr_layer& p) : p_(p), job_{} {
        job_.layer = &p;
        job_.columns = p.V + (p.norm == kinds::norm::sum);
        job_.key_row = padded(p.Hq * p.K), job_.value_row = padded(p.H * job_.columns);
        job_.decay_row = padded(decay_shape() == HR_DECAY_VECTOR ? p.H * p.K : p.H), job_.head_row = padded(p.H);
        job_.low_row = padded(std::max({p.decay_reads, p.gate_reads, p.H}));
        job_.wide_row = padded(std::max({p.H * p.V, p.D}));
        numbers_.resize(p.B * (2 * job_.key_row + 2 * job_.value_row + job_.decay_row + 3 * job_.head_row +
                               job_.low_row + job_.wide_row) + padded(p.H * p.K));
        float* next = numbers_.data();
        const auto take = [&](float*& pointer, std::int64_t row) { pointer = next, next += p.B * row; };
        take(job_.q, job_.key_row), take(job_.k, job_.key_row);
        take(job_.v, job_.value_row), take(job_.out, job_.value_row);
        take(job_.decay, job_.decay_row);
        take(job_.beta, job_.head_row), take(job_.read, job_.head_row), take(job_.write, job_.head_row);
        take(job_.low, job_.low_row), take(job_.wide, job_.wide_row);
        job_.bonus = p.bonus ? next : nullptr;
    }

    int run_all() {
        for (std::int64_t row = 0; row < p_.B; row++) kernels().enter(job_, row);
        const hr_problem problem = recurrence();
        if (const int status = refused(problem)) return status;
        const Cut cut(problem);
        const Step step{{job_.out, job_.value_row, 0, job_.columns}, p_.memory, job_.bonus};
        if (const int status = run(kernels().step, cut, step, cut.units(p_.H, cut.parts()))) return status;
        for (std::int64_t row = 0; row < p_.B; row++) kernels().leave(job_, row);
        return HR_OK;
    }

private:
    static std::int64_t padded(std::int64_t n) { return (n + 15) / 16 * 16; }

    hr_decay decay_shape() const { return kinds::shape(static_cast<kinds::decay::kind>(p_.decay)); }
    hr_problem recurrence() const {
        const auto per_head = [&](bool there, float* x) { return hr_tensor{there ? x : nullptr, job_.head_row, 0, 1}; };
        const bool vector = decay_shape() == HR_DECAY_VECTOR, plain = p_.norm != kinds::norm::sum;
        hr_problem r{};
        r.abi = HR_ABI, r.dtype = HR_FLOAT32, r.threads = p_.threads, r.scale = p_.scale;
        r.decay = decay_shape();
        r.delta = p_.rule == kinds::rule::delta;
        r.B = r.sequences = p_.B, r.T = 1, r.H = p_.H, r.Hq = p_.Hq, r.K = p_.K, r.V = job_.columns;
        r.q = {job_.q, job_.key_row, 0, p_.K}, r.k = {job_.k, job_.key_row, 0, p_.K};
        r.v = {job_.v, job_.value_row, 0, job_.columns};
        r.log_decay = {p_.decay ? job_.decay : nullptr, job_.decay_row, 0, vector ? p_.K : 1};
        r.beta = per_head(p_.beta != kinds::beta::one, job_.beta);
        r.write_gate = per_head(p_.write == kinds::write::value, job_.write);
        r.read_gate = per_head(p_.read && read_inside(p_) && plain, job_.read);
        return r;
    }

    const hr_layer& p_;
    Layer job_;
    std::vector<float> numbers_;
};

template <class F>
int guarded(F f) {
    const FlushDenormals flush;
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return HR_NO_MEMORY;
    }
}

int convolve(const hr_problem& p, const Convolution& job) {
    if (const int status = refused(p)) return status;
    if (p.H != 1 || job.given.width < 2 || job.given.width > HR_WIDEST) return HR_UNSUPPORTED;
    return guarded([&] {
        const Cut cut(p);
        return run(kernels().convolution, cut, job, cut.units(1, cut.parts()));
    });
}

}  // namespace

int32_t hr_abi(void) { return HR_ABI; }

const char* hr_isa(void) { return choice().bfloat16.name; }

const char* hr_message(int status) {
    switch (status) {
        case HR_OK: return "done";
        case HR_WRONG_ABI: return "the library and its caller are of different versions";
        case HR_UNSUPPORTED: return "a size, dtype or decay that the library does not know";
        case HR_NO_MEMORY: return "not enough memory";
        default: return "unknown status";
    }
}

int64_t hr_kept_floats(const hr_problem* p) {
    const Plan plan = Cut(*p).plan;
    return plan.kept_floats() + (p->delta && p->keep_errors ? p->B * p->T * p->H * p->V : 0);
}

int hr_forward(const hr_problem* p, const hr_tensor* out, float* final_state, float* kept) {
    if (const int status = refused(*p)) return status;
    return guarded([&] {
        const Cut cut(*p);
        return run(choice().of(*p).forward, cut, Forward{*out, final_state, kept}, cut.units(p->H, cut.parts()));
    });
}

int hr_backward(const hr_problem* p, const hr_tensor* d_out, const float* d_final, const float* kept,
                const hr_gradients* gradients) {
    if (const int status = refused(*p)) return status;
    const Backward job{*d_out, d_final, kept, nullptr, false, nullptr};
    return guarded([&] { return SharedBackward(*p, job, *gradients).run_all(); });
}

int hr_step(const hr_problem* p, const hr_tensor* out, float* state) {
    if (const int status = refused(*p)) return status;
    if (p->T != 1 || p->cu_seqlens) return HR_UNSUPPORTED;
    return guarded([&] {
        const Cut cut(*p);
        return run(kernels().step, cut, Step{*out, state, nullptr}, cut.units(p->H, cut.parts()));
    });
}

int hr_convolve(const hr_problem* p, const hr_convolution* convolution, const hr_tensor* out) {
    return convolve(*p, {*convolution, *out, {}, nullptr, nullptr});
}

int hr_convolve_backward(const hr_problem* p, const hr_convolution* convolution, const hr_tensor* d_out,
                         const hr_tensor* d_x, float* d_weight, float* d_history) {
    return convolve(*p, {*convolution, *d_out, *d_x, d_weight, d_history});
}

const char* hr_kinds(void) { return HR_KINDS; }

int hr_layer_step(const hr_layer* p) {
    if (p->abi != HR_ABI) return HR_WRONG_ABI;
    if (!known(*p)) return HR_UNSUPPORTED;
    return guarded([&] { return LayerStep(*p).run_all(); });
}

int hr_int8(const hr_int8_product* p) {
    constexpr std::int64_t SHARE = 64;  // rows of the weight that a thread takes at a time
    if (p->abi != HR_ABI) return HR_WRONG_ABI;
    if (p->rows < 0 || p->inputs < 0 || p->outputs < 0 || p->threads < 1) return HR_UNSUPPORTED;
    return guarded([&] {
        const auto share = [&](std::int64_t i, void*) {
            kernels().int8_rows(*p, i * SHARE, std::min((i + 1) * SHARE, p->outputs));
        };
        const int threads = threads_for(1.0 * p->rows * p->inputs * p->outputs, p->threads);
        return run_units((p->outputs + SHARE - 1) / SHARE, threads, 0, share) ? HR_OK : HR_NO_MEMORY;
    });
}
