"""A token through a whole linear layer in one native call, `torch.ops.headrace.layer_step`, on the CPU: everything
between the input projection and the output projection, with the state updated in place (native/layer_step.h).

The library is handed bare addresses, so nothing reaches it that was not looked at here. A layer makes a call for every
token, which takes it some 30 µs: what is expected is worked out once for a batch size, and compared.

Dimensions: B batch, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import native
from .operator import library

SCHEMA = (
    "layer_step(Tensor projected, Tensor? hidden, Tensor?[] weights, Tensor(a!) memory, Tensor(b!)? conv, "
    "Tensor(c!)? tokens, int[] kinds, int[] sizes, float[] numbers) -> Tensor"
)
# hr_layer: what a layer has for all tokens (its sizes after B; scale, three epsilons, temperature, theta (0: no
# rotation)), then the addresses of its weights and of the other tensors.
_SETTINGS, _ADDRESSES = struct.Struct("@16i5fd9q"), struct.Struct("@19P")
WEIGHTS = (
    "conv_weight", "conv_bias", "decay_up", "decay_bias", "decay_log", "bonus", "read_scores", "write_scores", "skip",
    "gate_up", "gate_bias", "norm_weight", "norm_bias",
)  # fmt: skip
NAMES = (*WEIGHTS, "projected", "hidden", "memory", "conv", "tokens")
WRITTEN = slice(NAMES.index("memory"), len(NAMES))
OPTIONAL = ("conv_bias", "bonus", "skip")
DTYPES = {"memory": torch.float32, "tokens": torch.int64}  # of the others: that of `projected`
KINDS = {name: values for name, *values in map(str.split, native.kinds().splitlines())}

Shape = tuple[int, ...]


def numbered(names: dict[str, str]) -> tuple[list[int], str | None]:
    """Names of kinds as the library numbers them, or why it cannot: ([], a sentence)."""
    for kind, known in KINDS.items():
        if names[kind] not in known:
            return [], f"it does not know {kind}={names[kind]!r}"
    return [known.index(names[kind]) for kind, known in KINDS.items()], None


class Layer:
    """What the library is told of a layer: its kinds and sizes, in the order of hr_layer, and its numbers."""

    def __init__(self, kinds: Sequence[int], sizes: Sequence[int], numbers: Sequence[float]):
        self.kinds, self.sizes, self.numbers = kinds, sizes, numbers
        self._calls: dict[Any, Call] = {}

    def call(self, rows: int, dtype: torch.dtype) -> "Call":
        key = rows, dtype, torch.get_num_threads()
        found = self._calls.get(key)
        return found or self._calls.setdefault(key, Call(self, *key))

    def shapes(self, rows: int) -> dict[str, Shape]:
        """Of the tensors that a layer of these kinds has, and of those that it may have."""
        kind = {name: values[i] for (name, values), i in zip(KINDS.items(), self.kinds, strict=True)}
        return self._weight_shapes(kind) | self._token_shapes(kind, rows)

    def _weight_shapes(self, kind: dict[str, str]) -> dict[str, Shape]:
        D, H, Hq, K, V, width, decay_reads, gate_reads = self.sizes
        shapes: dict[str, Shape] = {"bonus": (H, K), "skip": (H,)}
        if width:
            channels = 2 * Hq * K + H * V
            shapes |= {"conv_weight": (channels, 1, width), "conv_bias": (channels,)}
        up = {"sigmoid": (H * K, decay_reads), "softplus-vector": (H * K, decay_reads), "exp": (decay_reads, H * K)}
        if kind["decay"] in up:
            shapes |= {"decay_up": up[kind["decay"]], "decay_bias": (H * K,)}
        if kind["decay"] == "softplus":
            shapes["decay_bias"] = (H,)
        if kind["decay"].startswith("softplus"):
            shapes["decay_log"] = (H,)
        scores = {"head": (H, K), "diag": (K, H), "query": (H, Hq * K), "hidden": (H, D)}[kind["source"]]
        shapes |= {f"{gate}_scores": scores for gate in ("read", "write") if kind[gate] != "none"}
        if kind["gate"] == "sigmoid-low-rank":
            shapes |= {"gate_up": (H * V, gate_reads), "gate_bias": (H * V,)}
        norms = {"rms": (V,), "group": (H * V,), "rms-joint": (H * V,)}
        if kind["norm"] in norms:
            shapes["norm_weight"] = norms[kind["norm"]]
        return shapes | ({"norm_bias": (H * V,)} if kind["norm"] == "group" else {})

    def _token_shapes(self, kind: dict[str, str], rows: int) -> dict[str, Shape]:
        D, H, Hq, K, V, width, decay_reads, gate_reads = self.sizes
        parts = 2 * Hq * K + H * V + decay_reads + gate_reads + H * (kind["beta"] == "sigmoid")
        shapes = {"projected": (rows, parts), "memory": (rows, H, K, V + (kind["norm"] == "sum"))}
        if kind["source"] == "hidden" and {kind["read"], kind["write"]} != {"none"}:
            shapes["hidden"] = (rows, D)
        if width:
            shapes["conv"] = (rows, width - 1, 2 * Hq * K + H * V)
        return shapes | ({"tokens": (rows,)} if self.numbers[-1] else {})


class Call:
    """What a call is for one batch size, one dtype of activations and one number of threads."""

    def __init__(self, layer: Layer, rows: int, dtype: torch.dtype, threads: int):
        shapes = layer.shapes(rows)
        self.expected = [
            (name, shapes.get(name), DTYPES.get(name, dtype), name in shapes and name not in OPTIONAL) for name in NAMES
        ]
        self.settings = _SETTINGS.pack(
            native.ABI, native.DTYPES[dtype], threads, *layer.kinds, *layer.numbers, rows, *layer.sizes
        )
        self.out = rows, layer.sizes[1] * layer.sizes[4]
        self.apart: list[int] = []  # addresses of tensors none of which lies in another

    def addresses(self, tensors: list[Tensor | None]) -> list[int]:
        """Of the tensors, in the order of NAMES, 0 for None. Raises ValueError for one that the library would not find
        as it expects it, or would write into by way of another."""
        found = []
        for x, (name, shape, dtype, needed) in zip(tensors, self.expected, strict=True):
            if x is None and not needed:
                found.append(0)
            elif x is not None and x.shape == shape and x.dtype is dtype and x.is_cpu and x.is_contiguous():
                found.append(x.data_ptr())
            else:
                raise ValueError(fault(name, x, shape, dtype))
        if found != self.apart:
            check_apart(tensors, found)
            self.apart = found
        return found


def fault(name: str, x: Tensor | None, shape: Shape | None, dtype: torch.dtype) -> str:
    """What is wrong with a tensor."""
    wanted = "None" if shape is None else f"shape {list(shape)}"
    if x is None:
        return f"{name} is None; expected {wanted}"
    if x.shape != shape:
        return f"{name} has shape {list(x.shape)}; expected {wanted}"
    if x.dtype is not dtype:
        return f"{name} has dtype {x.dtype}; expected {dtype}"
    return f"{name} is on {x.device} with strides {x.stride()}; expected contiguous memory of the CPU"


def check_apart(tensors: list[Tensor | None], addresses: list[int]) -> None:
    """Raises ValueError where one that is written into shares memory with another."""
    spans = [(n, a, a + x.nbytes) for n, x, a in zip(NAMES, tensors, addresses, strict=True) if x is not None]
    for name, start, end in (span for span in spans if span[0] in NAMES[WRITTEN]):
        for other, begin, stop in spans:
            if other != name and begin < end and start < stop:
                raise ValueError(f"{name} shares memory with {other}; expected it apart, since it is written into")


def step(layer: Layer, projected: Tensor, hidden, weights, memory, conv, tokens) -> Tensor:
    """As `layer_step`, of a layer that is known."""
    if projected.dtype not in native.DTYPES:
        raise ValueError(f"projected has dtype {projected.dtype}; expected torch.float32 or torch.bfloat16")
    call = layer.call(projected.shape[0], projected.dtype)
    addresses = call.addresses([*weights, projected, hidden, memory, conv, tokens])
    out = projected.new_empty(call.out)
    native.layer_step(call.settings + _ADDRESSES.pack(*addresses, out.data_ptr()))
    # Autograd, which may hold one of them for a backward, cannot see what was written.
    torch.autograd.graph.increment_version(x for x in (memory, conv, tokens) if x is not None and not x.is_inference())
    return out


known = lru_cache(maxsize=1024)(Layer)


def layer_step(projected: Tensor, hidden, weights, memory, conv, tokens, kinds, sizes, numbers) -> Tensor:
    """projected [B, parts], the layer's input [B, D] if scores read it -> [B, H V]; memory [B, H, K, ·], conv [B, ·, ·]
    and tokens [B] are brought up to date. All contiguous, and apart. ValueError for what is not."""
    layer = known(tuple(kinds), tuple(sizes), tuple(numbers))
    return step(layer, projected, hidden, weights, memory, conv, tokens)


def _fake(projected, hidden, weights, memory, conv, tokens, kinds, sizes, numbers):
    return projected.new_empty(projected.shape[0], sizes[1] * sizes[4])


library.define(SCHEMA)
library.impl("layer_step", layer_step, "CPU")
torch.library.register_fake("headrace::layer_step", _fake, lib=library)


def run(layer: Layer, *tensors) -> Tensor:
    """The operator where a graph is being traced; without its dispatch, which costs as much as the step, elsewhere."""
    if torch.compiler.is_compiling():
        return torch.ops.headrace.layer_step(*tensors, layer.kinds, layer.sizes, layer.numbers)
    return step(layer, *tensors)
