// The kinds of a layer's parts that hr_layer_step knows. A caller numbers them by HR_KINDS: a line for each field of
// hr_layer that is a kind, in their order, each with its values' names in the order of the enum beside it.

#pragma once

#define HR_KINDS                                                        \
    "feature_map identity elu+1 relu silu\n"                            \
    "qk_norm none l2\n"                                                 \
    "decay none retnet softplus sigmoid exp softplus-vector\n"          \
    "rule add delta\n"                                                  \
    "beta one sigmoid dt\n"                                             \
    "norm none sum rms group rms-joint\n"                               \
    "gate none silu sigmoid sigmoid-low-rank\n"                         \
    "order norm-gate gate-norm\n"                                       \
    "read none query norm\n"                                            \
    "write none value beta\n"                                           \
    "source head diag query hidden\n"                                   \
    "activation softmax sigmoid null\n"                                 \
    "gate_scale identity one"

namespace kinds {

namespace feature_map { enum { identity, elu_plus_one, relu, silu, count }; }
namespace qk_norm { enum { none, l2, count }; }
namespace decay { enum { none, retnet, softplus, sigmoid, exp, softplus_vector, count }; }
namespace rule { enum { add, delta, count }; }
namespace beta { enum { one, sigmoid, dt, count }; }
namespace norm { enum { none, sum, rms, group, rms_joint, count }; }
namespace gate { enum { none, silu, sigmoid, sigmoid_low_rank, count }; }
namespace order { enum { norm_gate, gate_norm, count }; }
namespace read { enum { none, query, norm, count }; }
namespace write { enum { none, value, beta, count }; }
namespace source { enum { head, diag, query, hidden, count }; }
namespace activation { enum { softmax, sigmoid, null, count }; }
namespace gate_scale { enum { identity, one, count }; }

}  // namespace kinds
