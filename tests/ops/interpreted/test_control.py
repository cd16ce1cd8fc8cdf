"""The decays and write strengths of the backend "triton" against PyTorch's, in float64."""

import math

import pytest
import torch

from headrace import InputError
from headrace.ops.control import Control
from headrace.ops.dispatch import choose
from headrace.studies.verify import relative

# Whether there are a bias and a log_rate.
FIELDS = {"sigmoid": (False, False), "softplus": (True, True), "exp": (True, False), "beta": (False, False)}


def given(kind, *shape, dtype=torch.float32, rate=1.0):
    """A call with shape [B, T, H] or [B, T, H, K], whose x lies between others' numbers; rounded to dtype."""
    B, T, H, *_ = shape
    N, (bias, log_rate) = math.prod(shape[2:]), FIELDS[kind]
    x = 3 * torch.randn(B, T, N + 3)[..., 1:-2]
    tensors = x.unflatten(2, shape[2:]), torch.randn(N) if bias else None, torch.randn(H) if log_rate else None
    return Control(*(x if x is None else x.to(dtype) for x in tensors), kind, rate)


def called(backend, dtype, call):
    """The result and the gradients to the tensors of the call."""
    call = Control(*(x if x is None else x.detach().to(dtype).requires_grad_() for x in call.tensors), *call[3:])
    y = choose("control", backend, call).run(call)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad((y * weights).sum(), [x for x in call.tensors if x is not None])


def agree(call, dtype=torch.float32, tolerance=2e-6):
    exact = called("torch", torch.float64, call)
    found = called("triton", dtype, call)
    assert found[0].dtype == torch.float32 and all(grad.dtype == dtype for grad in found[1:])
    for ours, theirs in zip(found, exact, strict=True):
        assert relative(ours, theirs) <= tolerance


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 70, 3, 60)])
@pytest.mark.parametrize("kind", FIELDS)
def test_is_pytorchs(kind, shape):
    agree(given(kind, *shape, rate=1 / 16 if kind == "sigmoid" else 1.0))


def test_groups_of_blocks_of_tokens():
    agree(given("softplus", 1, 2100, 16))


def test_bfloat16_is_rounded_once():
    """Gradients only, by 2^-8 at most; the result is in float32."""
    agree(given("softplus", 1, 30, 2, 16, dtype=torch.bfloat16), torch.bfloat16, 2**-8)


def test_small_decays_keep_their_digits():
    """log(1 + e^x) of an x from -80 to 80, each by itself: a memory that lasts needs small decays to be precise."""
    x = torch.linspace(-80, 80, 400)[None, :, None]
    ours, exact = (
        choose("control", backend, call).run(call)
        for backend, call in (
            (name, Control(x.to(dtype), torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype), "softplus"))
            for name, dtype in (("triton", torch.float32), ("torch", torch.float64))
        )
    )
    assert float((ours / exact - 1).abs().max()) <= 1e-6


def test_it_has_no_second_derivative():
    call = given("exp", 1, 4, 2)
    x = call.x.detach().requires_grad_()
    y = choose("control", "triton", call).run(call._replace(x=x))
    with pytest.raises(InputError, match="the triton control has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
