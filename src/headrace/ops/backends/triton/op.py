"""The backend "triton": headrace's own kernels for GPUs, as a PyTorch operator, `torch.ops.headrace.triton`."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ....utils.device import interpreted, without_autocast
from ... import convolution, residual_norm
from ...autograd import define, register, register_function
from ...call import SCHEMA, Call
from ...control import Control
from ...derivatives import transformed
from ...gated_norm import GatedNorm
from ...query_key import QueryKey
from ...residual_norm import ResidualNorm
from ...rewrite import normalised
from ..base import Backend, Kernel
from .layer import Layer
from .limits import DTYPES, LARGEST_HEADS, LARGEST_KEY, LARGEST_NORM, missing, unsupported_tokens

KEY = "CompositeExplicitAutograd"
CHUNKS = 16, 32, 64


def unsupported_reason(call: Call) -> str | None:
    """Returns why the kernels cannot compute a call, or None."""
    dtype, K = call.v.dtype, call.k.shape[-1]
    if not (call.v.is_cuda or interpreted()):
        return f"it runs on a GPU, and v is on {call.v.device.type}"
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
    with without_autocast(call.v):  # the states between segments are float32
        return _chunks_forward(call)


def _backward(d_out: Tensor, d_final: Tensor, call: Call, kept: Any, wanted: Any):
    with without_autocast(call.v):
        return _chunks_backward(d_out, d_final, call, wanted[3])


def _about() -> str:
    import triton

    device = "interpreter" if interpreted() else torch.cuda.get_device_name()
    return f"Triton {triton.__version__}, {device}"


def _step_of(*args):
    *given, bonus = args
    call, after = Call(*given), _like_step(*args)[1]
    return _token(call, bonus, after), after


def _step_in_place(*args):
    *given, bonus = args
    call = Call(*given)
    return _token(call, bonus, call.initial_state)


def _like_out(*args):
    return torch.empty_like(Call(*args[:-1]).v, memory_format=torch.contiguous_format)


def _like_step(*args):
    call = Call(*args[:-1])
    state = (*call.v.shape[:2], call.k.shape[-1], call.v.shape[-1])
    return _like_out(*args), call.v.new_empty(state, dtype=torch.float32)


STEP = f"({SCHEMA}, Tensor? bonus)"
_step_op = define("triton_step", STEP, 2, _step_of, _like_step, KEY)
_step_op_in_place = define(
    "triton_step_", STEP.replace("Tensor? initial_state", "Tensor(a!) initial_state"), 1, _step_in_place, _like_out, KEY
)


def _step(call: Call, bonus: Tensor | None, normalise: bool, in_place: bool) -> tuple[Tensor, Tensor]:
    if normalise:
        return normalised(call, lambda call: _step(call, None, False, in_place))
    state = call.initial_state
    if in_place and state is not None and state.dtype == torch.float32 and state.is_contiguous():
        return _step_op_in_place(*call, bonus), state
    return _step_op(*call, bonus)


def _unsupported_step(call: Call, bonus: Tensor | None, normalise: bool) -> str | None:
    """Returns why the kernel cannot compute one token, or None."""
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*call.tensors, bonus))
    if transformed() or wanted:
        return "its step has no derivatives; torch.no_grad() or backend='torch' does"
    return unsupported_reason(call)


def _unsupported_convolution(conv: nn.Conv1d, x: Tensor, *_) -> str | None:
    return unsupported_tokens(x) or convolution.unsupported_reason(conv)


def _unsupported_gated_norm(call: GatedNorm) -> str | None:
    width = call.x.shape[-1] * (call.x.shape[-2] if call.norm == "rms-joint" else 1)
    if width > LARGEST_NORM:
        return f"its norms have up to {LARGEST_NORM} channels, and this one has {width}"
    return _unsupported_function(call)


def _unsupported_residual_norm(call: ResidualNorm) -> str | None:
    if call.x.shape[-1] > LARGEST_NORM:
        return f"its norms have up to {LARGEST_NORM} channels, and this one has {call.x.shape[-1]}"
    return _unsupported_function(call)


def _unsupported_query_key(call: QueryKey) -> str | None:
    K, weight = call.x.shape[-1], call.weight
    if K > LARGEST_NORM:
        return f"its norms have up to {LARGEST_NORM} channels, and this one has {K}"
    if weight is not None and weight.dtype not in DTYPES:
        return f"it computes in float32, from float32, bfloat16 or float16, and the weight is {weight.dtype}"
    if weight is not None and weight.numel() > LARGEST_HEADS:
        return f"heads that compete have up to {LARGEST_HEADS} channels together, and these have {weight.numel()}"
    return _unsupported_function(call)


def _unsupported_function(call: GatedNorm | ResidualNorm | Control | QueryKey) -> str | None:
    if transformed():
        return "it supports neither transforms of torch.func nor forward-mode differentiation"
    return unsupported_tokens(call.x)


def _function(kind: Any, module: str, what: str = "", **options: Any) -> Callable[[Any], Any]:
    """Registers forward and backward of a module as a function of a `kind`. what: its name in errors."""
    what = f"the triton {what or module.replace('_', ' ')}"
    forward, backward = (_late(module, way) for way in ("forward", "backward"))
    return register_function(kind, f"triton_{module}", KEY, what, forward, backward, **options)


_convolve = convolution.register(
    "triton", "triton_convolve", KEY, _late("convolution", "forward"), _late("convolution", "backward")
)
_add_and_norm = residual_norm.register(
    "triton_residual_norm", KEY, "the triton residual norm", _late("residual_norm", "forward"),
    _late("residual_norm", "backward"),
)  # fmt: skip
_query_and_key = _function(QueryKey, "query_key", "computation of q and k", passes=lambda call: not call.changes_x)


def _query_key(call: QueryKey) -> tuple[Tensor, Tensor | None]:
    y, gates = _query_and_key(call)
    return y, None if call.weight is None else gates


BACKEND = Backend(
    missing=missing,
    about=_about,
    linear_attention=Kernel(register("triton", KEY, _forward, _backward, [], lambda call: ()), unsupported_reason),
    step=Kernel(_step, _unsupported_step),
    convolution=Kernel(_convolve, _unsupported_convolution),
    gated_norm=Kernel(_function(GatedNorm, "gated_norm"), _unsupported_gated_norm),
    residual_norm=Kernel(_add_and_norm, _unsupported_residual_norm),
    control=Kernel(_function(Control, "control"), _unsupported_function),
    query_key=Kernel(_query_key, _unsupported_query_key),
    layer_step=Layer,
    on_request=True,
)
