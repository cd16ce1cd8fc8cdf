"""The short convolution of the backend "triton" against PyTorch's, in float64."""

import pytest
import torch
from torch import nn

from headrace import InputError
from headrace.layers.linear.convolution import convolve
from headrace.ops.sequences import Sequences
from headrace.studies.verify import relative


def given(channels, tokens, rows=2, sequences=2, width=4, bias=True, dtype=torch.float64):
    """A convolution, tokens side by side with others', and what came before them."""
    conv = nn.Conv1d(channels, channels, width, groups=channels, bias=bias).double()
    wide, history = torch.randn(rows, tokens, channels + 5), torch.randn(sequences, width - 1, channels)
    return conv, *(x.to(dtype).double().requires_grad_() for x in (wide, history))


def called(backend, dtype, conv, wide, history, ends=None):
    """Results and gradients of convolving all channels of `wide` but the last five."""
    conv, wide, history = conv.to(dtype), *(x.detach().to(dtype).requires_grad_() for x in (wide, history))
    x = wide[..., :-5]
    found = convolve(conv, x, history, Sequences(x, ends), backend)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype) for y in found]
    inputs = [wide, history, *conv.parameters()]
    return *found, *torch.autograd.grad(sum((y * w).sum() for y, w in zip(found, weights, strict=True)), inputs)


def agree(conv, wide, history, ends=None, dtype=torch.float32, tolerance=1e-6):
    conv.to(dtype)  # its weights too are rounded once
    exact = called("torch", torch.float64, conv, wide, history, ends)
    for ours, theirs in zip(called("triton", dtype, conv, wide, history, ends), exact, strict=True):
        assert ours.dtype == dtype and relative(ours, theirs) <= tolerance


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "tokens", "width"), [(1, 1, 2), (70, 3, 4), (5, 130, 5)])
def test_is_pytorchs(channels, tokens, width, bias):
    agree(*given(channels, tokens, width=width, bias=bias))


def test_sequences_of_a_pack_do_not_meet():
    agree(*given(20, 90, 1, 5), torch.tensor([0, 1, 1, 3, 75, 90]))


def test_bfloat16_is_rounded_once():
    """Of results; gradients twice, as they come and as they go, each by 2^-8 at most and 2^-10 on average."""
    agree(*given(20, 30, dtype=torch.bfloat16), dtype=torch.bfloat16, tolerance=4e-3)


def test_what_it_cannot_take():
    conv, wide, history = given(3, 5)
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        convolve(conv, wide[..., :-5], history, Sequences(wide, None), "triton")
