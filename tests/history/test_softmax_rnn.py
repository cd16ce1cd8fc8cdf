"""Softmax attention as a sum of recurrent networks, and taken apart."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from attention_layers import agree
from headrace import InputError, layers, zoo
from headrace.extra.taylor import TaylorFeatures, truncated_exp
from headrace.history.specs.softmax_rnn import NORMS, SoftmaxRNNSpec
from headrace.layers.rotary import DEFAULT, angles, rotate
from headrace.verification.verify import relative

D, H, d = 32, 2, 16


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# --- features --------------------------------------------------------------------------------------------------------


def tensor_power(x, order):
    power = torch.ones(1, dtype=x.dtype)
    for _ in range(order):
        power = torch.kron(power, x)
    return power


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_features_are_the_distinct_monomials(dim, order):
    features, q, k = TaylorFeatures(dim, order), draw(dim), draw(dim)
    assert features(q).shape == (math.comb(dim + order, order),)
    powers = sum(tensor_power(q, m) @ tensor_power(k, m) / math.factorial(m) for m in range(order + 1))
    product = features(q) @ features(k)
    assert abs(product - powers) <= 1e-12 * max(1, features(q).norm() * features(k).norm())
    assert abs(product - truncated_exp(q @ k, order)) <= 1e-12 * max(1, features(q).norm() * features(k).norm())


def test_truncated_exponential_sign():
    x = torch.linspace(-8, 8, 161, dtype=torch.float64)
    for order in range(11):
        literal = sum(x**m / math.factorial(m) for m in range(order + 1))
        torch.testing.assert_close(truncated_exp(x, order), literal, rtol=1e-12, atol=1e-10)
        assert bool((truncated_exp(x, order) > 0).all()) is (order % 2 == 0)


@pytest.mark.parametrize("order", [1, 3])
def test_vanishing_denominator_is_refused(order):
    with pytest.raises(InputError, match="even order"):
        zoo.get(f"taylor-softmax(inputs.order={order})")
    assert zoo.get(f"taylor-softmax(inputs.order={order}, read.norm=rms)").inputs.order == order


def test_state_is_small_for_small_keys():
    described = zoo.get("taylor-softmax")
    assert described.state_shapes(1024, 4)["memory"] == (4, 153, 257)
    assert described.flops_per_token(1024, 4) == 4 * 4 * 153 * 257
    with pytest.raises(InputError, match="key_dim"):
        zoo.get("taylor-softmax(heads.key_dim=0)")


# --- taken apart -----------------------------------------------------------------------------------------------------

NUMERATORS = [
    *(("exp", order) for order in (None, 0, 2, 3)),
    *(("relu", order) for order in (None, 3)),
    *(("elu+1", order) for order in (None, 2)),
    *(("cosine", order) for order in (None, 4)),
]
DENOMINATORS = ["sum", "detached", "none", "input-length", "l2", "rms", "layer"]


def specs(denominator):
    """Every numerator of one denominator, with one of the other fields' values after the other, and others under the
    next denominator, but for what is refused."""
    norm, sums = denominator in NORMS, denominator in ("sum", "detached")
    lengths = (False,) if denominator == "sum" else (False, True)
    others = itertools.cycle(itertools.product((None, 0.3), (False, True) if norm else (False,), lengths))
    first = DENOMINATORS.index(denominator)
    for numerator, order in [*NUMERATORS[first:], *NUMERATORS[:first]]:
        clamp, affine, by_length = next(others)
        if not (sums and (numerator, order) in (("exp", 3), ("cosine", None))):
            yield SoftmaxRNNSpec(numerator, order, clamp, denominator, affine=affine, by_length=by_length)
    for gate, affine in itertools.product(("output", "input", "both"), (False, True) if norm else (False,)):
        yield SoftmaxRNNSpec(denominator=denominator, gate=gate, affine=affine)
        if norm and gate != "input":
            yield SoftmaxRNNSpec(denominator=denominator, gate=gate, gate_order="gate-norm", affine=affine)


def weight(spec, q, k):
    """Of one query and one key."""
    function = {"exp": lambda x: x, "relu": F.relu, "elu+1": lambda x: F.elu(x) + 1}
    function["cosine"] = lambda x: x / (x @ x + 1e-6).sqrt()
    q, k = (function[spec.numerator](x) for x in (q, k))
    logit = q @ k / (1 if spec.numerator == "cosine" else len(q) ** 0.5)
    logit = logit if spec.clamp is None else logit.clamp(max=spec.clamp)
    if spec.order is not None:
        return sum(logit**m / math.factorial(m) for m in range(spec.order + 1))
    return logit.exp() if spec.numerator == "exp" else logit


def readout(spec, layer, weights, values, gate):
    """Of one token and head: weights [L], values [L, d], gate []. Norms are PyTorch's own, with their default ε in
    float32."""
    out, size = weights @ values, values.shape[1:]
    if spec.denominator == "sum":
        out = out / (weights.sum() + (0 if spec.numerator == "exp" and spec.order is None else 1e-6))
    if spec.denominator == "detached":
        out = out / weights.sum().clamp(min=1).detach()
    out = out / len(weights) if spec.by_length else out
    out = out * gate if spec.gate_order == "gate-norm" else out
    if spec.denominator == "l2":
        out = F.normalize(out, dim=-1)
    if spec.denominator == "rms":
        out = F.rms_norm(out, size, eps=torch.finfo(torch.float32).eps)
    if spec.denominator == "layer":
        out = F.layer_norm(out, size)
    out = out * layer.norm_weight if spec.affine else out
    out = out + layer.norm_bias if spec.affine and spec.denominator == "layer" else out
    return out if spec.gate_order == "gate-norm" else out * gate


def literal(layer, x, causal):
    """The layer, pair of tokens by pair of tokens: x [T, D] -> [T, D]."""
    spec, T = layer.spec, len(x)
    q, k, v = (p(x).view(T, H, -1) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (
        rotate(y[None], angles(torch.arange(T)[None], DEFAULT, layer.rope_theta, layer.head_dim))[0] for y in (q, k)
    )
    logits = x.new_zeros(T, 0) if layer.gate is None else layer.gate(x)
    none = x.new_full((T, H), torch.inf)  # a gate of 1
    of_output = logits[:, :H] if spec.gate in ("output", "both") else none
    of_input = logits[:, -H:] if spec.gate in ("input", "both") else none
    gate, v = torch.sigmoid(of_output), v * torch.sigmoid(of_input)[..., None]
    if spec.denominator == "input-length":
        seen = torch.arange(1, T + 1) if causal else torch.full((T,), T)
        v = torch.stack([v[s] / (seen[s] ** torch.sigmoid(layer.power))[:, None] for s in range(T)])
    rows = []
    for t, h in itertools.product(range(T), range(H)):
        end = t + 1 if causal else T
        weights = torch.stack([weight(spec, q[t, h], k[s, h]) for s in range(end)])
        rows.append(readout(spec, layer, weights, v[:end, h], gate[t, h]))
    return layer.o_proj(torch.stack(rows).view(T, -1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_product_form_equals_its_equation(denominator, causal):
    for described in specs(denominator):
        layer = layers.build(described, hidden_size=8, num_heads=H, causal=causal).double()
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.add_(torch.randn_like(p), alpha=0.3 if "norm" in name else 0.5)
        x = draw(3, 8).requires_grad_()
        actual, expected = layer(x[None])[0][0], literal(layer, x, causal)
        assert relative(actual, expected) <= 1e-10, described
        weights = torch.randn_like(actual)
        gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (actual, expected)]
        assert (gradients[0] - gradients[1]).norm() <= 1e-9 * max(1, gradients[1].norm()), described


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_softmax_parts_give_softmax_attention(causal):
    sdpa = layers.build(zoo.get("transformer"), hidden_size=D, num_heads=H, causal=causal).double()
    ours = layers.build(SoftmaxRNNSpec(), hidden_size=D, num_heads=H, causal=causal).double()
    ours.load_state_dict(sdpa.state_dict())
    agree(lambda x: ours(x)[0], lambda x: sdpa(x)[0], 3 * draw(2, 60, D), 1e-12)


def raw(spec, q, k, v):
    """Σ_s e^{q_t·k_s / √d} v_s over s ≤ t, and the sum of its weights, as they are written: nothing is factored out."""
    logits = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    weights = (logits if spec.clamp is None else logits.clamp(max=spec.clamp)).exp().tril()
    return torch.einsum("bhts,bshd->bthd", weights, v), weights.sum(-1).transpose(1, 2)[..., None]


@pytest.mark.parametrize("clamp", [None, 5.0])
@pytest.mark.parametrize("logit", [-60.0, -20.0, -8.0, -2.0, 0.0, 30.0])
@pytest.mark.parametrize("denominator", ["detached", "l2", "rms", "layer"])
def test_denominators_equal_the_authors_code_at_any_logit_size(denominator, logit, clamp):
    """theirs: softmax_detach_denom, gated_softmax_no_gate and its _L2norm and _rmsnorm, of the paper's repository."""
    layer = layers.build(SoftmaxRNNSpec(denominator=denominator, clamp=clamp), hidden_size=D, num_heads=H).double()
    direction = F.normalize(torch.ones(d, dtype=torch.float64), dim=0)
    q, k, v = (0.3 * draw(2, 6, H, d) for _ in range(3))
    q, k = q + 8 * direction, k + logit * d**0.5 / 8 * direction
    result = layer.read(q, k, v)
    out, total = raw(layer.spec, q, k, v)
    theirs = {
        "detached": lambda: out / total.clamp(min=1),
        "l2": lambda: F.normalize(out, dim=-1),
        "rms": lambda: F.rms_norm(out, (d,), eps=torch.finfo(torch.float32).eps),
        "layer": lambda: F.layer_norm(out, (d,)),
    }[denominator]()
    assert relative(result, theirs) <= 1e-12
    narrow = layer.float().read(q.float(), k.float(), v.float())
    # Logits are sums of d products of up to 8 |logit| √d / 8: d rounding errors of 2^-24, and e^x has their sum.
    assert relative(narrow, theirs) <= 4 * d * 2**-24 * max(1, abs(logit)) and narrow.isfinite().all()


