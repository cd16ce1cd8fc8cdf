"""The op in float32 against the literal loop in float64: long sequences, hostile decays, vanishing gates."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from equation import (
    KINDS,
    H,
    assert_gradients_keep_their_digits,
    detached,
    inputs,
    leaves,
    of_decay,
    of_kind,
    prepare,
    skip_if_missing,
    weighted_gradients,
)
from headrace import linear_attention
from headrace.extra.residual import ResidualDelta
from headrace.ops.backends.native import library as native
from headrace.ops.reference import literal
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative, worst

BACKENDS = ["torch", "batched", "native"]  # "batched": the PyTorch backend as on a GPU
ROUNDED = 3e-6  # 2^-24 · √2048: the roundings of 2,048 tokens, as a random walk


def errors_in_float32(arguments, monkeypatch, rule="add", **settings):
    """(worst of output and state, worst gradient) of the float32 op against the literal loop in float64, whose result
    all backends share; of each the largest of any backend."""
    arguments = {name: x.float().double() for name, x in arguments.items()}
    expected, expected_gradients = differentiated(literal, arguments, torch.float64, rule, **settings)
    errors = []
    for name in BACKENDS:
        with monkeypatch.context() as patch:
            prepare(name, patch)
            op = partial(linear_attention, backend=name.replace("batched", "torch"))
            actual, gradients = differentiated(op, arguments, torch.float32, rule, **settings)
        forward = max(relative(x, y) for x, y in zip(actual, expected, strict=True))
        errors.append((forward, worst(gradients, expected_gradients)))
    return tuple(map(max, zip(*errors, strict=True)))


def differentiated(op, arguments, dtype, rule, **settings):
    """(output and state, the gradients of a weighted sum of them)"""
    given = leaves(arguments, dtype)
    pair = op(**given, rule=rule, **settings)
    return pair, weighted_gradients(pair, list(given.values()))


def long_inputs(tokens=2048, heads=2, key=32, value=16, beta=1.0):
    q, k = torch.randn(2, 1, tokens, heads, key).double()
    return {
        "q": q,
        "k": F.normalize(k, dim=-1),
        "v": torch.randn(1, tokens, heads, value).double(),
        "beta": beta * torch.rand(1, tokens, heads).double(),
        "log_decay": -0.1 * torch.rand(1, tokens, heads).double(),
    }


@pytest.mark.parametrize(
    ("rule", "beta", "bound", "decay"),
    [("add", 1.0, ROUNDED, "none"), ("add", 1.0, ROUNDED, "vector"), ("delta", 1.0, ROUNDED, "scalar"),
     ("delta", 1.9, 1e-5, "none"), ("delta", 1.9, 1e-5, "vector")],
)  # fmt: skip
def test_float32_over_2048_tokens(monkeypatch, rule, beta, bound, decay):
    arguments = long_inputs(beta=beta)
    if decay == "none":
        del arguments["log_decay"]
    elif decay == "vector":
        arguments["log_decay"] = -0.1 * torch.rand(1, 2048, 2, 32).double()
    forward, backward = errors_in_float32(arguments, monkeypatch, rule)
    assert forward <= bound and backward <= 10 * bound


def hostile_decays():
    """For long_inputs(tokens=256): [1, 256, 2, 32] and [1, 256, 2]."""
    quiet, sudden = torch.zeros(1, 256, 2, 32).double(), torch.where(torch.arange(256) % 49 < 48, -50.0, -0.01).double()
    channels = quiet.clone()
    channels[..., ::3], channels[..., 1::3] = -50, -300
    alternating = quiet.clone()
    alternating[:, :, :, 0] = sudden[None, :, None]
    per_head = quiet[..., 0].clone()
    per_head[..., 0] = -300
    forgotten = channels / 500
    forgotten[:, 100::31, 1, ::5] = -torch.inf
    return {
        "channels": channels,
        "alternating": alternating,
        "heads": per_head,
        "alternating heads": sudden[None, :, None].expand(1, 256, 2),
        "forgotten": forgotten,
        "forgotten heads": forgotten[..., 0],
    }


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("kind", hostile_decays())
def test_hostile_decays(monkeypatch, rule, kind):
    arguments = long_inputs(tokens=256) | {"log_decay": hostile_decays()[kind]}
    forward, backward = errors_in_float32(arguments, monkeypatch, rule)
    assert forward <= 2e-6 and backward <= 5e-6


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_vector_decay_costs_no_precision(monkeypatch, rule):
    """Exponents of up to −20 within a block: their rounding would leave 20 · 2⁻²⁴ = 1.2e-6 of each factor."""
    arguments = long_inputs(tokens=512, key=64)
    arguments["log_decay"] = F.logsigmoid(torch.randn(1, 512, 2, 64).double())
    forward, backward = errors_in_float32(arguments, monkeypatch, rule)
    assert forward <= 5 * 2.0**-24  # of rounding to float32
    assert backward <= 10 * 2.0**-24


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("shape", [(1, 128, 2, 32), (1, 128, 2)], ids=["vector", "scalar"])
def test_gradient_through_a_steep_decay(backend, rule, shape):
    """With log_decay g = −e^z (RWKV-6), what rounding leaves in the gradient to g, where
    the decay lets nothing pass, is multiplied by a large g on the way to z."""
    arguments = {name: x for name, x in long_inputs(tokens=128).items() if name not in ("log_decay", "beta")}
    z = 2.5 * torch.randn(shape, dtype=torch.float64)
    results = []
    for dtype, op in ((torch.float64, literal), (torch.float32, partial(linear_attention, backend=backend))):
        leaf = z.to(dtype).requires_grad_()
        out, _ = op(**{name: x.to(dtype) for name, x in arguments.items()}, log_decay=-leaf.exp(), rule=rule)
        results.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert relative(results[1], results[0]) < 2e-6


@pytest.mark.parametrize("value", [-1e-4, -4.0, -50.0])
@pytest.mark.parametrize("name", BACKENDS)
def test_small_gradients_keep_their_relative_precision(name, value, monkeypatch):
    prepare(name, monkeypatch)
    settings = {"backend": name.replace("batched", "torch")}
    for decay in ("fixed", "scalar", "vector"):
        for options in ({}, {"rule": "delta"}, {"normalize": True}):
            drawn = inputs(decay, rows=1, tokens=37, heads=2, key=8, normalize="normalize" in options)
            assert_gradients_keep_their_digits(of_decay(drawn, value), settings, **options)


def test_repeated_key_stays_accurate(monkeypatch):
    arguments = long_inputs(tokens=128) | {"beta": torch.ones(1, 128, 2).double()}
    arguments["k"] = arguments["k"][:, :1].expand(-1, 128, -1, -1)
    del arguments["log_decay"]  # nothing old is left to decay: its gradient is zero
    forward, backward = errors_in_float32(arguments, monkeypatch, "delta")
    assert forward <= ROUNDED and backward <= 1e-5


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_vanishing_beta_and_closed_gates(monkeypatch, rule):
    arguments = long_inputs(tokens=130)
    zero_one = (torch.arange(130) % 2).double()[None, :, None].expand(1, 130, 2)
    arguments |= {"read_gate": zero_one, "write_gate": 1 - zero_one, "beta": torch.full((1, 130, 2), 1e-12).double()}
    forward, backward = errors_in_float32(arguments, monkeypatch, rule)
    assert max(forward, backward) <= ROUNDED


def test_70001_tokens_at_once_and_in_pieces(backend):
    tokens, generator = 70_001, torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, tokens, 2, *shape, generator=generator)  # noqa: E731
    x = {"q": draw(8), "k": F.normalize(draw(8), dim=-1), "v": draw(4), "log_decay": -0.01 * draw().abs()}
    op = partial(linear_attention, rule="delta", backend=backend)
    whole, final = op(**x)
    outs, states = [], [None]
    for piece in zip(*(y.split([30_000, tokens - 30_500, 500], 1) for y in x.values()), strict=True):
        out, state = op(**dict(zip(x, piece, strict=True)), initial_state=states[-1])
        outs.append(out)
        states.append(state)
    assert relative(torch.cat(outs, 1), whole.double()) < 1e-6 and relative(states[-1], final.double()) < 1e-6
    tail = {name: y[:, -500:].double() for name, y in x.items()}
    assert relative(whole[:, -500:], literal(**tail, rule="delta", initial_state=states[2].double())[0]) < 2e-6


# Of the loop over tokens, which takes longest, every kind and every decay once.
RECURRENT = [("add", "vector"), ("delta", "scalar"), ("bonus", "vector"), ("normalize", "fixed")]
ONCE = {"torch": ("torch", "chunkwise"), "recurrent": ("torch", "recurrent"), "native": ("native", "chunkwise")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["fixed", "scalar", "vector"])
def test_bfloat16_is_rounded_once(decay, kind):
    """Gradients of heads that share q and k, of a fixed decay and of the bonus are sums over 1,024 tokens and more."""
    options, settings = of_kind(kind)
    drawn = inputs(decay, tokens=512, groups=2, key=8, value=8, **options)
    drawn["log_decay"] = drawn["log_decay"] / 20

    def computed(dtype, **way):
        x = leaves(detached(drawn, torch.bfloat16), dtype)
        pair = linear_attention(**x, **settings, **way)
        gradients = weighted_gradients(pair, list(x.values()), torch.bfloat16)
        return dict(zip(("out", *x), (pair[0], *gradients), strict=True))

    expected = computed(torch.float64, backend="torch")
    for way, (backend, form) in ONCE.items():
        if way == "recurrent" and (kind, decay) not in RECURRENT:
            continue
        if way == "native" and native.instructions == "avx512bf16":  # test_bfloat16.py
            continue
        skip_if_missing(backend)
        # Half a unit in the last of eight bits is 2^-8 of a number at most. Over many numbers it is 0.42 · 2^-8 in
        # norm; √2 times as much, 0.6 · 2^-8, where they are rounded twice.
        for name, y in computed(torch.bfloat16, backend=backend, form=form).items():
            assert relative(y, expected[name]) <= (0.5 if y.numel() > 1000 else 1) * 2**-8, (way, name)


def test_shared_weight_gradients_are_summed_in_float32():
    drawn = inputs("scalar", rows=1, tokens=128, state=False) | dict.fromkeys(("read_gate", "write_gate"))
    results = []
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        module = ResidualDelta(1, H).to(dtype)
        given = {name: None if y is None else y.detach().to(wide) for name, y in drawn.items()}
        op = partial(linear_attention, rule="delta", backend="torch")
        out, *_ = module(op, given, None, Sequences(given["v"], None))
        results.append(torch.autograd.grad(out.square().sum(), module.weight)[0])
    assert relative(*results) <= 2**-8  # rounded once
