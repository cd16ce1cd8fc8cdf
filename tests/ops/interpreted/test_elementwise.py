"""The operators over the channels of a head against what PyTorch computes in float64: results and gradients."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx

from headrace import InputError, Mixer, zoo
from headrace.layers.linear import decays
from headrace.layers.linear.competition import HeadCompetition
from headrace.layers.linear.features import EPS, l2_norm
from headrace.layers.linear.mixer import LinearMixer
from headrace.layers.linear.readout import Gate, GateFirst, Norm, Out, Skip
from headrace.layers.norms import add_and_norm
from headrace.layers.rotary import rotate
from headrace.ops.backends.triton import elementwise
from headrace.spec.linear import Competition
from headrace.verification.verify import relative


def results(function, *given):
    """function(*given), and its gradients."""
    given = [x.detach().requires_grad_() for x in given]
    found = function(*given)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return found, *torch.autograd.grad((found.double() * weights).sum(), given)


def agree(kernel, plain, *given, tolerance):
    ours, exact = results(kernel, *given), results(plain, *(x.double() for x in given))
    for found, expected, like in zip(ours, exact, [ours[0], *given], strict=True):
        assert found.dtype == like.dtype and found.shape == expected.shape
        assert relative(found.double(), expected) <= tolerance


def side_by_side(B, T, H, K, dtype=torch.float32, scale=1.0):
    """[B, T, H, K] as a view of more channels."""
    torch.manual_seed(0)
    return (scale * torch.randn(B, T, H * K + 5)).to(dtype)[..., : H * K].unflatten(-1, (H, K))


SIZES = [(2, 5, 3, 48), (1, 1, 1, 3), (1, 70, 2, 128), (1, 2, 2, 700)]  # several programs, rows of one token


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_l2_norm(sizes):
    agree(lambda x: elementwise.L2Norm.apply(x, EPS), l2_norm, side_by_side(*sizes), tolerance=1e-6)


def agree_twice(kernel, plain, *given):
    """The products of a second derivative and the arguments."""
    wide = tuple(x.double() for x in given)
    ours = torch.autograd.functional.vhp(lambda *x: kernel(*x).pow(3).sum(), given, given)[1]
    exact = torch.autograd.functional.vhp(lambda *x: plain(*x).pow(3).sum(), wide, wide)[1]
    assert all(relative(a.double(), b) <= 1e-5 for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize(("sizes", "F", "rows"), [((2, 5, 3, 48), 24, 1), ((2, 5, 3, 48), 10, 2), ((1, 1, 1, 3), 1, 1)])
def test_rotation_and_its_second_derivative(sizes, F, rows):
    """All channels and some of them, at the places of a batch and of each of its rows."""
    x, angle = side_by_side(*sizes), torch.randn(rows, sizes[1], 1, F)
    by = angle.cos(), angle.sin()
    functions = lambda x: rotate(x, by, "triton"), lambda x: rotate(x, tuple(y.double() for y in by), "torch")
    agree(*functions, x, tolerance=1e-6)
    agree_twice(*functions, x)


@torch.no_grad()
def test_angles_of_each_head_are_pytorchs():
    """As Mamba-3 has them, whose angles have no gradient in evaluation."""
    x, angle = side_by_side(2, 4, 3, 8), torch.randn(2, 4, 3, 4)
    by = angle.cos(), angle.sin()
    torch.testing.assert_close(rotate(x, by, "triton"), rotate(x, by, "torch"), rtol=0, atol=0)


def test_angles_with_gradients_are_pytorchs():
    x, angle = side_by_side(1, 4, 2, 8), torch.randn(1, 4, 2, 4, requires_grad=True)
    y = rotate(x, (angle.cos(), angle.sin()), "triton")
    assert torch.autograd.grad(y.square()[..., 0].sum(), angle)[0].count_nonzero()


def plain_decay(x, bias, log_rate):
    return decays.softplus_decay(decays.biased(x, bias), log_rate)


def decay(x, bias, log_rate):
    return elementwise.SoftplusDecay.apply(x, bias, log_rate)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decay(sizes):
    H, K = sizes[2:]
    agree(decay, plain_decay, side_by_side(*sizes, scale=3.0), torch.randn(H * K), torch.randn(H), tolerance=2e-6)


def decay_of_heads(x, bias, log_rate):
    return elementwise.head_decay(x[..., 0], bias, log_rate)[..., None]


@pytest.mark.parametrize("sizes", [(2, 5, 3, 1), (1, 4500, 2, 1)], ids=str)
def test_decay_of_each_head_and_its_step_size(sizes):
    x, bias = side_by_side(*sizes, scale=3.0), torch.randn(sizes[2])
    agree(decay_of_heads, plain_decay, x, bias, torch.randn(sizes[2]), tolerance=2e-6)
    step_size = lambda x, bias: -decay_of_heads(x, bias, None), lambda x, bias: F.softplus(x + bias[:, None])
    agree(*step_size, x, bias, tolerance=2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decay_of_a_sigmoid(sizes):
    functions = (lambda x: decays.log_sigmoid(x, 16.0, "triton")), (lambda x: F.logsigmoid(x) / 16)
    agree(*functions, side_by_side(*sizes, scale=3.0), tolerance=1e-6)
    infinite = torch.tensor([[[[-torch.inf, torch.inf]]]])
    for ours, plain in zip(*(results(function, infinite) for function in functions), strict=True):
        assert ours.equal(plain)
    far = torch.tensor([[[[-300.0, -101.0, -88.0, -41.0, -39.0, 0.0, 16.0, 17.0, 39.0, 41.0, 88.0, 104.0, 300.0]]]])
    for ours, exact in zip(results(functions[0], far), results(functions[1], far.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=500 * torch.finfo(torch.float32).eps, atol=1e-38)


def plain_norm(silu):
    def norm(x, gate, weight=None):
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5) * (F.silu if silu else torch.sigmoid)(gate)

    return norm


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("sizes", [*SIZES, (1, 700, 1, 128)], ids=str)  # the last has several programs in the backward
def test_norm_with_an_output_gate(sizes, silu):
    x, gate, weight = side_by_side(*sizes), side_by_side(*sizes).flip(1), torch.randn(sizes[3])
    norm = lambda x, gate, weight=None: elementwise.GatedNorm.apply(x, gate, weight, 1e-5, silu)  # noqa: E731
    agree(norm, plain_norm(silu), x, gate, weight, tolerance=2e-6)
    agree(norm, plain_norm(silu), x, gate, tolerance=2e-6)


def plain_gate_norm(groups):
    def norm(x, gate, *others):
        v, skip, read, weight = others or [None] * 4
        x = (x if skip is None else (x + skip[:, None] * v) * read[..., None]) * F.silu(gate)
        wide = x.unflatten(2, (groups, -1)).flatten(3)
        normal = F.rms_norm(wide, wide.shape[-1:], None, 1e-5).view_as(x)
        return normal if weight is None else normal * weight.view(x.shape[2:])

    return norm


def gate_norm(groups):
    return lambda x, gate, *others: elementwise.gate_norm(x, gate, *(others or [None] * 4), groups, 1e-5)


def of_gate_norm(*sizes, dtype=torch.float32):
    x, (B, T, H, V) = side_by_side(*sizes, dtype), sizes
    return x, x.flip(1), x.roll(1, -1) + 1, *(torch.randn(n).to(dtype) for n in ((H,), (B, T, H), (H * V,)))


@pytest.mark.parametrize("programs", [3, 100])  # of the backward, each for several tokens or one
@pytest.mark.parametrize(
    ("sizes", "groups"), [((2, 5, 3, 48), 1), ((1, 7, 4, 16), 2), ((1, 2, 6, 5), 3), ((1, 3, 32, 64), 1)]
)
def test_norm_of_several_heads_after_an_output_gate(sizes, groups, programs, monkeypatch):
    monkeypatch.setattr(elementwise, "SUMS", programs)
    given = of_gate_norm(*sizes)
    agree(gate_norm(groups), plain_gate_norm(groups), *given, tolerance=2e-6)
    agree(gate_norm(groups), plain_gate_norm(groups), *given[:2], tolerance=2e-6)


def test_operator_of_the_norm_after_a_gate_passes_opcheck():
    given = [x.detach().requires_grad_() for x in of_gate_norm(2, 3, 4, 5)]
    for some in (given, [*given[:2], *[None] * 4]):
        operator = torch.ops.headrace.gate_norm.default, (*some, 2, 1e-5)
        assert set(torch.library.opcheck(*operator).values()) == {"SUCCESS"}


def test_norms_without_an_epsilon():
    """Rows past the last token are zero: their norm is ∞, which must not reach the gradient to the weight."""
    x, weight = side_by_side(1, 3, 1, 8), torch.randn(8)
    norm = lambda x, gate, weight: elementwise.GatedNorm.apply(x, gate, weight, 0.0, False)  # noqa: E731
    plain = lambda x, gate, weight: F.rms_norm(x, (8,), weight, 0.0) * gate.sigmoid()  # noqa: E731
    agree(norm, plain, x, x.flip(1), weight, tolerance=2e-6)
    x = x[:, :, 0]
    norm = lambda x, y, weight: elementwise.NormOfSum.apply(x, y, weight, 0.0)[1]  # noqa: E731
    agree(norm, lambda x, y, weight: F.rms_norm(x + y, (8,), weight, 0.0), x, x.flip(1) / 2, weight, tolerance=2e-6)


class Branches(nn.Module):
    """The sum and its norm, side by side."""

    def forward(self, x, y, weight=None):
        s, z = elementwise.NormOfSum.apply(x, y, weight, 1e-5) if x.dtype != torch.float64 else self.plain(x, y, weight)
        return torch.cat([s, z], -1)

    def plain(self, x, y, weight):
        return x + y, F.rms_norm(x + y, x.shape[-1:], weight, 1e-5)


@pytest.mark.parametrize("sizes", [(2, 5, 70), (1, 1, 1), (1, 40, 2000)], ids=str)
def test_norm_of_a_sum_and_its_second_derivative(sizes):
    (x, y), weight = (side_by_side(*sizes[:2], 1, sizes[2])[:, :, 0] for _ in range(2)), torch.randn(sizes[2])
    both, y = Branches(), y.flip(1)
    agree(both, both, x, y, weight, tolerance=2e-6)
    agree(both, both, x, y, tolerance=2e-6)
    agree_twice(both, both, x, y, weight)
    agree_twice(both, both, x, y)


@pytest.mark.parametrize("sizes", [(2, 5, 70), (1, 1, 1), (1, 3, 5000)], ids=str)
def test_product_with_silu_and_its_second_derivative(sizes):
    x, gate = (side_by_side(*sizes[:2], 1, sizes[2])[:, :, 0] for _ in range(2))
    agree(elementwise.SiLUProduct.apply, elementwise.silu_product, x, gate, tolerance=1e-6)
    agree_twice(elementwise.SiLUProduct.apply, elementwise.silu_product, x, gate)


def gates(temperature=1.0, scale="identity", log=False, dtype=torch.float32):
    """The kernel, and what PyTorch computes, as functions of x and the weights."""
    spec = Competition(temperature=temperature, scale=scale)

    def kernel(x, weight):
        return elementwise.head_gate(x, weight, 1 / temperature, scale == "identity", log, dtype)

    def plain(x, weight):
        module = HeadCompetition(spec, 1, len(weight), *x.shape[2:])
        log_gate = torch.func.functional_call(module, {"weight": weight}, (x, x))
        return log_gate if log else log_gate.exp()

    return kernel, plain


@pytest.mark.parametrize("log", [False, True], ids=["gates", "logarithms"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "scale": "one"}], ids=["identity", "scaled"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 1), (3, 1), (1, 1), (6, 3), (17, 17)])
def test_gates_of_heads(heads, shared, options, log, monkeypatch):
    """Where a program of the backward has several tokens, or one, and heads of x are shared."""
    x, weight = side_by_side(2, 5, heads // shared, 12), torch.randn(heads, 12)
    for programs in (3, 100):
        monkeypatch.setattr(elementwise, "PROGRAMS", programs)
        agree(*gates(**options, log=log), x, weight, tolerance=2e-6)


@pytest.mark.parametrize("log", [False, True], ids=["gates", "logarithms"])
def test_gates_of_scores_far_apart(log):
    """Scores of ±1e4, which float32 has exactly, and ties of them."""
    rows = [[1e4, -1e4, 0], [1e4, 1e4, -1e4], [-1e4, -1e4, -1e4], [1e4, 9999, 0], [-1e4, 1, 0]]
    x = torch.tensor(rows).view(1, 5, 3, 1)
    agree(*gates(log=log), x, torch.ones(3, 1), tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_of_equal_scores_are_exactly_one(dtype):
    for heads in range(1, 34):
        x = side_by_side(1, 2, heads, 3, dtype)
        gate = gates(dtype=dtype)[0](x, torch.zeros(heads, 3, dtype=dtype))
        assert gate.dtype == dtype and torch.equal(gate, torch.ones_like(gate))


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("name", ["gla", "gated-deltanet", "mamba2"])
def test_layers_with_first_gates_equal_those_without(name):
    found = []
    for each in (name, f"softmax-{name}"):
        torch.manual_seed(0)
        layer = Mixer(each, hidden_size=48, num_heads=3)
        layer.backend = "triton"
        found.append(layer(torch.linspace(-1, 1, 2 * 9 * 48).view(2, 9, 48))[0])
    assert torch.equal(*found)


def compared(layer, other):
    """Whether outputs and gradients of two layers agree; layers run by their kernels."""
    x, found = torch.randn(2, 9, 32), []
    for each in (layer, other):
        y, _ = each(leaf := x.clone().requires_grad_())
        wanted = leaf, *(p for p in each.parameters() if p.requires_grad)
        found.append((y, *torch.autograd.grad(y.square().sum(), wanted)))
    return all(relative(ours.double(), plain.double()) <= 1e-5 for ours, plain in zip(*found, strict=True))


def gated_layer():
    torch.manual_seed(0)
    layer = Mixer("softmax-gla", hidden_size=32, num_heads=2)
    layer.backend = "triton"
    for gate in (layer.read_competition, layer.write_competition):
        torch.nn.init.normal_(gate.weight)
    return layer


def test_compiled_graphs_have_the_kernel_of_gates(monkeypatch):
    names, launch, layer = [], elementwise._launch, gated_layer()
    monkeypatch.setattr(
        elementwise, "_launch", lambda name, *args, **named: names.append(name) or launch(name, *args, **named)
    )
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(2, 9, 32))[0].sum().backward()
    assert names == ["head_gate"] * 4
    assert compared(compiled, layer)


def test_compiled_graphs_have_the_norm_after_a_gate(monkeypatch):
    torch.manual_seed(0)
    names, launch, layer = [], elementwise._launch, Mixer("softmax-mamba2", hidden_size=32, num_heads=2)
    monkeypatch.setattr(
        elementwise, "_launch", lambda name, *args, **named: names.append(name) or launch(name, *args, **named)
    )
    layer.backend, compiled = "triton", torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(2, 9, 32))[0].sum().backward()
    assert [name for name in names if name != "head_gate"] == ["gate_norm", "gate_norm_backward"]
    assert compared(compiled, layer)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_traces_have_the_norm_after_a_gate():
    layer = Mixer("softmax-mamba2", hidden_size=32, num_heads=2).requires_grad_(False)
    layer.backend = "triton"
    traced = torch.jit.trace(lambda x: layer(x)[0], torch.randn(2, 6, 32), check_trace=False)
    x = torch.randn(2, 6, 32)
    assert "headrace::gate_norm" in str(traced.graph) and relative(traced(x).double(), layer(x)[0].double()) <= 1e-6


class Shifted(Norm):
    """A stage of a plug-in: after the norm, or before it."""

    applies = classmethod(lambda cls, spec: True)

    def build(self, mixer):
        """Nothing."""

    def __call__(self, mixer, t):
        t.out = t.out + 3


STAGES = [
    ("mamba2", (Skip, Shifted, GateFirst, Norm, Out)), ("mamba2", (GateFirst, Skip, Norm, Out)),
    ("mamba2", (Skip, GateFirst, Norm, Shifted, Out)), ("mamba2", (Skip, GateFirst, Shifted, Out)),
    ("gla", (Norm, Shifted, Gate, Out)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages"), STAGES, ids=str)
def test_stages_of_plug_ins_around_norm_and_gate(name, stages, monkeypatch):
    monkeypatch.setattr(LinearMixer, "READOUT", stages)
    layer = Mixer(name, hidden_size=32, num_heads=2)
    plain, layer.backend = deepcopy(layer), "triton"
    assert compared(layer, plain)


def test_hooks_see_the_logarithms_of_gates():
    layer, plain, seen = gated_layer(), gated_layer(), []
    for each in (layer.read_competition, layer.write_competition):
        each.register_forward_hook(lambda module, args, log_gate: seen.append(log_gate))
    assert compared(layer, plain) and [x.shape for x in seen] == [(2, 9, 2)] * 2


def test_operator_of_gates_passes_opcheck():
    x = side_by_side(2, 3, 4, 5)
    given = x.detach().requires_grad_(), torch.randn(4, 5, requires_grad=True), 1.0, True, False, torch.float32
    assert set(torch.library.opcheck(torch.ops.headrace.head_gate.default, given).values()) == {"SUCCESS"}
    constant = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    backward = torch.ops.headrace.head_gate_backward.default, (torch.randn(2, 3, 4), *constant)
    assert set(torch.library.opcheck(*backward).values()) == {"SUCCESS"}


def test_bfloat16_is_rounded_once():
    """And the bias has the sum of what was rounded."""
    x, bias = side_by_side(1, 30, 2, 32, torch.bfloat16), torch.randn(64)
    agree(lambda x: elementwise.L2Norm.apply(x, EPS), l2_norm, x, tolerance=2**-8)
    agree(decay, plain_decay, x, bias, torch.randn(2), tolerance=2**-8)
    agree(*gates(), x, torch.randn(2, 32).bfloat16(), tolerance=2**-8)
    gate, weight = x.flip(1), torch.randn(64)
    norm = lambda *given: elementwise.GatedNorm.apply(*given, 1e-5, True)  # noqa: E731
    agree(norm, plain_norm(True), x, gate, weight[:32], tolerance=2**-7)  # and the gradient that comes in
    given = of_gate_norm(1, 30, 2, 32, dtype=torch.bfloat16)
    for parameters in (given[3:], [p.float() for p in given[3:]]):
        agree(gate_norm(1), plain_gate_norm(1), *given[:3], *parameters, tolerance=2**-7)
    x, gate = x.flatten(-2), gate.flatten(-2)
    agree(elementwise.SiLUProduct.apply, elementwise.silu_product, x, gate, tolerance=2**-8)
    agree(Branches(), Branches(), x, gate, weight, tolerance=2**-7)  # and the sum


def test_decay_where_rate_or_step_size_overflows():
    """Each number and gradient is PyTorch's, those beyond e^64 included. The error is that of an exponent of 250."""
    A = torch.tensor([-3.0, 2.0, 39.0, 41.0, 60.0, 100.0, 150.0])
    z = torch.tensor([-250.0, -151.0, -104.0, -60.0, -41.0, -40.0, -39.0, -20.0, -5.0, 0.0, 5.0, 15.0])
    x, bias = z.expand(1, 1, len(A), -1), torch.zeros(len(A) * len(z))
    found = results(decay, x, bias, A)
    for ours, plain in zip(found, results(plain_decay, x, bias, A), strict=True):
        torch.testing.assert_close(ours, plain, rtol=500 * torch.finfo(torch.float32).eps, atol=1e-38)


