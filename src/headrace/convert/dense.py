"""Further formats of transformers' models of softmax attention with dense MLPs."""

from dataclasses import replace
from typing import Any

from ..extra.growing import GrowingSpec
from ..extra.late_norm import LateNormSpec
from . import softmax
from .fields import Config, Fields
from .form import Format, Model, model_of
from .parallel import GPT, GPT_NORMS, squared, up_down
from .parts import in_order, is_positive, multiplier
from .rotary import ORIGINAL
from .softmax import UNGATED, attention, attention_views, gated, keyed, style_of, window_of, windowed
from .variants import SANDWICH_NORMS, bounded, gemma3, multiplied, sandwich
from .views import NORMS, Block, View, mlp_views, modules, named

BIASES: Any = {(True, True): True, (True, False): "qkv", (False, True): "o", (False, False): False}
BEFORE = {name: SANDWICH_NORMS[name] for name in ("mixer_norm", "mlp_norm")}
APERTUS_MLPS = UNGATED | {"xielu": "xielu"}
APERTUS = {"mixer_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
AFTER = {"mixer_after": "post_norm1", "mlp_after": "post_norm2"}
LATE = NORMS | {"mixer.q_norm": "self_attn.query_layernorm", "mixer.k_norm": "self_attn.key_layernorm"}


def seed_oss(c: Fields) -> Model:
    c.ignore("pretraining_tp", "residual_dropout")
    return gated(c, [attention(c, bias=BIASES[c["attention_bias"], c["attention_out_bias"]])])


def arcee(c: Fields) -> Model:
    style = style_of(c, kinds=UNGATED, bias=c["mlp_bias"])
    return model_of(c, keyed([attention(c, bias=c["attention_bias"])]), style)


def exaone(c: Fields) -> Model:
    """Llama with names of modules of its own."""
    c.ignore("pretraining_tp")
    spec, style = attention(c, bias=c["attention_bias"]), style_of(c, bias=c["mlp_bias"])
    mixer = spec, attention_views(spec, "attn.attention", o_proj="out_proj")
    names = {"gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"}
    mlp = modules({f"mlp.{ours}": f"mlp.{theirs}" for ours, theirs in names.items()}, style.bias)
    return model_of(c, [mixer], style, GPT_NORMS, mlp, names=GPT)


def exaone4(c: Fields) -> Model:
    """In a model with a window, the layers without one have no positions."""
    c.ignore("sliding_window_pattern")  # by which its class has set layer_types
    alone = attention(c, qk_norm="head", rotary=c["sliding_window"] is None)
    return gated(c, windowed(c, attention(c, qk_norm="head"), alone), "branch")


def cwm(c: Fields) -> Model:
    c.ignore("pretraining_tp")
    return gated(c, windowed(c, attention(c)))


def ministral3(c: Fields) -> Model:
    """q grows with its position, unless the factor is 0."""
    given: Config = dict(c["rope_parameters"])
    growth, period = given.pop("llama_4_scaling_beta", None), given.get(ORIGINAL)
    given.pop("max_position_embeddings", None)  # which has a field of its own
    spec = attention(c, parameters=given, pattern=window_of(c))
    if not growth:
        return gated(c, [spec])
    if not is_positive(growth) or not is_positive(period) or spec.rope.by_length:
        c.refuse("rope_parameters", f"numbers llama_4_scaling_beta and {ORIGINAL}, and no frequencies by the length")
    return gated(c, [GrowingSpec(**vars(spec), growth=growth, period=int(period))])


def hunyuan(c: Fields) -> Model:
    return gated(c, [hunyuan_spec(c)], norms=LATE)


def hunyuan_spec(c: Fields) -> LateNormSpec:
    """q and k have their norms after the rotation, whose base a number `alpha` may change."""
    c.ignore("pretraining_tp", "eod_token_id")
    given = dict(c["rope_parameters"])
    if alpha := given["rope_type"] == "dynamic" and given.pop("alpha", None):
        given["rope_type"] = "default"
        given.pop("factor", None)
    spec = LateNormSpec(**vars(attention(c, parameters=given, bias=c["attention_bias"])))
    if alpha:
        d, _ = spec.head_dims(c["hidden_size"], c["num_attention_heads"])
        if not is_positive(alpha) or alpha > LARGEST_ALPHA or d == 2:
            c.refuse(
                "rope_parameters", f"a number alpha up to {LARGEST_ALPHA:.0e}, and more than two channels per head"
            )
        spec = replace(spec, rope=replace(spec.rope, theta=given["rope_theta"] * alpha ** (d / (d - 2))))
    return spec


LARGEST_ALPHA = 1e6  # whose power is a for any number of channels


def nanochat(c: Fields) -> Model:
    """Its norms have no weights, and channels turn the other way round: their halves change places."""
    spec, H = attention(c, bias=c["attention_bias"]), c["num_attention_heads"]
    if spec.rope.scale != 1:
        c.refuse("rope_parameters", "frequencies without a factor of the rotated channels")
    bounded = {"logits_cap": c["final_logit_softcapping"]}
    style = style_of(c, kinds=UNGATED, norm="rms-plain", embedding_norm=True, **bounded)
    d, _ = spec.head_dims(c["hidden_size"], H)
    own = in_order(attention_views(spec, "self_attn"), d, (H, spec.kv_heads or H), (*range(d // 2, d), *range(d // 2)))
    mixer = LateNormSpec(**vars(spec), weights=False), own
    return model_of(c, [mixer], style, dense=up_down("mlp.fc1", "mlp.fc2", False))


def apertus(c: Fields) -> Model:
    spec, style = attention(c, bias=c["attention_bias"], qk_norm="head"), style_of(c, kinds=APERTUS_MLPS)
    numbers = ("alpha_p", "alpha_n", "beta", "eps") if style.mlp == "xielu" else ()
    mlp = mlp_views("mlp", style) | named("mlp.activation", "mlp.act_fn", {name: name for name in numbers})
    return model_of(c, keyed([spec]), style, APERTUS, mlp)


def vaultgemma(c: Fields) -> Model:
    """Gemma 2 without norms after the branches."""
    return sandwich(c, bounded(c), "pre", BEFORE)


def hyperclovax(c: Fields) -> Model:
    """Granite with a factor of the logits, not a divisor, and with norms after the branches."""
    return multiplied(c, multiplier(c, "logits_scaling"), AFTER if c["use_post_norm"] else {})


def opt(c: Fields) -> Model:
    """Its positions begin at row 2 of their table."""
    c.ignore("dropout", "layerdrop", "init_std")
    c.only("do_layer_norm_before", True)
    c.only("_remove_final_layer_norm", False)
    c.only("word_embed_proj_dim", c["hidden_size"])
    bias, n, weights = c["enable_bias"], c["max_position_embeddings"], c["layer_norm_elementwise_affine"]
    spec, norm = attention(c, rotary=False, bias=bias), "layer-bias" if weights else "layer-plain"
    style = style_of(c, "activation_function", UNGATED, norm=norm, bias=bias, positions="learned")
    mixer, mlp = (spec, attention_views(spec, "self_attn", o_proj="out_proj")), up_down("fc1", "fc2", bias)
    norms = {"mixer_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
    places = ("model.decoder", "embed_tokens", "final_layer_norm", "layers")
    sizes = {"intermediate_size": c["ffn_dim"], "norm_eps": 1e-5}
    model = model_of(c, [mixer], style, norms, mlp, names=places, **sizes)
    table = View("model.decoder.embed_positions.weight", Block(1, n + 2, 2, n))
    return model._replace(views=model.views | {"model.backbone.positions.table.weight": table})


def mistral3(c: Fields) -> Model:
    """The language model is one of two."""
    c.only("model_type", "mistral", "ministral3")
    if c.get("model_type") == "ministral3":
        return inside(ministral3(c))
    if c.get("layer_types") is not None:  # which transformers reads of a model without images alone
        c.refuse("layer_types", "none, as each layer of such a model has the window")
    return inside(softmax.mistral(c))


def inside(model: Model) -> Model:
    """Returns the language model of a model that reads images too."""
    views = {ours: view._replace(name=f"language_model.{view.name}") for ours, view in model.views.items()}
    return model._replace(views=views)


TOWERS = ("vision_tower.", "multi_modal_projector.")
IMAGES: Any = {
    "outside": (*TOWERS, *(f"model.{tower}" for tower in TOWERS)),
    "inner": "text_config", "renamed": ("language_model.model.", "model.language_model."),
}  # fmt: skip
FORMATS: dict[str, Format] = {
    "seed_oss": Format("SeedOssForCausalLM", seed_oss),
    "arcee": Format("ArceeForCausalLM", arcee),
    "exaone": Format("LlamaForCausalLM", exaone),
    "exaone4": Format("Exaone4ForCausalLM", exaone4),
    "internlm3": Format("LlamaForCausalLM", softmax.llama),
    "iquestcoder": Format("LlamaForCausalLM", softmax.llama),
    "cwm": Format("CwmForCausalLM", cwm),
    "ministral": Format("MinistralForCausalLM", softmax.mistral),
    "ministral3": Format("Ministral3ForCausalLM", ministral3),
    "mistral3": Format("Mistral3ForConditionalGeneration", mistral3, **IMAGES),
    "gemma3": Format("Gemma3ForConditionalGeneration", lambda c: inside(gemma3(c)), **IMAGES),
    "hunyuan_v1_dense": Format("HunYuanDenseV1ForCausalLM", hunyuan),
    "nanochat": Format("NanoChatForCausalLM", nanochat),
    "apertus": Format("ApertusForCausalLM", apertus),
    "vaultgemma": Format("VaultGemmaForCausalLM", vaultgemma),
    "jais2": Format("Jais2ForCausalLM", squared),
    "hyperclovax": Format("HyperCLOVAXForCausalLM", hyperclovax),
    "opt": Format("OPTForCausalLM", opt),
}
