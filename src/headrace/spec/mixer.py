"""`Spec`, the base of the specs of token mixers. `serialize.TYPES` has a row for each of its subclasses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..utils.errors import InputError, require
from .record import Record, require_positive

Shapes = dict[str, tuple[int, ...]]
FEWEST = 4  # a model that is too narrow for as many heads of the published width has its default number of heads


class Update(NamedTuple):
    """The update S_t = A S_{t−1} + kᵀ b of a mixer outside the algebra of MixerSpec, in symbols of the catalogue."""

    A: str
    b: str
    retention: str
    objective: str = "−⟨kS, v⟩"


class Facts(NamedTuple):
    """What the library knows of a kind of mixer, besides how it is computed."""

    layer: str  # module and class of the layer; one that begins with a dot is below headrace.layers
    update: Update | None = None
    flops: int = 0  # operations per number of the memory and token, as `flops_per_token` counts them
    cached: bool = False  # whether the state is a cache of keys and values; the layer then has a form for encoders


class Stateful(Record):
    """Base class of the specs that have a state: mixers, and whole models."""

    # Shapes of the state of one sequence by name: (hidden_size, num_heads, tokens=1) of a mixer, and with the number of
    # layers as a fourth argument of a model.
    state_shapes: Callable[..., Shapes]

    def state_bytes(self, hidden_size: int, num_heads: int, *extent: int, itemsize: int = 4, **named: int) -> int:
        """Returns the size in bytes of one sequence's state, with `itemsize` bytes per number. The other arguments are
        those of `state_shapes`."""
        shapes = self.state_shapes(hidden_size, num_heads, *extent, **named)
        return itemsize * sum(math.prod(shape) for shape in shapes.values())

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of heads, which is `default` unless the spec sets it."""
        return default

    def idle_gates(self, hidden_size: int | None = None, num_heads: int | None = None) -> list[str]:
        """Returns a sentence for each gate of competition that has no effect. Sentences on the number of heads need
        the sizes of the model, unless the spec sets that number."""
        return []


class Spec(Stateful):
    """Base class of the specs of token mixers."""

    facts: Facts
    gated: ClassVar[bool] = False  # whether a gate multiplies the output or the values, besides a decay and β
    table: ClassVar[str] = "others"  # the table of the zoo that lists the mixer
    uncompeting = "has no memory that heads could compete for"  # why it has no softmax version

    def layer(self, causal: bool) -> str:
        """Returns module and class of the layer, as `Facts.layer`. causal: False for an encoder's."""
        return self.facts.layer

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (K, V), the key and value dimensions per head. Raises InputError for sizes that do not divide."""
        raise TypeError(f"{type(self).__name__} does not define head_dims")

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        """Returns the floating-point operations per token of the recurrence in its recurrent form, without projections
        and convolution: 0 for attention, which is matrix products. A multiply-add counts as two; exponentials and the
        discretization of a fixed system as none."""
        flops = self.facts.flops
        return flops and flops * math.prod(self.state_shapes(hidden_size, num_heads)["memory"])


@dataclass(frozen=True)
class ModelSpec(Stateful):
    """Base of the specs of whole models other than decoders. A field `mixer` is the spec of the blocks' mixer."""

    builder: ClassVar[str]  # the function that builds the model, for errors

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns the key and value dimensions per head. Raises InputError for sizes that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        return hidden_size, hidden_size

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of heads, 1 for a model without heads."""
        return 1


def heads_of_width(count: int | None, width: int | None, total: float, default: int) -> int:
    """Returns the number of heads: `count`, or the divisor of `total` channels that gives heads nearest to `width` in
    ratio, or `default` without both and in a model too narrow for FEWEST heads of this width.

    Raises InputError if the channels divide only into heads under half or over twice the width."""
    total = round(total, 6)
    if count or not width or total < FEWEST * width:
        return count or default
    near = [n for n in range(FEWEST, int(2 * total / width) + 1) if total % n == 0 and total <= 2 * n * width]
    expected = f"a multiple of {width}, or a number of heads (heads.count) that divides them"
    require(bool(near), f"heads of width {width} for {total:g} channels; expected {expected}")
    return min(near, key=lambda n: abs(math.log(total / n / width)))


def width_per_head(name: str, factor: float, hidden_size: int, H: int) -> int:
    """Returns factor · hidden_size / H. Raises InputError, which calls the factor `name`, unless it is an integer."""
    width = round(factor * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
    if width % H or width < H:
        raise InputError(f"num_heads={H} does not divide {name} · hidden_size = {width:g}; expected a multiple of {H}")
    return int(width) // H
