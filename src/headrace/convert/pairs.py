"""The formats of transformers' models of softmax attention in which rotary positions turn neighbouring channels."""

from typing import Any

from ..spec.attention import AttentionSpec
from .fields import Fields
from .form import Format, Mixer, Model, model_of
from .parts import in_order, multiplier, scaled
from .softmax import attention, attention_views, style_of, windowed
from .views import FINAL_NORM, NORMS, Views, gate_up_views

GLM4_NORMS = NORMS | {"mixer_after": "post_self_attn_layernorm", "mlp_after": "post_mlp_layernorm"}


def neighbours(views: Views, spec: AttentionSpec, hidden_size: int, H: int) -> Views:
    """Returns the views of a layer of attention in whose rows of q and k the two channels that turn together are
    neighbours."""
    d, _ = spec.head_dims(hidden_size, H)
    turned = (spec.rope.dims or d) if spec.rotary else 0
    order = (*range(0, turned, 2), *range(1, turned, 2), *range(turned, d))
    return in_order(views, d, (H, spec.kv_heads or H), order)


def cohere(c: Fields) -> Model:
    c.only("use_qk_norm", False, None)
    return of_cohere(c, [attention(c, bias=c["attention_bias"])])


def cohere2(c: Fields) -> Model:
    """Its layers without a window have no positions."""
    c.ignore("sliding_window_pattern")  # by which its class has set layer_types
    spec = attention(c, bias=c["attention_bias"])
    return of_cohere(c, windowed(c, spec, attention(c, rotary=False, bias=c["attention_bias"])))


def of_cohere(c: Fields, specs: list[AttentionSpec]) -> Model:
    """Its factor of the logits becomes one of the final norm."""
    style = style_of(c, norm="layer", order="parallel-joint")
    model = model_of(c, in_pairs(c, specs), style)
    return model._replace(views=scaled(model.views, {FINAL_NORM: multiplier(c, "logit_scale")}))


def glm(c: Fields) -> Model:
    return of_glm(c)


def glm4(c: Fields) -> Model:
    return of_glm(c, "both", GLM4_NORMS)


def of_glm(c: Fields, order: Any = "pre", norms: dict[str, str] | None = None) -> Model:
    spec = attention(c, partial=True, bias="qkv" if c["attention_bias"] else False)
    mlp = gate_up_views("mlp.gate_up_proj", "mlp.down_proj", c["intermediate_size"])
    return model_of(c, in_pairs(c, [spec]), style_of(c, order=order), norms, mlp)


def ernie4_5(c: Fields) -> Model:
    return model_of(c, in_pairs(c, [attention(c, bias=c["use_bias"])]), style_of(c, bias=c["use_bias"]))


def helium(c: Fields) -> Model:
    spec = attention(c, bias="qkv" if c["attention_bias"] else False)
    return model_of(c, in_pairs(c, [spec]), style_of(c, bias=c["mlp_bias"]))


def in_pairs(c: Fields, specs: list[AttentionSpec]) -> list[Mixer]:
    """Returns the mixers with Llama's names of modules."""
    D, H = c["hidden_size"], c["num_attention_heads"]
    return [(spec, neighbours(attention_views(spec, "self_attn"), spec, D, H)) for spec in specs]


FORMATS: dict[str, Format] = {
    "cohere": Format("CohereForCausalLM", cohere),
    "cohere2": Format("Cohere2ForCausalLM", cohere2),
    "glm": Format("GlmForCausalLM", glm),
    "glm4": Format("Glm4ForCausalLM", glm4),
    "ernie4_5": Format("Ernie4_5ForCausalLM", ernie4_5),
    "helium": Format("HeliumForCausalLM", helium),
}
