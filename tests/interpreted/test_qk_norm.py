"""The norms of q and k and the rotary embedding of the backend "triton" against PyTorch's, in float64."""

import pytest
import torch

from headrace import InputError
from headrace.ops.dispatch import choose
from headrace.ops.qk_norm import QKNorm
from headrace.studies.verify import relative


def given(norm="none", shape=(2, 5, 3, 20), positions=None, theta=10000.0, dtype=torch.float32):
    """A call whose x lies between others' numbers, rounded to dtype; positive, as the norm of sums needs it."""
    *rows, heads, K = shape
    x = torch.rand(*rows, heads * K + 3)[..., 1:-2].unflatten(-1, (heads, K)) + 0.1
    return QKNorm(x.to(dtype), positions, norm, theta)


def called(backend, dtype, call):
    """The result and the gradient to x."""
    call = call._replace(x=call.x.detach().to(dtype).requires_grad_())
    y = choose("qk_norm", backend, call).run(call)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad((y * weights).sum(), call.x)


def agree(call, dtype=torch.float32, tolerance=2e-6):
    exact, found = called("torch", torch.float64, call), called("triton", dtype, call)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype and relative(ours, theirs) <= tolerance


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("norm", ["none", "l2", "sum"])
def test_is_pytorchs(norm, rows):
    """With the positions of each row, or of all."""
    agree(given(norm, positions=torch.randint(0, 50, (rows, 5))))


@pytest.mark.parametrize("norm", ["l2", "sum"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 2), (1, 3, 2, 7), (1, 300, 1, 130)])
def test_a_norm_alone(norm, shape):
    """Of odd heads too, and of more tokens than a program holds."""
    agree(given(norm, shape))


def test_angles_keep_their_digits():
    """At position 10,000,000 a float32 angle is off by half a radian."""
    agree(given(shape=(1, 4, 1, 64), positions=10_000_000 + torch.arange(4)[None], theta=500000.0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_narrow_inputs_are_rounded_once(dtype, tolerance):
    """By half of eps at most in float16; the interpreter truncates bfloat16, by eps at most."""
    agree(given("l2", positions=torch.arange(5)[None], dtype=dtype), dtype, tolerance)


def test_a_vector_of_zeros():
    """The norm's epsilon keeps it and its gradient finite."""
    x = torch.zeros(1, 1, 1, 4, requires_grad=True)
    y = choose("qk_norm", "triton", call := QKNorm(x, None, "l2", 1.0)).run(call)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros_like(x)) and torch.allclose(slope, torch.full_like(x, 1000.0))


def test_opcheck():
    """Without the check of a compiled call, which takes seconds."""
    call = given("l2", positions=torch.arange(5)[None])
    forward, backward = torch.ops.headrace.triton_qk_norm.default, torch.ops.headrace.triton_qk_norm_backward.default
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for operator, arguments in ((forward, (call.x.requires_grad_(), *call[1:])), (backward, (call.result(), *call))):
        arguments = [x.detach() if operator is backward and isinstance(x, torch.Tensor) else x for x in arguments]
        assert torch.library.opcheck(operator, tuple(arguments), test_utils=checks) == dict.fromkeys(checks, "SUCCESS")


def test_it_has_no_second_derivative():
    call = given("l2")
    x = call.x.detach().requires_grad_()
    y = choose("qk_norm", "triton", call).run(call._replace(x=x))
    with pytest.raises(InputError, match="the triton qk norm has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
