"""The short convolution of the backend "triton" as a PyTorch operator, `torch.ops.headrace.convolve_triton`. The
backward computes the convolution anew, so that x alone is kept.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....utils.device import interpreted
from ... import derivatives
from ...autograd import define
from ...call import like
from ...modules import is_plain
from ...sequences import Sequences
from .limits import DTYPES, missing

WIDEST = 8
ROWS, CHANNELS, TILES = 32, 64, 8  # of a tile; tiles of a program of the backward
INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu"
KEY = "CompositeExplicitAutograd"


def unsupported_reason(conv: nn.Conv1d, x: Tensor) -> str | None:
    """Returns why the kernels cannot convolve the first tokens x [B, T, C] of sequences, or None."""
    if not (x.is_cuda or interpreted()):
        return f"it runs on a GPU, and x is on {x.device.type}"
    if (reason := missing()) is not None:
        return reason
    if not is_plain(conv, nn.Conv1d) or derivatives.transformed():
        return "hooks, parametrizations, adapters and transforms need PyTorch's convolution"
    if x.dtype not in DTYPES or conv.kernel_size[0] > WIDEST:
        given = f"{x.dtype} and width {conv.kernel_size[0]}"
        return f"it takes float32, bfloat16 and float16 and widths up to {WIDEST}, and x has {given}"
    return None


def convolve_token(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, silu: bool, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Convolves one token x [N, 1, C] after its history [N, W − 1, C]: (y [N, 1, C], the next history). There are no
    gradients. in_place: whether the next history takes the place of this one."""
    from .launch import one_stride, strides
    from .taps import convolve_token as kernel

    tokens, y, W = one_stride(x[:, :, None]), like(x), weight.shape[-1]
    in_place = in_place and history.dtype == x.dtype and history.is_contiguous()
    history = history.to(x).contiguous()
    after = history if in_place else torch.empty_like(history)
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):
        kernel[len(x), -(-x.shape[2] // CHANNELS)](
            tokens, weight.contiguous(), bias, history, y, after, C=x.shape[2], W=W, SILU=silu, BC=CHANNELS,
            TAPS=1 << (W - 1).bit_length(), num_warps=1, **strides(x=tokens),
        )  # fmt: skip
    if in_place and not after.is_inference():
        torch.autograd.graph.increment_version(after)  # tells autograd, which may have saved it for a backward
    return y, after


def _arguments(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Returns the arguments that all kernels have, without the bias, which has to be contiguous."""
    from .launch import one_stride, strides

    B, T, C = x.shape
    tokens, starts = one_stride(x[:, :, None]), None
    assert tokens is not None
    if cu_seqlens is not None:
        owner = torch.searchsorted(cu_seqlens[:-1], torch.arange(T, device=x.device), right=True) - 1
        starts = cu_seqlens[owner].long()
    return {
        "x": tokens, "weight": weight.contiguous(), "starts": starts, "total": B * T, "T": T, "C": C,
        "W": weight.shape[-1], "R": ROWS, "BC": CHANNELS, **strides(x=tokens),
    }  # fmt: skip


def _grid(x: Tensor, rows: int) -> tuple[int, int]:
    return -(-x.shape[0] * x.shape[1] // rows), -(-x.shape[2] // CHANNELS)


def _last(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the next history [N, W − 1, C]: the last tokens of each sequence, after zeros if they are fewer."""
    sequences = Sequences(x, cu_seqlens)
    return sequences.last(x, x.new_zeros(sequences.count, weight.shape[-1] - 1, x.shape[2]))


def _add_last(d_x: Tensor, d_last: Tensor, cu_seqlens: Tensor | None) -> None:
    """Adds the gradient of `_last` to that of x, in place."""
    if cu_seqlens is None:
        n = min(d_x.shape[1], d_last.shape[1])
        d_x[:, d_x.shape[1] - n :] += d_last[:, d_last.shape[1] - n :]
        return
    places = cu_seqlens.diff()[:, None] + torch.arange(-d_last.shape[1], 0, device=d_x.device)
    d_last = torch.where((places >= 0)[..., None], d_last, 0)
    d_x[0].index_add_(0, (cu_seqlens[:-1, None] + places).clamp(min=0).flatten(), d_last.flatten(0, 1))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    from .taps import convolve as kernel

    y, bias = like(x), None if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):
        kernel[_grid(x, ROWS)](bias=bias, y=y, SILU=silu, **_arguments(x, weight, cu_seqlens))
    return y, _last(x, weight, cu_seqlens)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return like(x), x.new_empty(sequences, weight.shape[-1] - 1, x.shape[2])


def _backward(
    d_y: Tensor, d_last: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from . import taps

    d_z, d_x, grid, common = d_y.contiguous(), like(x), _grid(x, ROWS * TILES), _arguments(x, weight, cu_seqlens)
    sums = x.new_empty(grid[0], weight.shape[-1] + 1, x.shape[2], dtype=torch.float32)
    with torch.cuda.device_of(x):
        if silu:
            d_y, d_z = d_z, x.new_empty(x.shape, dtype=torch.float32)
            bias = None if bias is None else bias.contiguous()
            taps.silu_backward[_grid(x, ROWS)](bias=bias, d_y=d_y, d_z=d_z, **common)
        taps.convolve_backward[grid](
            d_z=d_z, d_x=d_x, d_weight=sums, TILES=TILES, TAPS=1 << weight.shape[-1].bit_length(), **common
        )
    if d_last.numel():
        _add_last(d_x, d_last, cu_seqlens)
    sums = sums.sum(0).to(weight.dtype)
    return d_x, sums[:-1].T[:, None].contiguous(), sums[-1].clone()


def _fake_backward(d_y: Tensor, d_last: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like(x), like(weight), weight.new_empty(len(weight))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


@derivatives.first_order("the short convolution", "; expected backend='torch', which has all derivatives")
def _differentiate(ctx: Any, d_y: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    x = given[0]
    d_y = torch.zeros_like(x) if d_y is None else d_y
    d_last = x.new_empty(0) if d_last is None else d_last
    d_x, d_weight, d_bias = _gradient(d_y, d_last, *given, ctx.silu)
    return d_x, d_weight, None if given[2] is None else d_bias, None, None


_gradient = define(
    "convolve_triton_backward", f"(Tensor d_y, Tensor d_last, {INPUTS})", 3, _backward, _fake_backward, KEY
)
# (x, weight, bias, cu_seqlens, silu) -> (y [B, T, C], the next history [N, W − 1, C])
convolve = define("convolve_triton", f"({INPUTS})", 2, _forward, _fake, KEY, _differentiate, _save)
