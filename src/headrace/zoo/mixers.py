"""The named mixers: the mixers without competition, and the published forms of softmax linear attention. A decoder,
which HeadraceConfig(mixer=…) builds, stands among them."""

from dataclasses import replace
from typing import Any, NamedTuple

from ..spec.attention import AttentionSpec, Pattern
from ..spec.decay import Decay
from ..spec.linear import Competition, Heads, Inputs, MixerSpec, Read, Write
from ..spec.stack import BlockStyle, Decoder, Layer


class Entry(NamedTuple):
    """A row of the zoo: a named mixer or model."""

    about: str
    paper: str  # address of the paper
    spec: Any


MAMBA2 = MixerSpec(
    # state-spaces/mamba, Mamba2: expand 2, headdim 64, d_state 128 = 4 D / heads, ngroups 1
    Heads(expand_k=4.0, expand_v=2.0, qk_groups=1, width=64),
    Inputs(conv=4, conv_bias=True),
    Decay("softplus"),
    Write(beta="dt"),
    Read("rms-joint", "silu", "gate-norm", scale="one", skip=True),
)
# its authors' DeltaNetConfig: 16 heads at a hidden size of 2048
DELTANET = MixerSpec(Heads(width=128), Inputs(conv=4, qk_norm="l2"), write=Write("delta", "sigmoid"))
GATED_DELTANET = MixerSpec(
    Heads(expand_k=0.75, expand_v=1.5),
    Inputs(conv=4, qk_norm="l2"),
    Decay("softplus"),
    Write("delta", "sigmoid"),
    Read("rms", "silu"),
)
KDA = MixerSpec(
    Heads(width=128),  # Kimi-Linear-48B-A3B: head_dim 128
    inputs=Inputs(conv=4, qk_norm="l2"),
    decay=Decay("softplus-vector"),
    write=Write("delta", "sigmoid"),
    read=Read("rms", "sigmoid-low-rank"),
)

