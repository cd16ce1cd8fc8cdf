// The kernels for one instruction set. Compiled three times, as the namespace that HR_ISA names:
//
//     portable   no flags                                        (SSE2 or NEON)
//     avx2       -mavx2 -mfma                                    (x86 only)
//     avx512     -mavx512f -mavx512bw -mavx512vl -mavx512dq      (x86 only)
//
// and with -O3 -fno-math-errno -ffp-contract=fast -fvisibility=hidden everywhere; never with -ffast-math.

#include "backward.h"
#include "forward.h"
#include "step.h"

namespace HR_ISA {

template <template <class, bool> class Run>
struct Chosen {
    // Run for the problem's decay and rule.
    template <class... Args>
    static std::size_t call(const Plan& plan, const Args&... args) {
        switch (plan.problem->decay) {
            case HR_DECAY_NONE: return rule<NoDecay>(plan, args...);
            case HR_DECAY_VECTOR: return rule<VectorDecay>(plan, args...);
            default: return rule<ScalarDecay>(plan, args...);
        }
    }
    template <class Decay, class... Args>
    static std::size_t rule(const Plan& plan, const Args&... args) {
        return plan.problem->delta ? run<Run<Decay, true>>(plan, args...) : run<Run<Decay, false>>(plan, args...);
    }
    // Over a null pointer the work is only measured.
    template <class Work, class Job>
    static std::size_t run(const Plan& plan, const Job& job, const Unit& unit, void* const& memory) {
        Arena arena(memory);
        Work work(arena, plan, job, unit);
        if (memory) work.run();
        return arena.used();
    }
};

static std::size_t forward_memory(const Plan& plan, const Forward& job, const Unit& unit) {
    return Chosen<ForwardUnit>::call(plan, job, unit, static_cast<void*>(nullptr));
}
static void forward(const Plan& plan, const Forward& job, const Unit& unit, void* memory) {
    Chosen<ForwardUnit>::call(plan, job, unit, memory);
}
static std::size_t backward_memory(const Plan& plan, const Backward& job, const Unit& unit) {
    return Chosen<BackwardUnit>::call(plan, job, unit, static_cast<void*>(nullptr));
}
static void backward(const Plan& plan, const Backward& job, const Unit& unit, void* memory) {
    Chosen<BackwardUnit>::call(plan, job, unit, memory);
}
static std::size_t step_memory(const Plan& plan, const Step& job, const Unit& unit) {
    return Chosen<StepUnit>::call(plan, job, unit, static_cast<void*>(nullptr));
}
static void step(const Plan& plan, const Step& job, const Unit& unit, void* memory) {
    Chosen<StepUnit>::call(plan, job, unit, memory);
}

#define HR_TEXT(x) #x
#define HR_NAME(x) HR_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    HR_NAME(HR_ISA), {forward_memory, forward}, {backward_memory, backward}, {step_memory, step},
};

}  // namespace HR_ISA
