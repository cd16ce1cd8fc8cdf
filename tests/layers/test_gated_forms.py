"""Mixers of a linear spec against their equations: a loop over tokens in float64, from the layer's weights alone. Those
of models that are converted are compared as whole models: tests/convert/test_convert_flash.py."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from attention_layers import agree
from headrace import Mixer
from headrace.verification.verify import relative
from tiny import perturbed

B, T, D, H = 2, 19, 24, 4


def layer_of(expression):
    return perturbed(Mixer(expression, hidden_size=D, num_heads=H, layer_idx=1, num_layers=3).double(), 0.3)


def loop(layer, q, k, v, decay, bonus=None, scale=1.0):
    """S_t = diag(α_t) S_{t−1} + k_tᵀ v_t, o_t = q_t (S_t, or S_{t−1} + diag(u) k_tᵀ v_t)."""
    S, out = q.new_zeros(B, H, q.shape[-1], v.shape[-1]), []
    for t in range(T):
        now = k[:, t, :, :, None] * v[:, t, :, None]
        old, S = S, decay[:, t, :, :, None] * S + now
        read = S if bonus is None else old + bonus[:, :, None] * now
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    return torch.stack(out, 1)


def parts_of(layer, x):
    return {name: (x @ layer.part(name).T).unflatten(-1, (H, -1)) for name in layer.parts if layer.parts[name]}


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def hgrn2(layer, x, bound=None):
    """f = b + (1 − b) σ(x W), k = 1 − f; RMSNorm over all heads."""
    p, least = parts_of(layer, x), 0 if bound is None else torch.tensor(bound).double().exp()
    f = least + (1 - least) * torch.sigmoid(p["decay"])
    out = loop(layer, F.silu(p["q"]), 1 - f, p["v"], f, scale=layer.K**-0.5)
    return layer.o_proj(rms(out.flatten(-2), layer.norm_weight))


def simple_gla(layer, x):
    p = parts_of(layer, x)
    decay = torch.sigmoid(p["decay"] + layer.decay.bias[:, None]) ** (1 / layer.spec.decay.temperature)
    out = rms(loop(layer, p["q"], p["k"], p["v"], decay, scale=layer.K**-0.5), layer.norm_weight)
    return layer.o_proj((out * F.silu(p["gate"])).flatten(-2))


def rwkv5(layer, x):
    before, p = F.pad(x, (0, 0, 1, -1)), {}
    for name, mu in zip(("k", "v", "q", "gate"), layer.shift.offset, strict=True):
        p[name] = parts_of(layer, mu * before + (1 - mu) * x)[name]
    decay = torch.exp(-layer.decay.bias.exp()).view(H, -1).expand(B, T, H, -1)
    out = loop(layer, p["q"], p["k"], p["v"], decay, layer.bonus)
    out = (out - out.mean(-1, keepdim=True)) / (out.var(-1, unbiased=False, keepdim=True) + 64e-5).sqrt()
    out = out.flatten(-2) * layer.norm_weight + layer.norm_bias
    return layer.o_proj(out * F.silu(p["gate"].flatten(-2)))


def lightning(layer, x):
    p = parts_of(layer, x)
    q, k, v = (F.silu(p[name]) for name in "qkv")
    decay = torch.exp(-(2.0 ** (-8 * torch.arange(1, H + 1).double() / H)))[:, None].expand(B, T, H, 1)
    out = rms(loop(layer, q, k, v, decay).flatten(-2), layer.norm_weight)
    return layer.o_proj(out * torch.sigmoid(p["gate"].flatten(-2)))


def based(layer, x):
    """Σ_s (1 + q·k/4 + (q·k/4)²/2) v over the sum of weights, for 16 key channels."""
    p = parts_of(layer, x)
    logits = torch.einsum("bthk,bshk->bhts", p["q"], p["k"]) / 4
    weights = (1 + logits + logits.square() / 2).tril()
    out = weights @ p["v"].transpose(1, 2) / (weights.sum(-1, keepdim=True) + 1e-6)
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


def mlstm(layer, x):
    """S and n as they are, without a maximum: S_t = f S_{t−1} + e^i kᵀ v, o = q S / max(|q·n|, 1)."""
    p = parts_of(layer, x)
    f = torch.sigmoid(p["decay"] + layer.decay.bias[:, None])
    v = F.pad(p["v"], (0, 1), value=1.0)
    read = loop(layer, p["q"], p["beta"].exp() * p["k"], v, f, scale=layer.K**-0.5)
    out = read[..., :-1] / read[..., -1:].abs().clamp(min=1)
    out = (out - out.mean(-1, keepdim=True)) / (out.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    out = out.flatten(-2) * layer.norm_weight + layer.norm_bias
    return layer.o_proj(out * torch.sigmoid(p["gate"].flatten(-2)))


EQUATIONS = {
    "hgrn2": hgrn2, "hgrn2(decay.lower_bound=-0.5)": lambda layer, x: hgrn2(layer, x, -0.5), "simple-gla": simple_gla,
    "simple-gla(decay.temperature=1)": simple_gla, "rwkv5": rwkv5, "lightning-attention": lightning, "based": based,
    "mlstm": mlstm,
}  # fmt: skip


@pytest.mark.parametrize("expression", EQUATIONS)
def test_layer_equals_its_equation(expression):
    """Outputs, and the gradients of the input and of every parameter."""
    layer, x = layer_of(expression), torch.randn(B, T, D, dtype=torch.float64)
    agree(lambda x: layer(x)[0], lambda x: EQUATIONS[expression](layer, x), x, 1e-12, layer.parameters())


def test_value_gate_has_the_dtype_of_autocast():
    layer, x = Mixer("gla(inputs.value_gate=true)", hidden_size=D, num_heads=H), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and relative(y, layer(x)[0]) < 0.05


def test_first_forget_gates_do_not_depend_on_the_temperature():
    """σ(3) to σ(6), whatever divides the logarithm."""
    for temperature in (1.0, 16.0):
        layer = Mixer(f"simple-gla(decay.temperature={temperature})", hidden_size=D, num_heads=H).double()
        decay = layer.decay(torch.zeros(1, 1, H, dtype=torch.float64))[0, 0].exp()
        torch.testing.assert_close(decay, torch.sigmoid(torch.linspace(3, 6, H).double()), rtol=1e-5, atol=0)


# --- the exponential gate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 30.0, 100.0])
def test_input_gates_of_any_size_are_as_exact_as_the_precision(factor):
    """In float32, where e^i is infinite above 88, against float64, where i is up to 700 before e^i is: outputs, tokens
    one by one and gradients. The weights of a positive feature map add up, so that no denominator is near 0; an error
    of i is one of e^i, 2⁻²⁴ |i|."""
    layer = Mixer("mlstm(read.norm=none, read.eps=none, inputs.feature_map=elu+1)", hidden_size=D, num_heads=H)
    layer.part("beta").data.mul_(factor / layer.part("beta").data.std() / D**0.5)
    exact, x = copy.deepcopy(layer).double(), torch.randn(B, T, D)
    (y, state), (expected, _) = layer(x), exact(x.double())
    tolerance = 32 * 2.0**-24 * max(factor, 1)
    assert relative(y, expected) <= tolerance and torch.isfinite(state.memory).all()
    for out in (y, expected):
        out.square().mean().backward()
    for mine, other in zip(layer.parameters(), exact.parameters(), strict=True):
        assert torch.isfinite(mine.grad).all() and relative(mine.grad, other.grad) <= 10 * tolerance
    state, rows = None, []
    with torch.no_grad():
        for token in x.split(1, 1):
            out, state = layer(token, state)
            rows.append(out)
    assert relative(torch.cat(rows, 1), expected) <= tolerance


def test_output_does_not_depend_on_the_maximum():
    """A memory times e^−c with a maximum that is c higher is the same memory."""
    layer, x = layer_of("mlstm"), torch.randn(B, T, D, dtype=torch.float64)
    state = layer(x)[1]
    moved = state._replace(memory=state.memory * math.exp(-3), peak=state.peak + 3)
    assert relative(layer(x, moved)[0], layer(x, state)[0]) <= 1e-13


def test_zero_input_of_an_exponential_gate_is_no_division_by_zero():
    layer = Mixer("mlstm(decay.kind=none, decay.temperature=16)", hidden_size=D, num_heads=H)
    x = torch.randn(B, T, D)
    layer.part("beta").data.mul_(500)
    layer.part("q").data.zero_()
    y = layer(x)[0]
    y.sum().backward()
    assert torch.isfinite(y).all() and all(torch.isfinite(p.grad).all() for p in layer.parameters())