MIXERS: dict[str, Entry] = {
    "linear-attention": Entry(
        "The memory is the sum of kᵀ v; the output is divided by the sum of weights.",
        "https://arxiv.org/abs/2006.16236",
        MixerSpec(inputs=Inputs(feature_map="elu+1"), read=Read("sum", scale="one")),
    ),
    "retnet": Entry(
        "Linear attention with a fixed decay per head, rotary positions and RMSNorm per head.",
        "https://arxiv.org/abs/2307.08621",
        MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("retnet"), read=Read("rms", "silu")),
    ),
    "xpos-retnet": Entry(
        "RetNet with the decay of xPos: a fixed rate per key channel, the same for all heads.",
        "https://arxiv.org/abs/2212.10554",
        MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("xpos"), read=Read("rms", "silu")),
    ),
    "lightning-attention": Entry(
        "Linear attention with the slopes of ALiBi as fixed decays, and SiLU on q, k and v (MiniMax-01).",
        "https://arxiv.org/abs/2501.08313",
        MixerSpec(
            Heads(width=128),  # MiniMax-Text-01: head_dim 128
            inputs=Inputs(feature_map="silu", value_map="silu"),
            decay=Decay("slopes"),
            read=Read("rms-joint", "sigmoid", scale="one"),
        ),
    ),
    "mamba2": Entry(
        "A step size dt, computed from the token, sets both decay and write strength.",
        "https://arxiv.org/abs/2405.21060",
        MAMBA2,
    ),
    "gla": Entry(
        "A decay per key channel, computed by a low-rank sigmoid gate.",
        "https://arxiv.org/abs/2312.06635",
        MixerSpec(Heads(expand_k=0.5), decay=Decay("sigmoid", rank=16), read=Read("rms", "silu")),
    ),
    "simple-gla": Entry(
        "GLA with one decay per token and head.",
        "https://arxiv.org/abs/2312.06635",
        MixerSpec(decay=Decay("sigmoid-head"), read=Read("rms", "silu")),
    ),
    "hgrn2": Entry(
        "The decay per key channel is a sigmoid, and the key is 1 − the decay.",
        "https://arxiv.org/abs/2404.07904",
        MixerSpec(
            Heads(width=128),  # its authors' HGRN2Config: expand_ratio 128
            inputs=Inputs(feature_map="silu", key="complement"),
            decay=Decay("sigmoid", rank="full", temperature=1.0),
            read=Read("rms-joint"),
        ),
    ),
    "rwkv5": Entry(
        "A learned decay per channel, a bonus for the current token; inputs are mixed with the previous token.",
        "https://arxiv.org/abs/2404.05892",
        MixerSpec(
            Heads(width=64),  # RWKV-LM: head_size 64
            inputs=Inputs(shift="lerp"),
            decay=Decay("exp-fixed"),
            read=Read("group", "silu", scale="one", bonus=True),
        ),
    ),
    "rwkv6": Entry(
        "A bonus weight for the current token; inputs are mixed with the previous token.",
        "https://arxiv.org/abs/2404.05892",
        MixerSpec(
            Heads(width=64),  # RWKV-LM: head_size 64
            inputs=Inputs(shift="ddlerp"),
            decay=Decay("exp", rank=64),
            read=Read("group", "silu", scale="one", bonus=True),
        ),
    ),
    "delta-fast-weights": Entry(
        "Linear attention with the delta rule on sparse features (DPFP) that are normalized to sum 1.",
        "https://arxiv.org/abs/2102.11174",
        MixerSpec(
            Heads(count=8),  # IDSIA/lmtool-fwp: n_head 8 at 128 and at 256
            inputs=Inputs(feature_map="dpfp-1", qk_norm="sum"),
            write=Write("delta", "sigmoid"),
            read=Read("none", scale="one"),
        ),
    ),
    "deltanet": Entry(
        "Delta rule: the value stored under k is removed before v is written.",
        "https://arxiv.org/abs/2406.06484",
        DELTANET,
    ),
    "gated-deltanet": Entry(
        "DeltaNet with the decay of Mamba-2.",
        "https://arxiv.org/abs/2412.06464",
        GATED_DELTANET,
    ),
    "negative-deltanet": Entry(
        "DeltaNet whose write strength goes up to 2, for state transitions with eigenvalues from −1 to 1.",
        "https://arxiv.org/abs/2411.12537",
        replace(DELTANET, write=Write("delta", "sigmoid-2")),
    ),
    "negative-gated-deltanet": Entry(
        "Gated DeltaNet whose write strength goes up to 2, for eigenvalues from −1 to 1.",
        "https://arxiv.org/abs/2411.12537",
        replace(GATED_DELTANET, write=Write("delta", "sigmoid-2")),
    ),
    "kda": Entry(
        "Gated DeltaNet with a decay per key channel.",
        "https://arxiv.org/abs/2510.26692",
        KDA,
    ),
    "transformer": Entry(
        "Causal softmax attention with rotary positions (Transformer++); the baseline.",
        "https://arxiv.org/abs/2302.13971",
        AttentionSpec(),
    ),
    "mqa": Entry(
        "Multi-query attention: all query heads share one key/value head.",
        "https://arxiv.org/abs/1911.02150",
        AttentionSpec(kv_heads=1),
    ),
    "gqa": Entry(
        "Grouped-query attention: groups of query heads share a key/value head.",
        "https://arxiv.org/abs/2305.13245",
        AttentionSpec(kv_heads=2),
    ),
    "sliding-window": Entry(
        "Each token attends to the last 64 tokens.",
        "https://arxiv.org/abs/2310.06825",
        AttentionSpec(pattern=Pattern(window=64)),
    ),
    "fox": Entry(
        "Forgetting Transformer: softmax attention whose logits decay by a forget gate per token and head.",
        "https://arxiv.org/abs/2503.02130",
        AttentionSpec(rotary=False, forget=True),
    ),
    "gpt": Entry(
        "Causal softmax attention with learned positions; GPT-2.",
        "https://openai.com/research/better-language-models",
        Decoder(
            (Layer(AttentionSpec(rotary=False, bias=True)),),
            BlockStyle("layer", mlp="gelu-tanh", bias=True, positions="learned"),
        ),
    ),
}

# Equations 4-16 of arXiv 2602.01744 as published: gates that sum to 1, the read gate on q, and the weight decay of all
# other matrices. The weights start at zero as in `Competition()`, since the paper does not state their initialization.
PAPER = Competition(read="query", write="value", scale="one", weight_decay=True)
SOFTMAX_LINEAR_ATTENTION = "https://arxiv.org/abs/2602.01744"


def _published(base: str, **changes: Any) -> MixerSpec:
    return replace(MIXERS[base].spec, competition=PAPER, **changes)


# The models of arXiv 2602.01744. `softmax-X` differs from `paper-softmax-X` in three fields of `Competition`: its gates
# are 1 for equal scores, its read gate comes after the norm of each head, and its gates have no weight decay.
PUBLISHED: dict[str, Entry] = {
    "paper-softmax-retnet": Entry(
        "RetNet with competing heads by equations 10 and 11.", SOFTMAX_LINEAR_ATTENTION, _published("retnet")
    ),
    "paper-softmax-gla": Entry(
        "GLA with competing heads by equations 12 and 13.", SOFTMAX_LINEAR_ATTENTION, _published("gla")
    ),
    "paper-softmax-gated-deltanet": Entry(
        "Gated DeltaNet with competing heads by equations 14 to 16, with the decay of Gated DeltaNet, which the "
        "printed equations lack.",
        SOFTMAX_LINEAR_ATTENTION,
        _published("gated-deltanet"),
    ),
    "paper-softmax-gated-deltanet-as-printed": Entry(
        "Equations 14 to 16 as printed, without a decay.",
        SOFTMAX_LINEAR_ATTENTION,
        _published("gated-deltanet", decay=Decay()),
    ),
}
