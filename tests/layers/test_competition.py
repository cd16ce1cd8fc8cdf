"""Head competition: what each option means. The paper's equations: test_published_forms.py."""

import math

import pytest
import torch

from headrace import InputError, layers, zoo
from headrace.layers.linear.competition import HeadCompetition
from headrace.spec import Competition

D, H = 24, 3


def competition(heads=5, key_dim=4, **options):
    gate = HeadCompetition(Competition(**options), 12, heads, heads, key_dim).double()
    torch.nn.init.normal_(gate.weight)
    return gate


def test_competition_of_one_head_is_the_identity():
    gate = competition(heads=1)
    assert torch.equal(gate(torch.randn(2, 7, 1, 4).double(), torch.zeros(2, 7, 12)), torch.zeros(2, 7, 1).double())


@pytest.mark.parametrize(
    "activation", [{}, {"activation": "sigmoid"}, {"activation": "null"}, {"activation": "sigmoid", "range": 2.0}]
)
@pytest.mark.parametrize("source", ["head", "diag", "query", "hidden"])
@pytest.mark.parametrize("heads", [5, 429])  # PyTorch's logarithm of 429 is not the nearest float32 to it
def test_zero_scores_give_gates_of_exactly_one(activation, source, heads):
    gate = HeadCompetition(Competition(**activation, source=source), 12, heads, heads, 4)
    log_gate = gate(torch.randn(2, 7, heads, 4), torch.randn(2, 7, 12))
    assert torch.equal(log_gate, torch.zeros(2, 7, heads))


@pytest.mark.parametrize("largest", ["heads", 3.0])
def test_wide_sigmoid_has_the_range_and_slope_of_a_softmax(largest):
    """R σ(s − log(R − 1)): 1 at s = 0, between 0 and R, with slope 1 − 1/R at 0, as H softmax(s) has for R = H."""
    heads, R = 5, 5.0 if largest == "heads" else largest
    gate = competition(heads=heads, activation="sigmoid", range=largest, source="hidden")
    softmax = competition(heads=heads, source="hidden")
    for one in (gate, softmax):
        one.weight.data.zero_()[0, 0] = 1.0  # head 0 scores the first number of x, the others score 0
    s = torch.linspace(-9, 9, 7, dtype=torch.float64, requires_grad=True)
    x = torch.nn.functional.pad(s[None, :, None], (0, 11))
    gates = gate(torch.zeros(1, 7, heads, 4).double(), x).exp()[0]
    torch.testing.assert_close(gates[:, 0], R * torch.sigmoid(s - math.log(R - 1)))
    assert (gates[:, 1:] == 1).all() and gates[3, 0] == 1
    ends = gate(torch.zeros(1, 2, heads, 4).double(), torch.tensor([[[-99.0], [99.0]]]).double().expand(1, 2, 12)).exp()
    torch.testing.assert_close(ends[0, :, 0], torch.tensor([0.0, R]).double(), atol=1e-12, rtol=1e-12)
    (slope,) = torch.autograd.grad(gates[3, 0], s)
    assert slope[3].item() == pytest.approx(1 - 1 / R)
    if largest == "heads":
        (its,) = torch.autograd.grad(softmax(torch.zeros(1, 7, heads, 4).double(), x).exp()[0, 3, 0], s)
        torch.testing.assert_close(slope, its)


def test_range_needs_sigmoid_gates():
    with pytest.raises(InputError, match=r"competition.range=3.0 is of sigmoid gates; expected .*, got 'softmax'"):
        Competition(range=3.0)
    for value in (1, 1.0, "wide"):
        with pytest.raises(InputError, match=rf"Competition\.range={value!r}.*; expected"):
            Competition(activation="sigmoid", range=value)


@pytest.mark.parametrize("source", ["head", "hidden"])
def test_shuffled_gates_permute_heads(source):
    own, shuffled = competition(source=source), competition(source=source, shuffle=True)
    shuffled.weight.data.copy_(own.weight)
    q, x, positions = torch.randn(2, 7, 5, 4).double(), torch.randn(2, 7, 12).double(), torch.arange(7)[None]
    gates, moved = own(q, x), shuffled(q, x, positions)
    torch.testing.assert_close(moved.sort(-1).values, gates.sort(-1).values, atol=0, rtol=0)
    for t in range(7):
        assert torch.equal(moved[:, t], gates[:, t].roll(-t, -1))


