"""Programs with the addresses of their tensors, as the native library takes them.

Weights are read where they are, and states are updated in place. A call checks only whether a weight, a module or a
state was replaced since the last call; if so, all of them are checked again.

Dimensions: B sequences.
"""

import operator
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.modules.module import _has_any_global_hook

from ....utils.errors import InputError
from ...checks import require
from ...derivatives import dispatched
from ...written import check_apart
from . import library as native
from .program import NAMES, Layer, Operation, Program, UnsupportedError
from .structs import LAYOUTS

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PROGRAM, _OPERATION, _LAYER = (LAYOUTS[name] for name in ("hr_program", "hr_operation", "hr_layer"))
_STATE, _DTYPE = _OPERATION.offset("state"), _OPERATION.offset("dtype")
NO_TOKEN = 4  # hr_status
LAYOUT: Any = Tensor.data_ptr, Tensor.stride, operator.attrgetter("shape"), operator.attrgetter("dtype")


class Bound:
    """A program with the addresses of its weights, and of the states that it had last.

    Raises UnsupportedError for weights that it cannot read, and InputError for one whose shape is not the one that its
    module was built with."""

    def __init__(self, program: Program, weights: list[Any]):
        for expected, weight in zip(program.weights, weights, strict=True):
            if (fault := expected.fault(weight, expected.shape)) is not None:
                require(weight is None or weight.shape == expected.shape, fault)
                raise UnsupportedError(fault)
        self.program, self.weights = program, weights
        self.dtype: torch.dtype = weights[0].dtype  # of the embedding, in the program of a model
        self.layout = [[*map(each, weights)] for each in LAYOUT]
        self.places = self.layout[0]
        self.last: Ready | None = None
        # The matrix of a linear layer has a dtype of its own.
        vectors = [(op.bias, None if op.kind == "linear" else op.weight) for op in program.operations]
        self.of_operations = [*map(self._one_dtype, vectors)]
        self.of_layers = [self._one_dtype(layer.weights.values()) for layer in program.layers]
        self.state_dtypes = self._state_dtypes()

    def _one_dtype(self, weights: Iterable[int | None]) -> torch.dtype | None:
        dtypes = {self.weights[i].dtype for i in weights if i is not None}
        if len(dtypes) > 1:
            raise UnsupportedError(f"weights of one part have the dtypes {', '.join(sorted(map(str, dtypes)))}")
        return dtypes.pop() if dtypes else None

    def _state_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of the states that can be updated in place."""
        dtypes = {i: x.dtypes[0] for i, x in enumerate(self.program.states) if len(x.dtypes) == 1}
        for op, dtype in zip(self.program.operations, self.of_operations, strict=True):
            if op.state is not None and dtype is not None:
                dtypes[op.state] = dtype
        for layer, dtype in zip(self.program.layers, self.of_layers, strict=True):
            dtypes = dict.fromkeys(layer.state.values(), dtype or self.dtype) | dtypes
        return [dtypes.get(i, self.dtype) for i in range(len(self.program.states))]

    def has_weights(self, weights: list[Any]) -> bool:
        """Whether these are the same tensors, read in the same way from the same memory, which their `data` can set."""
        same = all(map(operator.is_, weights, self.weights))
        return same and all([*map(each, weights)] == own for each, own in zip(LAYOUT, self.layout, strict=True))

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the weights of the layers, or of all operations without layers, have this dtype."""
        return all(own in (None, dtype) for own in (*self.of_layers, *self.of_operations))

    def take(self, states: Sequence[Any], rows: int) -> "Ready | None":
        """Returns the program with the states of B = `rows` sequences, or None if they cannot be updated in place: they
        have other shapes or dtypes, or autograd needs them."""
        ready = self._take([getattr(states[i], field) for i, field in self.program.state_places], rows)
        if ready is None or not self.program.attentions:
            return ready
        packed = [each.packed(self, states[each.place], rows) for each in self.program.attentions]
        return None if None in packed else ready._replace(attentions=b"".join(packed))

    def _take(self, states: list[Any], rows: int) -> "Ready | None":
        places = [native.address(x) for x in states]
        where, last = (rows, torch.is_inference_mode_enabled()), self.last
        if (
            last is not None
            and where == last.where
            and places == last.places
            and all(x is state() for x, state in zip(states, last.states, strict=True))
        ):
            return last
        for expected, dtype, x in zip(self.program.states, self.state_dtypes, states, strict=True):
            if expected.fault(x, (rows, *expected.shape)) is not None or x.dtype is not dtype:
                return None
            if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
                return None
        self._check_apart(states, places)
        self.last = Ready(self.program, where, [*map(weakref.ref, states)], places, *self._packed(states, places))
        return self.last

    def first_states(self, rows: int) -> list[Any]:
        """Returns the states of B = `rows` sequences before their first token."""
        parts: list[dict[str, Tensor]] = [{} for _ in self.program.kinds]
        for each in self.program.attentions:
            parts[each.place] |= each.empty(rows, self.dtype)
        places = zip(self.program.state_places, self.program.states, self.state_dtypes, strict=True)
        for (place, field), expected, dtype in places:
            parts[place][field] = torch.zeros(rows, *expected.shape, dtype=dtype, device="cpu")
        return [kind(**given) for kind, given in zip(self.program.kinds, parts, strict=True)]

    def _check_apart(self, states: list[Tensor], places: list[int]) -> None:
        """Raises InputError if a state shares memory with another tensor."""
        given = (self.weights, self.places, self.program.weights), (states, places, self.program.states)
        spans = (
            (place, place + x.nbytes, expected.name, of_state)
            for some, of_state in zip(given, (False, True), strict=True)
            for x, place, expected in zip(*some, strict=True)
        )
        check_apart(spans, "separate memory for the state")

    def _packed(self, states: list[Tensor], places: list[int]) -> tuple[bytes, bytes]:
        operations = zip(self.program.operations, self.of_operations, strict=True)
        layers = zip(self.program.layers, self.of_layers, strict=True)
        packed = b"".join(_OPERATION.pack(*self._operation(op, dtype, states, places)) for op, dtype in operations)
        return packed, b"".join(_LAYER.pack(*self._layer(layer, dtype, places)) for layer, dtype in layers)

    def _operation(self, op: Operation, dtype: torch.dtype | None, states: list[Tensor], places: list[int]) -> Iterable:
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

    def _layer(self, layer: Layer, dtype: torch.dtype | None, places: list[int]) -> Iterable:
        code, frequencies = CODES[dtype or torch.float32], native.address(layer.frequencies)
        given = layer.fields | {"dtype": code, "frequencies": frequencies}
        given |= {name: self._address(i) for name, i in layer.weights.items()}
        given |= {name: places[i] for name, i in layer.state.items()}
        return (given.get(name, 0) for name in _LAYER.fields)


