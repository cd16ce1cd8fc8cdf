"""The formats of transformers' models of softmax attention in which rotary positions turn neighbouring channels."""

from dataclasses import replace

from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Layer
from .fields import Fields
from .form import Block, Format, Model, Views, model_of, plain
from .hybrid import FINAL_NORM, gate_up_views, multiplier
from .parts import NORMS, mlp_views, scaled
from .softmax import GATED, activation, attention, attention_views, windows

GLM4_NORMS = NORMS | {
    "mixer_after.weight": "post_self_attn_layernorm.weight", "mlp_after.weight": "post_mlp_layernorm.weight",
}  # fmt: skip


def neighbours(views: Views, spec: AttentionSpec, hidden_size: int, H: int) -> Views:
    """Returns the views of a layer of attention in whose rows of q and k the two channels that turn together are
    neighbours."""
    d, _ = spec.head_dims(hidden_size, H)
    turned = (spec.rope.dims or d) if spec.rotary else 0
    return reordered(views, spec, H, (*range(0, turned, 2), *range(1, turned, 2), *range(turned, d)))


def reordered(views: Views, spec: AttentionSpec, H: int, order: tuple[int, ...]) -> Views:
    """Returns the views of a layer of attention, of whose rows of q and k a head has this order."""
    d = len(order)
    blocks = {part: Block(heads, d, 0, d, order=order) for part, heads in (("q", H), ("k", spec.kv_heads or H))}
    return {
        name: view._replace(block=blocks[name[6]]) if name.startswith(("mixer.q_proj", "mixer.k_proj")) else view
        for name, view in views.items()
    }  # fmt: skip


def cohere(c: Fields) -> Model:
    c.only("use_qk_norm", False, None)
    return of_cohere(c, [attention(c, bias=c["attention_bias"])] * c["num_hidden_layers"])


def cohere2(c: Fields) -> Model:
    """Its layers without a window have no positions."""
    spec = attention(c, bias=c["attention_bias"])
    alone = attention(c, rotary=False, bias=c["attention_bias"])
    return of_cohere(c, [alone if each is None else replace(spec, pattern=each) for each in windows(c)])


def of_cohere(c: Fields, specs: list[AttentionSpec]) -> Model:
    """Its factor of the logits becomes one of the final norm."""
    style = BlockStyle("layer", "parallel-joint", mlp=activation(c, "hidden_act", GATED))
    own = plain({"mixer_norm.weight": "input_layernorm.weight"}) | mlp_views("mlp", style)
    model = in_pairs(c, specs, style, own)
    return model._replace(views=scaled(model.views, {FINAL_NORM: multiplier(c, "logit_scale")}))


def glm(c: Fields) -> Model:
    return of_glm(c, BlockStyle(mlp=activation(c, "hidden_act", GATED)), NORMS)


def glm4(c: Fields) -> Model:
    return of_glm(c, BlockStyle(order="both", mlp=activation(c, "hidden_act", GATED)), GLM4_NORMS)


def of_glm(c: Fields, style: BlockStyle, norms: dict[str, str]) -> Model:
    spec = attention(c, partial=True, bias="qkv" if c["attention_bias"] else False)
    own = plain(norms) | gate_up_views("mlp.gate_up_proj", "mlp.down_proj", c["intermediate_size"], bias=False)
    return in_pairs(c, [spec] * c["num_hidden_layers"], style, own)


def ernie4_5(c: Fields) -> Model:
    style = BlockStyle(mlp=activation(c, "hidden_act", GATED), bias=c["use_bias"])
    own = plain(NORMS) | mlp_views("mlp", style)
    return in_pairs(c, [attention(c, bias=c["use_bias"])] * c["num_hidden_layers"], style, own)


def helium(c: Fields) -> Model:
    style = BlockStyle(mlp=activation(c, "hidden_act", GATED), bias=c["mlp_bias"])
    spec = attention(c, bias="qkv" if c["attention_bias"] else False)
    return in_pairs(c, [spec] * c["num_hidden_layers"], style, plain(NORMS) | mlp_views("mlp", style))


def in_pairs(c: Fields, specs: list[AttentionSpec], style: BlockStyle, own: Views) -> Model:
    """Returns a model with Llama's names of modules. own: the views of a layer beside those of attention."""
    D, H = c["hidden_size"], c["num_attention_heads"]
    views = [own | neighbours(attention_views(spec, "self_attn"), spec, D, H) for spec in specs]
    return model_of(c, [Layer(spec) for spec in specs], style, views)


FORMATS: dict[str, Format] = {
    "cohere": Format("CohereForCausalLM", cohere),
    "cohere2": Format("Cohere2ForCausalLM", cohere2),
    "glm": Format("GlmForCausalLM", glm),
    "glm4": Format("Glm4ForCausalLM", glm4),
    "ernie4_5": Format("Ernie4_5ForCausalLM", ernie4_5),
    "helium": Format("HeliumForCausalLM", helium),
}
