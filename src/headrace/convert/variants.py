"""The formats of transformers' models of softmax attention that differ from Llama's in a part or two."""

from dataclasses import replace
from typing import Any

import torch

from ..extra.capped import CappedSpec
from ..extra.clamped import ClampedExperts
from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Order
from . import moe
from .fields import Fields
from .form import PRECISIONS, Format, Model, model_of
from .mxfp4 import PackedExperts
from .parts import as_granite, multiplier
from .rotary import own_rotation
from .softmax import attention, fused, gated, keyed, style_of, window_of, windowed, windows
from .views import NORMS, Block, View, Views, gate_up_views, named, plain


def phi3(c: Fields) -> Model:
    """One projection has q, k and v, and one the gate and the other input of the MLP. A window of at least
    max_position_embeddings tokens, as Phi-4-mini has it, is none."""
    c.ignore("resid_pdrop", "embd_pdrop", "original_max_position_embeddings")  # `rotation` reads the last of some kinds
    sizes, spec = (c["hidden_size"], c["num_attention_heads"]), attention(c, True, pattern=window_of(c, limited=True))
    own = fused(spec, sizes, "self_attn.qkv_proj", "self_attn.o_proj", grouped=False)
    mlp = gate_up_views("mlp.gate_up_proj", "mlp.down_proj", c["intermediate_size"])
    return model_of(c, [(spec, own)], style_of(c), dense=mlp)


def smollm3(c: Fields) -> Model:
    """Layers with a 0 in no_rope_layers have no positions."""
    c.ignore("no_rope_layer_interval")  # by which its class has set no_rope_layers
    patterns, rotates = windows(c), c["no_rope_layers"]
    if any(patterns):  # the mask has a window without it
        c.only("use_sliding_window", True)
    c.ignore("use_sliding_window")
    if len(rotates) < len(patterns):
        c.refuse("no_rope_layers", f"a list of at least num_hidden_layers={len(patterns)} numbers")
    specs = [
        attention(c, bias=c["attention_bias"], rotary=bool(rotary), pattern=pattern)
        for rotary, pattern in zip(rotates, patterns, strict=False)
    ]
    c.ignore("rope_parameters")  # of a model of layers without positions alone
    return gated(c, specs)


def olmo3(c: Fields) -> Model:
    """Layers with and without a window have rotary positions of their own."""
    return gated(c, by_kind(c, bias=c["attention_bias"], qk_norm="joint"), "branch")


def gemma(c: Fields) -> Model:
    c.only("use_bidirectional_attention", None, False)
    style = style_of(c, norm="rms-offset", embedding_scale=embedding_factor(c))
    return model_of(c, keyed([attention(c, bias=c["attention_bias"])]), style)


def embedding_factor(c: Fields) -> float:
    """Returns Gemma's factor of the embeddings, rounded to the dtype of the weights."""
    return float(torch.tensor(c["hidden_size"] ** 0.5, dtype=PRECISIONS.get(c.get("dtype"), torch.float32)))


def gemma2(c: Fields) -> Model:
    return sandwich(c, bounded(c))


def bounded(c: Fields) -> list[AttentionSpec]:
    """Returns the specs of attention whose logits are bounded."""
    spec, cap = attention(c, bias=c["attention_bias"], scale=query_scale(c)), c["attn_logit_softcapping"]
    if cap is not None and cap <= 0:
        c.refuse("attn_logit_softcapping", "more than 0, or null")
    return windowed(c, spec if cap is None else CappedSpec(**vars(spec), cap=cap))


def gemma3(c: Fields) -> Model:
    """As OLMo 3, with a norm before and a norm after each branch."""
    c.ignore("sliding_window_pattern")  # by which its class has set layer_types
    c.only("attn_logit_softcapping", None)
    return sandwich(c, by_kind(c, bias=c["attention_bias"], qk_norm="head-offset", scale=query_scale(c)))


def query_scale(c: Fields) -> float:
    if c["query_pre_attn_scalar"] <= 0:
        c.refuse("query_pre_attn_scalar", "more than 0")
    return c["query_pre_attn_scalar"] ** -0.5


SANDWICH_NORMS = {
    "mixer_norm": "input_layernorm", "mixer_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_after": "post_feedforward_layernorm",
}  # fmt: skip


