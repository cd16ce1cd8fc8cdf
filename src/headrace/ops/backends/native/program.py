"""Programs: one token of each of several sequences through a layer or a model, in one native call (native/program.cpp).

A program is a list of operations on the columns of working rows, one row of float32 per sequence. It refers to the
weights by the modules that hold them, reads them where they are, and updates the states in place. A call checks only
whether a weight, a module or a state was replaced since the last call; if so, all of them are checked again.

Dimensions: B sequences.
"""

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ....utils.errors import InputError
from ...checks import require
from ...derivatives import has_address, transformed
from . import library as native
from .layer import DTYPES, OPTIONAL, STATE, WEIGHTS, numbered, state_shapes, weight_shapes

NAMES = {name: values for name, *values in map(str.split, native.operations().splitlines())}
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PROGRAM = struct.Struct("@2i5qP")  # hr_program
_OPERATION = struct.Struct("@6i5qf4P")  # hr_operation
_STATE = _OPERATION.size - struct.calcsize("P")  # where hr_operation has its state
_DTYPE = struct.calcsize("@2i")  # and where its dtype
_LAYER = struct.Struct("@14i5fd8q16P")  # hr_layer
NO_TOKEN = 4  # hr_status


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


class Program:
    """Operations, and the modules, weights and states that they need. Built by the methods below, then run."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.layers: list[Layer] = []
        self.weights: list[Expected] = []
        self.states: list[Expected] = []
        self.state_places: list[tuple[int, str]] = []  # index in the list of states, and field
        self.width = self._next = 0
        self.vocabulary = 0
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
        state = {n: self.state(place, n, shape, *DTYPES.get(n, ())) for n, shape in of_state.items()}
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

    def take(self, states: Sequence[Any], rows: int) -> "Ready | None":
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


class Modules:
    """Modules of which a call does exactly what their classes do, as lists that are fast to check."""

    def __init__(self) -> None:
        self.modules: list[nn.Module | None] = []
        self.classes: list[type] = []
        self.places: list[tuple[dict[str, Any], str]] = []  # the parent's modules, and the name there
        self.hooks: list[dict] = []
        self.attributes: list[dict[str, Any]] = []

    def add(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.add_other(parent, name, module)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.attributes.append(vars(module))

    def add_other(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Adds a module that no operation stands for."""
        self.modules.append(module)
        self.classes.append(type(module))
        self.places.append((parent._modules, name))

    def are_plain(self) -> bool:
        """Whether no module has a hook or a forward of its own. (Those of a backward never run in a program.)"""
        return not any(self.hooks) and not any("forward" in attributes for attributes in self.attributes)

    def are_same(self, plain: bool) -> bool:
        """Whether the modules are in their places, of their classes, and plain or not."""
        held = [modules.get(name) for modules, name in self.places]
        same = all(map(operator.is_, held, self.modules)) and list(map(type, held)) == self.classes
        return same and self.are_plain() == plain


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


