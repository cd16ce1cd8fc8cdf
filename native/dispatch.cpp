// The C ABI: what is refused, which instruction set runs, how a problem is cut into units for the threads.

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "job.h"
#include "pool.h"

namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__) || defined(__i386__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

const Kernels& choose() {
#if defined(__x86_64__) || defined(__i386__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return avx512::kernels;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kernels;
#endif
    return portable::kernels;
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

int refused(const hr_problem& p) {
    if (p.abi != HR_ABI) return HR_WRONG_ABI;
    const bool sizes = p.B >= 0 && p.T >= 0 && p.H >= 1 && p.Hq >= 1 && p.H % p.Hq == 0 && p.K >= 1 && p.V >= 1 &&
                       p.K <= 1 << 16 && p.V <= 1 << 16 && p.sequences >= 0 && p.threads >= 1;
    const bool kinds = (p.dtype == HR_FLOAT32 || p.dtype == HR_BFLOAT16) && p.decay >= HR_DECAY_NONE &&
                       p.decay <= HR_DECAY_VECTOR && (p.cu_seqlens ? p.B == 1 : p.sequences == p.B);
    return sizes && kinds ? HR_OK : HR_UNSUPPORTED;
}

// Tokens a chunk. Beyond 64 the C×C work inside a chunk costs more than the K×V work between chunks saves; so it does
// earlier where K and V are small.
int chunk_of(const hr_problem& p) {
    std::int64_t tokens = p.chunk;
    if (tokens <= 0)
        for (tokens = 16; tokens < 64 && 2 * tokens < p.K + p.V;) tokens *= 2;
    return static_cast<int>(std::clamp<std::int64_t>((tokens + 15) / 16 * 16, 16, 128));
}

class Cut {
public:
    explicit Cut(const hr_problem& p) : plan{&p, chunk_of(p), 1, nullptr, 0}, kept_at_(p.sequences) {
        const std::int64_t per_token = p.dtype == HR_BFLOAT16 ? (2 * p.K + p.V) / 2 + 1 : 2 * p.K + p.V;
        plan.run = (10 * p.K * p.V + plan.chunk * per_token - 1) / (plan.chunk * per_token);
        for (std::int64_t n = 0; n < p.sequences; n++) {
            kept_at_[n] = plan.kept_states;
            plan.kept_states += std::max<std::int64_t>(plan.length(n) - 1, 0) / (plan.run * plan.chunk);
        }
        plan.kept_at = kept_at_.data();
    }

    // One a head of a sequence, or, where these are fewer than threads, some columns of one, a multiple of 16.
    std::vector<Unit> units(bool may_split) const {
        const hr_problem& p = *plan.problem;
        const std::int64_t whole = p.sequences * p.H;
        const std::int64_t parts = may_split && whole > 0 ? (p.threads + whole - 1) / whole : 1;
        const std::int64_t width = parts == 1 ? p.V : ((p.V + parts - 1) / parts + 15) / 16 * 16;
        std::vector<Unit> found;
        for (std::int64_t n = 0; n < p.sequences; n++)
            for (std::int64_t h = 0; h < p.H; h++)
                for (std::int64_t column = 0; column < p.V; column += width)
                    found.push_back({n, h, column, std::min(width, p.V - column)});
        return found;
    }

    Plan plan;

private:
    std::vector<std::int64_t> kept_at_;
};

template <class Job>
int run(const Work<Job>& work, const Cut& cut, const Job& job, bool may_split) {
    const std::vector<Unit> units = cut.units(may_split);
    if (units.empty()) return HR_OK;
    const std::size_t bytes = work.measure(cut.plan, job, units[0]);
    const auto body = [&](std::int64_t i, void* memory) { work.run(cut.plan, job, units[i], memory); };
    const auto count = static_cast<std::int64_t>(units.size());
    return run_units(count, cut.plan.problem->threads, bytes, body) ? HR_OK : HR_NO_MEMORY;
}

// The gradient to a fixed decay, summed over sequences in their order.
void add_up(const std::vector<double>& parts, const hr_problem& p, const hr_tensor& into) {
    for (std::int64_t h = 0; h < p.H; h++) {
        double total = 0;
        for (std::int64_t n = 0; n < p.sequences; n++) total += parts[n * p.H + h];
        static_cast<float*>(into.data)[h * into.head] = static_cast<float>(total);
    }
}

template <class F>
int guarded(F f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return HR_NO_MEMORY;
    }
}

}  // namespace

int32_t hr_abi(void) { return HR_ABI; }

const char* hr_isa(void) { return kernels().name; }

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
    return guarded([&] { return run(kernels().forward, Cut(*p), Forward{*out, final_state, kept}, true); });
}

int hr_backward(const hr_problem* p, const hr_tensor* d_out, const float* d_final, const float* kept,
                const hr_gradients* gradients) {
    if (const int status = refused(*p)) return status;
    return guarded([&] {
        Backward job{*d_out, d_final, kept, *gradients, false, nullptr};
        std::vector<double> fixed;
        if (p->decay == HR_DECAY_FIXED && gradients->log_decay.data) {
            fixed.resize(p->sequences * p->H);
            job.fixed_decay = fixed.data();
        }
        const int status = run(kernels().backward, Cut(*p), job, false);
        if (!status && job.fixed_decay) add_up(fixed, *p, gradients->log_decay);
        return status;
    });
}

int hr_step(const hr_problem* p, const hr_tensor* out, float* state) {
    if (const int status = refused(*p)) return status;
    if (p->T != 1 || p->cu_seqlens) return HR_UNSUPPORTED;
    return guarded([&] { return run(kernels().step, Cut(*p), Step{*out, state}, true); });
}
