// The C ABI: what is refused, which instruction set runs, how a problem is cut into units for the threads.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "guarded.h"
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
    const std::string_view limit = asked && *asked ? asked : "avx512bf16";
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

}  // namespace

const Kernels& kernels() { return choice().kernels; }

namespace {

int refused(const hr_problem& p, bool grouped_queries = false) {
    if (p.abi != HR_ABI) return HR_WRONG_ABI;
    const bool heads = p.H >= 1 && p.Hq >= 1 && (p.H % p.Hq == 0 || (grouped_queries && p.Hq % p.H == 0));
    const bool sizes = p.B >= 0 && p.T >= 0 && heads && p.K >= 1 && p.V >= 1 && p.K <= 1 << 16 && p.V <= 1 << 16 &&
                       p.sequences >= 0 && p.threads >= 1;
    const bool kinds = (p.dtype == HR_FLOAT32 || p.dtype == HR_BFLOAT16) && p.decay >= HR_DECAY_NONE &&
                       p.decay <= HR_DECAY_VECTOR && (p.cu_seqlens ? p.B == 1 : p.sequences == p.B);
    const bool bonus = !p.bonus || (!p.delta && p.decay != HR_DECAY_FIXED);
    const bool normalizer = p.normalizer == 0 || (p.normalizer > 0 && !p.delta && !p.bonus && !p.read_gate.data);
    return sizes && kinds && bonus && normalizer ? HR_OK : HR_UNSUPPORTED;
}

// C, the tokens of a chunk. The C×C work inside chunks grows with C, and the cost of reading and writing the state between
// them falls: a smaller state has a smaller best C. A decay per key adds to the work that each token has for any C.
int chunk_of(const hr_problem& p) {
    if (p.chunk > 0) return std::clamp((p.chunk + 15) / 16 * 16, 16, 128);
    const bool vector_alone = p.decay == HR_DECAY_VECTOR && !p.delta;
    return p.K + p.V <= 128 && !vector_alone ? 16 : 32;
}

// Threads for which there is work: waking one takes as long as a million products.
int threads_for(double products, int most) {
    return static_cast<int>(std::clamp(products / 1e6, 1.0, static_cast<double>(most)));
}

// Chunks from one kept state to the next, a function of sizes alone, which op.py repeats. The kept states take a tenth
// of the inputs' memory. The backward computes the states between two of them again and holds all of these; where they would
// take more than AGAIN floats, the number kept and the number computed again are equal within a factor of two.
std::int64_t run_of(const hr_problem& p, int chunk) {
    constexpr std::int64_t AGAIN = (64 << 20) / sizeof(float);
    const std::int64_t state = p.K * p.V, chunks = p.T / chunk, half = p.dtype == HR_BFLOAT16 ? 2 : 1;
    const std::int64_t per_chunk = chunk * (2 * p.K + p.V), tenth = (10 * half * state + per_chunk - 1) / per_chunk;
    std::int64_t run = std::max<std::int64_t>(AGAIN / state, 1);
    while (run < tenth && run * run < chunks) run *= 2;
    return std::min(run, tenth);
}

class Cut {
public:
    explicit Cut(const hr_problem& p) : plan{&p, chunk_of(p), 1, nullptr, 0}, kept_at_(p.sequences) {
        plan.run = run_of(p, plan.chunk);
        const std::int64_t apart = plan.run * plan.chunk;
        std::int64_t longest = 1;
        for (std::int64_t n = 0; n < p.sequences; n++) {
            kept_at_[n] = used_;
            used_ += std::max<std::int64_t>(plan.length(n) - 1, 0) / apart;
            longest = std::max(longest, plan.length(n));
        }
        plan.kept_at = kept_at_.data();
        plan.kept_states = p.B * ((p.T + plan.delay() - 1) / apart);  // at least as many, wherever packed sequences end
        plan.run = std::min(plan.run, (longest + plan.chunk - 1) / plan.chunk);  // what the backward has room for
    }

    int threads() const {
        const hr_problem& p = *plan.problem;
        return threads_for(2.0 * p.B * p.T * p.H * p.K * p.V, p.threads);
    }