@pytest.mark.parametrize("denominator", NORMS)
def test_norm_of_zeros_is_zero(denominator):
    layer = layers.build(SoftmaxRNNSpec(denominator=denominator), hidden_size=D, num_heads=H)
    q, v = torch.full((1, 3, H, d), 6.0), torch.zeros(1, 3, H, d, requires_grad=True)
    out = layer.read(q, q, v)
    assert not out.any() and torch.autograd.grad(out.sum(), v)[0].isfinite().all()


def test_cosine_attention_begins_as_the_authors_code():
    """linear_cosine of the paper's repository, Σ_s cos(q_t, k_s) v_s / s^σ(c): c is 0.5 at first."""
    layer = layers.build(SoftmaxRNNSpec("cosine", denominator="input-length"), hidden_size=D, num_heads=H)
    assert layer.power.tolist() == [0.5] * H
    assert set(layer.state_dict()) == {*(f"{name}_proj.weight" for name in "qkvo"), "power"}


def test_stored_values_have_the_precision_of_keys():
    spec = SoftmaxRNNSpec(numerator="cosine", denominator="input-length")
    layer = layers.build(spec, hidden_size=D, num_heads=H)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(torch.randn(2, 5, D))
    assert state.k.dtype == state.v.dtype == torch.bfloat16 and y.isfinite().all()


def test_tokens_of_another_width_are_refused_in_place_too():
    """Of every mixer with a state, by the one check before `run_in_place`."""
    for name in ("softmax-rnn-norm", "gla", "mamba"):
        layer = layers.Mixer(name, hidden_size=D, num_heads=H)
        with torch.no_grad():
            _, state = layer(torch.randn(2, 5, D))
            for x in (torch.randn(2, 1, D + 1), torch.randn(2, D), torch.ones(2, 1, D, dtype=torch.long)):
                with pytest.raises(InputError, match=r"^x has "):
                    layer(x, state, in_place=True)


def test_a_series_whose_factorial_has_more_than_64_bits_is_refused():
    assert TaylorFeatures(1, 20)(torch.ones(1)).isfinite().all()
    with pytest.raises(InputError, match="order=21 of a series; expected at most 20"):
        TaylorFeatures(1, 21)


@torch.no_grad()
def test_autocast_does_not_round_the_logits():
    layer = layers.Mixer("softmax-rnn-norm", hidden_size=16, num_heads=2)
    q, k, v = (4 * torch.randn(2, 9, 2, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer.read(q, k, v)
    assert torch.equal(rounded, layer.read(q, k, v))
