"""Derivatives beyond a first gradient, and tensors that are no plain ones: right, or refused in one sentence."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from equation import detached, inputs, of_kind, skip_if_missing
from headrace import InputError, linear_attention, step, zoo
from headrace.extra.gathered import Groups, attend_gathered
from headrace.extra.mesa import RidgeRead
from headrace.extra.scan import Pack, packed_scan
from headrace.extra.selective_scan import Operands, scan_tiles
from headrace.history.layers.flash import flash_attention
from headrace.layers import build
from headrace.layers.linear.convolution import convolve
from headrace.layers.quantized import QuantizedLinear
from headrace.ops.loss import linear_cross_entropy
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative

# Forward-mode derivatives import it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def op(backend, **settings):
    """A function of q in float32; the second is where to differentiate it."""
    x = detached(inputs("scalar"))
    q = x.pop("q")
    return lambda q: linear_attention(q, **x, backend=backend, **settings)[0], q


# --- functions with a hand-written gradient -------------------------------------------------------------------------


def loss(x):
    return linear_cross_entropy(x, torch.ones(5, 6).double(), torch.tensor([0, 2, 4]))


def dense(q, k, v, groups):
    return q * k.sum((1, 2, 3))[:, None, None, None] * v.sum((1, 2, 3))[:, None, None, None]


def gathered(x):
    rows = torch.arange(3)[:, None]
    return attend_gathered(dense, Groups(rows, rows, rows, rows), x[:, None], x[:, None], x[:, None], [])


def scanned(x):
    return packed_scan(x, x, x[:1], Pack([3], x.device).tile(0, 3))[1]


def selected(x):
    return scan_tiles(Operands(x, x.exp(), -x[:2].exp(), x[:, :2], x[:, :2], torch.zeros(1, 2, 6).double()), [3])[0]


RIDGE = RidgeRead(3, 1, 6).double()


def ridged(x):
    q, recurrent = x[None, :, None], partial(linear_attention, scale=1.0, form="recurrent")
    given = {"q": q, "k": q, "v": q, "log_decay": None, "beta": None}
    return RIDGE(recurrent, given, None, Sequences(q, None))[0]


FUNCTIONS = {
    "linear_cross_entropy": loss, "ridge_steps": ridged,
    "flash_attention": lambda x: flash_attention(*[x[None, :, None]] * 3), "attention of gathered keys": gathered,
    "a scan over time": scanned, "the selective scan": selected,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("reduce", [torch.sum, lambda y: y.square().sum()], ids=["sum", "square"])
def test_gradient_penalties_are_refused(name, reduce):
    """Through a sum the incoming gradient is a constant: then PyTorch's own once_differentiable gives zeros."""
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    run = FUNCTIONS[name]
    assert torch.autograd.grad(reduce(run(x)), x)[0].norm() > 0
    with pytest.raises(InputError, match=f"{name} has no second derivative"):
        torch.autograd.grad(reduce(run(x)), x, create_graph=True)[0].square().sum().backward()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func_transforms_are_refused(name):
    run, x = FUNCTIONS[name], torch.randn(3, 6, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(InputError, match=f"{name} has no"):
            transform(lambda x: run(x).sum())(x)


# --- linear_attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [torch.sum, lambda y: y.square().sum()], ids=["sum", "square"])
def test_second_derivatives_are_refused(backend, reduce):
    run, q = op(backend)
    q.requires_grad_()
    sentence = r"linear_attention has no second derivative, .*; expected form='recurrent'"
    with pytest.raises(InputError, match=sentence):
        torch.autograd.grad(reduce(run(q)), q, create_graph=True)
    for vectorize in (False, True):
        with pytest.raises(InputError, match=sentence):
            torch.autograd.functional.hessian(lambda q: reduce(run(q)), q, vectorize=vectorize)


def test_layer_error_names_the_form_with_second_derivatives():
    layer = build(zoo.get("gla"), hidden_size=16, num_heads=2).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(InputError, match=r"for a layer, layer.op = partial\(linear_attention, form='recurrent'\)"):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    layer.op = partial(linear_attention, form="recurrent")
    torch.autograd.gradgradcheck(lambda x: layer(x)[0], x, fast_mode=True)


def test_forward_derivatives_are_refused(backend):
    run, q = op(backend)
    sentence = r"linear_attention has no forward-mode derivative, .*; expected form='recurrent'"
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(InputError, match=sentence):
            transform(lambda q: run(q).sum())(q)
    for differentiable in (False, True):
        with forward_ad.dual_level(), pytest.raises(InputError, match=sentence):
            run(forward_ad.make_dual(q.detach().requires_grad_(differentiable), q))


def test_gradients_inside_transforms_are_refused(backend):
    run, q = op(backend)
    total, linear = lambda q: run(q).sum(), nn.Linear(6, 6)
    inside = partial(torch.func.functional_call, linear)
    sentence = "no gradient inside a transform of torch.func; expected form='recurrent'"
    for transform, x in (
        (torch.func.grad(total), q),
        (torch.func.jacrev(total), q),
        (torch.func.vmap(torch.func.grad(total)), q[None]),
        (torch.func.grad(lambda parameters: total(inside(parameters, q))), dict(linear.named_parameters())),
    ):
        with pytest.raises(InputError, match=sentence):
            transform(x)
    expected = torch.autograd.grad(linear(run(q)[..., [0] * 6]).sum(), linear.weight)[0]
    actual = torch.func.grad(lambda parameters: inside(parameters, run(q)[..., [0] * 6]).sum())(
        {name: x.detach() for name, x in linear.named_parameters()}
    )
    assert torch.allclose(actual["weight"], expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_transforms_raise_instead_of_zero_gradients(backend):
    run, q = op(backend)
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises((InputError, RuntimeError), match=r"linear_attention has no|setup_context"):
            torch.compile(transform(lambda q: run(q).sum()), backend="aot_eager")(q)


# PyTorch calls an operator once per sample, and says so: on stderr before 2.15, as a warning since.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_vmap_equals_a_loop(backend):
    """Its tensors do not say whether they need a gradient."""
    run, q = op(backend)
    several = torch.stack([q, 2 * q, -q]).requires_grad_()
    actual, expected = torch.func.vmap(run)(several), torch.stack([run(q) for q in several])
    weight = torch.randn_like(expected)
    assert torch.equal(actual, expected)
    assert torch.equal(*(torch.autograd.grad((y * weight).sum(), several)[0] for y in (actual, expected)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_gradients(backend, reentrant):
    run, q = op(backend, rule="delta")
    q.requires_grad_()
    gradients = []
    for function in (run, partial(checkpoint, run, use_reentrant=reentrant)):
        q.grad = None
        function(q).square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


# Every kind and every decay: test_op.py has their product for the first derivative.
@pytest.mark.parametrize(
    ("kind", "decay"),
    [("add", "none"), ("delta", "fixed"), ("bonus", "scalar"), ("normalize", "vector"), ("delta", "vector")],
)
def test_recurrent_form_passes_gradcheck_and_gradgradcheck(decay, kind):
    options, settings = of_kind(kind)
    x = inputs(decay, rows=1, tokens=3, groups=2, key=2, value=2, **options)
    run = lambda *given: linear_attention(**dict(zip(x, given, strict=True)), **settings, form="recurrent")  # noqa: E731
    given = tuple(x.values())
    assert torch.autograd.gradcheck(run, given, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


def test_step_has_forward_mode_derivatives():
    x, state = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 4)
    run = lambda x: step(x, x, x, state)[0]  # noqa: E731
    actual = torch.func.jvp(run, (x,), (x,))[1]
    expected = torch.autograd.functional.jvp(lambda x: step(x, x, x, state.double())[0], x.double(), x.double())[1]
    assert relative(actual, expected) < 1e-6


@pytest.mark.parametrize("name", ["q", "log_decay", "initial_state"])
def test_complex_tensors_are_refused(name):
    x = inputs("scalar")
    with pytest.raises(InputError, match=f"{name} has dtype torch.complex128; expected a floating-point dtype"):
        linear_attention(**(x | {name: x[name] + 0j}))


def test_meta_tensors_work(backend):
    x = {name: y.to("meta") for name, y in detached(inputs("scalar")).items()}
    if backend == "native":
        with pytest.raises(InputError, match="it runs on the CPU, and v is on meta"):
            linear_attention(**x, backend=backend)
        return
    x["q"].requires_grad_()
    out, state = linear_attention(**x, backend=backend)
    assert out.is_meta and state.shape == x["initial_state"].shape
    assert torch.autograd.grad(out.sum(), x["q"])[0].shape == x["q"].shape
    out, state = step(*(x[name][:, 0] for name in "qkv"), x["initial_state"], backend=backend)
    assert out.is_meta and state.shape == x["initial_state"].shape


# --- the convolution and the product with integers -------------------------------------------------------------------


def convolved(conv, x):
    return convolve(conv, x, None, Sequences(x, None))[0]


def test_convolution_equals_pytorch_under_transforms():
    skip_if_missing("native")
    conv, x = nn.Conv1d(6, 6, 4, groups=6), torch.randn(2, 9, 6)
    run, exact = partial(convolved, conv), partial(convolved, nn.Conv1d(6, 6, 4, groups=6).double())
    exact.args[0].load_state_dict(conv.state_dict())
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        pairs = (run, x), (exact, x.double())
        actual, expected = (transform(lambda x, f=f: f(x).square().sum())(y) for f, y in pairs)
        assert relative(actual, expected) < 1e-5
    assert relative(torch.func.vmap(run)(x[None])[0], exact(x.double())) < 1e-6
    x.requires_grad_()
    with pytest.raises(InputError, match=r"the native convolution has no second derivative, .* expected float64"):
        torch.autograd.grad(run(x).sum(), x, create_graph=True)


@torch.no_grad()
def test_int8_linear_works_under_transforms():
    layer, x = QuantizedLinear(nn.Linear(6, 5)), torch.randn(2, 6)
    expected = x @ layer.weight.T
    assert torch.allclose(torch.func.jvp(layer, (x,), (x,))[1], expected, atol=1e-6)
    assert torch.allclose(torch.func.vmap(layer)(x), expected + layer.bias, atol=1e-6)


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("wrap", [lambda x: TwoTensor(x, x.clone()), lambda x: x.as_subclass(Named)])
@torch.no_grad()
def test_tensor_subclasses_are_kept(wrap):
    """One made of two tensors has no memory of its own to read."""
    q, x = torch.randn(1, 4, 2, 6), torch.randn(1, 3, 6)
    layer, conv = QuantizedLinear(nn.Linear(6, 5)), nn.Conv1d(6, 6, 4, groups=6)
    # The kernel of int8 weights rounds x to 16 bits, and does not take part.
    rounding = float(x.abs().max() * 6 * layer.weight.abs().max()) / 2**16
    runs = (
        (lambda q: linear_attention(q, q, q)[0], q, 1e-6),
        (layer, x[0], rounding),
        (partial(convolved, conv), x, 1e-6),
    )
    for run, y, tolerance in runs:
        result = run(wrap(y))
        assert type(result) is type(wrap(y))
        assert torch.allclose(getattr(result, "a", result).as_subclass(torch.Tensor), run(y), atol=tolerance)


@torch.no_grad()
def test_one_token_layer_step_has_forward_mode_derivatives():
    """Not through the native call, which would lose it."""
    made, x = build(zoo.get("gla"), hidden_size=32, num_heads=4, layer_idx=1, num_layers=3), torch.randn(2, 5, 32)
    state, exact, token = made(x)[1], copy.deepcopy(made).double(), torch.randn(2, 1, 32)
    wide = type(state)(*(y if y is None else y.double() for y in state))
    run = lambda token: made(token, state, in_place=True)[0]  # noqa: E731
    expected = torch.func.jvp(lambda token: exact(token, wide)[0], (token.double(),), (token.double(),))[1]
    assert relative(torch.func.jvp(run, (token,), (token,))[1], expected) < 1e-5


@pytest.mark.parametrize("name", ["transformer", "gqa", "gsa", "gla"])
def test_layers_have_forward_mode_derivatives(name):
    """Those of linear attention where the op is as the error of `linear_attention` names it."""
    layer, x, along = build(zoo.get(name), hidden_size=16, num_heads=2).double(), *torch.randn(2, 1, 5, 16).double()
    layer.op = partial(linear_attention, form="recurrent")
    found = torch.func.jvp(lambda x: layer(x)[0], (x,), (along,))[1]
    with torch.no_grad():
        before, after = (layer(x + step * along)[0] for step in (-1e-5, 1e-5))
    assert relative(found, (after - before) / 2e-5) < 1e-6
