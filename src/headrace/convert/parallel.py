"""The formats of transformers' models of softmax attention with LayerNorms, in most of which attention and MLP have one
input (`BlockStyle.order`)."""

from collections.abc import Sequence

from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Layer
from .fields import Fields
from .form import Format, Model, View, Views, assembled, plain, shared, stacked, whole
from .softmax import UNGATED, activation, attention, attention_views

KINDS = ("weight", "bias")


def gpt_neox(c: Fields) -> Model:
    """One matrix has q, k and v of each head. The head is called embed_out, also where transformers has lm_head."""
    c.ignore("hidden_dropout", "classifier_dropout", "is_decoder")
    spec = attention(c, partial=True, bias=c["attention_bias"])
    order = "parallel" if c["use_parallel_residual"] else "pre"
    style = BlockStyle("layer", order, mlp=activation(c, "hidden_act", UNGATED), bias=True)
    own = both({
        "mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
    })  # fmt: skip
    kinds = KINDS if spec.bias else KINDS[:1]
    own |= plain({f"mixer.o_proj.{kind}": f"attention.dense.{kind}" for kind in kinds})
    sizes = dict.fromkeys("qkv", c["hidden_size"])
    for kind in kinds:
        parts = stacked(f"attention.query_key_value.{kind}", sizes, c["num_attention_heads"])
        own |= {f"mixer.{part}_proj.{kind}": view for part, view in parts.items()}
    model = decoder(c, [spec] * c["num_hidden_layers"], style, own, ("gpt_neox", "embed_in", "final_layer_norm"))
    if "lm_head.weight" in model.views:
        model.views["lm_head.weight"] = View("embed_out.weight")
    return model._replace(copies=(("embed_out.weight", "gpt_neox.embed_in.weight"),) * c["tie_word_embeddings"])


def phi(c: Fields) -> Model:
    c.only("qk_layernorm", False)
    c.ignore("resid_pdrop", "embd_pdrop")
    spec = attention(c, partial=True, bias=True)
    kind = activation(c, "hidden_act", UNGATED)
    style = BlockStyle("layer", "parallel-joint", mlp=kind, bias=True, head_bias=True)
    own = both({"mixer_norm": "input_layernorm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"})
    own |= attention_views(spec, "self_attn", o_proj="dense")
    return decoder(c, [spec] * c["num_hidden_layers"], style, own, ("model", "embed_tokens", "final_layernorm"))


def both(names: dict[str, str]) -> Views:
    """Returns the views of the weights and biases of modules: {our name: their name}."""
    return plain({f"{our}.{kind}": f"{their}.{kind}" for our, their in names.items() for kind in KINDS})


def decoder(
    c: Fields, specs: Sequence[AttentionSpec], style: BlockStyle, own: Views, names: tuple[str, str, str]
) -> Model:
    """Returns a model whose layers all have the same views. names: of the model, its embedding and its final norm."""
    outside = whole(*names, c["tie_word_embeddings"])
    if style.bias:
        outside["model.backbone.norm.bias"] = View(f"{names[0]}.{names[2]}.bias")
    if style.head_bias:
        outside["lm_head.bias"] = View("lm_head.bias")
    sizes = {"num_heads": c["num_attention_heads"], "intermediate_size": c["intermediate_size"]}
    arguments = shared(c, [Layer(spec) for spec in specs], style, **sizes)
    return Model(arguments, assembled([own] * len(specs), outside, f"{names[0]}.layers"))


FORMATS: dict[str, Format] = {
    "gpt_neox": Format(
        "GPTNeoXForCausalLM", gpt_neox, renamed=("embed_out", "lm_head"),
        buffers=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    "phi": Format("PhiForCausalLM", phi),
}  # fmt: skip