def sandwich(
    c: Fields, specs: list[AttentionSpec], order: Order = "both", norms: dict[str, str] = SANDWICH_NORMS
) -> Model:
    """Returns a model of Gemma 2 or 3, with a norm before and a norm after each branch, or of another order."""
    c.only("use_bidirectional_attention", None, False)
    numbers = {"embedding_scale": embedding_factor(c), "logits_cap": c["final_logit_softcapping"]}
    style = style_of(c, "hidden_activation", norm="rms-offset", order=order, **numbers)
    return model_of(c, keyed(specs), style, norms)


def by_kind(c: Fields, **options: Any) -> list[AttentionSpec]:
    """Returns the specs of layers that have rotary positions of their own with and without a window. options: fields of
    the specs."""
    spec = attention(c, rotary=False, **options)
    d, _ = spec.head_dims(c["hidden_size"], c["num_attention_heads"])
    specs = windowed(c, replace(spec, rotary=True))
    for i, kind in enumerate(c["layer_types"]):
        if (own := c["rope_parameters"].get(kind)) is None:
            c.refuse("rope_parameters", f"parameters of {kind}")
        specs[i] = replace(specs[i], rope=own_rotation(c, d, own))
    return specs


def granite(c: Fields) -> Model:
    return multiplied(c, 1 / multiplier(c, "logits_scaling"))


def multiplied(c: Fields, logits: float, after: dict[str, str] | None = None) -> Model:
    """Returns a model whose factors of activations become factors of weights. logits: that of the logits; after: names
    of norms after the branches {ours: theirs}."""
    spec = attention(c, bias=c["attention_bias"], scale=multiplier(c, "attention_multiplier"))
    scale, order = multiplier(c, "embedding_multiplier"), "both" if after else "pre"
    style = style_of(c, order=order, bias=c["mlp_bias"], embedding_scale=scale)
    model = model_of(c, keyed([spec]), style, NORMS | (after or {}))
    return as_granite(c, model, logits, [f"*.{name}.*" for name in after or ("mixer.o_proj", "mlp.down_proj")])


def gpt_oss(c: Fields) -> Model:
    """Attention with sinks, and experts with biases and bounds, released in MXFP4."""
    c.ignore("hidden_act")  # which its experts do not read
    if (packed := c.get("quantization_config")) is not None and packed.get("quant_method") != "mxfp4":
        c.refuse("quantization_config", "a quant_method of mxfp4")
    fields = moe.COUNTED | {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}
    style = BlockStyle(experts=moe.mixture_of(c, fields, ClampedExperts, normalized=True))
    specs = windowed(c, attention(c, bias=c["attention_bias"], null="learned"))
    experts = plain({"mixer.sinks": "self_attn.sinks"}) | clamped_experts(c, c["num_local_experts"])
    return model_of(c, keyed(specs), style, experts=experts)


def clamped_experts(c: Fields, count: int) -> Views:
    """Returns the views of a router and of its experts, each matrix in one tensor of all experts, transposed. The rows
    of the gate and of the other projection alternate."""
    D, W = c["hidden_size"], c["intermediate_size"]
    both, down = ("gate_up_proj", D, 2 * W), ("down_proj", W, D)
    parts = {"gate": (*both, Block(1, 2 * W, 0, W, 2)), "up": (*both, Block(1, 2 * W, 1, W, 2)), "down": (*down, None)}
    views = named("mlp.router", "mlp.router", {kind: kind for kind in ("weight", "bias")})
    for e in range(count):
        for part, (name, inputs, outputs, block) in parts.items():
            bias = View(f"mlp.experts.{name}_bias", block, shape=(count, outputs), item=e)
            matrix = bias._replace(name=f"mlp.experts.{name}", shape=(count, inputs, outputs), transposed=True)
            views |= {f"mlp.{e}.{part}": matrix, f"mlp.{e}.{part}_bias": bias}
    return views


FORMATS: dict[str, Format] = {
    "phi3": Format("Phi3ForCausalLM", phi3),
    "smollm3": Format("SmolLM3ForCausalLM", smollm3),
    "olmo3": Format("Olmo3ForCausalLM", olmo3),
    "gemma": Format("GemmaForCausalLM", gemma),
    "gemma2": Format("Gemma2ForCausalLM", gemma2),
    "gemma3_text": Format("Gemma3ForCausalLM", gemma3),
    "granite": Format("GraniteForCausalLM", granite),
    "gpt_oss": Format("GptOssForCausalLM", gpt_oss, files=PackedExperts),
}
