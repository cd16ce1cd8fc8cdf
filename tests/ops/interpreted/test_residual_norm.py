"""The residual norm of the backend "triton" against PyTorch's, in float64."""

import copy

import pytest
import torch
from torch import nn

from headrace import InputError, set_backend, zoo
from headrace.layers.blocks import block
from headrace.ops.backends.triton import residual_norm
from headrace.ops.dispatch import choose
from headrace.ops.residual_norm import ResidualNorm
from headrace.studies.verify import relative, worst

DTYPES = torch.float32, torch.bfloat16


def given(shape=(2, 5, 20), x=torch.float32, y=torch.float32, n=torch.float32):
    """A call of these dtypes; y of None: without y."""
    weight = torch.rand(shape[-1]).requires_grad_()
    tensors = [None if dtype is None else torch.randn(shape).to(dtype).requires_grad_() for dtype in (x, y)]
    return ResidualNorm(*tensors, weight, 1e-5, n)


def wide(call):
    tensors = (x if x is None else x.detach().double().requires_grad_() for x in call[:3])
    return ResidualNorm(*tensors, call.eps, torch.float64)


def called(backend, call, used=(True, True)):
    """The results, and the gradients to the tensors of a random sum of those that are used."""
    results = choose("residual_norm", backend, call).run(call)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(z.shape, generator=draw, dtype=torch.float64) for z in results]
    total = sum((z * w.to(z)).sum().double() for z, w, wanted in zip(results, weights, used, strict=True) if wanted)
    grads = torch.autograd.grad(total, [x for x in call[:3] if x is not None], allow_unused=True)
    return [z.detach() for z in results], [g for g in grads if g is not None]


@pytest.mark.parametrize("used", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("y", [torch.float32, None])
def test_is_pytorchs(y, used):
    call = given(y=y)
    (ours, slopes), (theirs, exact) = (called(*pair, used) for pair in (("triton", call), ("torch", wide(call))))
    assert max(relative(*pair) for pair in zip(ours, theirs, strict=True)) <= 2e-6
    assert worst(slopes, exact) <= 2e-6
    assert (ours[0].data_ptr() == call.x.data_ptr()) == (y is None)


@pytest.mark.parametrize("n", DTYPES)
@pytest.mark.parametrize("y", [*DTYPES, None])
@pytest.mark.parametrize("x", DTYPES)
def test_dtypes(x, y, n):
    """Each result is rounded once: to bfloat16 by at most 2^-8 of a number, as the interpreter truncates. n is of the
    rounded s, and gradients are rounded as they come and as they go."""
    call = given(x=x, y=y, n=n)
    (s, found), slopes = called("triton", call)
    total = x if y is None else torch.promote_types(x, y)
    assert (s.dtype, found.dtype) == (total, n)
    assert [g.dtype for g in slopes] == [x, *([y] if y else []), torch.float32]
    (exact, _), _ = called("torch", wide(call))
    assert relative(s, exact) <= (2**-8 if total == torch.bfloat16 else 1e-6)
    (_, exact), grads = called("torch", wide(given()._replace(x=s.detach(), y=None, weight=call.weight)))
    assert relative(found, exact) <= (2**-8 if n == torch.bfloat16 else 2e-6)
    rounded = 2**-8 if torch.bfloat16 in (total, n, x, y) else 2e-6
    assert all(relative(g, grads[0]) <= 2 * rounded for g in slopes[:-1])
    assert relative(slopes[-1], grads[1]) <= 2 * rounded


def test_several_blocks_of_tokens_and_groups_of_them():
    call = given((1, 600, 128))
    (ours, slopes), (theirs, exact) = called("triton", call), called("torch", wide(call))
    assert worst(ours + slopes, theirs + exact) <= 2e-6


def test_what_it_cannot_take():
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        choose("residual_norm", "triton", wide(given()))
    with pytest.raises(InputError, match="up to 16384 channels, and this one has 20000"):
        choose("residual_norm", "triton", given((1, 1, 20000)))


@pytest.mark.parametrize("y", [*DTYPES, None])
def test_opcheck(y):
    call = given(y=y)
    assert set(torch.library.opcheck(torch.ops.headrace.triton_residual_norm.default, tuple(call)).values()) == {
        "SUCCESS"
    }


def test_it_has_no_second_derivative():
    call = given()
    _, n = choose("residual_norm", "triton", call).run(call)
    with pytest.raises(InputError, match="the triton residual norm has no second derivative"):
        torch.autograd.grad(n.square().sum(), call.x, create_graph=True)


SIZES = block.Sizes(hidden_size=16, num_heads=2, intermediate_size=24)


def made():
    torch.manual_seed(0)
    found = block.Block(zoo.mixer("gla"), SIZES)
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return found


@pytest.fixture
def launched(monkeypatch):
    """The calls of the kernel."""
    calls, forward = [], residual_norm.forward
    monkeypatch.setattr(residual_norm, "forward", lambda call: calls.append(call) or forward(call))
    return calls


def test_in_a_block(launched):
    ours, x = made(), torch.randn(2, 7, 16)
    exact = copy.deepcopy(ours).double()
    set_backend(ours, "triton")
    found = []
    for each, z in ((ours, x), (exact, x.double())):
        z = z.requires_grad_()
        y, _ = each(z)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [z, *each.parameters()])])
    assert [call.y is None for call in launched] == [True, False]
    assert worst(*found) <= 1e-5


def test_a_norm_with_a_hook_is_called(launched):
    ours, x = made(), torch.randn(2, 7, 16)
    set_backend(ours, "triton")
    seen = []
    ours.mlp_norm.register_forward_hook(lambda *_: seen.append(1))
    ours(x)
    ours.mixer_norm = nn.LayerNorm(16)
    ours(x)
    assert len(seen) == 2 and len(launched) == 1


def test_autocast_gives_the_linear_layers_their_dtype(launched):
    """The residual stream keeps its own."""
    ours, x = made(), torch.randn(2, 7, 16)
    set_backend(ours, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = ours(x)
    assert [call.dtype for call in launched] == [torch.bfloat16] * 2
    assert y.dtype == launched[1].x.dtype == torch.float32 and launched[1].y.dtype == torch.bfloat16
