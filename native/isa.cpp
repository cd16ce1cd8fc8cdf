// The kernels for one instruction set. Compiled once for each, as the namespace that HR_ISA names:
//
//     portable   no flags                                        (SSE2 or NEON)
//     avx2       -mavx2 -mfma                                    (x86 only)
//     avx512     -mavx512f -mavx512bw -mavx512vl -mavx512dq      (x86 only)
//     avx512bf16  the same and -mavx512bf16                      (x86 only; those of problems in bfloat16 alone)
//
// and with -O3 -fno-math-errno -ffp-contract=fast -fvisibility=hidden everywhere; never with -ffast-math.

#include "backward.h"
#include "forward.h"
#if !defined(__AVX512BF16__)
#include "attention.h"
#include "convolution.h"
#include "gather.h"
#include "layer_step.h"
#include "program.h"
#include "scan.h"
#include "step.h"
#endif

namespace HR_ISA {

// Over a null pointer the work is only measured.
template <class Work, class Job>
std::size_t measure_or_run(const Plan& plan, const Job& job, const Unit& unit, void* memory) {
    Arena arena(memory);
    Work work(arena, plan, job, unit);
    if (memory) work.run();
    return arena.used();
}

// Run for the problem's decay and rule.
template <template <class, bool> class Run>
struct Chosen {
    template <class Job>
    static std::size_t call(const Plan& plan, const Job& job, const Unit& unit, void* memory) {
        // no default: -Werror=switch refuses a decay without a case
        switch (static_cast<hr_decay>(plan.problem->decay)) {
            case HR_DECAY_NONE: break;
            case HR_DECAY_FIXED:
            case HR_DECAY_SCALAR: return rule<ScalarDecay>(plan, job, unit, memory);
            case HR_DECAY_VECTOR: return rule<VectorDecay>(plan, job, unit, memory);
        }
        return rule<NoDecay>(plan, job, unit, memory);
    }
    template <class Decay, class Job>
    static std::size_t rule(const Plan& plan, const Job& job, const Unit& unit, void* memory) {
        return plan.problem->delta ? measure_or_run<Run<Decay, true>>(plan, job, unit, memory)
                                   : measure_or_run<Run<Decay, false>>(plan, job, unit, memory);
    }
};

template <class Job, std::size_t (*call)(const Plan&, const Job&, const Unit&, void*)>
struct Entry {
    static std::size_t measure(const Plan& plan, const Job& job, const Unit& unit) {
        return call(plan, job, unit, nullptr);
    }
    static void run(const Plan& plan, const Job& job, const Unit& unit, void* memory) { call(plan, job, unit, memory); }
    static constexpr Work<Job> work = {measure, run};
};

#if !defined(__AVX512BF16__)
template <void (LayerRow<float>::*single)(), void (LayerRow<std::uint16_t>::*half)()>
void layer_row(const Layer& job, std::int64_t row) {
    if (job.layer->dtype == HR_BFLOAT16) {
        LayerRow<std::uint16_t> work(job, row);
        (work.*half)();
    } else {
        LayerRow<float> work(job, row);
        (work.*single)();
    }
}

// f(row) of the row in the dtype of the cache.
template <class F>
HR_INLINE void with_attention(const Attention& job, std::int64_t row, F f) {
    if (job.attention->dtype == HR_BFLOAT16)
        f(AttentionRow<std::uint16_t>(job, row));
    else
        f(AttentionRow<float>(job, row));
}
inline void enter_attention(const Attention& job, std::int64_t row) {
    with_attention(job, row, [](auto work) { work.enter(); });
}
inline void attend(const Attention& job, std::int64_t row, std::int64_t head, float* scores) {
    with_attention(job, row, [&](auto work) { work.attend(head, scores); });
}
inline void leave_attention(const Attention& job, std::int64_t row) {
    with_attention(job, row, [](auto work) { work.leave(); });
}
#endif

#define HR_TEXT(x) #x
#define HR_NAME(x) HR_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    HR_NAME(HR_ISA),
    W,
    Entry<Forward, Chosen<ForwardUnit>::call<Forward>>::work,
    Entry<Backward, Chosen<BackwardUnit>::call<Backward>>::work,
#if !defined(__AVX512BF16__)
    Entry<Gather, measure_or_run<GatherUnit, Gather>>::work,
    Entry<Step, Chosen<StepUnit>::call<Step>>::work,
    Entry<Convolution, measure_or_run<ConvolutionUnit, Convolution>>::work,
    Entry<Scan, measure_or_run<ScanUnit, Scan>>::work,
    layer_row<&LayerRow<float>::enter, &LayerRow<std::uint16_t>::enter>,
    layer_row<&LayerRow<float>::leave, &LayerRow<std::uint16_t>::leave>,
    enter_attention,
    attend,
    leave_attention,
    operate,
    linear,
#endif
};

}  // namespace HR_ISA
