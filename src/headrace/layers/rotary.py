"""Rotary position embeddings (arXiv 2104.09864).

Dimensions: B batch, T tokens, K key dimension per head, F frequencies, of which each rotates two channels.
"""

import math

import torch
from torch import Tensor

from ..ops.autograd import define
from ..ops.backends.triton import elementwise
from ..ops.call import accumulator
from ..ops.checks import require
from ..spec.attention import Rope
from ..utils.device import float64, kept

DEFAULT = Rope()  # made here, as torch.compile cannot trace the checks of a spec
Angles = tuple[Tensor, Tensor]  # cosines and sines [B or 1, T, 1, F], or [B, T, heads, F] if each head has its own


def rotate(x: Tensor, by: Angles, backend: str = "auto") -> Tensor:
    """Rotates the first 2 F channels of x [B, T, heads, K]: channel i < F with channel i + F."""
    cos, sin = (y.to(accumulator(x)).to(x.device) for y in by)
    if cos.shape[2] == 1 and not cos.requires_grad and elementwise.computes(backend, x):
        return elementwise.Rotation.apply(x, cos, sin)
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat([*(y.to(x.dtype) for y in turned), rest], -1)


def angles(positions: Tensor, rope: Rope, theta: float, width: int, lengths: Tensor | None = None) -> Angles:
    """Returns cosines and sines, times the rope's scale, of the angles at positions [B or 1, T], by `float64`: a
    float32 angle is off by 0.004 at position 100000.

    Args:
        theta: base of the frequencies, unless the rope has its own.
        width: K.
        lengths: [B or 1, 1], number of tokens of each sequence, on which frequencies may depend."""
    frequency = frequencies(rope, theta, rope.dims or width, positions if lengths is None else lengths)
    single = positions.shape[-1] == 1  # a token, whose angles are cheaper than a kernel
    inline = single or not torch.compiler.is_dynamo_compiling()
    return (_turn if inline else _in_a_graph)(positions, frequency, rope.scale)


def _turn(positions: Tensor, frequency: Tensor, scale: float) -> Angles:
    angle = float64(positions)[..., None, None] * frequency
    turn = angle.cos(), angle.sin()
    return turn if scale == 1 else (turn[0] * scale, turn[1] * scale)


# Inductor would compute an angle again, in float64, for each channel of each head that it rotates.
SCHEMA = "(Tensor positions, Tensor frequency, float scale)"
_in_a_graph = define("angles", SCHEMA, 2, _turn, _turn, "CompositeExplicitAutograd")


def frequencies(rope: Rope, theta: float, dims: int, lengths: Tensor) -> Tensor:
    """Returns the frequencies, in radians per token, of sequences of these lengths [B or 1, 1]: [F], or
    [B or 1, 1, 1, F] if they depend on the length. The formulas are those of `Rope`."""
    if rope.kind not in ("dynamic", "longrope"):
        return fixed_frequencies(rope, theta, dims, lengths.device)
    half, base, original = dims // 2, rope.theta or theta, rope.original or 1
    lengths = float64(lengths)
    index = torch.arange(half, device=lengths.device, dtype=torch.float64)
    if rope.kind == "dynamic":
        ratio = (lengths[..., None, None] / original).clamp(min=1)
        return (base * (rope.factor * ratio - rope.factor + 1) ** (half / (half - 1))) ** (index / -half)
    short, long = (index.new_tensor(divisors) for divisors in (rope.short, rope.long))
    return base ** (index / -half) / torch.where(lengths[..., None, None] > original, long, short)


@kept
def fixed_frequencies(rope: Rope, theta: float, dims: int, device: torch.device) -> Tensor:
    half, base, original = dims // 2, rope.theta or theta, rope.original or 1
    index = float64(torch.arange(half, device=device))
    frequency = base ** (index / -half)
    if rope.kind == "llama3":
        share = (frequency * original / (2 * math.pi) - rope.slow) / (rope.fast - rope.slow)
    elif rope.kind == "yarn":
        first, last = _ramp(rope, base, dims)
        share = (last - index) / (last - first)
    else:
        return frequency if rope.factor == 1 else frequency / rope.factor
    share = share.clamp(0, 1)  # that is not divided
    return frequency * (share + (1 - share) / rope.factor)


def _ramp(rope: Rope, base: float, dims: int) -> tuple[float, float]:
    """Returns the indices of the frequencies between which YaRN's share of the division rises from 0 to 1."""
    require(base > 1, f"rope.kind='yarn' with the base {base} of the frequencies, theta; expected more than 1")
    rotations = ((rope.original or 1) / (2 * math.pi * n) for n in (rope.fast, rope.slow))
    first, last = (dims * math.log(n) / (2 * math.log(base)) for n in rotations)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    return first, last + 0.001 * (first == last)  # as in the published code, without a division by 0
