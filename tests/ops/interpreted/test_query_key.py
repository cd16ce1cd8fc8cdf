"""Norms, rotary embedding and gates of q and k by the backend "triton" against PyTorch's, in float64."""

import copy

import pytest
import torch

from headrace import InputError, Mixer
from headrace.ops.backends.triton import query_key
from headrace.ops.dispatch import choose
from headrace.ops.query_key import QueryKey
from headrace.studies.verify import relative, worst


def given(norm="none", shape=(2, 5, 3, 20), positions=None, theta=10000.0, dtype=torch.float32):
    """A call whose x lies between others' numbers, rounded to dtype; positive, as the norm of sums needs it."""
    *rows, heads, K = shape
    x = torch.rand(*rows, heads * K + 3)[..., 1:-2].unflatten(-1, (heads, K)) + 0.1
    return QueryKey(x.to(dtype), positions, None, norm, theta)


def gated(call, heads, **activation):
    """The same call with gates of `heads` heads."""
    return call._replace(weight=torch.randn(heads, call.x.shape[3]), temperature=0.7, **activation)


def called(backend, dtype, call, results=(0, 1)):
    """The results and the gradients of these to x and the weights."""
    x, _, weight = (y if y is None else y.detach().to(dtype).requires_grad_() for y in (call.x, None, call.weight))
    every = choose("query_key", backend, call := call._replace(x=x, weight=weight)).run(call)
    found = [every[i] for i in results if every[i] is not None]
    by = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).to(y) for i, y in enumerate(found)]
    return *found, *torch.autograd.grad(found, [y for y in (x, weight) if y is not None], by, materialize_grads=True)


def agree(call, dtype=torch.float32, tolerance=2e-6, results=(0, 1)):
    exact = called("torch", torch.float64, call, results)
    for ours, theirs in zip(called("triton", dtype, call, results), exact, strict=True):
        assert ours.dtype in (dtype, torch.float32) and relative(ours, theirs) <= tolerance


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
    y, _ = choose("query_key", "triton", call := QueryKey(x, norm="l2")).run(call)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros_like(x)) and torch.allclose(slope, torch.full_like(x, 1000.0))


@pytest.mark.parametrize(("norm", "log"), [("none", True), ("l2", False), ("sum", True)])
@pytest.mark.parametrize(
    ("heads", "kind", "identity"), [(3, "softmax", True), (6, "null", False), (9, "sigmoid", True)]
)
def test_with_gates(norm, log, heads, kind, identity):
    """Of one, two or three heads for each of x, which is turned or not."""
    positions = torch.randint(0, 50, (2, 5)) if heads != 6 else None
    agree(gated(given(norm, positions=positions), heads, kind=kind, identity=identity, log=log, offset=0.3))


@pytest.mark.parametrize("results", [[0], [1]])
def test_gradients_of_one_result_alone(results):
    agree(gated(given("l2"), 3), results=results)


def test_gates_of_many_tokens_and_channels(monkeypatch):
    """Of several blocks of tokens for each program and several programs; one token is larger than a block."""
    monkeypatch.setattr(query_key, "SIZE", 32)
    monkeypatch.setattr(query_key, "PARTS", 3)
    agree(gated(given("l2", (1, 7, 3, 40), torch.arange(7)[None]), 3, log=False))


@pytest.mark.parametrize("heads", [0, 6])
def test_opcheck(heads):
    """Without the check of a compiled call, which takes seconds."""
    call = given("l2", positions=torch.arange(5)[None])
    call = gated(call, heads) if heads else call
    operators = torch.ops.headrace.triton_query_key, torch.ops.headrace.triton_query_key_backward
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    given_to = (call.x.detach().requires_grad_(), *call[1:]), (*call.results(), *call)
    for operator, arguments in zip(operators, given_to, strict=True):
        assert torch.library.opcheck(operator.default, arguments, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")


def test_it_has_no_second_derivative():
    call = given("l2")
    x = call.x.detach().requires_grad_()
    y, _ = choose("query_key", "triton", call).run(call._replace(x=x))
    with pytest.raises(InputError, match="the triton computation of q and k has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_gates_alone_pass_x_on():
    """y is x, whose gradient the kernel adds its own to; also in a compiled graph, and without gradients."""
    layer, x = Mixer("softmax-gla", hidden_size=8, num_heads=2), torch.randn(1, 5, 8, requires_grad=True)
    for gate in (layer.read_competition, layer.write_competition):
        torch.nn.init.normal_(gate.weight)
    exact, found = copy.deepcopy(layer).double(), []
    exact.backend, layer.backend = "torch", "triton"
    for each, given in (
        (exact, x.double()),
        (layer, x),
        (torch.compile(layer, backend="aot_eager", fullgraph=True), x),
    ):
        y = each(given)[0]
        by = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        found.append([y.detach(), *torch.autograd.grad((y * by).sum(), [given, *each.parameters()])])
    assert worst(found[1], found[0]) <= 2e-6 and worst(found[2], found[0]) <= 2e-6
    with torch.no_grad():
        assert torch.equal(layer(x)[0], found[1][0])
