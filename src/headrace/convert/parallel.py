"""The formats of transformers' models of softmax attention with LayerNorms, in most of which attention and MLP have one
input (`BlockStyle.order`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..spec.attention import AttentionSpec, Pattern, Rope
from .fields import Fields
from .form import Format, Model, model_of
from .pairs import neighbours
from .parts import layer_types
from .softmax import UNGATED, attention, attention_views, fused, keyed, style_of, window_of
from .views import LLAMA, View, Views, modules

GPT = ("transformer", "wte", "ln_f", "h")  # as LLAMA
GPT_NORMS = {"mixer_norm": "ln_1", "mlp_norm": "ln_2"}
JOINT: Any = {"norm": "layer", "order": "parallel-joint", "bias": True, "head_bias": True}
DENSE = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"


def gpt_neox(c: Fields) -> Model:
    """The head is called embed_out in checkpoints, and lm_head in transformers' class."""
    c.only("head_dim", None)  # of the rotation alone
    c.ignore("hidden_dropout", "classifier_dropout", "is_decoder")
    spec = attention(c, partial=True, bias=c["attention_bias"])
    order: Any = "parallel" if c["use_parallel_residual"] else "pre"
    style = style_of(c, kinds=UNGATED, norm="layer", order=order, bias=True)
    sizes = c["hidden_size"], c["num_attention_heads"]
    mixer = spec, fused(spec, sizes, "attention.query_key_value", "attention.dense")
    names = ("gpt_neox", "embed_in", "final_layer_norm", "layers")
    model = model_of(c, [mixer], style, dense=up_down(*DENSE), names=names)
    if c["tie_word_embeddings"]:
        return model._replace(copies=(("embed_out.weight", "gpt_neox.embed_in.weight"),))
    return model._replace(views=model.views | {"lm_head.weight": View("embed_out.weight")})


