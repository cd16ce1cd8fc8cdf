"""The published forms of softmax linear attention (arXiv 2602.01744) against the paper's equations: a loop over tokens
in float64, from the weights of the layer alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from headrace import zoo
from headrace.layers.linear.mixer import LinearMixer
from headrace.training.parameters import gate_parameters, parameter_groups, undecayed

B, T, D, H = 2, 23, 32, 4


def layer_of(expression, **settings):
    layer = LinearMixer(zoo.get(expression), hidden_size=D, num_heads=H, **settings).double()
    with torch.no_grad():
        for gate in gate_parameters(layer):
            gate.normal_(std=0.7)
    return layer


def rotated(x):
    """Rotary positions of x [B, T, H, K]: channels i and i + K/2 turn by t 10000^(−2i/K)."""
    half = x.shape[-1] // 2
    angle = torch.arange(T)[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def convolved(x, weight):
    """The causal convolution of x [B, T, C] with a filter per channel [C, 1, n], and SiLU."""
    n = weight.shape[-1]
    padded = F.pad(x, (0, 0, n - 1, 0))
    return F.silu(sum(padded[:, i : i + T] * weight[:, 0, i] for i in range(n)))


def decays(layer, parts):
    """α [B, T, H, K or 1]: of each head (RetNet), key channel (GLA), or token and head (Gated DeltaNet)."""
    kind = layer.spec.decay.kind
    if kind == "retnet":
        return (1 - 2.0 ** (-5 - torch.arange(H).double()))[:, None].expand(B, T, H, 1)
    if kind == "sigmoid":
        return (torch.sigmoid(layer.decay.up(parts["decay"])) ** (1 / 16)).view(B, T, H, -1)
    if kind == "softplus":
        return (-layer.decay.A_log.exp() * F.softplus(parts["decay"] + layer.decay.dt_bias)).exp()[..., None]
    return torch.ones(B, T, H, 1, dtype=torch.float64)


def by_the_equations(layer, x):
    """Equations 4, 10 to 13 and, with β, 14 to 16; the norm of each head, the output gate and the projection of FLA's
    layers, on which the paper builds."""
    parts = {name: x @ layer.part(name).T for name in layer.parts}
    qkv = [parts[name] for name in "qkv"]
    if layer.conv is not None:
        qkv = convolved(torch.cat(qkv, -1), layer.conv.weight).split([part.shape[-1] for part in qkv], -1)
    q, k, v = (part.view(B, T, H, -1) for part in qkv)
    reads = torch.softmax((q * layer.read_competition.weight).sum(-1), -1)  # equation 4
    writes = torch.softmax((k * layer.write_competition.weight).sum(-1), -1)
    if "beta" in parts:  # DeltaNet's φ
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if layer.spec.inputs.rotary:
        q, k = rotated(q), rotated(k)
    alpha, S, out = decays(layer, parts), torch.zeros(B, H, q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for t in range(T):
        S = alpha[:, t, ..., None] * S
        if "beta" in parts:
            held = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            error = torch.sigmoid(parts["beta"][:, t, :, None]) * (writes[:, t, :, None] * v[:, t] - held)
            S = S + k[:, t, :, :, None] * error[:, :, None]
        else:
            S = S + (writes[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", reads[:, t, :, None] * q[:, t], S) / math.sqrt(q.shape[-1]))
    y = torch.stack(out, 1)
    y = y / (y.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * layer.norm_weight
    y = y * F.silu(parts["gate"].view_as(y))
    return layer.o_proj(y.flatten(-2))


def test_the_named_forms_are_those_of_the_paper():
    assert set(zoo.PUBLISHED) == {
        "paper-softmax-retnet", "paper-softmax-gla", "paper-softmax-gated-deltanet",
        "paper-softmax-gated-deltanet-as-printed",
    }  # fmt: skip
    assert zoo.get("paper-softmax-gla") == zoo.get("softmax-gla(competition=paper)")
    printed = zoo.get("softmax-gated-deltanet(competition=paper, decay.kind=none)")
    assert zoo.get("paper-softmax-gated-deltanet-as-printed") == printed


@pytest.mark.parametrize("name", zoo.PUBLISHED)
def test_a_published_layer_equals_the_equations(name):
    layer, x = layer_of(name), torch.randn(B, T, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_the_equations(layer, x), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["retnet", "gla", "gated-deltanet"])
def test_the_default_form_is_another_function(name):
    """With equal weights; a page that calls `softmax-X` the paper's is wrong."""
    published, default = layer_of(f"paper-softmax-{name}"), layer_of(f"softmax-{name}")
    default.load_state_dict(published.state_dict())
    x = torch.randn(B, T, D, dtype=torch.float64)
    y = published(x)[0]
    assert (default(x)[0] - y).norm() > 0.2 * y.norm()


@pytest.mark.parametrize("name", ["retnet", "gla", "gated-deltanet"])
@pytest.mark.parametrize("epsilon", [1e-30, 1e-5])
def test_the_norm_of_each_head_divides_the_published_read_gate_out_again(name, epsilon):
    """RMSNorm(G y; ε) = RMSNorm(y; ε/G²), so the gate moves an output by at most a factor that tends to 1 with ε."""
    changes = "read.gate=none, heads.expand_v=1"
    gated = layer_of(f"paper-softmax-{name}({changes})", norm_eps=epsilon)
    ungated = layer_of(f"paper-softmax-{name}({changes}, competition.read=none)", norm_eps=epsilon)
    raw = layer_of(f"paper-softmax-{name}({changes}, competition.read=none, read.norm=none)")
    for layer in (ungated, raw):
        layer.load_state_dict(gated.state_dict(), strict=False)
    for layer in (gated, ungated, raw):
        layer.o_proj = torch.nn.Identity()
    gates = []
    gated.read_competition.register_forward_hook(lambda module, args, out: gates.append(out.exp()[..., None]))
    x = torch.randn(B, T, D, dtype=torch.float64)
    y, readout = gated(x)[0].unflatten(-1, (H, -1)), raw(x)[0].unflatten(-1, (H, -1))
    expected = readout / (readout.square().mean(-1, keepdim=True) + epsilon / gates[0].square()).sqrt()
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-13)
    if epsilon < 1e-20:
        torch.testing.assert_close(y, ungated(x)[0].unflatten(-1, (H, -1)), rtol=1e-11, atol=1e-13)


def test_weight_decay_applies_to_the_gates_of_the_published_form_alone():
    for name, decayed in (("paper-softmax-gla", True), ("softmax-gla", False)):
        layer = layer_of(name)
        gates = {id(p) for p in gate_parameters(layer)}
        groups = parameter_groups(layer, 0.1, 2.0)
        assert sum(len(group["params"]) for group in groups) == len(list(layer.parameters()))
        (own,) = (group for group in groups if {id(p) for p in group["params"]} & gates)
        assert {id(p) for p in own["params"]} == gates
        assert own["weight_decay"] == (0.1 if decayed else 0.0) and own["lr"] == 2.0
        assert undecayed(layer.read_competition) == ([] if decayed else ["weight"])
        assert len(parameter_groups(layer, 0.0, 2.0)) == len(groups)