class Ready(NamedTuple):
    """A program with the addresses of its states. The caller keeps the states alive. A Ready never changes, so that
    threads may share a model."""

    program: Program
    where: tuple[int, bool]  # number of sequences, and whether inference mode is on
    states: list[weakref.ref[Tensor]]  # weak, as a model would keep the memory of its last batch
    places: list[int]
    operations: bytes  # hr_operation
    layers: bytes  # hr_layer
    attentions: bytes = b""  # hr_attention, of one call

    def run(self, outside: dict[int, Tensor], tokens: Tensor | None = None, in_order: bool = False) -> None:
        """Runs the program.

        Args:
            outside: tensors [B, ·] by the index of the operation that reads or writes them.
            tokens: [B], for a program that begins with an embedding.
            in_order: whether the tokens follow one another in one sequence, whose states are given.

        Raises:
            InputError: for a token that the embedding does not have.
        """
        program, operations = self.program, bytearray(self.operations)
        rows = self.where[0] if tokens is None or not in_order else len(tokens)
        for i, x in outside.items():
            struct.pack_into("@P", operations, i * _OPERATION.size + _STATE, x.data_ptr())
            if program.operations[i].kind in ("load", "store"):
                struct.pack_into("@i", operations, i * _OPERATION.size + _DTYPE, CODES[x.dtype])
        header = _PROGRAM.pack(
            native.ABI, torch.get_num_threads(), rows, program.width, len(program.operations), len(program.layers),
            program.vocabulary, native.address(tokens), in_order, len(program.attentions),
        )  # fmt: skip
        assert native.library is not None
        status = native.library.hr_run(header, bytes(operations), self.layers, self.attentions)
        # Tells autograd, which may have saved one of these tensors for a backward, that the tensors have changed.
        increment_version([s for each in self.states if (s := each()) is not None and not s.is_inference()])
        if status == NO_TOKEN:
            raise InputError(f"a token is not below {program.vocabulary}, the size of the vocabulary")
        native.check(status)


def refused_now() -> str | None:
    """Returns why no program can run now, or None."""
    if torch.is_grad_enabled():
        return "it has no gradient: torch.no_grad() is needed"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if dispatched():
        return "it reads memory by address, and runs neither in a graph nor under a transform or a dispatch mode"
    return "it calls no modules, so that a hook of all modules would not run" if _has_any_global_hook() else None


class ProgramOf:
    """The program of a module, built when it is first needed, and again after a change of the module.

    Args:
        build: adds the operations of the module to a new program, or raises UnsupportedError.
    """

    def __init__(self, build: Callable[[Program, Any], None]):
        self._build = build
        self._built: tuple[Program | None, str | None] = None, None  # the program, and why it could not be built
        self._bound: Bound | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_build": self._build, "_built": (None, None), "_bound": None}  # a copy has other modules

    def find(self, module: Any) -> tuple[Bound | None, str | None]:
        """Returns (a program that can run now, None), or (None, why there is none).

        Raises InputError for a weight whose shape is not the one that its module was built with."""
        if native.missing:
            return None, native.missing
        program, reason = self._built
        if program is None or not program.intact(module):
            program, reason = Program(module), None
            try:
                self._build(program, module)
            except UnsupportedError as error:
                reason = str(error)
            program.finish()
            self._built = program, reason  # complete, so that threads may share a model
        if reason := reason or refused_now():
            return None, reason
        bound, weights = self._bound, program.held_weights()
        if bound is None or bound.program is not program or not bound.has_weights(weights):
            try:
                self._bound = bound = Bound(program, weights)
            except UnsupportedError as error:
                return None, str(error)
        return bound, None