class Bound:
    """A program with the addresses of its weights and states."""

    def __init__(self, program: Program, weights: list[Tensor]):
        self.program, self.weights = program, weights
        self.places = [x.data_ptr() for x in weights]
        self.last: Ready | None = None
        self.of_operations = [self._one_dtype(self._vectors(op)) for op in program.operations]
        self.of_layers = [self._one_dtype(layer.weights.values()) for layer in program.layers]
        self.state_dtypes = self._state_dtypes()

    @staticmethod
    def _vectors(op: Operation) -> list[int]:
        """Returns the weights of an operation that have its dtype: all but the matrix of a linear layer."""
        return [i for i in (op.bias, None if op.kind == "linear" else op.weight) if i is not None]

    def _one_dtype(self, weights: Iterable[int]) -> torch.dtype | None:
        dtypes = {self.weights[i].dtype for i in weights}
        if len(dtypes) > 1:
            raise UnsupportedError(f"weights of one part have the dtypes {', '.join(sorted(map(str, dtypes)))}")
        return dtypes.pop() if dtypes else None

    def _state_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of the states that can be updated in place."""
        dtypes: dict[int, torch.dtype] = {}
        for op, dtype in zip(self.program.operations, self.of_operations, strict=True):
            if op.state is not None and dtype is not None:
                dtypes[op.state] = dtype
        for layer, dtype in zip(self.program.layers, self.of_layers, strict=True):
            dtypes |= {i: DTYPES.get(name, (dtype or torch.float32,))[0] for name, i in layer.state.items()}
        return [dtypes[i] for i in range(len(self.program.states))]

    def has_weights(self, weights: list[Tensor | None]) -> bool:
        """Whether these are the same tensors in the same memory."""
        same = all(map(operator.is_, weights, self.weights))
        return same and [x.data_ptr() for x in weights] == self.places  # type: ignore[union-attr]

    def take(self, states: list[Tensor], rows: int) -> "Ready | None":
        """Returns the program with states that can be updated in place, or None."""
        places = [0 if x is None else x.data_ptr() for x in states]
        where, last = (rows, torch.is_inference_mode_enabled()), self.last
        if (
            last is not None
            and where == last.where
            and places == last.places
            and all(map(operator.is_, states, last.states))
        ):
            return last
        for expected, dtype, x in zip(self.program.states, self.state_dtypes, states, strict=True):
            if expected.fault(x, (rows, *expected.shape)) is not None or x.dtype is not dtype:
                return None
            if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
                return None
        self._check_apart(states, places)
        self.last = Ready(self.program, where, states, places, *self._packed(states, places))
        return self.last

    def _check_apart(self, states: list[Tensor], places: list[int]) -> None:
        """Raises InputError if a state shares memory with another tensor."""
        names = [x.name for x in self.program.states]
        spans = sorted(
            (place, place + x.nbytes, name, of_state)
            for some, of_state in (((self.weights, self.places, [x.name for x in self.program.weights]), False),
                                   ((states, places, names), True))
            for x, place, name in zip(*some, strict=True)
        )  # fmt: skip
        reached, owner, state = 0, "", False
        for start, end, name, of_state in spans:
            if start < reached and (state or of_state):
                mine, other = (name, owner) if of_state else (owner, name)
                raise InputError(f"{mine} shares memory with {other}; expected separate memory for the state")
            if end > reached:
                reached, owner, state = end, name, of_state

    def _packed(self, states: list[Tensor], places: list[int]) -> tuple[bytes, bytes]:
        operations = zip(self.program.operations, self.of_operations, strict=True)
        layers = zip(self.program.layers, self.of_layers, strict=True)
        return (
            b"".join(_OPERATION.pack(*self._operation(op, dtype, states, places)) for op, dtype in operations),
            b"".join(_LAYER.pack(*self._layer(layer, dtype, places)) for layer, dtype in layers),
        )

    def _operation(
        self, op: Operation, dtype: torch.dtype | None, states: list[Tensor], places: list[int]
    ) -> Iterable[Any]:
        if dtype is None:
            dtype = torch.float32 if op.state is None else states[op.state].dtype
        matrix = torch.float32 if op.weight is None else self.weights[op.weight].dtype
        return (
            NAMES["kind"].index(op.kind), op.what, CODES[dtype], CODES[matrix], op.add, op.layer, op.x, op.other,
            op.out, op.inputs, op.outputs, op.number, self._address(op.weight, op.first),
            self._address(op.bias, op.first), self._address(op.scale, op.first),
            0 if op.state is None else places[op.state],
        )  # fmt: skip

    def _address(self, weight: int | None, first: int = 0) -> int:
        if weight is None:
            return 0
        x = self.weights[weight]
        return self.places[weight] + first * x.stride(0) * x.itemsize

    def _layer(self, layer: Layer, dtype: torch.dtype | None, places: list[int]) -> Iterable[Any]:
        *numbers, theta = layer.numbers
        weights = (self._address(layer.weights.get(name)) for name in WEIGHTS)
        states = (places[layer.state[name]] if name in layer.state else 0 for name in STATE)
        return CODES[dtype or torch.float32], *layer.kinds, *numbers, theta, *layer.sizes, *weights, *states


class Ready(NamedTuple):
    """A program with its states. It is not changed, so that threads may share a model."""

    program: Program
    where: tuple[int, bool]  # number of sequences, and whether inference mode is on
    states: list[Tensor]
    places: list[int]
    operations: bytes  # hr_operation
    layers: bytes  # hr_layer

    def run(self, outside: dict[int, Tensor], tokens: Tensor | None = None) -> None:
        """Runs the program.

        Args:
            outside: tensors [B, ·] by the index of the operation that reads or writes them.
            tokens: [B], for a program that begins with an embedding.

        Raises:
            InputError: for a token that the embedding does not have.
        """
        program, operations = self.program, bytearray(self.operations)
        for i, x in outside.items():
            struct.pack_into("@P", operations, i * _OPERATION.size + _STATE, x.data_ptr())
            if program.operations[i].kind in ("load", "store"):
                struct.pack_into("@i", operations, i * _OPERATION.size + _DTYPE, CODES[x.dtype])
        header = _PROGRAM.pack(
            native.ABI, torch.get_num_threads(), self.where[0], program.width, len(program.operations),
            len(program.layers), program.vocabulary, native.address(tokens),
        )  # fmt: skip
        status = native.run(header, bytes(operations), self.layers)
        # Tells autograd, which may have saved one of these tensors for a backward, that the tensors have changed.
        increment_version([x for x in self.states if not x.is_inference()])
        if status == NO_TOKEN:
            raise InputError(f"a token is not below {program.vocabulary}, the size of the vocabulary")
        native.check(status)
