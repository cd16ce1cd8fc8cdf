"""The sum of the residual stream and a branch with its RMSNorm, in one pass each way: s = x + y, n = RMSNorm(s) weight.

x, y, s, n [tokens, D], weight [D].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...residual_norm import ResidualNorm
from .gated_norm import BLOCK, PARTS, load, normed, place, row


@triton.jit(do_not_specialize=["tokens"])
def residual_norm(x, y, weight, s, n, tokens, eps, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Grid: (blocks of tokens, 1). Writes n and, unless y is None, s."""
    _, channels, inside, at = place(tl.program_id(0).to(tl.int64) * BT, tokens, 1, D, BT, BD)
    found = load(x, at, inside)
    if y is not None:
        total = (found + load(y, at, inside)).to(s.dtype.element_ty)
        tl.store(s + at, total, mask=inside)
        found = total.to(tl.float32)
    found, _ = normed(found, inside, eps, D, "rms")
    tl.store(n + at, (found * row(weight, channels, D, True)).to(n.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def residual_norm_back(
    s, weight, d_s, d_n, d_x, d_y, d_weight, tokens, eps,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of PARTS blocks of tokens, 1). Writes d_x, the gradient to s; d_y, the same, unless it is None; and
    d_weight [groups, D] of each group's tokens. d_s: the gradient to s past the norm; None: 0."""
    total = tl.zeros((1, BD), tl.float32)
    for part in range(PARTS):
        first = (tl.program_id(0).to(tl.int64) * PARTS + part) * BT
        _, channels, inside, at = place(first, tokens, 1, D, BT, BD)
        unit, factor = normed(load(s, at, inside), inside, eps, D, "rms")
        slope = load(d_n, at, inside)
        total += tl.sum(slope * unit, 0)[None, :]
        slope *= row(weight, channels, D, True)
        slope = factor * (slope - unit * (tl.sum(slope * unit, 1)[:, None] / D))
        if d_s is not None:
            slope += load(d_s, at, inside)
        tl.store(d_x + at, slope.to(d_x.dtype.element_ty), mask=inside)
        if d_y is not None:
            tl.store(d_y + at, slope.to(d_y.dtype.element_ty), mask=inside)
    channels = tl.arange(0, BD)[None, :]
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * D + channels, total, mask=channels < D)


def forward(call: ResidualNorm) -> tuple[Tensor, Tensor]:
    common, tokens = _sizes(call.x)
    s, n = found = call.results()
    x, y = (z if z is None else z.contiguous() for z in (call.x, call.y))
    with torch.cuda.device_of(n):
        residual_norm[(-(-tokens // common["BT"]), 1)](
            x, y, call.weight.contiguous(), None if y is None else s, n, tokens, call.eps, **common
        )
    return found


def backward(
    d_s: Tensor | None, d_n: Tensor, s: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    common, tokens = _sizes(s)
    groups = -(-tokens // (common["BT"] * PARTS))
    d_x = torch.empty_like(s, memory_format=torch.contiguous_format)
    d_y = None if dtype == s.dtype else torch.empty_like(d_x, dtype=dtype)
    d_weight = s.new_empty(groups, common["D"], dtype=torch.float32)
    with torch.cuda.device_of(s):
        residual_norm_back[(groups, 1)](
            s.contiguous(), weight.contiguous(), None if d_s is None else d_s.contiguous(), d_n.contiguous(), d_x, d_y,
            d_weight, tokens, eps, **common, PARTS=PARTS,
        )  # fmt: skip
    return d_x, s.new_empty(0, dtype=dtype) if d_y is None else d_y, d_weight.sum(0)


def _sizes(x: Tensor) -> tuple[dict[str, Any], int]:
    """Returns the sizes of a program, and the number of tokens."""
    D = x.shape[-1]
    BD = triton.next_power_of_2(D)
    return {"D": D, "BT": max(1, BLOCK // BD), "BD": BD, "num_warps": 8 if BD > 2048 else 4}, x[..., 0].numel()
