"""Programs: one token of each of several sequences through a layer or a model, in one native call (native/program.cpp).

A program is a list of operations on the columns of working rows, one row of float32 per sequence. It refers to the
weights by the modules that hold them; `bound.py` gives the library their addresses and runs it.

Dimensions: B sequences.
"""

import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...derivatives import has_address
from . import library as native
from .layer import OPTIONAL, STATE_DTYPES, numbered, state_shapes, weight_shapes

NAMES = native.names("hr_operations")  # the kinds of operations, norms and activations


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
    """The fields of hr_layer by name; weights and state as indices of a program's."""

    fields: dict[str, Any]
    weights: dict[str, int]
    state: dict[str, int]
    frequencies: Tensor | None


class Modules:
    """Modules whose calls do exactly what their classes do, as lists that are fast to check."""

    def __init__(self) -> None:
        self.modules: list[nn.Module | None] = []
        self.classes: list[type] = []
        self.places: list[tuple[dict[str, Any], str]] = []  # the parent's modules, and the name there
        self.hooks: list[dict] = []
        self.attributes: list[dict[str, Any]] = []
        self.absent: list[tuple[dict[str, Any], str]] = []  # parameters that are None, such as a bias

    def add(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.add_other(parent, name, module)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.attributes.append(vars(module))
        self.absent += [(module._parameters, key) for key, x in module._parameters.items() if x is None]

    def add_other(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Adds a module that no operation stands for."""
        self.modules.append(module)
        self.classes.append(type(module))
        self.places.append((parent._modules, name))

    def are_plain(self) -> bool:
        """Whether no module has a hook, a forward or a run of its own. (Hooks of a backward never run in a program.)"""
        return not any(self.hooks) and not any("forward" in own or "run" in own for own in self.attributes)

    def are_same(self, plain: bool) -> bool:
        """Whether the modules are in their places, of their classes, plain or not, and have no more parameters."""
        held = [modules.get(name) for modules, name in self.places]
        same = all(map(operator.is_, held, self.modules)) and list(map(type, held)) == self.classes
        return same and self.are_plain() == plain and not any(x.get(key) is not None for x, key in self.absent)


class Program:
    """Operations, and the modules, weights and states that they need. Built by the methods below, then bound."""

    def __init__(self, module: nn.Module) -> None:
        self._of = weakref.ref(module)  # a reference to what has the program would be a cycle, which is freed late
        self.operations: list[Operation] = []
        self.layers: list[Layer] = []
        # Each packs an hr_attention: packed(bound, state, B) -> bytes, or None; empty(B, dtype) -> the first cache.
        self.attentions: list[Any] = []
        self.weights: list[Expected] = []
        self.states: list[Expected] = []
        self.state_places: list[tuple[int, str]] = []  # index in the list of states, and field
        self.kinds: list[type] = []  # of the states of a model
        self.width = 0  # number of columns
        self.vocabulary = 0  # number of rows of the embedding
        self._next = 0  # the first unused column
        self._plain = True
        self._holders: list[tuple[dict[str, Any], str]] = []  # of the weights
        self._modules = Modules()
        self._settings: list[tuple[weakref.ref[Any], operator.attrgetter]] = []  # attributes, and what they were
        self._values: list[Any] = []

    def columns(self, count: int) -> int:
        """Returns the first of `count` new columns."""
        first, self._next = self._next, self._next + -(-count // 16) * 16
        self.width = max(self.width, self._next)
        return first

    def release(self, first: int) -> None:
        """Makes the columns from `first` on available again."""
        self._next = first

    def module(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        """Returns a module of the parent. Raises UnsupportedError unless it is of one of the kinds, without hooks."""
        module: Any = parent._modules.get(name)
        if type(module) not in kinds:
            self._modules.add_other(parent, name, module)
            raise UnsupportedError(f"{type(parent).__name__}.{name} is a {type(module).__name__}")
        self._modules.add(parent, name, module)
        if not self._modules.are_plain():
            raise UnsupportedError(f"{type(parent).__name__}.{name} has a hook or a forward of its own")
        return module

    def fixed(self, holder: Any, *names: str) -> None:
        """Notes attributes with which the program is built."""
        get = operator.attrgetter(*names)
        self._settings.append((weakref.ref(holder), get))
        self._values.append(get(holder))

    def weight(self, module: nn.Module, path: str, shape: Sequence[int], *dtypes: torch.dtype, name: str = "") -> int:
        """Returns the index of a weight by its path in a module, a parameter or a buffer."""
        *parents, key = path.split(".")
        for parent in parents:
            module = getattr(module, parent)
        holder: Any = module._parameters if key in module._parameters else module._buffers
        self._holders.append((holder, key))
        self.weights.append(Expected(name or path, tuple(shape), dtypes or tuple(native.DTYPES)))
        return len(self.weights) - 1

    def state(self, place: int, field: str, shape: Sequence[int], *dtypes: torch.dtype) -> int:
        """Returns the index of a tensor [B, *shape] of the states."""
        self.state_places.append((place, field))
        self.states.append(Expected(field, tuple(shape), dtypes or tuple(native.DTYPES)))
        return len(self.states) - 1

    def add(self, kind: str, **fields: Any) -> None:
        self.operations.append(Operation(kind, **fields))

    def linear(self, module: Any, x: int, out: int, add: bool = False, rows: tuple[int, int] | None = None) -> None:
        """Adds a linear layer: out = W x + b, or out += W x + b.

        Args:
            module: an nn.Linear, or a QuantizedLinear: `stored` [outputs, inputs] and `scale` [outputs].
            rows: (first row, number of rows) of W to compute; None: all.
        """
        shape = module.out_features, module.in_features
        first, outputs = rows or (0, shape[0])
        if isinstance(module, nn.Linear):
            weight, scale = self.weight(module, "weight", shape), None
        else:
            weight = self.weight(module, "stored", shape, module.stored.dtype)
            scale = self.weight(module, "scale", shape[:1], torch.float32)
        bias = None if module.bias is None else self.weight(module, "bias", shape[:1])
        if bias is None:
            self._modules.absent.append((module._buffers, "bias"))  # of a QuantizedLinear
        sizes = {"inputs": shape[1], "outputs": outputs, "first": first}
        self.add("linear", x=x, out=out, add=add, weight=weight, scale=scale, bias=bias, **sizes)

    def layer(self, fields: dict[str, Any], weights: dict[str, Any], place: int) -> int:
        """Returns the index of a layer between its projections.

        Args:
            fields: as in `layer.py`.
            weights: (module, path) by name.
            place: index of its state.
        """
        codes, unknown = numbered(fields)
        if unknown is not None:
            raise UnsupportedError(unknown)
        shapes, of_state = weight_shapes(fields), state_shapes(fields)
        if absent := [name for name in shapes if name not in weights and name not in OPTIONAL]:
            raise UnsupportedError(f"{absent[0]} is not a parameter of the mixer")
        indices = {name: self.weight(module, path, shapes[name], name=name) for name, (module, path) in weights.items()}
        state = {}
        for name, shape in of_state.items():
            dtype = STATE_DTYPES.get(name, torch.float32)
            state[name] = self.state(place, name.partition("_")[0], shape, *([] if dtype is None else [dtype]))
        self.layers.append(Layer(codes, indices, state, fields["frequencies"]))
        return len(self.layers) - 1

    def finish(self) -> None:
        """Ends the building, also of a program that cannot be built."""
        self._plain = self._modules.are_plain()

    def intact(self, module: nn.Module) -> bool:
        """Whether this is the module that the program was built from, unchanged. Otherwise it must be built again."""
        same = self._of() is module and self._modules.are_same(self._plain)
        return same and [get(held()) for held, get in self._settings] == self._values

    def held_weights(self) -> list[Any]:
        """Returns the weights that the modules have now, None for one that is gone."""
        return [holder.get(name) for holder, name in self._holders]
