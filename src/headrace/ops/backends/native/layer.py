"""`torch.ops.headrace.layer_step`: one token of a linear layer in one native call on the CPU, from the output of the
input projection to the input of the output projection, with the state updated in place (native/layer_step.h).

The library gets bare addresses, so that every tensor is checked here before the call. A layer makes one call of some
20 µs per token, so that the expected shapes and dtypes are computed once per batch size.

Dimensions: B batch, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...autograd import define
from ...checks import require
from . import library as native
from .layer_shapes import Shape, token_shapes, weight_shapes

SCHEMA = (
    "(Tensor projected, Tensor? hidden, Tensor?[] weights, Tensor(a!) memory, Tensor(b!)? conv, "
    "Tensor(c!)? tokens, int[] kinds, int[] sizes, float[] numbers)"
)
# hr_layer: the constants of a layer (its sizes after B; scale, three epsilons, temperature, theta (0: no rotation)),
# then the addresses of its weights and of the other tensors.
_SETTINGS = struct.Struct("@16i5fd9q")
WEIGHTS = (
    "conv_weight", "conv_bias", "decay_up", "decay_bias", "decay_log", "bonus", "read_scores", "write_scores", "skip",
    "gate_up", "gate_bias", "norm_weight", "norm_bias",
)  # fmt: skip
TOKEN = ("projected", "hidden")
STATE = ("memory", "conv", "tokens")
OPTIONAL = ("conv_bias", "bonus", "skip")
DTYPES = {"memory": torch.float32, "tokens": torch.int64}  # other tensors have the dtype of `projected`
KINDS = {name: values for name, *values in map(str.split, native.kinds().splitlines())}
MANY = 1024  # size limit of the caches


def numbered(names: dict[str, str]) -> tuple[list[int], str | None]:
    """Returns (the library's numbers of the kinds, None), or ([], why the library does not support one of them)."""
    for kind, known in KINDS.items():
        if names[kind] not in known:
            return [], f"it does not support {kind}={names[kind]!r}"
    return [known.index(names[kind]) for kind, known in KINDS.items()], None


class Layer:
    """The constant arguments of a layer's native calls.

    Args:
        kinds: the kind of each part of the layer by the part's name in KINDS.
        sizes, numbers: in the order of hr_layer.
        weights: names of the layer's weights.

    Raises:
        ValueError: if the kinds need other weights.
    """

    def __init__(self, kinds: dict[str, str], sizes: Sequence[int], numbers: Sequence[float], weights: Sequence[str]):
        self.kind, self.sizes, self.numbers, self.weights = kinds, sizes, numbers, weights
        self.kinds, self.unknown = ([], native.missing) if native.missing else numbered(kinds)
        if self.unknown is not None:
            return
        absent = f"{struct.calcsize('P')}x"  # a null pointer
        self.addresses = "@" + "".join("P" if name in weights else absent for name in WEIGHTS) + "6P"
        self._calls: dict[Any, Call] = {}
        shapes = weight_shapes(self.kind, self.sizes)
        for name in WEIGHTS:
            if name in weights and name not in shapes:
                raise ValueError(f"{name} is given; expected None")
            if name not in weights and name in shapes and name not in OPTIONAL:
                raise ValueError(f"{name} is None; expected {_words(shapes[name])}")

    def unsupported_reason(self, x: Tensor, weights: Sequence[Tensor]) -> str | None:
        """Returns why the library cannot compute x [B, 1, D] with these weights, or None.

        Raises InputError for a weight whose shape is not the layer's."""
        if not x.is_cpu or x.dtype not in native.DTYPES:
            return f"it runs on the CPU, in float32 and bfloat16; x is {x.dtype} on {x.device.type}"
        if native.missing or self.unknown:
            return native.missing or self.unknown
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        expected = self.call(x.shape[0], x.dtype).weights
        if (n := unfit(weights, expected)) is None:
            return None
        require(weights[n].shape == expected[n].shape, expected[n].fault(weights[n]))
        return expected[n].fault(weights[n])

    def state(self, rows: int, dtype: torch.dtype) -> list["Expected"]:
        """Returns what the library expects of the state of `rows` sequences."""
        return self.call(rows, dtype).state

    def fits(self, state: Sequence[Tensor | None], x: Tensor) -> bool:
        """Whether the library can update the state of the sequences of x in place."""
        return unfit(state, self.call(x.shape[0], x.dtype).state) is None

    def run(self, weights: Sequence[Tensor], token: Sequence[Any], state: Sequence[Tensor | None]) -> Tensor:
        """Runs one token: by the operator while tracing a graph, else without the dispatcher, which takes as long as
        the step. The weights and the state must be as the call expects them."""
        if torch.compiler.is_compiling():
            given = dict(zip(self.weights, weights, strict=True))
            every, settings = [given.get(name) for name in WEIGHTS], (self.kinds, self.sizes, self.numbers)
            return _operator(*token, every, *state, *settings)
        return self.call(len(token[0]), token[0].dtype).step(weights, token, state)

    def call(self, rows: int, dtype: torch.dtype) -> "Call":
        """Returns the call for a batch size and a dtype of activations."""
        call = self._calls.get((rows, dtype))
        if call is None:
            call = self._calls[rows, dtype] = Call(self, rows, dtype)
        return call


class Expected(NamedTuple):
    """The shape and dtype of a tensor that the library expects, contiguous and on the CPU."""

    shape: Shape | None  # None: the tensor must be None
    dtype: torch.dtype
    name: str

    def fault(self, x: Tensor | None) -> str:
        """Returns a sentence about how a tensor differs from what is expected."""
        if x is None:
            return f"{self.name} is None; expected {_words(self.shape)}"
        if x.shape != self.shape:
            return f"{self.name} has shape {list(x.shape)}; expected {_words(self.shape)}"
        if x.dtype is not self.dtype:
            return f"{self.name} has dtype {x.dtype}; expected {self.dtype}"
        return f"{self.name} is on {x.device} with strides {x.stride()}; expected a contiguous tensor on the CPU"


def _words(shape: Shape | None) -> str:
    return "None" if shape is None else f"shape {list(shape)}"


def unfit(tensors: Iterable[Tensor | None], expected: list[Expected]) -> int | None:
    """Returns the index of the first tensor that is not as expected, or None."""
    for n, (x, (shape, dtype, _)) in enumerate(zip(tensors, expected, strict=True)):
        if x is None:
            if shape is not None:
                return n
        elif x.shape != shape or x.dtype is not dtype or not x.is_cpu or not x.is_contiguous():
            return n
    return None


def require_fit(tensors: Sequence[Tensor | None], expected: list[Expected]) -> None:
    """Raises ValueError unless all tensors are as expected."""
    if (n := unfit(tensors, expected)) is not None:
        raise ValueError(expected[n].fault(tensors[n]))


class Call:
    """A layer's call for one batch size and one dtype of activations. It holds no pointers, so that models can be
    copied and pickled."""

    def __init__(self, layer: Layer, rows: int, dtype: torch.dtype):
        shapes = weight_shapes(layer.kind, layer.sizes)
        shapes |= token_shapes(layer.kind, layer.sizes, bool(layer.numbers[-1]), rows)
        self.weights, self.token, self.state = (
            [Expected(shapes.get(name), DTYPES.get(name, dtype), name) for name in names]
            for names in (layer.weights, TOKEN, STATE)
        )
        self.numbers = *layer.kinds, *layer.numbers, rows, *layer.sizes
        self.dtype, self.out = native.DTYPES[dtype], (rows, layer.sizes[1] * layer.sizes[4])
        self.addresses = layer.addresses
        self.settings: dict[int, bytes] = {}
        self.apart: set[tuple[int, ...]] = set()  # addresses that were checked for overlaps

    def step(self, weights: Sequence[Tensor], token: Sequence[Tensor | None], state: Sequence[Tensor | None]) -> Tensor:
        """Runs the call. The weights and the state must be as expected. Raises ValueError if an input of the token is
        not as expected, or if a tensor of the state shares memory with another tensor."""
        require_fit(token, self.token)
        places = *[x.data_ptr() for x in weights], *[0 if x is None else x.data_ptr() for x in (*token, *state)]
        if places not in self.apart:
            self._check_apart(places)
        out = token[0].new_empty(self.out)  # type: ignore[union-attr]
        native.layer_step(self._settings() + struct.pack(self.addresses, *places, out.data_ptr()))
        # Tells autograd, which may have saved one of these tensors for a backward, that the tensors have changed.
        increment_version([x for x in state if x is not None and not x.is_inference()])
        return out

    def _settings(self) -> bytes:
        threads = torch.get_num_threads()
        if threads not in self.settings:
            self.settings[threads] = _SETTINGS.pack(native.ABI, self.dtype, threads, *self.numbers)
        return self.settings[threads]

    def _check_apart(self, places: tuple[int, ...]) -> None:
        expected = self.weights + self.token + self.state
        spans = [
            (x.name, start, start + math.prod(x.shape) * x.dtype.itemsize)
            for x, start in zip(expected, places, strict=True) if x.shape is not None
        ]  # fmt: skip
        for name, start, end in (span for span in spans if span[0] in STATE):
            for other, begin, stop in spans:
                if other != name and begin < end and start < stop:
                    raise ValueError(f"{name} shares memory with {other}; expected separate memory for the state")
        if len(self.apart) >= MANY:
            self.apart.clear()
        self.apart.add(places)


@lru_cache(maxsize=MANY)
def known(kinds: tuple[int, ...], *rest) -> Layer:
    """Returns the layer with these numbers of kinds."""
    return Layer({name: values[i] for (name, values), i in zip(KINDS.items(), kinds, strict=True)}, *rest)


def layer_step(projected: Tensor, hidden, weights, memory, conv, tokens, kinds, sizes, numbers) -> Tensor:
    """The operator: projected [B, parts], hidden [B, D] if scores use the layer's input -> [B, H V].

    Updates memory [B, H, K, ·], conv [B, ·, ·] and tokens [B] in place. Raises ValueError unless all tensors are
    contiguous and have separate memory."""
    if projected.dtype not in native.DTYPES or projected.dim() != 2:
        description = f"dtype {projected.dtype} and shape {list(projected.shape)}"
        raise ValueError(f"projected has {description}; expected torch.float32 or torch.bfloat16 and [B, parts]")
    given = {name: weight for name, weight in zip(WEIGHTS, weights, strict=True) if weight is not None}
    layer = known(tuple(kinds), tuple(sizes), tuple(numbers), tuple(given))
    call, state = layer.call(projected.shape[0], projected.dtype), (memory, conv, tokens)
    require_fit(list(given.values()), call.weights)
    require_fit(state, call.state)
    return call.step(list(given.values()), (projected, hidden), state)


def _fake(projected, hidden, weights, memory, conv, tokens, kinds, sizes, numbers):
    return projected.new_empty(projected.shape[0], sizes[1] * sizes[4])


_operator = define("layer_step", SCHEMA, 1, layer_step, _fake, "CPU")
