"""Attention to slots, GSA and ABC: against their equations, and against FLA's functions."""

import pytest
import torch
import torch.nn.functional as F

from attention_layers import agree, randomized
from headrace import layers, zoo
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative
from peers import load

B, T, D, H, M, V = 2, 37, 20, 2, 3, 4  # more than a chunk of 32 tokens; a key has 5 channels


def build(name):
    mixer = layers.build(zoo.get(f"{name}(slots={M}, expand_k=0.5, expand_v={H * V / D})"), hidden_size=D, num_heads=H)
    return randomized(mixer, 0.5).double()


def operands(mixer, x):
    return [y.unflatten(-1, (H, -1)) for y in mixer.in_proj(x).split(mixer.parts, -1)]


def read(q, keys, values):
    """q [B, H, K], keys and values [B, H, M, ·]."""
    logits = torch.einsum("bhk,bhmk->bhm", q, keys)
    return torch.einsum("bhm,bhmv->bhv", logits.softmax(-1), values)


def gsa_literally(mixer, x):
    """Token by token."""
    q, k, v, w = operands(mixer, x)
    q, k, v = (y * y.sigmoid() for y in (q, k, v))
    keys, values, rows = 0, 0, []
    for t in range(x.shape[1]):
        alpha = w[:, t].sigmoid()[..., None] ** (1 / 8)
        keys = alpha * keys + (1 - alpha) * k[:, t, :, None]
        values = alpha * values + (1 - alpha) * v[:, t, :, None]
        out = read(q[:, t], keys, values).flatten(1)
        out = out * out.sigmoid()
        norm = (out.square().mean(-1, keepdim=True) + mixer.norm_eps).sqrt()
        rows.append(mixer.o_proj(out / norm * mixer.norm_weight))
    return torch.stack(rows, 1)


def abc_literally(mixer, x):
    """The definition: keys and values of a slot are means of all past ones, with the weights e^w."""
    q, k, v, w = operands(mixer, x)
    rows = []
    for t in range(x.shape[1]):
        share = w[:, : t + 1].softmax(1)
        keys, values = (torch.einsum("bjhm,bjhk->bhmk", share, y[:, : t + 1]) for y in (k, v))
        rows.append(mixer.o_proj(read(q[:, t] * q.shape[-1] ** -0.5, keys, values).flatten(1)))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("name", "literally"), [("gsa", gsa_literally), ("abc", abc_literally)], ids=["gsa", "abc"])
def test_layer_equals_its_equation(name, literally):
    """Outputs, and the gradients of the input and of all parameters."""
    mixer, x = build(name), torch.randn(B, T, D, dtype=torch.float64)
    agree(lambda x: mixer(x)[0], lambda x: literally(mixer, x), x, 1e-12, mixer.parameters())


@pytest.mark.parametrize("name", ["gsa", "abc"])
@torch.no_grad()
def test_recurrence_equals_fla(name):
    """From a memory that is not zero in GSA; theirs of ABC begins with none."""
    pytest.importorskip("fla")
    mixer, x = build(name).float(), torch.randn(B, T, D)
    q, k, v, w = operands(mixer, x)
    memory = (name == "gsa") * torch.randn(B, *mixer.state_shapes["memory"])
    out, after = mixer._attend(q, k, v, w, memory, Sequences(x, None))
    if name == "gsa":
        log_decay, K = F.logsigmoid(w) / 8, k.shape[-1]
        theirs, states = load("fla:gsa/naive:naive_recurrent_gsa")(
            q, k, v, 1 - log_decay.exp(), log_decay, scale=1.0, initial_state=(memory[..., :K].mT, memory[..., K:]),
            output_final_state=True,
        )  # fmt: skip
        assert relative(after, torch.cat([states[0].mT, states[1]], -1)) <= 2e-6
    else:
        theirs, _ = load("fla:abc/naive:naive_recurrent_abc")(*(y.transpose(1, 2) for y in (q, k, v, w)))
        theirs = theirs.transpose(1, 2)
    assert relative(out, theirs) <= 2e-6


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("name", ["gsa", "abc"])
def test_float32_equals_float64_for_gates_of_any_size(name, scale):
    """Also where a gate closes, and where one weight e^w is all of the sum so far."""
    mixer, x = build(name), torch.randn(B, T, D)
    with torch.no_grad():
        mixer.in_proj.weight[-H * M :] *= scale
    single = build(name).float()
    single.load_state_dict(mixer.state_dict())
    y = single(x.requires_grad_())[0]
    assert relative(y.double(), mixer(x.double())[0]) <= 5e-6
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()