def test_null_slot_can_close_every_head():
    gate = competition(activation="null", source="hidden")
    gate.weight.data.fill_(-100.0)
    closed = gate(torch.zeros(1, 1, 5, 4).double(), torch.ones(1, 1, 12).double())
    assert closed.exp().sum() < 1e-12
    softmax = competition(activation="softmax", scale="one")
    kept = softmax(torch.randn(1, 9, 5, 4).double(), torch.zeros(1, 9, 12))
    torch.testing.assert_close(kept.exp().sum(-1), torch.ones(1, 9).double())


@pytest.mark.parametrize(
    ("source", "weights"), [("head", 2 * D), ("diag", 2 * D), ("query", 2 * H * D), ("hidden", 2 * H * D)]
)
def test_competition_adds_the_published_parameters(source, weights):
    """Equation 4's W is d × H with d the head dimension: 2 D weights a layer, 0.05M at 24 layers of width 1024."""
    build = lambda name: layers.build(zoo.get(name), hidden_size=D, num_heads=H)  # noqa: E731
    count = lambda mixer: sum(p.numel() for p in mixer.parameters())  # noqa: E731
    assert count(build(f"softmax-retnet(competition.source={source})")) - count(build("retnet")) == weights


def test_gate_in_beta_stops_a_losing_head_from_erasing():
    """Equation 14 gates v alone. In β's logit the gate also keeps the memory of a head that loses."""
    for place, erased in (("value", True), ("beta", False)):
        name = f"softmax-gated-deltanet(competition.write={place}, decay.kind=none, inputs.conv=0)"
        mixer = layers.build(zoo.get(name), hidden_size=D, num_heads=H).double()
        x = torch.randn(1, 1, D, dtype=torch.float64)
        _, state = mixer(x)
        k = (x @ mixer.part("k").T).view(H, -1)
        mixer.write_competition.weight.data.copy_(k * torch.tensor([[1e6], [-1e6], [-1e6]]))
        _, after = mixer(x, state._replace(conv=None))
        change = (after.memory - state.memory).flatten(2).norm(dim=-1)[0] / state.memory.flatten(2).norm(dim=-1)[0]
        assert bool(change[1] > 0.05) is erased, place


def test_both_spellings_of_sigmoid_gates_are_the_control_of_the_softmax():
    named = zoo.get("gla(competition=sigmoid)")
    assert named == zoo.get("softmax-gla(competition.activation=sigmoid)") and named.competition.range == "heads"
    assert zoo.plain(named) == zoo.get("gla")
    narrow = zoo.get("gla(competition=sigmoid, competition.range=2)")  # a change stays in its expression
    assert narrow.competition.range == 2.0 and zoo.get("gla(competition=sigmoid)").competition.range == "heads"


@torch.no_grad()
def test_read_gate_follows_the_norm_of_groups_of_one_head():
    """Which is the norm of a head, and would cancel a gate before it."""
    norms = "rms", "rms-groups", f"rms-groups, heads.qk_groups={H}"
    one, *others = (layers.Mixer(f"softmax-gla(read.norm={n})", hidden_size=D, num_heads=H) for n in norms)
    torch.nn.init.normal_(one.read_competition.weight)
    x = torch.randn(2, 5, D)
    for groups in others:
        groups.load_state_dict(one.state_dict() | {"norm_weight": one.norm_weight.repeat(one.H)})
        assert torch.allclose(groups(x)[0], one(x)[0], atol=1e-5)


@pytest.mark.parametrize("mixer", ["gla(competition=paper, read.skip=true)", "mlstm(competition=paper)"])
@torch.no_grad()
def test_read_gate_on_q_acts_where_the_norm_does_not_divide_it_out(mixer):
    """A skip is added before the norm, and a memory with a sum of weights is gated after it: nothing is idle."""
    spec = zoo.get(mixer)
    layer, x = layers.build(spec, hidden_size=D, num_heads=H), torch.randn(2, 5, D)
    before, _ = layer(x)
    torch.nn.init.normal_(layer.read_competition.weight, std=10)
    assert not spec.idle_gates(D, H) and (layer(x)[0] - before).norm() > 0.01 * before.norm()


@torch.no_grad()
def test_heads_compete_by_keys_with_as_many_channels_as_features():
    """The key of HGRN2 is 1 − the decay, which has a number for each feature of q."""
    spec = zoo.get("softmax-hgrn2(inputs.feature_map=dpfp-1)")
    layer, x = layers.build(spec, hidden_size=D, num_heads=H), torch.randn(2, 5, D)
    assert layer.write_competition.weight.shape == (H, 2 * layer.K)
    before, _ = layer(x)
    torch.nn.init.normal_(layer.write_competition.weight)
    assert (layer(x)[0] - before).norm() > 0.01 * before.norm()