def falcon(c: Fields) -> Model:
    """Those before Falcon-40B have one head of k and v, or one per head of q."""
    c.only("alibi", False)
    c.ignore("hidden_dropout", "num_kv_heads", "multi_query")  # each of the latter is of some models alone
    H, later, norms = c["num_attention_heads"], bool(c["new_decoder_architecture"]), c["num_ln_in_parallel_attn"]
    c.only("parallel_attn", True, *[False] * (not later))  # of the others no forward of transformers is defined
    c.only("num_ln_in_parallel_attn", None, 1, *[2] * later)
    groups = c["num_kv_heads"] if later else 1 if c["multi_query"] else H
    spec = replace(attention(c, bias=c["bias"]), kv_heads=None if groups == H else groups)
    order: Any = "pre"
    norms_of = None
    if later and norms != 1:  # 2 by default
        order, norms_of = "parallel", {"mixer_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    elif c["parallel_attn"]:
        order = "parallel-joint"
    style = style_of(c, "activation", UNGATED, norm="layer-bias", order=order, bias=c["bias"])
    mixer = spec, fused(spec, (c["hidden_size"], H), "self_attention.query_key_value", "self_attention.dense")
    places = ("transformer", "word_embeddings", "ln_f", "h")
    sizes = {"intermediate_size": c["ffn_hidden_size"]}
    return model_of(c, [mixer], style, norms_of, up_down(*DENSE, c["bias"]), names=places, **sizes)


def phi(c: Fields) -> Model:
    c.only("qk_layernorm", False)
    c.ignore("resid_pdrop", "embd_pdrop")
    spec = attention(c, partial=True, bias=True)
    style = style_of(c, kinds=UNGATED, **JOINT)
    mixer, names = (spec, attention_views(spec, "self_attn", o_proj="dense")), (*LLAMA[:2], "final_layernorm", "layers")
    return model_of(c, [mixer], style, dense=up_down("mlp.fc1", "mlp.fc2"), names=names)


def gptj(c: Fields) -> Model:
    c.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop")
    D, H, dims = c["n_embd"], c["n_head"], c["rotary_dim"]
    if not dims or dims > D // H:
        c.refuse("rotary_dim", f"at most n_embd / n_head = {D // H}")
    spec = AttentionSpec(rope=Rope(dims=None if dims == D // H else dims))
    style = style_of(c, "activation_function", UNGATED, **JOINT)
    views, mlp = attention_views(spec, "attn", o_proj="out_proj"), up_down("mlp.fc_in", "mlp.fc_out")
    mixer, sizes = (spec, neighbours(views, spec, D, H)), {"rope_theta": 10000.0} | gpt_sizes(c)
    return model_of(c, [mixer], style, {"mixer_norm": "ln_1"}, mlp, names=GPT, **sizes)


def gpt2(c: Fields) -> Model:
    """Its matrices are stored transposed."""
    c.only("add_cross_attention", False)
    c.ignore("reorder_and_upcast_attn", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    c.ignore(*(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    D, H, depth = c["n_embd"], c["n_head"], c["n_layer"]
    scales: list[Any] = ["key" if c["scale_attn_weights"] else "one"] * depth
    if c["scale_attn_by_inverse_layer_idx"]:
        scales = [(1.0 if scale == "one" else (D // H) ** -0.5) / (i + 1) for i, scale in enumerate(scales)]
    specs = [AttentionSpec(rotary=False, bias=True, scale=scale) for scale in scales]
    own = fused(specs[0], (D, H), "attn.c_attn", "attn.c_proj", grouped=False)
    model = of_gpt(c, specs, own, gpt_sizes(c))
    matrices = {name: view for name, view in model.views.items() if name.endswith("_proj.weight")}
    turned = {name: view._replace(transposed=True) for name, view in matrices.items()}
    return model._replace(views=model.views | turned)


def gpt_bigcode(c: Fields) -> Model:
    c.only("add_cross_attention", False)
    c.ignore("num_key_value_heads")  # which its class sets by multi_query
    c.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    D, H = c["n_embd"], c["n_head"]
    scale: Any = "key" if c["scale_attn_weights"] else "one"
    spec = AttentionSpec(1 if c["multi_query"] and H > 1 else None, rotary=False, bias=True, scale=scale)
    return of_gpt(c, [spec], fused(spec, (D, H), "attn.c_attn", "attn.c_proj"), gpt_sizes(c))


def gpt_sizes(c: Fields) -> dict[str, Any]:
    """Returns arguments of `shared`, by the fields of GPT-2."""
    return {
        "hidden_size": c["n_embd"], "num_hidden_layers": c["n_layer"], "num_heads": c["n_head"],
        "intermediate_size": c["n_inner"] or 4 * c["n_embd"], "max_position_embeddings": c["n_positions"],
    }  # fmt: skip


def gpt_neo(c: Fields) -> Model:
    """Layers with and without a window take turns. Their logits have no factor."""
    c.ignore("resid_dropout", "embed_dropout", "classifier_dropout")
    c.ignore("attention_types")  # by which its class has set attention_layers
    patterns = {"global": None, "local": Pattern(c.count("window_size", 1))}
    kinds = layer_types(c, patterns, "attention_layers")
    spec = AttentionSpec(rotary=False, bias="o", scale="one")
    sizes = {
        "num_hidden_layers": c["num_layers"], "num_heads": c["num_heads"],
        "intermediate_size": c["intermediate_size"] or 4 * c["hidden_size"],
    }  # fmt: skip
    own = attention_views(spec, "attn.attention", o_proj="out_proj")
    return of_gpt(c, [replace(spec, pattern=patterns[kind]) for kind in kinds], own, sizes)


def of_gpt(c: Fields, specs: Sequence[AttentionSpec], own: Views, sizes: dict[str, Any]) -> Model:
    """Returns a model with GPT-2's names of modules. own: the views of attention."""
    style = style_of(c, "activation_function", UNGATED, norm="layer", bias=True, positions="learned")
    mixers, mlp = [(spec, own) for spec in specs], up_down("mlp.c_fc", "mlp.c_proj")
    return model_of(c, mixers, style, GPT_NORMS, mlp, names=GPT, **sizes)


def up_down(up: str, down: str, bias: bool = True) -> Views:
    """Returns the views of an MLP of two modules."""
    return modules({"mlp.up_proj": up, "mlp.down_proj": down}, bias)


def stablelm(c: Fields) -> Model:
    c.only("qk_layernorm", False)
    c.only("head_dim", None)  # of the rotation alone
    c.ignore("hidden_dropout")
    joint, spec = c["use_parallel_residual"], attention(c, partial=True, bias="qkv" if c["use_qkv_bias"] else False)
    style = style_of(c, norm="layer-bias", order="parallel-joint" if joint else "pre")
    return model_of(c, keyed([spec]), style)


def starcoder2(c: Fields) -> Model:
    c.ignore("residual_dropout", "embedding_dropout")
    spec, bias = attention(c, bias=c["use_bias"], pattern=window_of(c)), c["use_bias"]
    style = style_of(c, kinds=UNGATED, norm="layer-bias", bias=bias)
    return model_of(c, keyed([spec]), style, dense=up_down("mlp.c_fc", "mlp.c_proj", bias))


def olmo(c: Fields) -> Model:
    """The epsilon of its norms is 1e-5 in any model."""
    c.only("clip_qkv", None)
    spec = attention(c, bias=c["attention_bias"])
    return model_of(c, keyed([spec]), style_of(c, norm="layer-plain"), norm_eps=1e-5)


def nemotron(c: Fields) -> Model:
    """The weights of its norms are stored minus 1."""
    model = squared(c, partial=True)
    norms = {name: view._replace(offset=1.0) for name, view in model.views.items() if name.endswith("norm.weight")}
    return model._replace(views=model.views | norms)


def squared(c: Fields, partial: bool = False) -> Model:
    """Returns a model of MLPs with ReLU². partial: as in `rotation`."""
    spec = attention(c, partial, bias=c["attention_bias"])
    return model_of(c, keyed([spec]), style_of(c, kinds=UNGATED, norm="layer-bias", bias=c["mlp_bias"]))


FORMATS: dict[str, Format] = {
    "gpt2": Format("GPT2LMHeadModel", gpt2, renamed=("transformer.", ""), buffers=(".attn.bias", ".attn.masked_bias")),
    "gpt_neox": Format(
        "GPTNeoXForCausalLM", gpt_neox, renamed=("embed_out", "lm_head"),
        buffers=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    "phi": Format("PhiForCausalLM", phi),
    "gptj": Format("GPTJForCausalLM", gptj, buffers=(".attn.bias", ".attn.masked_bias")),
    "falcon": Format("FalconForCausalLM", falcon),
    "stablelm": Format("StableLmForCausalLM", stablelm),
    "starcoder2": Format("Starcoder2ForCausalLM", starcoder2),
    "olmo": Format("OlmoForCausalLM", olmo),
    "nemotron": Format("NemotronForCausalLM", nemotron),
    "gpt_bigcode": Format("GPTBigCodeForCausalLM", gpt_bigcode, buffers=(".attn.bias", ".attn.masked_bias")),
    "gpt_neo": Format("GPTNeoForCausalLM", gpt_neo, buffers=(".attention.bias", ".attention.masked_bias")),
}  # fmt: skip
