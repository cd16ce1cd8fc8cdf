"""A token through a whole linear layer in one native call, `torch.ops.headrace.layer_step`, on the CPU: everything
between the input projection and the output projection, with the state updated in place (native/layer_step.h)."""

import struct

import torch
from torch import Tensor

from . import native
from .operator import library

SCHEMA = (
    "layer_step(Tensor projected, Tensor? hidden, Tensor?[] weights, Tensor(a!) memory, Tensor(b!)? conv, "
    "Tensor(c!)? tokens, int[] kinds, int[] sizes, float[] numbers) -> Tensor"
)
# In hr_layer's order: its 13 weights; its sizes after B; scale, three epsilons, temperature, theta (0: no rotation).
_LAYER = struct.Struct("@16i5fd9q19P")
KINDS = {name: values for name, *values in map(str.split, native.kinds().splitlines())}


def numbered(names: dict[str, str]) -> tuple[list[int], str | None]:
    """Names of kinds as the library numbers them, or why it cannot: ([], a sentence)."""
    for kind, known in KINDS.items():
        if names[kind] not in known:
            return [], f"it does not know {kind}={names[kind]!r}"
    return [known.index(names[kind]) for kind, known in KINDS.items()], None


def layer_step(projected: Tensor, hidden, weights, memory, conv, tokens, kinds, sizes, numbers) -> Tensor:
    """projected [B, parts], the layer's input [B, D] if scores read it -> [B, H V]; memory [B, H, K, ·], conv [B, ·, ·]
    and tokens [B] are brought up to date. All contiguous."""
    out = projected.new_empty(projected.shape[0], sizes[1] * sizes[4])
    addresses = [0 if x is None else x.data_ptr() for x in (*weights, projected, hidden, memory, conv, tokens, out)]
    packed = _LAYER.pack(
        native.ABI, native.DTYPES[projected.dtype], torch.get_num_threads(), *kinds, *numbers, projected.shape[0],
        *sizes, *addresses,
    )  # fmt: skip
    native.layer_step(packed)
    return out


def _fake(projected, hidden, weights, memory, conv, tokens, kinds, sizes, numbers):
    return projected.new_empty(projected.shape[0], sizes[1] * sizes[4])


library.define(SCHEMA)
library.impl("layer_step", layer_step, "CPU")
torch.library.register_fake("headrace::layer_step", _fake, lib=library)


def run(*args) -> Tensor:
    """The operator where a graph is being traced; without its dispatch, which costs as much as the step, elsewhere."""
    return torch.ops.headrace.layer_step(*args) if torch.compiler.is_compiling() else layer_step(*args)
