"""The short convolution of the backend "triton" against PyTorch's in float64: outputs and gradients."""

import pytest
import torch
from torch import nn

from headrace.layers.linear.convolution import convolve
from headrace.ops.backends.triton import convolution
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative


def called(conv, wide, ends, silu, backend):
    """Results and gradients of convolving all channels of `wide` but the last five."""
    x = wide[..., :-5]
    found = convolve(conv, x, None, Sequences(x, ends), backend, silu)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for y in found]
    loss = sum((y.double() * w).sum() for y, w in zip(found, weights, strict=True))
    return *found, *torch.autograd.grad(loss, [wide, *conv.parameters()])


@pytest.mark.parametrize(
    ("channels", "tokens", "rows", "width", "ends", "silu", "bias"),
    [
        (70, 37, 2, 4, None, True, True),
        (3, 1, 1, 2, None, True, False),
        (5, 300, 1, 3, None, False, True),  # a second program in the backward
        (66, 45, 1, 4, torch.tensor([0, 2, 2, 35, 45]), True, True),  # an empty sequence, and one of two tokens
    ],
)
def test_convolution(channels, tokens, rows, width, ends, silu, bias):
    torch.manual_seed(0)
    conv = nn.Conv1d(channels, channels, width, groups=channels, bias=bias)
    wide = torch.randn(rows, tokens, channels + 5)
    assert convolution.unsupported_reason(conv, wide[..., :-5]) is None
    ours = called(conv, wide.requires_grad_(), ends, silu, "triton")
    exact = called(conv.double(), wide.detach().double().requires_grad_(), ends, silu, "torch")
    for found, expected in zip(ours, exact, strict=True):
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert relative(found.double(), expected) <= 1e-6


def test_bfloat16_sums_are_float32():
    torch.manual_seed(0)
    conv = nn.Conv1d(8, 8, 4, groups=8, bias=False).bfloat16()
    wide = torch.randn(1, 40, 13).bfloat16()
    ours = called(conv, wide.requires_grad_(), None, True, "triton")
    exact = called(conv.double(), wide.detach().double().requires_grad_(), None, True, "torch")
    for found, expected in zip(ours, exact, strict=True):
        assert relative(found.double(), expected) <= 2**-8  # rounded once


@torch.no_grad()
def test_a_bias_may_have_any_stride():
    conv, x = nn.Conv1d(6, 6, 3, groups=6), torch.randn(1, 5, 6)
    conv.bias = nn.Parameter(torch.arange(12.0)[::2])
    assert conv.bias.stride() == (2,)
    found = convolve(conv, x, None, Sequences(x, None), "triton", True)
    expected = convolve(conv.double(), x.double(), None, Sequences(x, None), "torch", True)
    for y, z in zip(found, expected, strict=True):
        assert relative(y.double(), z) <= 1e-6


@pytest.mark.parametrize(("channels", "rows", "width", "silu", "bias"), [
    (70, 3, 4, True, True), (3, 1, 2, False, True), (130, 2, 3, True, False), (5, 2, 8, False, False),
])  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_one_token_after_its_history(channels, rows, width, silu, bias, in_place):
    torch.manual_seed(0)
    conv, wide = nn.Conv1d(channels, channels, width, groups=channels, bias=bias), torch.randn(rows, 1, channels + 5)
    x, history = wide[..., :-5], torch.randn(rows, width - 1, channels)
    exact = convolve(conv.double(), x.double(), history.double(), Sequences(x, None), "torch", silu)
    kept = history.clone()
    y, after = convolve(conv.float(), x, history, Sequences(x, None), "triton", silu, in_place)
    assert relative(y.double(), exact[0]) <= 1e-6 and after.equal(exact[1].float())
    assert (after is history) == in_place and (in_place or history.equal(kept))


def test_autograd_is_told_that_a_history_was_overwritten():
    conv, x, history = nn.Conv1d(3, 3, 2, groups=3), torch.randn(1, 1, 3), torch.randn(1, 1, 3)
    y = history * torch.ones(3, requires_grad=True)
    with torch.no_grad():
        convolve(conv, x, history, Sequences(x, None), "triton", in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
