"""What stands between a layer's products and its recurrence, by the backend "triton": the L2 norm of q and k, rotary
positions, decays by a sigmoid or softplus, norms with an output gate, products with SiLU and the gates of head
competition. Each keeps its inputs alone. Compiled graphs have the gates and the norm after a gate alone: Inductor fuses
what PyTorch computes with what stands beside it, but would compute the softmax of a token's scores anew for each
channel, and the product with the gate anew for each of its gradients.

Dimensions: B batch, T tokens, H heads, K channels per head, F frequencies, C channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....utils.device import interpreted
from ...autograd import define
from ...call import like
from ...derivatives import first_order, has_address, recorded, settled, transformed
from .limits import DTYPES, chosen, missing

NUMBERS = 2048  # of a program at a time
ROWS = 128  # at most, whose indices take more registers than their numbers
GROUPS = 16  # of them, of a program that sums over tokens
MOST_WEIGHTS, PROGRAMS = 4096, 2048  # of `head_gate`, and of its backward, where each sums the gradients to all weights
WIDEST, SUMS = 4096, 1024  # of `gate_norm`, the numbers of a program, and the programs of its backward
FAR = -40.0  # softplus(z) is e^z to the last digit of a float64 below
ROOM = 24  # of a rate e^A, below the largest number, for softplus(z), whose gradient to a low z − FAR has e^20
LIMITS = {"far": FAR, "limit": math.log(torch.finfo(torch.float32).max) - ROOM}
INSTEAD = "; expected backend='torch', which has all derivatives"


def computes(backend: str, x: Tensor, *others: Tensor, in_graphs: bool = False) -> bool:
    """Whether these functions compute x [B, T, H, K] or [B, T, C] and others by a layer's backend, or PyTorch does."""
    if (recorded() and not in_graphs) or not chosen(backend, x) or transformed():
        return False
    here = missing() is None and (x.is_cuda or interpreted()) and all(map(has_address, (x, *others)))
    fits = x.dim() == 3 or (x.dim() == 4 and x.shape[3] <= NUMBERS)
    return here and fits and x.dtype in DTYPES and x.numel() > 0


def silu_product(x: Tensor, gate: Tensor, backend: str = "auto") -> Tensor:
    """Returns x SiLU(gate) for x and gate [B, T, C] or [B, T, H, K], by PyTorch where no kernel computes it."""
    if x.shape == gate.shape and x.dtype == gate.dtype and computes(backend, x, gate):
        return SiLUProduct.apply(x, gate)
    return x * F.silu(gate)


def over_heads(kernel: str, x: Tensor, *tensors: Any, **numbers: Any) -> None:
    """Launches a kernel of rows.py over the heads of x [B, T, H, K].

    Args:
        tensors: its other tensors, in order.
        numbers: its other arguments; gate, of a kernel that has one, is None or as x. With GROUPS a program computes as
            many groups of rows.
    """
    (B, T, H, K), strided = x.shape, {"x": x} | ({"gate": numbers.pop("gate")} if "gate" in numbers else {})
    sizes = {"total": B * T * H, "H": H, "K": K, "BK": 1 << (K - 1).bit_length()}
    grid = (programs(x, numbers.get("GROUPS", 1)),)
    _launch(kernel, grid, strided, *tensors, R=rows_at_a_time(K), **sizes, **numbers)


def rows_at_a_time(K: int) -> int:
    return min(NUMBERS >> (K - 1).bit_length(), ROWS)