def test_second_derivatives_are_refused():
    x = side_by_side(1, 2, 1, 4).requires_grad_()
    y = elementwise.L2Norm.apply(x, EPS)
    with pytest.raises(InputError, match="L2 norm of q and k has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = gates()[0](x, torch.randn(1, 4))
    with pytest.raises(InputError, match="head competition has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(InputError, match="the norm after an output gate has no second derivative"):
        torch.autograd.grad(gate_norm(1)(x, x).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_transforms_and_compiled_graphs_have_pytorchs_operators():
    x, seen = side_by_side(1, 2, 1, 4), []

    def inside(x):
        seen.append(elementwise.computes("triton", x))
        return x

    assert (
        elementwise.computes("triton", x)
        and not elementwise.computes("torch", x)
        and not elementwise.computes("auto", x)
    )
    assert not elementwise.computes("triton", x.double())
    torch.func.vmap(inside)(x)
    torch.compile(inside, backend="eager", fullgraph=True)(x)
    torch.jit.trace(inside, x, check_trace=False)
    make_fx(inside)(x)
    assert seen == [False] * 4


class Unsettled(torch.autograd.Function):
    """The same numbers and gradients, as the results of collectives that nothing has waited for."""

    @staticmethod
    def forward(ctx, x):
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx, d_y):
        return AsyncCollectiveTensor(d_y.clone())


class Settled(Unsettled):
    """With such gradients alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


def test_results_of_collectives(monkeypatch):
    """As under tensor parallelism, where they are what a module returns, and gradients. They have no address."""
    monkeypatch.setattr(elementwise, "chosen", lambda backend, x: True)
    x, gate = side_by_side(1, 4, 2, 6), side_by_side(1, 4, 2, 6).flip(1)
    row, norm = x.flatten(2), nn.RMSNorm(12, 1e-5)
    both = lambda x, y: torch.cat(add_and_norm(norm, x, y), -1)  # noqa: E731
    functions = {
        both: (row, gate.flatten(2)), elementwise.silu_product: (x, gate),
        (lambda x: elementwise.L2Norm.apply(x, EPS)): (x,), (lambda x: decays.log_sigmoid(x, 16.0, "auto")): (x,),
        (lambda x, gate: elementwise.GatedNorm.apply(x, gate, None, 1e-5, True)): (x, gate), gate_norm(1): (x, gate),
    }  # fmt: skip
    for function, given in functions.items():
        wrapped = lambda *given, function=function: Settled.apply(function(*given))  # noqa: E731
        for ours, plain in zip(results(wrapped, *given), results(function, *given), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    for function in (both, elementwise.silu_product):
        x, y = functions[function]
        found = results(lambda x, y, function=function: function(x, Unsettled.apply(y)), x, y)
        for ours, plain in zip(found, results(function, x, y), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


GATED = (
    "softmax-gla", "softmax-gated-deltanet", "paper-softmax-gla", "softmax-retnet", "softmax-mamba2",
    "softmax-kda(competition.write=beta)", "softmax-gla(competition.read=query)", "softmax-gla(competition.scale=one)",
    "softmax-gla(competition.temperature=2)", "softmax-gla(competition.memories_per_head=2)",
    "softmax-gla(competition.top_k=1)", "softmax-gla(competition.source=query)", "softmax-gla(competition=sigmoid)",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", [*(name for table in zoo.TABLES.values() for name in table), *GATED])
def test_every_mixer_computes_the_same_where_auto_chooses_the_kernels(name, train, monkeypatch):
    """As on a Hopper GPU: outputs in evaluation, and with all gradients."""
    torch.manual_seed(0)
    layer = Mixer(name, hidden_size=32, num_heads=2).train(train)
    for gate in (module for module in layer.modules() if isinstance(module, HeadCompetition)):
        torch.nn.init.normal_(gate.weight)
    x, found = torch.randn(2, 9, 32), []
    for chosen in (elementwise.chosen, lambda backend, x: True):
        monkeypatch.setattr(elementwise, "chosen", chosen)
        with torch.set_grad_enabled(train):
            y, _ = layer(leaf := x.clone().requires_grad_(train))
        wanted = [leaf, *layer.parameters()] if train else []
        gradients = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True) if train else [x]
        found.append((y, torch.cat([d.flatten() for d in gradients if d is not None])))  # some are differences
    assert all(relative(ours.double(), plain.double()) <= 1e-5 for plain, ours in zip(*found, strict=True))
