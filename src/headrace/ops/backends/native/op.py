"""The backend "native": the native library as a PyTorch operator for the CPU, `torch.ops.headrace.native`."""

import torch
from torch import Tensor

from ... import derivatives
from ...autograd import register, wants_gradient
from ...call import Call
from ...prepared import prepare
from ...rewrite import normalized, per_query
from ..base import Backend, Kernel
from . import library as native

CHUNKS = range(16, 129, 16)
LARGEST = 2**16
AGAIN = 2**24  # floats of the states that a backward computes again at once
SPARE = 16  # floats, so that no size is 0 or 1, of which PyTorch's compiler makes another graph


def _unsupported_reason(call: Call) -> str | None:
    """Returns why the library cannot compute a call, or None."""
    device, dtype, (K, V) = call.v.device.type, call.v.dtype, (call.k.shape[-1], call.v.shape[-1] + call.normalize)
    if device != "cpu":
        return f"it runs on the CPU, and v is on {device}"
    if dtype not in native.DTYPES:
        return f"it computes in float32, from float32 or bfloat16, and v is {dtype}"
    if K > LARGEST or V > LARGEST:
        return f"it takes K and V (V + 1 with normalize) from 1 to {LARGEST}, and they are {K} and {V}"
    if call.chunk_size is not None and call.chunk_size not in CHUNKS:
        return f"its chunks are multiples of 16 up to 128 tokens, and chunk_size is {call.chunk_size}"
    return None


def _kept_shapes(call: Call):
    """Returns how many floats the library keeps, by the formula of native/dispatch.cpp, from sizes alone: in a graph
    they may be symbolic."""
    (B, T, H, V), K, chunk = call.v.shape, call.k.shape[-1], _chunk_size(call)
    per_chunk = chunk * (2 * K + V) * call.v.dtype.itemsize // torch.float32.itemsize
    tenth = -(-10 * K * V // per_chunk)
    run = max(AGAIN // (K * V), 1)
    while run < tenth and run * run < T // chunk:
        run *= 2
    rows = T if call.bonus is None else T + 1  # as Plan::delay
    states = B * ((rows - 1) // (min(run, tenth) * chunk))
    columns = V + 1 if call.normalize else V
    return ((states * H * K * columns + SPARE,),)


def _chunk_size(call: Call) -> int:
    """Returns the call's chunk size, or the library's default."""
    per_key = call.log_decay is not None and call.log_decay.dim() == 4 and not call.delta
    return call.chunk_size or (16 if call.k.shape[-1] + call.v.shape[-1] <= 128 and not per_key else 32)


_operator = register("native", "CPU", native.forward, native.backward, ["kept"], _kept_shapes)


def _run(call: Call) -> tuple[Tensor, Tensor]:
    decay = call.log_decay
    if call.bonus is not None and decay is not None and decay.dim() == 1:
        # With a bonus the library takes one per token.
        call = call._replace(log_decay=decay.expand(call.v.shape[:3]))
    if call.normalize and call.v.shape[1] == 1:  # a token's own kernel has no normalizer
        return normalized(call, _operator)
    return _operator(call)


def _step(call: Call, in_place: bool) -> tuple[Tensor, Tensor]:
    call = call.with_tokens()
    out, state = normalized(call, _token) if call.normalize else _token(call)
    return out.squeeze(1), state


def _token(call: Call) -> tuple[Tensor, Tensor]:
    """Computes one token. Its own kernel has grouped queries, and no gradient."""
    return per_query(call, _run) if wants_gradient(call) else _run(call)


def _unsupported_step(call: Call) -> str | None:
    return derivatives.transforms_reason() or _unsupported_reason(call)


BACKEND = Backend(
    missing=lambda: native.missing,
    about=lambda: f"C++, {native.instructions}",
    linear_attention=Kernel(_run, _unsupported_reason, extras=("bonus", "normalize")),
    step=Kernel(_step, _unsupported_step, prepare=prepare),
)
