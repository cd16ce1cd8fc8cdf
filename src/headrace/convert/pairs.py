"""The formats of transformers' models of softmax attention in which rotary positions turn neighbouring channels."""

from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Layer
from .fields import Fields
from .form import Format, Model, model_of
from .parts import NORMS, gate_up_views, in_order, mlp_views, multiplier, scaled
from .softmax import attention, attention_views, gated_style, windowed
from .views import FINAL_NORM, Views, modules

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
    return of_cohere(c, [attention(c, bias=c["attention_bias"])] * c["num_hidden_layers"])


def cohere2(c: Fields) -> Model:
    """Its layers without a window have no positions."""
    c.ignore("sliding_window_pattern")  # by which its class has set layer_types
    spec = attention(c, bias=c["attention_bias"])
    return of_cohere(c, windowed(c, spec, attention(c, rotary=False, bias=c["attention_bias"])))


def of_cohere(c: Fields, specs: list[AttentionSpec]) -> Model:
    """Its factor of the logits becomes one of the final norm."""
    style = gated_style(c, norm="layer", order="parallel-joint")
    model = in_pairs(c, specs, style, modules({"mixer_norm": "input_layernorm"}) | mlp_views("mlp", style))
    return model._replace(views=scaled(model.views, {FINAL_NORM: multiplier(c, "logit_scale")}))


def glm(c: Fields) -> Model:
    return of_glm(c, gated_style(c), NORMS)


def glm4(c: Fields) -> Model:
    return of_glm(c, gated_style(c, order="both"), GLM4_NORMS)


def of_glm(c: Fields, style: BlockStyle, norms: dict[str, str]) -> Model:
    spec = attention(c, partial=True, bias="qkv" if c["attention_bias"] else False)
    own = modules(norms) | gate_up_views("mlp.gate_up_proj", "mlp.down_proj", c["intermediate_size"])
    return in_pairs(c, [spec] * c["num_hidden_layers"], style, own)


def ernie4_5(c: Fields) -> Model:
    style = gated_style(c, bias=c["use_bias"])
    specs = [attention(c, bias=c["use_bias"])] * c["num_hidden_layers"]
    return in_pairs(c, specs, style, modules(NORMS) | mlp_views("mlp", style))


def helium(c: Fields) -> Model:
    style = gated_style(c, bias=c["mlp_bias"])
    spec = attention(c, bias="qkv" if c["attention_bias"] else False)
    return in_pairs(c, [spec] * c["num_hidden_layers"], style, modules(NORMS) | mlp_views("mlp", style))


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
