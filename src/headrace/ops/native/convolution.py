"""The native short convolution as a PyTorch operator for the CPU, `torch.ops.headrace.convolve`.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

import struct

import torch
from torch import Tensor, nn

from .. import derivatives
from ..call import Call
from ..modules import untouched
from ..operator import define, library
from ..sequences import Sequences
from . import library as native

INPUTS = "Tensor x, Tensor weight, Tensor history, Tensor? cu_seqlens"
WIDEST = 32
MOST_CHANNELS = 2**16
_CONVOLUTION = struct.Struct("@qPP")  # hr_convolution


def refuses(conv: nn.Conv1d, x: Tensor, *_) -> str | None:
    """Returns why the native convolution cannot compute x [B, T, C], or None."""
    if x.device.type != "cpu" or x.dtype not in native.DTYPES:
        return f"it runs on the CPU, in float32 and bfloat16, and x is {x.dtype} on {x.device.type}"
    if conv.kernel_size[0] > WIDEST or x.shape[2] > MOST_CHANNELS:
        found = f"{conv.kernel_size[0]} and {x.shape[2]}"
        return f"it takes widths up to {WIDEST} and up to {MOST_CHANNELS} channels, and they are {found}"
    if not untouched(conv, nn.Conv1d):
        return f"a hook, a parametrisation or an adapter of {type(conv).__name__} would not run"
    if derivatives.transformed():
        return "it supports neither transforms of torch.func nor forward-mode differentiation"
    return None


def run(conv: nn.Conv1d, x: Tensor, history: Tensor, sequences: Sequences) -> Tensor:
    """Computes the SiLU of the causal depthwise convolution of x [B, T, C] after history [N, W − 1, C]."""
    weight = conv.weight[:, 0].T
    bias = torch.zeros_like(weight[0]) if conv.bias is None else conv.bias
    return _convolve(x, torch.cat([weight, bias[None]]), history, sequences.cu_seqlens)


class _Given:
    """The structs hr_problem and hr_convolution, with references to the tensors that they point to."""

    def __init__(self, x: Tensor, weight: Tensor, history: Tensor, cu_seqlens: Tensor | None):
        x = x[:, :, None]
        one = x[..., :1]  # q and k, which the convolution does not use
        call = Call(one, one, x, cu_seqlens=cu_seqlens)
        self.problem, channels, width = native.Problem(call), x.shape[-1], len(weight) - 1
        native.expect("weight", weight, (width + 1, channels))
        native.expect("history", history, (call.sequences, width - 1, channels))
        self.weight, self.history = (y.to(torch.float32).contiguous() for y in (weight, history))
        addresses = self.weight.data_ptr(), self.history.data_ptr()
        self.packed = self.problem.packed, _CONVOLUTION.pack(width, *addresses)


def _place(x: Tensor) -> bytes:
    return native.PLACE.pack(*native.place(x[:, :, None]))


def _forward(*args) -> Tensor:
    assert native.library is not None
    given, out = _Given(*args), _like(args[0])
    native.check(native.library.hr_convolve(*given.packed, _place(out)))
    return out


def _backward(d_out: Tensor, *args) -> tuple[Tensor, Tensor, Tensor]:
    assert native.library is not None
    given, d_out = _Given(*args), d_out.contiguous()
    native.expect("d_out", d_out, args[0].shape, args[0].dtype)
    d_x, d_weight = _like(d_out), given.weight.new_empty(len(given.history), *given.weight.shape)
    d_history = torch.empty_like(given.history)
    into = _place(d_x), d_weight.data_ptr(), d_history.data_ptr()
    native.check(native.library.hr_convolve_backward(*given.packed, _place(d_out), *into))
    return d_x, d_weight.sum(0), d_history


def _like(x: Tensor, *_) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(d_out, x, weight, history, cu_seqlens):
    return _like(x), *(torch.empty_like(y, dtype=torch.float32) for y in (weight, history))


_convolve = define("convolve", f"({INPUTS})", 1, _forward, _like, "CPU")
_gradient = define("convolve_backward", f"(Tensor d_out, {INPUTS})", 3, _backward, _fake_backward, "CPU")


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


@derivatives.first_order("the native convolution", "; expected float64, for which PyTorch convolves")
def _gradients(ctx, d_out):
    given = ctx.saved_tensors  # accessed once, because activation checkpointing recomputes them at each access
    found = zip(_gradient(d_out, *given), given, strict=False)
    return *(grad.to(x.dtype) for grad, x in found), None


torch.library.register_autograd("headrace::convolve", _gradients, setup_context=_save, lib=library)
