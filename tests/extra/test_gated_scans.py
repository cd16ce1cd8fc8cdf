"""minGRU, minLSTM and HGRN: against their recurrences, and against FLA's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attention_layers import agree, randomized
from headrace import layers, zoo
from headrace.verification.verify import relative
from peers import load

B, T, D = 2, 13, 10


def build(name):
    mixer = layers.build(zoo.get(name), hidden_size=D, num_heads=2, layer_idx=1, num_layers=4)
    randomized(mixer.double(), 0.5)
    if mixer.floor is not None:
        nn.init.uniform_(mixer.floor, 0.05, 0.95)
    return mixer


def literally(name, mixer, x):
    """The equations of the papers, token by token."""
    h, rows, E = 0, [], mixer.out_proj.in_features
    for token in x.unbind(1):
        parts = mixer.in_proj(token).split(E, -1)
        if name == "mingru":
            z = parts[0].sigmoid()
            h = (1 - z) * h + z * parts[1]
            read = h
        elif name == "minlstm":
            f, i = parts[0].sigmoid(), parts[1].sigmoid()
            h = f / (f + i) * h + i / (f + i) * parts[2]
            read = h
        else:
            decay = mixer.floor + (1 - mixer.floor) * parts[0].sigmoid()
            h = decay * h + (1 - decay) * parts[1] * parts[1].sigmoid()
            norm = (h.square().mean(-1, keepdim=True) + mixer.norm_eps).sqrt()
            read = h / norm * mixer.norm_weight * parts[2] * parts[2].sigmoid()
        rows.append(mixer.out_proj(read))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("expand", [1, 1.5])
@pytest.mark.parametrize("name", ["mingru", "minlstm", "hgrn"])
def test_layer_equals_its_recurrence(name, expand):
    """Outputs, and the gradients of the input and of all parameters."""
    mixer, x = build(f"{name}(expand={expand})"), torch.randn(B, T, D, dtype=torch.float64)
    agree(lambda x: mixer(x)[0], lambda x: literally(name, mixer, x), x, 1e-14, mixer.parameters())


def test_hgrn_equals_fla():
    """FLA's layer is composed of FLA's recurrence: lower bound and gates are written as there."""
    pytest.importorskip("fla")
    mixer, x = build("hgrn").float(), torch.randn(B, T, D)
    f, c, gate = mixer.in_proj(x).split(D, -1)
    log_decay = torch.logaddexp(mixer.floor.log(), torch.log1p(-mixer.floor) + F.logsigmoid(f))
    h, _ = load("fla:hgrn/naive:naive_recurrent_hgrn")(F.silu(c) * (1 - log_decay.exp()), log_decay)
    norm = F.rms_norm(h, (D,), mixer.norm_weight, mixer.norm_eps)
    assert relative(mixer(x)[0], mixer.out_proj(norm * F.silu(gate))) <= 2e-6


def test_bounds_of_hgrn_grow_with_depth():
    layer = lambda i: layers.build(zoo.get("hgrn"), hidden_size=D, num_heads=2, layer_idx=i, num_layers=4)  # noqa: E731
    assert [layer(i).floor.unique().tolist() for i in range(4)] == [[0.0], [0.25], [0.5], [0.75]]


@pytest.mark.parametrize("name", ["mingru", "minlstm", "hgrn"])
def test_closed_and_open_gates_stay_finite(name):
    """Logits of hundreds: a gate that underflows in float32, and a ratio of two such gates."""
    mixer, x = build(name).float(), 300 * torch.randn(B, T, D, requires_grad=True)
    y = mixer(x)[0]
    assert all(g.isfinite().all() for g in (y, *torch.autograd.grad(y.sum(), [x, *mixer.parameters()])))
