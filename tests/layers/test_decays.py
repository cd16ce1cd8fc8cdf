"""Each decay is declared once: what spec/decay.py says is what its class computes, specs name and C++ knows."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch

from equation import skip_if_missing
from headrace import InputError, Mixer
from headrace.layers.linear import decays
from headrace.ops.backends.native import layer as native_layer
from headrace.spec.decay import DECAYS, Decay, DecayShape
from headrace.verification.verify import relative

NATIVE = Path(__file__).parents[2] / "native"


@pytest.mark.parametrize("kind", DECAYS)
def test_decays_have_their_declared_shape(kind):
    B, T, H, K = 2, 5, 3, 4
    shapes = {DecayShape.FIXED: (H,), DecayShape.SCALAR: (B, T, H), DecayShape.VECTOR: (B, T, H, K)}
    declared, decay = DECAYS[kind], decays.DECAYS[kind](Decay(kind), H, K, 0.5)
    x = torch.randn(B, T, decay.in_features)
    log_decay = decay(x)
    assert log_decay.shape == shapes[declared.shape] and (log_decay <= 0).all()
    assert declared.fixed == torch.equal(decay(x.flip(1)), log_decay)
    assert declared.fixed == (decay.in_features == 0) and declared.paper.startswith("https://arxiv.org/abs/")


@pytest.mark.parametrize(("kind", "numbers"), [("softplus", 400), ("softplus-vector", 1600)])
def test_initial_step_sizes_are_within_the_bounds(kind, numbers):
    for low, high in ((1e-3, 1e-1), (1e-5, 1e-3)):
        decay = decays.DECAYS[kind](Decay(kind, dt_min=low, dt_max=high), 400, 4, 0.0)
        dt = torch.nn.functional.softplus(decay.dt_bias.double())
        assert dt.numel() == numbers and low * 0.999 <= dt.min() <= dt.max() <= high * 1.001
        middle = dt.log().mean().item()  # of a uniform distribution of width w the standard deviation is w / √12
        assert middle == pytest.approx(math.log(low * high) / 2, abs=5 * math.log(high / low) / (12 * numbers) ** 0.5)


def by_formula(kind, heads=4, key=3, **settings):
    """A decay with random weights: what it computes of x, x + b [B, T, H, ·], and A [H, 1], in float64."""
    decay = decays.DECAYS[kind](Decay(kind, **settings), heads, key, 0.0).double()
    for parameter in decay.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, decay.in_features).double()
    if not decay.in_features:
        return decay(x), None, None
    return decay(x), (x + decay.dt_bias).unflatten(-1, (heads, -1)), decay.A_log.exp()[:, None]


def test_released_decays_equal_their_formulas():
    """Lightning Attention's slopes, KDA with a lower bound and one matrix, Mamba-2 with bounds of its step sizes, and
    the slowest rate of Mamba-3."""
    log_decay, _, _ = by_formula("slopes", rate=0.3)
    expected = torch.tensor([-0.3 * 2 ** (-8 * (h + 1) / 4) for h in range(4)], dtype=torch.float64)
    assert relative(log_decay, expected) <= 1e-15
    log_decay, z, A = by_formula("softplus-vector", rank="full", lower_bound=-5.0)
    assert relative(log_decay, -5 / (1 + torch.exp(-A * z))) <= 1e-14 and log_decay.min() >= -5
    log_decay, z, A = by_formula("softplus", dt_floor=0.6, dt_ceiling=0.9)
    dt = torch.log1p(z.exp())
    assert (dt < 0.6).any() and (dt > 0.9).any() and relative(log_decay, (-A * dt.clamp(0.6, 0.9))[..., 0]) <= 1e-14
    decay = decays.DECAYS["softplus-rate"](Decay("softplus-rate"), 2, 3, 0.0).double()
    dt, rates = torch.log1p((0.5 + decay.dt_bias).exp()), torch.tensor([1e-4, math.log1p(math.e)], dtype=torch.float64)
    assert relative(decay(torch.tensor([[[0.5, -20.0, 0.5, 1.0]]], dtype=torch.float64))[0, 0], -rates * dt) <= 1e-14


def test_exp_decay_of_bfloat16_weights_is_a_sum_in_float32():
    """Near −6, neighbours in bfloat16 are 3 % of a rate apart."""
    decay = decays.DECAYS["exp"](Decay("exp", rank=2), 2, 3, 0.0).bfloat16()
    x = torch.randn(1, 5, 2).bfloat16()
    logits = decay.bias.float() + (torch.tanh(x) @ decay.up).float()
    assert relative(decay(x), -logits.exp().view(1, 5, 2, 3)) <= 1e-6


def test_lower_bounds_of_the_sigmoid_decay_may_be_near_0():
    for bound in (-1e-3, -1e-17):  # between it and 0
        decay = decays.DECAYS["sigmoid"](Decay("sigmoid", rank="full", lower_bound=bound), 2, 3, 0.5)
        log_decay = decay(torch.randn(1, 9, 6).double())
        assert (log_decay >= 1.01 * bound).all() and (log_decay <= 1e-18).all()


def test_fields_of_one_decay_are_refused_for_others():
    for kind, settings in (
        ("softplus-vector", {"dt_floor": 0.1}), ("softplus", {"lower_bound": -5.0}), ("exp", {"rank": "full"}),
        ("retnet", {"rate": 2.0}), ("softplus", {"temperature": 1.0}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"decay\.\w+.* is of decay.kind="):
            Decay(kind, **settings)
    with pytest.raises(InputError, match=r"dt_min=1e-05 and dt_max=0.001 are step sizes, which decay.kind='sigmoid'"):
        Decay("sigmoid", dt_min=1e-5, dt_max=1e-3)
    for least, most in (("dt_floor", "dt_ceiling"), ("dt_min", "dt_max")):
        with pytest.raises(InputError, match=f"{least}=0.2 exceeds {most}=0.1"):
            Decay("softplus", **{least: 0.2, most: 0.1})


def test_numbers_equal_those_of_the_native_sources():
    enum = re.search(r"enum hr_decay \{(.*?)\}", (NATIVE / "headrace.h").read_text("utf-8"))
    numbers = {name: int(number) for name, number in re.findall(r"HR_DECAY_(\w+) = (\d+)", enum[1])}
    assert numbers == {shape.name: shape.value for shape in DecayShape}
    constant = re.search(r"SIGMOID_TEMPERATURE = (\d+);", (NATIVE / "kinds.h").read_text("utf-8"))
    assert float(constant[1]) == Decay.temperature


def test_every_declared_decay_has_a_class():
    assert decays.DECAYS.keys() == DECAYS.keys()


def test_native_kinds_are_declared():
    skip_if_missing("native")
    assert set(native_layer.KINDS["decay"]) <= {"none", *DECAYS}


def test_native_decays_have_their_declared_shape():
    """A fixed decay is one number per head in the step of a single token."""
    kinds = (NATIVE / "kinds.h").read_text("utf-8")
    body = re.search(r"hr_decay shape\(.*?\n\}", kinds, re.DOTALL)[0]
    names = re.search(r'"decay none (.*)\\n"', kinds)[1].split()
    found, waiting = {}, []
    for kind, shape in re.findall(r"case decay::(\w+):(?: return HR_DECAY_(\w+);)?", body):
        waiting.append(kind)
        if shape:
            found |= dict.fromkeys(waiting, shape)
            waiting = []
    per_head = {DecayShape.FIXED: "SCALAR"}
    declared = {k.replace("-", "_"): per_head.get(DECAYS[k].shape, DECAYS[k].shape.name) for k in names}
    assert found == {"none": "NONE"} | declared


# --- rates and step sizes from 0 to infinity ------------------------------------------------------------------------
RATES = [-3.0, 2.0, 39.0, 41.0, 60.0, 100.0, 150.0]  # A
INPUTS = [-250.0, -200.0, -151.0, -104.0, -90.0, -60.0, -41.0, -40.0, -39.0, -20.0, -5.0, 0.0, 5.0, 15.0]  # x + b


def log_softplus(z):
    return z if z < -40 else math.log(math.log1p(math.exp(z)) if z < 0 else z + math.log1p(math.exp(-z)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vector", [False, True])
def test_decay_is_exact_where_rate_or_step_size_overflows(vector, dtype):
    """log_decay = −exp(A + log softplus(z)), and its gradients, against Python's own numbers. Their relative error is
    that of an exponent of up to 250, rounded. Above 1e4, where nothing is left of a memory, they are large and finite.
    """
    H, K = len(RATES), len(INPUTS) if vector else 1
    z, A = (torch.tensor(numbers, dtype=dtype) for numbers in (INPUTS, RATES))
    x = (z.expand(1, 1, H, K) if vector else z[None, :, None].expand(1, -1, H)).clone().requires_grad_()
    y = decays.softplus_decay(decays.biased(x, z.new_zeros(H * K)), A.requires_grad_())
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    found = (t.view(H, -1) if vector else t[0].T for t in (y, dx))
    tolerance, least = 250 * torch.finfo(dtype).eps, torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    for rate, rows, slopes in zip(RATES, *found, strict=True):
        for value, row, slope in zip(INPUTS, rows.tolist(), slopes.tolist(), strict=True):
            exponent = rate + log_softplus(value)
            if exponent > math.log(1e4):
                assert -math.inf < row < -1e4 and math.isfinite(slope)
                continue
            assert row == pytest.approx(-math.exp(exponent), rel=tolerance, abs=least)
            share = math.exp(-math.log1p(math.exp(-value)) - log_softplus(value)) if value > -40 else 1
            assert slope == pytest.approx(-math.exp(exponent) * share, rel=tolerance, abs=least)
    loss = y.exp().sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [x, A]))


EXTREMES = [(name, *pair) for name in ("gated-deltanet", "kda") for pair in ((100.0, -200.0), (150.0, -151.0))]
EXTREMES += [("mamba2", 100.0, -200.0), ("mamba", 100.0, -200.0), ("mamba", 100.0, 0.0), ("rwkv6", 100.0, 0.0)]
EXTREMES += [("rwkv4", 100.0, 0.0), ("s4d", 100.0, -200.0), ("s4", 100.0, -200.0)]
NAMES = {"A_log": 0, "log_rate": 0, "log_damping": 0, "decay.bias": 0, "dt_bias": 1, "log_dt": 1}


@pytest.mark.parametrize(("name", "rate", "step"), EXTREMES)
def test_layer_with_an_infinite_rate_equals_float64(name, rate, step):
    """Whole, token by token (natively, where there is a native call) and in its gradients."""
    layer = Mixer(name, hidden_size=32, num_heads=2)
    with torch.no_grad():
        for path, p in layer.named_parameters():
            if (place := next((n for n in NAMES if path.endswith(n)), None)) is not None:
                p.fill_((rate, step)[NAMES[place]])
    x, exact = torch.randn(2, 9, 32), copy.deepcopy(layer).double()
    y, expected = layer(x)[0], exact(x.double())[0]
    assert relative(y.double(), expected) < 1e-4
    for made, out in ((layer, y), (exact, expected)):
        out.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in made.parameters())
    with torch.no_grad():
        state = layer(x[:, :1])[1]
        for t in range(1, 9):
            y, state = layer(x[:, t : t + 1], state, in_place=True)
    assert relative(y.double(), expected[:, 8:]) < 1e-4
