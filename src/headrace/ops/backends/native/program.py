"""Programs: one token of each of several sequences through a layer or a model, in one native call (native/program.cpp).

A program is a list of operations on the columns of working rows, one row of float32 per sequence. It refers to the
weights by the modules that hold them, reads them where they are, and updates the states in place. A call checks only
whether a weight, a module or a state was replaced since the last call; if so, all of them are checked again.

Dimensions: B sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...checks import require
from ...derivatives import transformed
from . import library as native
from .bound import Bound, Ready
from .layer import OPTIONAL, STATE_DTYPES, numbered, state_shapes, weight_shapes
from .modules import Modules
from .operations import Code, Expected, Layer, Operation, UnsupportedError


class Program(Code):
    """Operations, and the modules, weights and states that they need. Built by the methods below, then run."""

    def __init__(self) -> None:
        super().__init__()
        self.state_places: list[tuple[int, str]] = []  # index in the list of states, and field
        self._next = 0  # the first unused column
        self._plain = True
        self._holders: list[tuple[dict[str, Any], str]] = []  # of the weights
        self._modules = Modules()
        self._settings: list[tuple[dict[str, Any], str]] = []  # attributes, and the values that they had
        self._values: list[Any] = []
        self._bound: Bound | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_bound": None}  # a copy has other addresses

    # --- building ----------------------------------------------------------------------------------------------------

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
        self._settings += [(vars(holder), name) for name in names]
        self._values += [vars(holder)[name] for name in names]

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
        if (place, field) not in self.state_places:
            self.state_places.append((place, field))
            self.states.append(Expected(field, tuple(shape), dtypes or tuple(native.DTYPES)))
        return self.state_places.index((place, field))

    def add(self, kind: str, **fields: Any) -> None:
        self.operations.append(Operation(kind, **fields))

    def linear(self, module: Any, x: int, out: int, add: bool = False, rows: tuple[int, int] | None = None) -> None:
        """Adds a linear layer: out = W x + b, or out += W x + b.

        Args:
            module: an nn.Linear, or a layer with int8 weights: `integers` [outputs, inputs] and `scale` [outputs].
            rows: (first row, number of rows) of W to compute; None: all.
        """
        shape = module.out_features, module.in_features
        first, outputs = rows or (0, shape[0])
        if isinstance(module, nn.Linear):
            weight, scale = self.weight(module, "weight", shape), None
        else:
            weight = self.weight(module, "integers", shape, torch.int8)
            scale = self.weight(module, "scale", shape[:1], torch.float32)
        bias = None if module.bias is None else self.weight(module, "bias", shape[:1])
        sizes = {"inputs": shape[1], "outputs": outputs, "first": first}
        self.add("linear", x=x, out=out, add=add, weight=weight, scale=scale, bias=bias, **sizes)

    def layer(self, kinds: dict[str, str], sizes: Sequence[int], numbers: Sequence[float], weights: dict[str, Any],
              place: int) -> int:  # fmt: skip
        """Returns the index of a layer between its projections.

        Args:
            kinds, sizes, numbers: as in `layer.py`.
            weights: (module, path) by name.
            place: index of its state.
        """
        codes, unknown = numbered(kinds)
        if unknown is not None:
            raise UnsupportedError(unknown)
        shapes, of_state = weight_shapes(kinds, sizes), state_shapes(kinds, sizes, bool(numbers[-1]))
        if absent := [name for name in shapes if name not in weights and name not in OPTIONAL]:
            raise ValueError(f"{absent[0]} is None; expected shape {list(shapes[absent[0]])}")
        indices = {name: self.weight(module, path, shapes[name], name=name) for name, (module, path) in weights.items()}
        state = {n: self.state(place, n, shape, *STATE_DTYPES.get(n, ())) for n, shape in of_state.items()}
        self.layers.append(Layer(codes, list(sizes), list(numbers), indices, state))
        return len(self.layers) - 1

    def finish(self) -> None:
        """Ends the building, also of a program that cannot be built."""
        self._plain = self._modules.are_plain()

    # --- running -----------------------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Whether the modules are those that the program was built from. Otherwise it must be built again."""
        return self._modules.are_same(self._plain) and [held.get(n) for held, n in self._settings] == self._values

    def unsupported_reason(self) -> str | None:
        """Returns why the program cannot run now, or None.

        Raises InputError for a weight whose shape is not the one that its module was built with."""
        if torch.is_grad_enabled():
            return "it has no gradient: torch.no_grad() is needed"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if torch.compiler.is_compiling() or transformed():
            return "it reads memory by address, and runs neither in a graph nor under a transform"
        weights: list[Any] = [holder.get(name) for holder, name in self._holders]
        if self._bound is not None and self._bound.has_weights(weights):
            return None
        for expected, weight in zip(self.weights, weights, strict=True):
            if (fault := expected.fault(weight, expected.shape)) is not None:
                require(weight is None or weight.shape == expected.shape, fault)
                return fault
        try:
            self._bound = Bound(self, weights)
        except UnsupportedError as error:
            return str(error)
        return None

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the weights of the layers, or of all operations without layers, have this dtype."""
        assert self._bound is not None
        return all(own in (None, dtype) for own in (*self._bound.of_layers, *self._bound.of_operations))

    def dtype(self, weight: int) -> torch.dtype:
        """Returns the dtype of a weight."""
        assert self._bound is not None
        return self._bound.weights[weight].dtype

    def take(self, states: Sequence[Any], rows: int) -> Ready | None:
        """Returns the program with the states of B = `rows` sequences, or None if they cannot be updated in place: they
        have other shapes or dtypes, or autograd needs them. To be called after `unsupported_reason` returned None."""
        assert self._bound is not None
        return self._bound.take([getattr(states[i], field) for i, field in self.state_places], rows)

    def copies(self, states: Sequence[Any]) -> list[Any]:
        """Returns copies of states that can be updated in place. The states must have the right shapes."""
        assert self._bound is not None
        changed = list(states)
        for (i, field), dtype in zip(self.state_places, self._bound.state_dtypes, strict=True):
            x = getattr(states[i], field)
            copy = x.new_empty(x.shape, dtype=dtype).copy_(x)
            changed[i] = changed[i]._replace(**{field: copy})
        return changed


class ProgramOf:
    """The program of a module, built when it is first needed, and again after a change of the module.

    Args:
        build: adds the operations of the module to a new program, or raises UnsupportedError.
    """

    def __init__(self, build: Callable[[Program, Any], None]):
        self._build = build
        self._built: tuple[Program | None, str | None] = None, None  # the program, and why it could not be built

    def find(self, module: Any) -> tuple[Program | None, str | None]:
        """Returns (a program that can run now, None), or (None, why there is none)."""
        if native.missing:
            return None, native.missing
        program, reason = self._built
        if program is None or not program.intact():
            program, reason = Program(), None
            try:
                self._build(program, module)
            except UnsupportedError as error:
                reason = str(error)
            program.finish()
            self._built = program, reason  # complete, so that threads may share a model
        reason = reason or program.unsupported_reason()
        return (program, None) if reason is None else (None, reason)
