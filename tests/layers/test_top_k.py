"""Competition with competition.top_k: the literal equations, gradients, ties, and what else reads its gates."""

import pytest
import torch

from headrace import GateWarning, layers, zoo
from headrace.layers.linear.competition import HeadCompetition
from headrace.spec import Competition
from headrace.training.gate_statistics import GateWatch

D, H, T, K = 32, 4, 13, 2
RETNET = "softmax-retnet(inputs.rotary=false, read.gate=none, read.scale=one, competition.source=hidden, "
DELTA = "softmax-gated-deltanet(inputs.conv=0, read.gate=none, read.scale=one, competition.source=hidden, "


def gate_of(heads=5, **options):
    gate = HeadCompetition(Competition(source="hidden", **options), heads, heads, heads, 4).double()
    torch.nn.init.eye_(gate.weight)  # the scores are the input
    return lambda scores: gate.gate(torch.zeros(*scores.shape, 4).double(), scores)


def literal_gates(scores, k, control=False):
    """A softmax over the k largest scores, or sigmoids with its range and slope, times H; 0 for the others."""
    gates, (rows, heads) = torch.zeros_like(scores), scores.shape
    for row in range(rows):
        kept = scores[row].topk(k).indices
        own = 1 / (1 + (k - 1) * torch.exp(-scores[row, kept]))
        gates[row, kept] = heads * (own if control else scores[row, kept].softmax(-1))
    return gates


@pytest.mark.parametrize("k", [1, 2, 4])
def test_gates_are_the_activation_of_the_k_largest_scores(k):
    scores = torch.randn(1, 20, 5, dtype=torch.float64)
    for control, options in ((False, {}), (True, {"activation": "sigmoid", "range": "heads"})):
        gates = gate_of(top_k=k, **options)(scores)[0]
        torch.testing.assert_close(gates, literal_gates(scores[0], k, control), rtol=1e-13, atol=1e-13)
        assert ((gates > 0).sum(-1) == k).all()
    torch.testing.assert_close(gate_of(top_k=5)(scores), gate_of()(scores), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"activation": "null"}, {"activation": "sigmoid", "range": "heads"}])
@pytest.mark.parametrize("heads", [5, 429])
def test_equal_scores_keep_every_head_with_a_gate_of_exactly_one(options, heads):
    """So that a layer begins as the layer without competition, and no head is left out by the order of its weights."""
    gate = HeadCompetition(Competition(top_k=2, **options), 12, heads, heads, 4)
    assert torch.equal(gate(torch.randn(2, 7, heads, 4), torch.randn(2, 7, 12)), torch.zeros(2, 7, heads))
    tied = torch.tensor([[[1.0, 0.0, 0.0, 0.0, -1.0]]], dtype=torch.float64)
    assert ((gate_of(top_k=2, **options)(tied) > 0) == (tied > -1)).all()


@pytest.mark.parametrize("options", [{}, {"activation": "sigmoid", "range": "heads"}, {"activation": "null"}])
@pytest.mark.parametrize("k", [1, 2])
def test_gradients_are_those_of_the_chosen(options, k):
    scores = torch.tensor([[[0.3, -1.2, 2.0, 0.9, -0.4]]], dtype=torch.float64, requires_grad=True)
    gate = gate_of(top_k=k, **options)
    assert torch.autograd.gradcheck(gate, scores)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (grad,) = torch.autograd.grad((gate(scores) * weights).sum(), scores)
    assert ((grad != 0) <= (gate(scores) > 0)).all()


def test_straight_through_has_the_gates_of_the_chosen_and_the_gradient_of_all():
    scores, weights = torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True), torch.randn(5).double()
    chosen, through, whole = gate_of(top_k=2), gate_of(top_k=2, gradient="all"), gate_of()
    assert torch.equal(through(scores), chosen(scores))
    expected, found = (torch.autograd.grad((g(scores) * weights).sum(), scores)[0] for g in (whole, through))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def drawn(expression):
    mixer = layers.build(zoo.get(expression), hidden_size=D, num_heads=H).double()
    for path, parameter in mixer.named_parameters():
        if "competition" in path:
            torch.nn.init.normal_(parameter)
    return mixer


@pytest.mark.parametrize("expression", [RETNET, DELTA + "competition.write=beta, "], ids=["retnet", "gated-deltanet"])
def test_memories_that_lose_are_left_as_they_were(expression):
    mixer = drawn(expression + f"competition.top_k={K}, competition.freeze=true)")
    x = torch.randn(1, T, D, dtype=torch.float64)
    q, k, v = ((x[0] @ mixer.part(name).T).unflatten(-1, (H, -1)) for name in "qkv")
    gates = mixer.read_competition, mixer.write_competition
    reads, writes = (literal_gates(x[0] @ gate.weight.T, K) for gate in gates)
    delta = "delta" in expression
    if delta:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        odds = torch.exp(x[0] @ mixer.part("beta").T) * writes
        beta, decay = odds / (1 + odds), mixer.decay(x @ mixer.part("decay").T)[0].exp()
    else:
        beta, decay = writes, mixer.decay(x).exp().expand(T, H)
    S, out = torch.zeros(H, q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for t in range(T):
        for h in writes[t].nonzero()[:, 0]:
            S[h] = decay[t, h] * S[h]
            S[h] = S[h] + torch.outer(k[t, h], beta[t, h] * (v[t, h] - delta * (k[t, h] @ S[h])))
        out.append(torch.einsum("hk,hkv->hv", q[t], S))
    out = torch.stack(out)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + mixer.norm_eps) * reads[..., None]
    y, state = mixer(x)
    torch.testing.assert_close(y[0], mixer.o_proj(out.flatten(1)), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state.memory[0], S, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", ["top_k=1, competition.gradient=all", "top_k=2, competition.memories_per_head=2"])
def test_gradients_of_layers_are_finite_and_reach_the_scores(options):
    mixer = drawn(f"softmax-gla(competition.{options})")
    mixer(torch.randn(2, T, D, dtype=torch.float64))[0].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    assert mixer.write_competition.weight.grad.abs().sum() > 0


def test_statistics_of_gates_that_are_0_are_finite():
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([drawn("softmax-gla(competition.top_k=1, competition.gradient=all)")])}
    )
    watch = GateWatch()
    watch.labelled = torch.ones(2, T, dtype=torch.bool)
    with watch.on(model):
        model["layers"][0](torch.randn(2, T, D, dtype=torch.float64))
    assert [gate["entropy"] for gate in watch.summary()] == [0, 0]


@pytest.mark.parametrize("control", [False, True])
def test_scores_of_one_gate_that_get_no_gradient_are_said(control):
    options = "competition.top_k=1" + ", competition.activation=sigmoid" * control
    with pytest.warns(GateWarning, match="the scores are not trained"):
        mixer = drawn(f"softmax-gla({options})")
    mixer(torch.randn(2, T, D, dtype=torch.float64))[0].square().sum().backward()
    assert mixer.write_competition.weight.grad.abs().sum() == 0
    assert not zoo.get(f"softmax-gla({options}, competition.gradient=all)").idle_gates(num_heads=H)


def test_keeping_all_gates_is_said():
    with pytest.warns(GateWarning, match="competition.top_k=4 keeps all of 4 gates"):
        drawn("softmax-gla(competition.top_k=4)")
