"""The formats of Liquid AI's hybrids of gated short convolutions and softmax attention."""

from dataclasses import replace

from ..extra.specs.scan import ScanSpec
from ..spec.attention import Rope
from ..spec.stack import BlockStyle, Experts
from . import moe
from .fields import Fields
from .form import Format, Mixer, Model, model_of
from .parts import in_order, is_positive, layer_types
from .rotary import own_rotation
from .softmax import attention, attention_views, window_of
from .views import modules, plain


def lfm2(c: Fields) -> Model:
    c.ignore("full_attn_idxs")  # by which their class has set layer_types
    return lfm2_model(c, lfm2_width(c))


def lfm2_moe(c: Fields) -> Model:
    """The first layers have MLPs, the others experts, chosen by the sigmoid of a score plus a bias."""
    c.only("use_expert_bias", True)
    c.ignore("output_router_logits")  # transformers adds no load-balancing loss
    depth, dense = c["num_hidden_layers"], c["num_dense_layers"]
    mixture = (
        moe.mixture_of(c, LFM2_EXPERTS, balance=0.0, scores="sigmoid", biased=True, eps=1e-6) if dense < depth else None
    )
    c.ignore(*LFM2_EXPERTS.values())
    return lfm2_model(c, c["intermediate_size"], mixture, dense)


# Fields of Experts -> fields of the mixture of experts.
LFM2_EXPERTS = {
    "count": "num_experts", "chosen": "num_experts_per_tok", "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor", "width": "moe_intermediate_size",
}  # fmt: skip


def lfm2_model(c: Fields, width: int, mixture: Experts | None = None, dense: int = 0) -> Model:
    """width: of an MLP. mixture: of the layers from number `dense` on."""
    kinds, softmax = layer_types(c, ("conv", "full_attention")), attention(c, qk_norm="head")
    renamed = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
    own = {"conv": short_convolution(c), "full_attention": (softmax, attention_views(softmax, "self_attn", **renamed))}
    views = plain({"mlp.choice_bias": "feed_forward.expert_bias"})
    views |= moe.experts("feed_forward", mixture.count, moe.MIXTRAL_EXPERT) if mixture else {}
    return model_of(
        c, [own[kind] for kind in kinds], BlockStyle(experts=mixture), LFM2, modules(LFM2_MLP), experts=views,
        which=range(dense, len(kinds)), names=LFM2_OUTER, intermediate_size=width,
    )  # fmt: skip


LFM2 = {"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm"}
LFM2_MLP = {f"mlp.{ours}_proj": f"feed_forward.{theirs}" for ours, theirs in moe.MIXTRAL_EXPERT.items()}
LFM2_OUTER = ("model", "embed_tokens", "embedding_norm", "layers")


def short_convolution(c: Fields) -> Mixer:
    bias = c["conv_bias"]
    names = {f"mixer.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")}
    spec = ScanSpec("short-conv", conv=c.count("conv_L_cache", 2), conv_bias=bias, bias=bias)
    return spec, modules(names, bias)


def lfm2_width(c: Fields) -> int:
    """Returns the width of the MLP: two thirds of intermediate_size times a factor, rounded up to a multiple."""
    width, factor, multiple = c["intermediate_size"], c["block_ffn_dim_multiplier"], c.count("block_multiple_of", 1)
    if not c["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def lfm3(c: Fields) -> Model:
    """Attention has a gate per head, and rotary positions of its own in layers with a window; a norm follows each
    branch."""
    c.only("attention_bias", False)
    c.ignore("sliding_window", "rope_parameters")  # of a model without layers that read them
    kinds, D, H = layer_types(c, ("conv", *WINDOWS)), c["hidden_size"], c["num_attention_heads"]
    own = {"conv": short_convolution(c)}
    plain_spec = attention(c, rotary=False, qk_norm="head", gate="head" if c["use_attention_gate"] else "none")
    d, _ = plain_spec.head_dims(D, H)
    for kind in [each for each in WINDOWS if each in kinds]:
        rope, order = rotated(c, kind, d)
        pattern = window_of(c) if kind == "sliding_attention" else None
        spec = replace(plain_spec, rotary=True, rope=rope, pattern=pattern)
        views = attention_views(spec, "self_attn", g_proj="gate_proj")
        own[kind] = spec, in_order(views, d, (H, spec.kv_heads or H), order)
    after, mixers = c["use_sandwich_norm"], [own[kind] for kind in kinds]
    style, norms = BlockStyle(order="both" if after else "pre"), LFM2 | (LFM3 if after else {})
    return model_of(c, mixers, style, norms, modules(LFM2_MLP), names=LFM2_OUTER)


WINDOWS = "full_attention", "sliding_attention"
LFM3 = {"mixer_after": "post_operator_norm", "mlp_after": "post_ffn_norm"}


def rotated(c: Fields, kind: str, d: int) -> tuple[Rope, tuple[int, ...]]:
    """Returns the rotation of a kind of layers, and the order of a head's channels for it. "proportional" turns a share
    of the frequencies of all channels: the first ones of each half of a head."""
    if (given := c["rope_parameters"].get(kind)) is None:
        c.refuse("rope_parameters", f"parameters of {kind}")
    if given.get("rope_type") != "proportional":
        return own_rotation(c, d, given), (*range(d),)
    theta, share, half = given.get("rope_theta"), given.get("partial_rotary_factor", 1.0), d // 2
    if not (is_positive(theta) and is_positive(share)):
        c.refuse("rope_parameters", "a rope_theta and a partial_rotary_factor of more than 0")
    turned = int(share * d // 2)
    if not 0 < turned <= half or given.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}:
        c.refuse("rope_parameters", "a proportional rotation with a partial_rotary_factor above 0 and of at most 1")
    first = [*range(turned), *range(half, half + turned)]
    return Rope(theta=theta ** (turned / half), dims=2 * turned), (*first, *sorted({*range(d)} - {*first}))


FORMATS: dict[str, Format] = {
    "lfm2": Format("Lfm2ForCausalLM", lfm2),
    "lfm2_moe": Format("Lfm2MoeForCausalLM", lfm2_moe),
    "lfm3": Format("Lfm3ForCausalLM", lfm3),
}
