"""The Mamba layers of transformers, which several formats have."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from .. import zoo
from ..spec.linear import Heads, MixerSpec
from ..spec.mixer import Spec
from ..spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import Model, shared
from .views import BACKBONE, View, Views, assembled, below, modules, named, outer_views, stacked

SILU = ("silu", "swish")


class Mamba2(NamedTuple):
    """A Mamba-2 layer of transformers."""

    heads: int
    key_dim: int
    value_dim: int
    groups: int = 1  # number of q/k heads; the value heads of each are a group of the norm
    conv: int = 4
    conv_bias: bool = True
    biases: tuple[bool, bool] = (False, False)  # of the input and of the output projection
    limit: tuple[float, float] = (0.0, math.inf)  # of the step size
    norm: str = "gate-norm"  # the order of norm and gate; none: no norm
    eps: float | None = None  # of the norm; None: the model's
    levels: int = 0  # of a log-linear memory; 0: there is one memory

    def spec(self, hidden_size: int, num_heads: int) -> MixerSpec:
        """Returns the spec in a model of this width and number of heads."""
        base: Any = zoo.get("log-linear-mamba2" if self.levels else "mamba2")
        levels: Config = {"levels": self.levels} if self.levels else {}
        floor, ceiling = self.limit
        keys, values = (n * self.heads / hidden_size for n in (self.key_dim, self.value_dim))
        groups = None if self.groups == self.heads else self.groups
        read: Config = {"norm": "rms-joint" if groups == 1 else "rms-groups", "order": self.norm, "eps": self.eps}
        read = {"norm": "none"} if self.norm == "none" else read
        return replace(
            base, heads=Heads(keys, values, groups, None if self.heads == num_heads else self.heads),
            inputs=replace(base.inputs, conv=self.conv, conv_bias=self.conv_bias, bias=self.biases[0]),
            decay=replace(base.decay, dt_floor=floor, dt_ceiling=None if ceiling == math.inf else ceiling),
            read=replace(base.read, bias=self.biases[1], **read), **levels,
        )  # fmt: skip

    def views(self, theirs: str) -> Views:
        """Returns the views of the layer: in_proj stacks gate, v, k, q, dt and levels; the convolution v, k and q."""
        wide, narrow = self.heads * self.value_dim, self.groups * self.key_dim
        mixed = {"v": wide, "k": narrow, "q": narrow}
        own = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "skip": "D", "o_proj.weight": "out_proj.weight"}
        own |= {"norm_weight": "norm.weight"} if self.norm != "none" else {}
        own |= {"o_proj.bias": "out_proj.bias"} if self.biases[1] else {}
        own |= {"levels.weight": "L"} if self.levels else {}
        last = {"decay": self.heads} | ({"levels": self.heads * self.levels} if self.levels else {})
        views = named("mixer", theirs, own)
        for kind, projected, convolved in (("weight", True, True), ("bias", self.biases[0], self.conv_bias)):
            places = stacked(f"{theirs}.in_proj.{kind}", {"gate": wide} | mixed | last)
            views |= below(f"mixer.in_proj.{kind}".removesuffix(".weight"), places) if projected else {}
            views |= below(f"mixer.conv.{kind}", stacked(f"{theirs}.conv1d.{kind}", mixed)) if convolved else {}
        return views


def limit(c: Fields, name: str) -> tuple[float, float]:
    """Returns the bounds of a step size."""
    bounds = [*map(float, c[name] or ())]
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] or bounds[1] == 0:
        c.refuse(name, "two numbers from 0 on, the first at most the second")
    return bounds[0], bounds[1]


def divisor(c: Fields, name: str, heads: int) -> int:
    """Returns a number of groups of heads."""
    if not c[name] or c[name] < 1 or heads % c[name]:
        c.refuse(name, f"a divisor of the number of heads, {heads}")
    return c[name]


def mamba1(theirs: str, bias: bool, conv_bias: bool) -> Views:
    """Returns the views of a layer of Mamba."""
    names = {"x_proj.weight": "x_proj.weight", "skip": "D", "dt_weight": "dt_proj.weight", "dt_bias": "dt_proj.bias"}
    views = named("mixer", theirs, names) | modules({"mixer.conv": f"{theirs}.conv1d"}, conv_bias)
    views |= modules({f"mixer.{name}": f"{theirs}.{name}" for name in ("in_proj", "out_proj")}, bias)
    return views | {"mixer.A_log": View(f"{theirs}.A_log", transposed=True)}


def mamba_layer(c: Fields, biases: tuple[bool, bool], norm: str = "gate-norm") -> Mamba2:
    """Returns a layer of Mamba-2 by the fields of Bamba. biases: of the input and of the output projection."""
    c.ignore("mamba_expand", "mamba_d_ssm")  # the width, which is that of the heads
    c.ignore("mamba_chunk_size")
    heads, state = c["mamba_n_heads"], c.count("mamba_d_state", 1)
    return Mamba2(
        heads, state, c["mamba_d_head"], divisor(c, "mamba_n_groups", heads), c.count("mamba_d_conv", 2),
        c["mamba_conv_bias"], biases, limit(c, "time_step_limit"), norm,
    )  # fmt: skip


def mixers_alone(c: Fields, spec: Spec, views: Views, **sizes: Any) -> Model:
    """Returns a model of mixers without MLPs. views: of a layer's mixer."""
    depth, own = c["num_hidden_layers"], modules({"mixer_norm": "norm"}) | views
    style = BlockStyle(mlp="none")
    arguments = shared(c, [Layer(spec)] * depth, style, **sizes)
    return Model(arguments, assembled([own] * depth, outer_views(c, style, BACKBONE), "backbone.layers"))
