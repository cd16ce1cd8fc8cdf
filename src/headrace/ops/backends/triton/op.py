"""The backend "triton": headrace's own kernels for GPUs, as a PyTorch operator, `torch.ops.headrace.triton`."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ....utils.device import interpreted, is_hopper
from ...autograd import define, register, wants_gradient
from ...call import SCHEMA, Call
from ...derivatives import transforms_reason
from ...rewrite import normalized, per_query, with_bonus
from ..base import Backend, Kernel
from .limits import DTYPES, LARGEST_KEY, missing

KEY = "CompositeExplicitAutograd"
CHUNKS = 16, 32, 64


def unsupported_reason(call: Call) -> str | None:
    """Returns why the kernels cannot compute a call, or None."""
    if not (call.v.is_cuda or interpreted()):
        return f"it runs on a GPU, and v is on {call.v.device.type}"
    return unsupported_on_gpus(call)


def unsupported_on_gpus(call: Call) -> str | None:
    """Returns why the kernels cannot compute a call of tensors like these on any GPU, or None."""
    dtype, K = call.v.dtype, call.k.shape[-1]
    if dtype not in DTYPES:
        return f"it computes in float32, from float32, bfloat16 or float16, and v is {dtype}"
    if not 0 < K <= LARGEST_KEY or call.v.shape[-1] == 0:
        return f"it takes K from 1 to {LARGEST_KEY} and V from 1, and they are {K} and {call.v.shape[-1]}"
    if call.chunk_size not in (None, *CHUNKS):
        return f"its chunks have 16, 32 or 64 tokens, and chunk_size is {call.chunk_size}"
    return None


def _late(module: str, name: str) -> Callable[..., Any]:
    """Returns a function of a module, which is imported at the first call because it needs Triton."""
    loaded = cache(partial(import_module, f".{module}", __package__))

    def run(*args: Any) -> Any:
        return getattr(loaded(), name)(*args)

    return run


_chunks_forward, _chunks_backward = _late("launch", "forward"), _late("launch", "backward")
_token = _late("step", "step")


def _forward(call: Call, keep: bool):
    return _chunks_forward(call)


def _backward(d_out: Tensor, d_final: Tensor, call: Call, kept: Any, wanted: Any):
    return _chunks_backward(d_out, d_final, call, wanted[3])


def _on_request(call: Call) -> bool:
    """True except on Hopper: an H200 has run the kernels; for other GPUs they were only compiled."""
    if call.v.dim() == 3 and wants_gradient(call):  # PyTorch's step has derivatives of all orders
        return True
    return not (call.v.is_cuda and is_hopper(call.v.device))


def _about() -> str:
    import triton

    device = "interpreter" if interpreted() else torch.cuda.get_device_name()
    by_name = "" if interpreted() or is_hopper(torch.device("cuda")) else ", which only its name chooses"
    return f"Triton {triton.__version__}, {device}{by_name}"


def _step_of(*args):
    call, after = Call(*args), _like_step(*args)[1]
    return _token(call, after), after


def _step_in_place(*args):
    call = Call(*args)
    return _token(call, call.initial_state)


def _like_out(*args):
    call = Call(*args)
    return call.v.new_empty(call.out_shape)


def _like_step(*args):
    call = Call(*args)
    state = (*call.v.shape[:2], call.k.shape[-1], call.v.shape[-1])
    return _like_out(*args), call.v.new_empty(state, dtype=torch.float32)


STEP = f"({SCHEMA})"
_step_op = define("triton_step", STEP, 2, _step_of, _like_step, KEY)
_step_op_in_place = define(
    "triton_step_", STEP.replace("Tensor? initial_state", "Tensor(a!) initial_state"), 1, _step_in_place, _like_out, KEY
)


_chunkwise = register("triton", KEY, _forward, _backward, [], lambda call: ())


def _step(call: Call, in_place: bool) -> tuple[Tensor, Tensor]:
    if wants_gradient(call):  # the kernel of one token has none
        out, after = _differentiable(call.with_tokens())
        return out.squeeze(1), after
    if call.normalize:
        return normalized(call, lambda call: _step(call, in_place))
    state = call.initial_state
    if in_place and state is not None and state.dtype == torch.float32 and state.is_contiguous():
        out = _step_op_in_place(*call)
        if not (torch.compiler.is_compiling() or state.is_inference()):
            increment_version(state)  # tells autograd, which may have saved it for a backward
        return out, state
    return _step_op(*call)


def _differentiable(call: Call) -> tuple[Tensor, Tensor]:
    run = partial(per_query, run=_chunkwise)
    if call.normalize:
        return normalized(call, run)
    return run(call) if call.bonus is None else with_bonus(call, run)


def _unsupported_step(call: Call) -> str | None:
    """Returns why the kernels cannot compute one token, or None."""
    return transforms_reason() or unsupported_reason(call)


BACKEND = Backend(
    missing=missing,
    about=_about,
    linear_attention=Kernel(_chunkwise, unsupported_reason),
    step=Kernel(_step, _unsupported_step),
    on_request=_on_request,
)
