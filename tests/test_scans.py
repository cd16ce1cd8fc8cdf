"""Mixers with a recurrence per channel: against other libraries and their literal recurrences, and what is refused."""

import pytest
import torch
from torch import nn

from headrace import mixers, spec, zoo
from headrace.errors import InputError
from headrace.mixers import selective
from headrace.mixers.selective import Operands, selective_scan, selective_step

D, T = 32, 70


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def build(name, **settings):
    return mixers.build(
        zoo.get(name), **{"hidden_size": D, "num_heads": 4, "layer_idx": 1, "num_layers": 3, **settings}
    )


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def agree(ours, theirs, weights):
    """Outputs and the gradient of the input, with their weights in ours, of which every one has a counterpart."""
    shapes = {key: parameter.shape for key, parameter in ours.state_dict().items()}
    ours.load_state_dict({key: x.detach().reshape(shapes[key]) for key, x in weights.items()})
    x = torch.randn(2, T, D, requires_grad=True)
    outputs = ours(x)[0], theirs(x)
    weight = torch.randn_like(x)
    gradients = (torch.autograd.grad((y * weight).sum(), x)[0] for y in outputs)
    assert error(*outputs) <= 1e-5
    assert error(*gradients) <= 1e-5


# --- Mamba -----------------------------------------------------------------------------------------------------------


def test_mamba_is_transformers():
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=D, state_size=16, num_hidden_layers=1, use_mambapy=False, use_bias=False)
    theirs = randomised(MambaMixer(config, 0))
    weights = {
        "in_proj.weight": theirs.in_proj.weight, "x_proj.weight": theirs.x_proj.weight, "skip": theirs.D,
        "conv.weight": theirs.conv1d.weight, "conv.bias": theirs.conv1d.bias, "A_log": theirs.A_log.T,
        "dt_weight": theirs.dt_proj.weight, "dt_bias": theirs.dt_proj.bias, "out_proj.weight": theirs.out_proj.weight,
    }  # fmt: skip
    agree(build("mamba"), theirs, weights)


def selective_operands(tokens, sequences, S=3, E=5):
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    A, dt = -draw(S, E).exp(), draw(tokens, E).exp()
    operands = Operands(draw(tokens, E), dt, A, draw(tokens, S), draw(tokens, S), draw(sequences, S, E))
    return Operands(*(x.requires_grad_() for x in operands))


def selective_literally(x, lengths):
    out, final = [], []
    for n, tokens in enumerate(torch.arange(sum(lengths)).split(lengths)):
        h = x.initial[n : n + 1]
        for t in tokens:
            y, h = selective_step(Operands(x.u[t, None], x.dt[t, None], x.A, x.B[t, None], x.C[t, None], h))
            out.append(y)
        final.append(h)
    return torch.cat(out), torch.cat(final)


@pytest.mark.parametrize("tile", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("lengths", [[9], [4, 4], [0, 1, 0, 7, 3, 0], [1, 1, 1]], ids=str)
def test_the_selective_scan_is_its_recurrence(monkeypatch, lengths, tile):
    """However tiles and sequences fall: outputs, last states and every gradient, those of the last states too."""
    x = selective_operands(sum(lengths), len(lengths))
    monkeypatch.setattr(selective, "TILE", tile * x.A.numel())
    ours, theirs = selective_scan(x, lengths), selective_literally(x, lengths)
    weights = [torch.randn_like(y) for y in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-12)
    loss = lambda results: sum((y * w).sum() for y, w in zip(results, weights, strict=True))  # noqa: E731
    for mine, their in zip(torch.autograd.grad(loss(ours), x), torch.autograd.grad(loss(theirs), x), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-11, atol=1e-11)


def test_decays_beyond_every_range():
    x = selective_operands(40, 1)
    extreme = x._replace(dt=torch.where(torch.rand_like(x.dt) < 0.3, 1e6, 1e-12).requires_grad_())
    out, final = selective_scan(extreme, [40])
    assert error(out, selective_literally(extreme, [40])[0]) <= 1e-12
    gradients = torch.autograd.grad(out.sum() + final.sum(), extreme)
    assert all(g.isfinite().all() for g in gradients)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(zoo.SCANS))
def test_what_has_no_heads_cannot_compete(name):
    with pytest.raises(InputError, match=f"{name} has none"):
        zoo.get(f"softmax-{name}")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "mamba", "conv": 4}, "needs state_size"),
        ({"kind": "mamba", "state_size": 0, "conv": 4}, "state_size=0"),
        ({"kind": "mamba", "state_size": 4, "conv": 1}, "conv=1"),
        ({"kind": "mamba", "state_size": 4, "conv": 4, "rank": 0}, "rank=0"),
        ({"kind": "mamba", "state_size": 4, "conv": 4, "expand": 0.0}, "expand=0.0"),
        ({"kind": "s4", "state_size": 3}, "multiple of 2"),
        ({"kind": "s4", "state_size": 4, "conv": 4}, "has no conv"),
        ({"kind": "rwkv4", "state_size": 4}, "has no state_size"),
        ({"kind": "rwkv4", "expand": 2.0}, "has no expand"),
    ],
)
def test_what_a_spec_refuses(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        spec.ScanSpec(**fields)


def test_a_near_miss_and_a_width_that_does_not_fit():
    with pytest.raises(InputError, match="mamba"):
        zoo.get("manba")
    with pytest.raises(InputError, match="no whole number of channels"):
        build("mamba(expand=1.3)")