def programs(x: Tensor, groups: int) -> int:
    """Returns the number of programs of `over_heads`."""
    return -(-x.numel() // (x.shape[3] * rows_at_a_time(x.shape[3]) * groups))


def over_tokens(kernel: str, x: Tensor, gate: Tensor, *tensors: Tensor) -> None:
    """Launches a kernel of rows.py over the tokens of x and gate [B, T, ·]; tensors: its other tensors, in order."""
    given = {"x": x.flatten(2)[:, :, None], "gate": gate.flatten(2)[:, :, None]}
    B, T, _, C = given["x"].shape
    width = min(1 << (C - 1).bit_length(), NUMBERS)
    _launch(kernel, (B * T, -(-C // width)), given, *tensors, C=C, BC=width)


def _launch(kernel: str, grid: tuple[int, ...], strided: dict[str, Any], *tensors: Any, **numbers: float) -> None:
    from . import rows
    from .launch import one_stride, strides

    given: dict[str, Any] = {name: one_stride(x) for name, x in strided.items()}
    with torch.cuda.device_of(tensors[-1]):
        getattr(rows, kernel)[grid](*given.values(), *tensors, **numbers, **strides(**given))


class L2Norm(torch.autograd.Function):
    """(x [B, T, H, K], eps) -> x / √(|x|² + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        over_heads("l2_norm", x, y := like(x), eps=eps)
        return y

    @staticmethod
    @first_order("the L2 norm of q and k", INSTEAD)
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        over_heads("l2_norm_backward", x, settled(d_y), d_x := like(x), eps=ctx.eps)
        return d_x, None


class Rotation(torch.autograd.Function):
    """(x [B, T, H, K], cos and sin [B or 1, T, 1, F], which get no gradients) -> x, its first 2 F channels rotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        n = cos.shape[-1]
        over_heads("rotate", x, cos.contiguous(), sin.contiguous(), y := like(x), F=n, places=cos.numel() // n)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return Rotation.apply(settled(d_y), cos, -sin), None, None


class SoftplusDecay(torch.autograd.Function):
    """(x [B, T, H, K], bias [H K] or None, log_rate [H] or None, sign, rate) -> −e^log_rate softplus(sign (x + bias)),
    in float32. rate: the logarithm of all rates, if there is no log_rate."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, log_rate: Tensor | None, sign: float = 1.0, rate: float = 0.0
    ) -> Tensor:
        ctx.numbers = LIMITS | {"sign": sign, "rate": rate}
        bias, log_rate = (None if p is None else p.contiguous() for p in (bias, log_rate))
        ctx.save_for_backward(x, bias, log_rate)
        y = x.new_empty(x.shape, dtype=torch.float32)
        over_heads("softplus_decay", x, bias, log_rate, y, **ctx.numbers)
        return y

    @staticmethod
    @first_order("the decay", INSTEAD)
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, bias, log_rate = ctx.saved_tensors
        d_x, d_rates = like(x), None if log_rate is None else x.new_empty(x.shape[:-1], dtype=torch.float32)
        over_heads("softplus_decay_backward", x, bias, log_rate, settled(d_y), d_rates, d_x, **ctx.numbers)
        d_bias = None if bias is None else d_x.sum((0, 1), dtype=torch.float32).flatten().to(bias.dtype)
        return d_x, d_bias, None if d_rates is None else d_rates.sum((0, 1)).to(log_rate.dtype), None, None


class GatedNorm(torch.autograd.Function):
    """(x and gate [B, T, H, V], weight [V] or None, eps, silu) -> x / √(mean x² + eps) · weight · SiLU(gate), or with
    silu=False · σ(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, silu: bool) -> Tensor:
        weight = None if weight is None else weight.contiguous()
        ctx.save_for_backward(x, gate, weight)
        ctx.numbers = {"eps": eps, "SILU": silu}
        over_heads("norm", x, weight, None, None, y := like(x), gate=gate, **ctx.numbers)
        return y

    @staticmethod
    @first_order("the norm with an output gate", INSTEAD)
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        return *_norm_backward(x, gate, weight, None, d_y, **ctx.numbers), None, None


class NormOfSum(torch.autograd.Function):
    """(x and y [B, T, D], weight [D] or None, eps) -> (x + y, its RMSNorm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        weight, ctx.eps, sums, normed = None if weight is None else weight.contiguous(), eps, like(x), like(x)
        over_heads("norm", x[:, :, None], weight, y.contiguous(), sums, normed, gate=None, eps=eps, SILU=False)
        ctx.save_for_backward(sums, weight)
        return sums, normed

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor, d_normed: Tensor) -> Any:
        sums, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # under create_graph=True: what PyTorch can differentiate again
            wide, d_wide = sums.float(), d_normed.float()
            inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
            d_row, d_weight = d_wide if weight is None else d_wide * weight, (d_wide * wide * inverse).sum((0, 1))
            d_x = inverse * (d_row - wide * inverse.square() * (wide * d_row).mean(-1, keepdim=True))
            d_x = d_x.to(sums.dtype) + d_sums
            return d_x, d_x, None if weight is None else d_weight.to(weight.dtype), None
        d_x, _, d_weight = _norm_backward(sums[:, :, None], None, weight, d_sums, d_normed, eps=ctx.eps, SILU=False)
        return d_x[:, :, 0], d_x[:, :, 0], d_weight, None


def _norm_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, d_sums: Tensor | None, d_y: Tensor, **numbers: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients to x, the gate and the weight."""
    sums = None if weight is None else x.new_empty(programs(x, GROUPS), x.shape[3], dtype=torch.float32)
    d_gate, d_sums = None if gate is None else like(gate), None if d_sums is None else settled(d_sums)
    tensors = weight, d_sums, settled(d_y), d_gate, sums
    over_heads("norm_backward", x, *tensors, d_x := like(x), gate=gate, GROUPS=GROUPS, **numbers)
    return d_x, d_gate, None if weight is None or sums is None else sums.sum(0).to(weight.dtype)


def head_decay(x: Tensor, bias: Tensor, log_rate: Tensor | None) -> Tensor:
    """Returns −e^log_rate softplus(x + bias) [B, T, H] for x [B, T, H], in float32."""
    return SoftplusDecay.apply(x[..., None], bias, log_rate)[..., 0]


class SiLUProduct(torch.autograd.Function):
    """(x, gate), both [B, T, C] or [B, T, H, K] -> x SiLU(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        over_tokens("silu_product", x, gate, y := like(x))
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # under create_graph=True: what PyTorch can differentiate again
            s = gate.sigmoid()
            return d_y * gate * s, d_y * x * s * (1 + gate * (1 - s))
        over_tokens("silu_product_backward", x, gate, settled(d_y), d_x := like(x), d_gate := like(gate))
        return d_x, d_gate


def _launch_gates(x: Tensor, weight: Tensor, kind: tuple[Any, ...], programs: int, *tensors: Tensor | None) -> None:
    """Launches the kernel of `head_gate`, or nothing for tensors without memory."""
    if has_address(x):
        (B, T, HQ, K), H, given = x.shape, len(weight), {"rate": kind[0], "SCALE": kind[1], "LOG": kind[2]}
        HB, BK = _tile(H, K)
        sizes = {"total": B * T, "H": H, "HQ": HQ, "K": K, "HB": HB, "BK": BK, "num_warps": min(16, -(-HB * BK // 512))}
        _launch("head_gate", (programs,), {"x": x}, weight.contiguous(), *tensors, **sizes, **given)


def _gate(x: Tensor, weight: Tensor, *kind: Any) -> Tensor:
    gate = x.new_empty((*x.shape[:2], len(weight)), dtype=kind[-1])
    _launch_gates(x, weight, kind, x.shape[0] * x.shape[1], None, None, gate)
    return gate


def _gate_backward(d_gate: Tensor, x: Tensor, weight: Tensor, *kind: Any) -> tuple[Tensor, Tensor]:
    programs, d_scores = torch.sym_min(x.shape[0] * x.shape[1], PROGRAMS), x.new_empty(d_gate.shape)
    sums = x.new_empty((programs, *weight.shape), dtype=torch.float32)
    _launch_gates(x, weight, kind, programs, settled(d_gate), sums, d_scores)
    return d_scores, sums.sum(0).to(weight.dtype)


def _save(ctx: Any, given: Any, gate: Tensor) -> None:
    ctx.save_for_backward(*given[:2])
    ctx.kind = given[2:]


@first_order("head competition", INSTEAD)
def _differentiate(ctx: Any, d_gate: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    d_scores, d_weight = _gradients(d_gate, x, weight, *ctx.kind)
    d_x = d_scores[..., None] * weight  # a graph fuses this with the other gradients to x
    d_x = d_x if d_x.shape == x.shape else d_x.unflatten(2, (x.shape[2], -1)).sum(3)
    return d_x.to(x.dtype), d_weight, None, None, None, None


KEY, INPUTS = "CompositeExplicitAutograd", "Tensor x, Tensor weight, float rate, bool scale, bool log, ScalarType dtype"
_gradients = define("head_gate_backward", f"(Tensor d_gate, {INPUTS})", 2, _gate_backward, _gate_backward, KEY)
# (x [B, T, Hq, K], weight [H, K], ...) -> softmax(rate ⟨x_h, w_h⟩) over the heads, times H if `scale`, or its logarithm
head_gate = define("head_gate", f"({INPUTS})", 1, _gate, _gate, KEY, _differentiate, _save)


def gate_norm_takes(heads: int, V: int) -> bool:
    """Whether a program of `gate_norm` holds a group of this many heads with V channels."""
    return math.prod(_tile(heads, V)) <= WIDEST


def _tile(*sizes: int) -> list[int]:
    return [1 << (n - 1).bit_length() for n in sizes]


def _launch_norm(kernel: str, programs: int, given: Any, *results: Tensor | None, **numbers: int) -> None:
    """Launches `gate_norm` or its backward with the arguments of the operator, or nothing without memory."""
    x, gate, v, *parameters, groups, eps = given
    if has_address(x):
        HG, K = x.shape[2] // groups, x.shape[3]
        (HB, BK), dense = _tile(HG, K), (None if p is None else p.contiguous() for p in parameters)
        sizes = {"HG": HG, "K": K, "HB": HB, "BK": BK, "eps": eps} | numbers
        warps = min(16, -(-HB * BK // 256))  # of 64 threads on AMD's GPUs, and 1,024 at most
        strided = {"x": x, "gate": gate, "v": v}
        _launch(kernel, (programs, groups), strided, *dense, *results, num_warps=warps, **sizes)


def _gate_norm(x: Tensor, *given: Any) -> Tensor:
    _launch_norm("gate_norm", x.shape[0] * x.shape[1], (x, *given), y := like(x))
    return y


def _backward_norm(d_y: Tensor, *given: Any) -> tuple[Tensor, ...]:
    x, gate, _, skip, read, weight, *_ = given
    programs = torch.sym_min(total := x.shape[0] * x.shape[1], SUMS)
    sums = [None if p is None else x.new_empty((programs, len(p)), dtype=torch.float32) for p in (skip, weight)]
    d_x, d_gate, d_read = (None if z is None else like(z) for z in (x, gate, read))
    _launch_norm("gate_norm_backward", programs, given, settled(d_y), d_read, *sums, d_gate, d_x, total=total)
    of_parameters = (d if d is None else d.sum(0).to(p.dtype) for p, d in zip((skip, weight), sums, strict=True))
    found = d_x, d_gate, d_read, *of_parameters
    return tuple(x.new_empty(0) if d is None else d for d in found)


def _save_norm(ctx: Any, given: Any, y: Tensor) -> None:
    ctx.save_for_backward(*given[:6])
    ctx.numbers = given[6:]


@first_order("the norm after an output gate", INSTEAD)
def _differentiate_norm(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    _, _, _, skip, read, weight = given = ctx.saved_tensors
    d_x, d_gate, *found = _norm_gradients(d_y, *given, *ctx.numbers)
    d_read, d_skip, d_weight = (None if p is None else d for p, d in zip((read, skip, weight), found, strict=True))
    d_v = None if skip is None else (d_x * skip[:, None]).to(d_x.dtype)  # which a graph fuses with the others to v
    return d_x, d_gate, d_v, d_skip, d_read, d_weight, None, None


GIVEN = "Tensor x, Tensor gate, Tensor? v, Tensor? skip, Tensor? read, Tensor? weight, int groups, float eps"
_norm_gradients = define("gate_norm_backward", f"(Tensor d_y, {GIVEN})", 5, _backward_norm, _backward_norm, KEY)
# (x, gate and v [B, T, H, V], skip [H], read [B, T, H], weight [H V], ...) -> weight · RMSNorm((x + skip v) · read ·
# SiLU(gate)), [B, T, H, V], the norm being of H / groups heads. Without v there is no skip.
gate_norm = define("gate_norm", f"({GIVEN})", 1, _gate_norm, _gate_norm, KEY, _differentiate_norm, _save_norm)