    // Into how many blocks of columns a head is cut, multiples of 16, so that there is a unit for every thread. A normalizer's
    // gradient is of all columns.
    std::int64_t parts() const {
        if (plan.problem->normalizer > 0) return 1;
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

    // The room in `kept` that no state takes: what is returned has no number of before.
    void clear_unused(float* kept) const {
        const std::int64_t state = plan.problem->H * plan.problem->K * plan.columns();
        std::fill(kept + used_ * state, kept + plan.kept_floats(), 0.0f);
    }

    Plan plan;

private:
    std::vector<std::int64_t> kept_at_;
    std::int64_t used_ = 0;
};

template <class Job>
int run(const Work<Job>& work, const Cut& cut, const Job& job, const std::vector<Unit>& units) {
    if (units.empty()) return HR_OK;
    const std::size_t bytes = work.measure(cut.plan, job, units[0]);
    const auto body = [&](std::int64_t i, void* memory) { work.run(cut.plan, job, units[i], memory); };
    const auto count = static_cast<std::int64_t>(units.size());
    return run_units(count, cut.threads(), bytes, body) ? HR_OK : HR_NO_MEMORY;
}

// A tensor [B, T, heads, width], if it lies in one piece.
void will_be_written(const hr_problem& p, const hr_tensor& x, std::int64_t heads, std::int64_t width, bool half) {
    if (x.data && x.token == heads * width && x.batch == p.T * x.token)
        in_large_pages(x.data, p.B * x.batch * (half ? sizeof(std::uint16_t) : sizeof(float)));
}

// A backward, and what its units find for themselves until that is added up: heads may share q and k, and the parts of
// a head share all but v and the state.
class SharedBackward {
public:
    SharedBackward(const hr_problem& p, const Backward& job, const hr_gradients& wanted)
        : p_(p), cut_(p), units_(cut_.units(p.H, cut_.parts())), job_(job), wanted_(wanted) {
        const std::int64_t count = units_.empty() ? 1 : units_.back().part + 1, shared = p.H / p.Hq;
        const bool half = p.dtype == HR_BFLOAT16;
        parts_.resize(count, wanted);
        job_.gradients = parts_.data();
        will_be_written(p, wanted.q, p.Hq, p.K, half), will_be_written(p, wanted.k, p.Hq, p.K, half);
        will_be_written(p, wanted.v, p.H, p.V, half), will_be_written(p, wanted.log_decay, p.H, p.K, false);
        job_.by_head = shared > 1 || count > 1;
        if (job_.by_head) {
            separate(&hr_gradients::q, p.K, shared, half);
            separate(&hr_gradients::k, p.K, shared, half);
        }
        if (count > 1) {
            separate(&hr_gradients::beta, 1);
            separate(&hr_gradients::write_gate, 1);
            separate(&hr_gradients::read_gate, 1);
            if (p.decay != HR_DECAY_FIXED) separate(&hr_gradients::log_decay, p.decay == HR_DECAY_VECTOR ? p.K : 1);
        }
        if (wanted.bonus) {
            bonus_.resize(count * p.sequences * p.H * p.K);
            job_.bonus = bonus_.data();
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
        if (wanted_.bonus) add_up_bonus();
        return HR_OK;
    }

private:
    bool fixed_decay_wanted() const { return p_.decay == HR_DECAY_FIXED && wanted_.log_decay.data; }
    void separate(hr_tensor hr_gradients::* which, std::int64_t width, std::int64_t shared = 1, bool half = false) {
        if (!(wanted_.*which).data) return;
        const std::int64_t token = p_.H * width, batch = p_.T * token, size = p_.B * batch;
        const auto count = static_cast<std::int64_t>(parts_.size());
        float* own = found_.emplace_back(new float[count * size]).get();
        in_large_pages(own, count * size * sizeof(float));
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

    void add_up_bonus() const {
        const std::int64_t size = p_.H * p_.K;
        for (std::int64_t i = 0; i < size; i++) {
            double total = 0;
            for (std::size_t j = i; j < bonus_.size(); j += size) total += bonus_[j];
            wanted_.bonus[i] = static_cast<float>(total);
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
    std::vector<double> fixed_decay_, bonus_;
};

int convolve(const hr_problem& p, const Convolution& job) {
    if (const int status = refused(p)) return status;
    if (p.H != 1 || job.given.width < 2 || job.given.width > HR_WIDEST) return HR_UNSUPPORTED;
    return guarded([&] {
        const Cut cut(p);
        return run(kernels().convolution, cut, job, cut.units(1, cut.parts()));
    });
}

int scan(const hr_problem& p, const Scan& job) {
    if (const int status = refused(p)) return status;
    if (p.H != 1 || p.dtype != HR_FLOAT32 || !p.cu_seqlens || !p.initial_state) return HR_UNSUPPORTED;
    return guarded([&] {
        const Cut cut(p);
        return run(kernels().scan, cut, job, cut.units(1, (p.V + HR_SCAN_PART - 1) / HR_SCAN_PART));
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
        case HR_NO_TOKEN: return "a token that the model does not have";
        default: return "unknown status";
    }
}

int64_t hr_kept_floats(const hr_problem* p) { return Cut(*p).plan.kept_floats(); }

int hr_forward(const hr_problem* p, const hr_tensor* out, float* final_state, float* kept) {
    if (const int status = refused(*p)) return status;
    return guarded([&] {
        const Cut cut(*p);
        will_be_written(*p, *out, p->H, p->V, p->dtype == HR_BFLOAT16);
        if (kept) in_large_pages(kept, hr_kept_floats(p) * sizeof(float)), cut.clear_unused(kept);
        return run(choice().of(*p).forward, cut, Forward{*out, final_state, kept}, cut.units(p->H, cut.parts()));
    });
}

int hr_backward(const hr_problem* p, const hr_tensor* d_out, const float* d_final, const float* kept,
                const hr_gradients* gradients) {
    if (const int status = refused(*p)) return status;
    const Backward job{*d_out, d_final, kept, nullptr, false, nullptr, nullptr};
    return guarded([&] { return SharedBackward(*p, job, *gradients).run_all(); });
}

int hr_step(const hr_problem* p, const hr_tensor* out, float* state) {
    if (const int status = refused(*p, true)) return status;
    if (p->T != 1 || p->cu_seqlens || p->normalizer > 0) return HR_UNSUPPORTED;
    return guarded([&] {
        hr_problem token = *p;
        token.bonus = nullptr;
        const Cut cut(token);
        return run(kernels().step, cut, Step{*out, state, p->bonus}, cut.units(p->H, cut.parts()));
    });
}

int hr_step_at(const hr_problem* problem, void* const* addresses) {
    if (problem->abi != HR_ABI) return HR_WRONG_ABI;
    hr_problem p = *problem;
    for (hr_tensor* x : {&p.q, &p.k, &p.v, &p.log_decay, &p.beta, &p.write_gate, &p.read_gate}) x->data = *addresses++;
    const hr_tensor out{addresses[0], std::max(p.H, p.Hq) * p.V, 0, p.V};
    return hr_step(&p, &out, static_cast<float*>(addresses[1]));
}

int hr_convolve(const hr_problem* p, const hr_convolution* convolution, const hr_tensor* out) {
    return convolve(*p, {*convolution, *out, {}, nullptr, nullptr});
}

int hr_convolve_backward(const hr_problem* p, const hr_convolution* convolution, const hr_tensor* d_out,
                         const hr_tensor* d_x, float* d_weight, float* d_history) {
    return convolve(*p, {*convolution, *d_out, *d_x, d_weight, d_history});
}

int hr_selective_scan(const hr_problem* p, const hr_scan* given, const hr_tensor* out, float* state) {
    return scan(*p, {given->A, given->kept, state, given->dt, *out, {}, {}, nullptr, nullptr, nullptr, nullptr});
}

int hr_selective_scan_backward(const hr_problem* p, const hr_scan* given, const hr_tensor* d_out, const float* d_state,
                               const hr_scan_gradients* g) {
    float* state = const_cast<float*>(d_state);
    return scan(*p, {given->A, given->kept, state, given->dt, *d_out, g->u, g->dt, g->A, g->B, g->C, g->initial});
}
