"""What a program consists of: operations and layers, and the tensors that they need.

Dimensions: B sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...derivatives import has_address


class UnsupportedError(Exception):
    """Why a program cannot compute a module."""


class Expected(NamedTuple):
    """A tensor that a program needs: contiguous, on the CPU."""

    name: str
    shape: tuple[int, ...]  # of a state: without the dimension B
    dtypes: tuple[torch.dtype, ...]

    def fault(self, x: Tensor | None, shape: tuple[int, ...]) -> str | None:
        """Returns a sentence about how a tensor differs from what is expected, or None."""
        if x is None:
            return f"{self.name} is None; expected shape {list(shape)}"
        if x.shape != shape:
            return f"{self.name} has shape {list(x.shape)}; expected shape {list(shape)}"
        if x.dtype not in self.dtypes:
            return f"{self.name} has dtype {x.dtype}; expected {' or '.join(map(str, self.dtypes))}"
        if not (x.is_cpu and x.is_contiguous() and has_address(x)):
            return f"{self.name} is on {x.device} with strides {x.stride()}; expected a contiguous tensor on the CPU"
        return None


class Operation(NamedTuple):
    """The fields of hr_operation. Weights are indices of a program's weights, and `state` is one of its states."""

    kind: str
    x: int = 0  # first column of the input
    out: int = 0
    inputs: int = 0
    outputs: int = 0
    other: int = -1
    what: int = 0
    add: bool = False
    layer: int = 0
    number: float = 1.0
    weight: int | None = None
    bias: int | None = None
    scale: int | None = None
    first: int = 0  # first row of weight and bias
    state: int | None = None


class Layer(NamedTuple):
    """The fields of hr_layer; weights and state by name, as indices of a program's."""

    kinds: list[int]
    sizes: list[int]
    numbers: list[float]
    weights: dict[str, int]
    state: dict[str, int]


class Code:
    """The operations and layers of a program, and the tensors to which they refer."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.layers: list[Layer] = []
        self.weights: list[Expected] = []
        self.states: list[Expected] = []
        self.width = 0  # number of columns
        self.vocabulary = 0  # number of rows of the embedding
