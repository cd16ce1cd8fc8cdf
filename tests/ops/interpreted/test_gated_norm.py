"""The gated norm of the backend "triton" against PyTorch's, in float64."""

import copy

import pytest
import torch

from headrace import InputError, Mixer
from headrace.layers.blocks import block
from headrace.ops.backends.triton import gated_norm
from headrace.ops.dispatch import choose
from headrace.ops.gated_norm import GatedNorm
from headrace.studies.verify import relative, worst


def given(shape, norm, gate="silu", order="norm-gate", strength=False, dtype=torch.float32):
    """A call whose logits lie between others', as they do in the result of an input projection; rounded to dtype."""
    B, T, H, V = shape
    size = {"rms": V, "none": None}.get(norm, H * V)
    tensors = [
        2 * torch.randn(shape) + 0.5,
        None if gate == "none" else torch.randn(B, T, H * V + 3)[..., 1:-2].unflatten(-1, (H, V)),
        torch.rand(B, T, H) if strength else None,
        None if size is None else torch.randn(size),
        torch.randn(size) if norm == "group" else None,
    ]
    return GatedNorm(*(x if x is None else x.to(dtype) for x in tensors), norm, gate, order, 1e-5)


def called(backend, dtype, call):
    """The result and the gradients to the tensors of the call."""
    tensors = [x if x is None else x.detach().to(dtype).requires_grad_() for x in call.tensors]
    y = choose("gated_norm", backend, GatedNorm(*tensors, *call[5:])).run(GatedNorm(*tensors, *call[5:]))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return y, *torch.autograd.grad((y * weights).sum(), [x for x in tensors if x is not None])


def agree(call, dtype=torch.float32, tolerance=2e-6):
    exact = called("torch", torch.float64, call)
    for ours, theirs in zip(called("triton", dtype, call), exact, strict=True):
        assert ours.dtype == dtype and relative(ours, theirs) <= tolerance


@pytest.mark.parametrize("order", ["norm-gate", "gate-norm"])
@pytest.mark.parametrize(("norm", "gate"), [("rms", "silu"), ("group", "sigmoid"), ("rms-joint", "silu")])
def test_is_pytorchs(norm, gate, order):
    agree(given((2, 5, 3, 20), norm, gate, order, strength=norm != "rms-joint"))


@pytest.mark.parametrize(("norm", "gate"), [("rms", "none"), ("none", "sigmoid"), ("group", "none")])
def test_a_norm_or_a_gate_alone(norm, gate):
    agree(given((1, 3, 2, 7), norm, gate))


def test_several_blocks_of_tokens_and_groups_of_them():
    agree(given((1, 600, 1, 128), "rms", strength=True))


def test_bfloat16_is_rounded_once():
    """Of results; gradients twice, as they come and as they go, each by 2^-8 at most and 2^-10 on average."""
    agree(given((1, 30, 2, 16), "rms", strength=True, dtype=torch.bfloat16), torch.bfloat16, 4e-3)


@pytest.mark.parametrize("mixer", ["softmax-gla", "mamba2"])
def test_in_a_layer(mixer):
    torch.manual_seed(0)
    x, layers = torch.randn(1, 9, 32, requires_grad=True), {}
    for backend in ("torch", "triton"):
        torch.manual_seed(1)
        layer = Mixer(mixer, hidden_size=32, num_heads=2)
        layer.backend = backend
        y, _ = layer(x)
        layers[backend] = y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    for ours, theirs in zip(layers["triton"], layers["torch"], strict=True):
        assert ours is theirs is None or relative(ours, theirs) <= 1e-5


def test_what_it_cannot_take():
    call = given((1, 1, 2, 4), "rms")
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        choose("gated_norm", "triton", call._replace(x=call.x.double()))
    with pytest.raises(InputError, match="up to 16384 channels, and this one has 20000"):
        choose("gated_norm", "triton", given((1, 1, 2, 10000), "rms-joint"))


def test_opcheck():
    call = given((1, 5, 2, 4), "rms", strength=True)
    tensors = [x if x is None else x.detach().requires_grad_() for x in call.tensors]
    checked = torch.library.opcheck(torch.ops.headrace.triton_gated_norm.default, (*tensors, *call[5:]))
    assert set(checked.values()) == {"SUCCESS"}


def test_it_has_no_second_derivative():
    call = given((1, 2, 1, 4), "rms")
    x = call.x.requires_grad_()
    y = choose("gated_norm", "triton", call).run(call)
    with pytest.raises(InputError, match="the triton gated norm has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(("widest", "heads"), [(24, 1), (20, 2), (7, 4)])
def test_a_gated_mlp(widest, heads, monkeypatch):
    """Its 24 channels are heads of at most `widest`."""
    calls, compute = [], gated_norm.forward
    monkeypatch.setattr(gated_norm, "forward", lambda call: calls.append(call.x.shape) or compute(call))
    monkeypatch.setattr(block, "WIDEST", widest)
    mlp, x = block.MLP(block.Sizes(hidden_size=8, num_heads=1, intermediate_size=24)), torch.randn(2, 5, 8)
    exact = copy.deepcopy(mlp).double()
    mlp.backend, found = "triton", []
    for each, given in ((exact, x.double()), (mlp, x)):
        given = given.requires_grad_()
        y = each(given)
        by = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        found.append([y.detach(), *torch.autograd.grad((y * by).sum(), [given, *each.parameters()])])
    assert calls == [(1, 10, heads, 24 // heads)]
    assert worst(found[1], found[0]) <= 2e-6
