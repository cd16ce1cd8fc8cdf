// The kinds of a layer's parts that hr_layer knows. A caller numbers them by HR_KINDS: a line for each field of
// hr_layer that is a kind, in their order, each with its values' names in the order of the enum beside it.

#pragma once

#include "headrace.h"

#define HR_KINDS                                                            \
    "feature_map identity elu+1 relu silu learned-softmax learned-exp\n"    \
    "head_norm none head joint\n"                                           \
    "qk_norm none l2\n"                                                     \
    "rotary none last first\n"                                              \
    "decay none retnet softplus sigmoid-head sigmoid exp softplus-vector\n" \
    "rule add delta\n"                                                      \
    "beta one sigmoid dt\n"                                                 \
    "norm none sum rms group rms-joint\n"                                   \
    "gate none silu sigmoid sigmoid-low-rank\n"                             \
    "order norm-gate gate-norm\n"                                           \
    "read none query after_norm\n"                                          \
    "write none value beta\n"                                               \
    "source head diag query hidden\n"                                       \
    "activation softmax sigmoid null\n"                                     \
    "gate_scale identity one"

#define HR_OPERATIONS                                                              \
    "kind embed load store norm linear transposed activate mix layer cap attend\n" \
    "norm rms rms-offset layer\n"                                                  \
    "activation silu sigmoid relu relu2 tanh gelu gelu-tanh\n"

namespace kinds {

constexpr float SIGMOID_TEMPERATURE = 16;  // of the decays "sigmoid…": Decay.temperature in Python
constexpr float FARTHEST = 30;             // logit of the feature map "learned-exp": FARTHEST in extra/linearized.py

namespace feature_map { enum { identity, elu_plus_one, relu, silu, learned_softmax, learned_exp, count }; }
namespace head_norm { enum { none, head, joint, count }; }
namespace qk_norm { enum { none, l2, count }; }
namespace rotary { enum { none, last, first, count }; }  // of the feature map and the rotation
namespace decay { enum kind { none, retnet, softplus, sigmoid_head, sigmoid, exp, softplus_vector, count }; }
namespace rule { enum { add, delta, count }; }
namespace beta { enum { one, sigmoid, dt, count }; }
namespace norm { enum { none, sum, rms, group, rms_joint, count }; }
namespace gate { enum { none, silu, sigmoid, sigmoid_low_rank, count }; }
namespace order { enum { norm_gate, gate_norm, count }; }
namespace read { enum { none, query, after_norm, count }; }
namespace write { enum { none, value, beta, count }; }
namespace source { enum { head, diag, query, hidden, count }; }
namespace activation { enum { softmax, sigmoid, null, count }; }
namespace gate_scale { enum { identity, one, count }; }

// The shape of a kind's log_decay in the recurrence. No default: -Werror=switch refuses a kind that is not listed.
constexpr hr_decay shape(decay::kind kind) {
    switch (kind) {
        case decay::none: return HR_DECAY_NONE;
        case decay::retnet:
        case decay::softplus:
        case decay::sigmoid_head: return HR_DECAY_SCALAR;
        case decay::sigmoid:
        case decay::exp:
        case decay::softplus_vector: return HR_DECAY_VECTOR;
        case decay::count: break;
    }
    return HR_DECAY_NONE;
}

// The number of names in the line of HR_KINDS that begins with `field`, which has to be the number of the enum's values.
constexpr int names(const char* lines, const char* field) {
    for (const char* at = lines; *at;) {
        const char* word = field;
        while (*word && *at == *word) at++, word++;
        int spaces = 0;
        const bool found = !*word && *at == ' ';
        for (; *at && *at != '\n'; at++) spaces += *at == ' ';
        if (found) return spaces;
        if (*at) at++;
    }
    return -1;
}

#define HR_SAME_COUNT(field) static_assert(names(HR_KINDS, #field) == field::count, #field ": HR_KINDS and enum differ")
HR_SAME_COUNT(feature_map);
HR_SAME_COUNT(head_norm);
HR_SAME_COUNT(qk_norm);
HR_SAME_COUNT(rotary);
HR_SAME_COUNT(decay);
HR_SAME_COUNT(rule);
HR_SAME_COUNT(beta);
HR_SAME_COUNT(norm);
HR_SAME_COUNT(gate);
HR_SAME_COUNT(order);
HR_SAME_COUNT(read);
HR_SAME_COUNT(write);
HR_SAME_COUNT(source);
HR_SAME_COUNT(activation);
HR_SAME_COUNT(gate_scale);
#undef HR_SAME_COUNT
static_assert(names(HR_OPERATIONS, "kind") == HR_KINDS_OF_OPERATIONS, "HR_OPERATIONS and hr_kind differ");
static_assert(names(HR_OPERATIONS, "norm") == HR_NORMS, "HR_OPERATIONS and hr_norm differ");
static_assert(names(HR_OPERATIONS, "activation") == HR_ACTIVATIONS, "HR_OPERATIONS and hr_activation differ");

}  // namespace kinds
