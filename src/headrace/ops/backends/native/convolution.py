"""The native short convolution as a PyTorch operator for the CPU, `torch.ops.headrace.convolve`.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ... import derivatives
from ...autograd import define
from ...call import Call, like
from ...modules import is_plain
from . import library as native
from .structs import LAYOUTS

WIDEST = 32
MOST_CHANNELS = 2**16
_CONVOLUTION = LAYOUTS["hr_convolution"]
INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor history, Tensor? cu_seqlens"


def unsupported_reason(conv: nn.Conv1d, x: Tensor) -> str | None:
    """Returns why the native convolution cannot compute x [B, T, C], or None."""
    if native.missing or torch.onnx.is_in_onnx_export():
        return native.missing or "an ONNX graph takes the convolution of PyTorch"
    if x.device.type != "cpu" or x.dtype not in native.DTYPES:
        return f"it runs on the CPU, in float32 and bfloat16, and x is {x.dtype} on {x.device.type}"
    if not is_plain(conv, nn.Conv1d):
        return f"a hook, a parametrization or an adapter of {type(conv).__name__} would not run"
    if conv.kernel_size[0] > WIDEST or x.shape[2] > MOST_CHANNELS:
        sizes = f"{conv.kernel_size[0]} and {x.shape[2]}"
        return f"it takes widths up to {WIDEST} and up to {MOST_CHANNELS} channels, and they are {sizes}"
    return derivatives.transforms_reason()


class _Given:
    """The structs hr_problem and hr_convolution, with references to the tensors that they point to: the weights are
    [W + 1, C], the bias in the last row."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor | None):
        x = x[:, :, None]
        one = x[..., :1]  # q and k, which the convolution does not use
        call = Call(one, one, x, cu_seqlens=cu_seqlens)
        self.problem, channels, width = native.Problem(call), x.shape[-1], weight.shape[-1]
        native.expect("weight", weight, (channels, 1, width))
        native.expect("history", history, (call.sequences, width - 1, channels))
        last = weight.new_zeros(channels) if bias is None else bias
        self.weight = torch.cat([weight[:, 0].T, last[None]]).float()
        self.history = history.to(torch.float32).contiguous()
        self.packed = self.problem.packed, _CONVOLUTION.pack(width, self.weight.data_ptr(), self.history.data_ptr())


def _place(x: Tensor) -> bytes:
    return native.PLACE.pack(*native.place(x[:, :, None]))


def _forward(*args) -> Tensor:
    assert native.library is not None
    given, out = _Given(*args), like(args[0])
    native.check(native.library.hr_convolve(*given.packed, _place(out)))
    return out


def _backward(d_out: Tensor, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert native.library is not None
    given, d_out = _Given(*args), d_out.contiguous()
    native.expect("d_out", d_out, args[0].shape, args[0].dtype)
    d_x, d_weight = like(d_out), given.weight.new_empty(len(given.history), *given.weight.shape)
    d_history = torch.empty_like(given.history)
    into = _place(d_x), d_weight.data_ptr(), d_history.data_ptr()
    native.check(native.library.hr_convolve_backward(*given.packed, _place(d_out), *into))
    *taps, d_bias = d_weight.sum(0)
    _, weight, _, history, _ = args
    d_weight = torch.stack(taps, -1)[:, None]
    return d_x, d_weight.to(weight.dtype), d_bias.to(weight.dtype, copy=True), d_history.to(history.dtype)


def _fake_backward(d_y, x, weight, bias, history, cu_seqlens):
    return like(x), like(weight), weight.new_empty(len(weight)), like(history)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


@derivatives.first_order("the native convolution", "; expected float64, for which PyTorch convolves")
def _differentiate(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors  # accessed once, because activation checkpointing recomputes them at each access
    d_x, d_weight, d_bias, d_history = _gradient(d_y, *given)
    return d_x, d_weight, None if given[2] is None else d_bias, d_history, None


_gradient = define("convolve_backward", f"(Tensor d_y, {INPUTS})", 4, _backward, _fake_backward, "CPU")
convolve = define("convolve", f"({INPUTS})", 1, _forward, like, "CPU", _differentiate, _save)
