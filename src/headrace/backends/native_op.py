"""The native library as a PyTorch operator, `torch.ops.headrace.native`, on the CPU."""

import torch
from torch import Tensor

from . import native
from .operator import register, wants_gradient

CHUNKS = range(16, 129, 16)


def missing() -> str | None:
    return native.missing


def about() -> str:
    return f"C++, {native.instructions}"


def refuses(call) -> str | None:
    """Why the library cannot take a Call, or None."""
    device, dtype = call.v.device.type, call.v.dtype
    if device != "cpu":
        return f"it runs on the CPU, and v is on {device}"
    if dtype not in native.DTYPES:
        return f"it computes in float32, from float32 or bfloat16, and v is {dtype}"
    if call.chunk_size is not None and call.chunk_size not in CHUNKS:
        return f"its chunks are multiples of 16 up to 128 tokens, and chunk_size is {call.chunk_size}"
    return None


def _kept_shapes(*args):
    """The library knows how much, for sizes that are numbers; while tracing they may not be."""
    keep = args[-1]
    return ((torch.library.get_ctx().new_dynamic_size() if keep else 0,),)


_native = register("native", "CPU", native.forward, native.backward, ["kept"], _kept_shapes)


def run(*args) -> tuple[Tensor, Tensor]:
    """(out, final state); the arguments are those of INPUTS in order; chunk_size None: the library's choice."""
    *given, chunk_size = args
    out, final, _ = _native(*given, chunk_size or 0, wants_gradient(*given))
    return out, final
