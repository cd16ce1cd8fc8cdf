"""The formats of transformers' models of scans and of linear mixers without a delta rule, alone or with attention."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ... import zoo
from ...spec.linear import Heads, MixerSpec
from ...spec.scan import ScanSpec
from ...spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import Format, Model, View, Views, below, conv_width, layer_name, named, shared, stacked, whole

SILU = ("silu", "swish")
STEPS = ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor")  # of initial values alone


class Mamba2(NamedTuple):
    """A Mamba-2 layer of transformers."""

    heads: int
    key_dim: int
    value_dim: int
    groups: int = 1  # number of q/k heads, of which each is a group of the norm
    conv: int = 4
    conv_bias: bool = True
    biases: tuple[bool, bool] = (False, False)  # of the input and of the output projection
    limit: tuple[float, float] = (0.0, math.inf)  # of the step size
    norm: str = "gate-norm"  # the order of norm and gate; none: no norm
    eps: float | None = None  # of the norm; None: the model's

    def spec(self, hidden_size: int, num_heads: int) -> MixerSpec:
        """Returns the spec in a model of this width and number of heads."""
        base: MixerSpec = zoo.get("mamba2")
        floor, ceiling = self.limit
        widths = (n * self.heads / hidden_size for n in (self.key_dim, self.value_dim))
        groups = None if self.groups == self.heads else self.groups
        norm = "none" if self.norm == "none" else "rms-joint" if groups == 1 else "rms-groups"
        return replace(
            base, heads=Heads(*widths, groups, None if self.heads == num_heads else self.heads),
            inputs=replace(base.inputs, conv=self.conv, conv_bias=self.conv_bias, bias=self.biases[0]),
            decay=replace(base.decay, dt_floor=floor, dt_ceiling=None if ceiling == math.inf else ceiling),
            read=replace(
                base.read, norm=norm, order="gate-norm" if self.norm == "none" else self.norm, eps=self.eps,
                bias=self.biases[1],
            ),
        )  # fmt: skip

    def views(self, theirs: str) -> Views:
        """Returns the views of the layer: in_proj stacks gate, v, k, q and dt; the convolution stacks v, k and q."""
        wide, narrow = self.heads * self.value_dim, self.groups * self.key_dim
        mixed = {"v": wide, "k": narrow, "q": narrow}
        own = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "skip": "D", "o_proj.weight": "out_proj.weight"}
        own |= {"norm_weight": "norm.weight"} if self.norm != "none" else {}
        own |= {"o_proj.bias": "out_proj.bias"} if self.biases[1] else {}
        views = named("mixer", theirs, own)
        for kind, projected, convolved in (("weight", True, True), ("bias", self.biases[0], self.conv_bias)):
            places = stacked(f"{theirs}.in_proj.{kind}", {"gate": wide} | mixed | {"decay": self.heads})
            views |= below(f"mixer.in_proj.{kind}".removesuffix(".weight"), places) if projected else {}
            views |= below(f"mixer.conv.{kind}", stacked(f"{theirs}.conv1d.{kind}", mixed)) if convolved else {}
        return views


def limit(c: Fields, name: str) -> tuple[float, float]:
    """Returns the bounds of a step size."""
    low, high = map(float, c[name])
    if not 0 <= low <= high or high == 0:
        c.refuse(name, "numbers from 0 on, the first at most the second")
    return low, high


def mamba2(c: Fields) -> Model:
    H, D, V = c["num_heads"], c["hidden_size"], c["head_dim"]
    if c["expand"] * D != V * H:
        c.refuse("head_dim", f"expand · hidden_size / num_heads = {c['expand'] * D / H:g}")
    if H % c["n_groups"]:
        c.refuse("n_groups", f"a divisor of num_heads = {H}")
    c.only("hidden_act", *SILU)
    c.only("rescale_prenorm_residual", False)  # transformers rescales again whenever it loads
    c.ignore(*STEPS, "chunk_size", "residual_in_fp32")
    layer = Mamba2(
        H, c["state_size"], V, c["n_groups"], conv_width(c, "conv_kernel"), c["use_conv_bias"],
        (c["use_bias"],) * 2, limit(c, "time_step_limit"),
    )  # fmt: skip
    layers = [Layer(layer.spec(D, H))] * c["num_hidden_layers"]
    views = whole("backbone", "embeddings", "norm_f", c["tie_word_embeddings"])
    for i in range(len(layers)):
        theirs = f"backbone.layers.{i}"
        views |= named(layer_name(i), theirs, {"mixer_norm.weight": "norm.weight"})
        views |= below(layer_name(i), layer.views(f"{theirs}.mixer"))
    return Model(shared(c, layers, BlockStyle(mlp="none"), num_heads=H), views)


def mamba2_describe(config: Any) -> Config:
    spec, heads = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, heads)
    ceiling = spec.decay.dt_ceiling
    limits = [spec.decay.dt_floor, {"__float__": "Infinity"} if ceiling is None else ceiling]
    return {
        "num_heads": heads, "head_dim": V, "state_size": K, "expand": V * heads // config.hidden_size,
        "n_groups": spec.heads.qk_groups or heads, "conv_kernel": spec.inputs.conv, "use_bias": spec.inputs.bias,
        "use_conv_bias": spec.inputs.conv_bias, "time_step_limit": limits, "layer_norm_epsilon": config.norm_eps,
        "rescale_prenorm_residual": False,
    }  # fmt: skip


def mamba1(theirs: str, bias: bool, conv_bias: bool) -> Views:
    """Returns the views of a layer of Mamba."""
    names = {
        "conv.weight": "conv1d.weight", "x_proj.weight": "x_proj.weight", "skip": "D",
        "dt_weight": "dt_proj.weight", "dt_bias": "dt_proj.bias", "in_proj.weight": "in_proj.weight",
        "out_proj.weight": "out_proj.weight",
    }  # fmt: skip
    names |= {"conv.bias": "conv1d.bias"} if conv_bias else {}
    names |= {"in_proj.bias": "in_proj.bias", "out_proj.bias": "out_proj.bias"} if bias else {}
    return named("mixer", theirs, names) | {"mixer.A_log": View(f"{theirs}.A_log", transposed=True)}


def mamba(c: Fields) -> Model:
    D, bias, conv_bias = c["hidden_size"], c["use_bias"], c["use_conv_bias"]
    c.only("hidden_act", *SILU)
    c.only("rescale_prenorm_residual", False)  # transformers rescales again whenever it loads
    c.ignore("expand", "residual_in_fp32", "use_mambapy", "use_associative_scan")  # expand: of intermediate_size
    c.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor")
    spec = ScanSpec(
        "mamba", c["state_size"], conv_width(c, "conv_kernel"), c["intermediate_size"] / D, c["time_step_rank"],
        conv_bias=conv_bias, bias=bias,
    )  # fmt: skip
    layers = [Layer(spec)] * c["num_hidden_layers"]
    views = whole("backbone", "embeddings", "norm_f", c["tie_word_embeddings"])
    for i in range(len(layers)):
        theirs = f"backbone.layers.{i}"
        views |= named(layer_name(i), theirs, {"mixer_norm.weight": "norm.weight"})
        views |= below(layer_name(i), mamba1(f"{theirs}.mixer", bias, conv_bias))
    return Model(shared(c, layers, BlockStyle(mlp="none")), views)


FORMATS: dict[str, Format] = {
    "mamba2": Format("Mamba2ForCausalLM", mamba2, mamba2_describe, MixerSpec),
    "mamba": Format("MambaForCausalLM", mamba),
}
