"""The formats of transformers' models of scans and of linear mixers without a delta rule."""

from typing import Any

from ... import zoo
from ...spec.linear import MixerSpec
from ...spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import Format, Model, Views, below, conv_width, layer_name, named, shared, stacked, whole

MAMBA2 = {
    "mixer_norm.weight": "norm.weight", "mixer.decay.A_log": "mixer.A_log", "mixer.decay.dt_bias": "mixer.dt_bias",
    "mixer.skip": "mixer.D", "mixer.norm_weight": "mixer.norm.weight",
    "mixer.o_proj.weight": "mixer.out_proj.weight",
}  # fmt: skip


def mamba2(c: Fields) -> Model:
    H, D, K, V = c["num_heads"], c["hidden_size"], c["state_size"], c["head_dim"]
    if c["expand"] * D != V * H:
        c.refuse("head_dim", f"expand · hidden_size / num_heads = {c['expand'] * D / H:g}")
    c.only("n_groups", 1)  # transformers normalises each group separately
    if [*map(float, c["time_step_limit"])] != [0.0, float("inf")]:
        c.refuse("time_step_limit", "[0, inf]")
    c.only("hidden_act", "silu", "swish")
    c.only("use_bias", False)
    c.only("use_conv_bias", True)
    c.only("rescale_prenorm_residual", False)  # transformers rescales again whenever it loads
    c.ignore("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "chunk_size", "residual_in_fp32")
    conv = conv_width(c, "conv_kernel")
    spec = zoo.get(f"mamba2(heads.expand_k={K * H / D}, heads.expand_v={V * H / D}, inputs.conv={conv})")
    layers = [Layer(spec)] * c["num_hidden_layers"]
    views = whole("backbone", "embeddings", "norm_f", c["tie_word_embeddings"])
    for i in range(len(layers)):
        theirs = f"backbone.layers.{i}"
        views |= named(layer_name(i), theirs, MAMBA2) | below(
            layer_name(i), mamba2_projections(f"{theirs}.mixer", H, K, V)
        )
    return Model(shared(c, layers, BlockStyle(mlp="none"), num_heads=H), views)


def mamba2_projections(theirs: str, heads: int, key_dim: int, value_dim: int, groups: int = 1) -> Views:
    """Returns the views of a Mamba-2 layer: in_proj stacks gate, v, k, q and dt; the convolution stacks v, k and q."""
    wide, narrow = heads * value_dim, groups * key_dim
    mixed = {"v": wide, "k": narrow, "q": narrow}
    views = below("mixer.in_proj", stacked(f"{theirs}.in_proj.weight", {"gate": wide} | mixed | {"decay": heads}))
    for kind in ("weight", "bias"):
        views |= below(f"mixer.conv.{kind}", stacked(f"{theirs}.conv1d.{kind}", mixed))
    return views


def mamba2_describe(config: Any) -> Config:
    spec, heads = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, heads)
    return {
        "num_heads": heads, "head_dim": V, "state_size": K, "expand": V * heads // config.hidden_size,
        "n_groups": 1, "conv_kernel": spec.inputs.conv, "layer_norm_epsilon": config.norm_eps,
        "rescale_prenorm_residual": False,
    }  # fmt: skip


FORMATS: dict[str, Format] = {"mamba2": Format("Mamba2ForCausalLM", mamba2, mamba2_describe, MixerSpec)}
