"""The native short convolution as a PyTorch operator for the CPU, `torch.ops.headrace.convolve`.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

import struct

import torch
from torch import Tensor, nn

from ... import convolution
from ...call import Call
from . import library as native

WIDEST = 32
MOST_CHANNELS = 2**16
_CONVOLUTION = struct.Struct("@qPP")  # hr_convolution


def unsupported_reason(conv: nn.Conv1d, x: Tensor, *_) -> str | None:
    """Returns why the native convolution cannot compute x [B, T, C], or None."""
    if x.device.type != "cpu" or x.dtype not in native.DTYPES:
        return f"it runs on the CPU, in float32 and bfloat16, and x is {x.dtype} on {x.device.type}"
    if conv.kernel_size[0] > WIDEST or x.shape[2] > MOST_CHANNELS:
        found = f"{conv.kernel_size[0]} and {x.shape[2]}"
        return f"it takes widths up to {WIDEST} and up to {MOST_CHANNELS} channels, and they are {found}"
    return convolution.unsupported_reason(conv)


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
        addresses = self.weight.data_ptr(), self.history.data_ptr()
        self.packed = self.problem.packed, _CONVOLUTION.pack(width, *addresses)


def _place(x: Tensor) -> bytes:
    return native.PLACE.pack(*native.place(x[:, :, None]))


def _forward(*args) -> Tensor:
    assert native.library is not None
    given, out = _Given(*args), convolution.like(args[0])
    native.check(native.library.hr_convolve(*given.packed, _place(out)))
    return out


def _backward(d_out: Tensor, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert native.library is not None
    given, d_out = _Given(*args), d_out.contiguous()
    native.expect("d_out", d_out, args[0].shape, args[0].dtype)
    d_x, d_weight = convolution.like(d_out), given.weight.new_empty(len(given.history), *given.weight.shape)
    d_history = torch.empty_like(given.history)
    into = _place(d_x), d_weight.data_ptr(), d_history.data_ptr()
    native.check(native.library.hr_convolve_backward(*given.packed, _place(d_out), *into))
    *taps, d_bias = d_weight.sum(0)
    return d_x, torch.stack(taps, -1)[:, None], d_bias.clone(), d_history


run = convolution.register("native", "convolve", "CPU", _forward, _backward)
