"""A mixture of experts: its equation, its load, its loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from attention_layers import agree
from headrace import InputError, zoo
from headrace.extra.clamped import ClampedExperts, ClampedMixture
from headrace.extra.moe import MixtureOfExperts, Routing
from headrace.extra.sparsemixer import NearExperts, NearMixture
from headrace.ops.loss import IGNORED
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from headrace.training.parameters import parameter_groups
from tiny import build, close, tokens

D, W = 8, 6


def mixture(gated=True, **spec):
    return MixtureOfExperts(Experts(**{"count": 5, "chosen": 2, **spec}), D, W, F.silu, gated).double()


def equals_its_equation(experts, literal):
    """Token by token, with random parameters; and the gradients, to the router too."""
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, D, dtype=torch.float64)
    rows = lambda x: torch.stack([literal(token) for token in x.flatten(0, 1)]).view(2, 7, D)  # noqa: E731
    agree(experts, rows, x, 1e-12, experts.parameters())


@pytest.mark.parametrize("gated", [True, False])
def test_moe_equals_its_equation(gated):
    experts = mixture(gated)

    def literal(token):
        shares, out = experts.router(token).softmax(0), 0
        for e in shares.argsort(descending=True)[:2]:
            hidden = experts.up[e] @ token
            hidden = F.silu(hidden[:W]) * hidden[W:] if gated else F.silu(hidden)
            out = out + shares[e] * (experts.down[e] @ hidden)
        return out

    equals_its_equation(experts, literal)


def test_experts_with_bounds_equal_their_equation():
    """On both sides of the bounds: the softmax of the chosen logits, and biases of all projections."""
    spec = ClampedExperts(5, 2, normalized=True, limit=1.0, alpha=2.0)
    experts, sides = ClampedMixture(spec, D, W, F.silu, True).double(), set()
    assert not experts.up_bias.any() and not experts.down_bias.any()

    def literal(token):
        logits, out = experts.router.weight @ token + experts.router.bias, 0
        values, indices = logits.topk(2)
        for share, e in zip(values.softmax(0), indices, strict=True):
            hidden = experts.up[e] @ token + experts.up_bias[e]
            sides.update((hidden[:W] > 1).tolist(), (hidden[W:].abs() > 1).tolist())
            gate = torch.minimum(hidden[:W], torch.ones(()))
            value = torch.minimum(torch.maximum(hidden[W:], -torch.ones(())), torch.ones(()))
            hidden = gate / (1 + (-2.0 * gate).exp()) * (value + 1)
            out = out + share * (experts.down[e] @ hidden + experts.down_bias[e])
        return out

    equals_its_equation(experts, literal)
    assert sides == {True, False}
    with pytest.raises(InputError, match="limit and alpha are gated by a sigmoid; expected mlp='swiglu'"):
        ClampedMixture(spec, D, W, F.gelu, True)


def test_experts_by_near_logits_equal_their_equation():
    """Three of five, each with its share of the logits left that are near its own."""
    near, counts = 0.6, set()
    experts = NearMixture(NearExperts(5, 3, near=near), D, W, F.silu, True).double()

    def literal(token):
        logits, out = experts.router.weight @ token, 0
        values = logits.tolist()
        order = sorted(range(5), key=lambda e: -values[e])
        for place, e in enumerate(order[:3]):
            best = values[e]
            others = [i for i in order[place:] if best - values[i] <= 2 * near * max(abs(values[i]), best)]
            counts.add(len(others))
            share = logits[e].exp() / sum(logits[i].exp() for i in others)
            hidden = experts.up[e] @ token
            out = out + share * (experts.down[e] @ (F.silu(hidden[:W]) * hidden[W:]))
        return out

    equals_its_equation(experts, literal)
    assert {1, 2, 3} <= counts
    with pytest.raises(InputError, match=r"experts\.normalized=True with experts.near, which do not have it"):
        NearExperts(4, 2, normalized=True)


def test_biases_of_experts_are_not_decayed():
    style = BlockStyle(experts=ClampedExperts(4, 2))
    model = build(Decoder((Layer(zoo.get("gla"), "experts"),), style), num_hidden_layers=1)
    free = {id(p) for group in parameter_groups(model, 0.1, 1.0) if not group["weight_decay"] for p in group["params"]}
    names = {name.rpartition("mlp.")[2] for name, p in model.named_parameters() if id(p) in free and "mlp." in name}
    assert names == {"router.bias", "up_bias", "down_bias"}


def test_no_token_is_dropped_when_one_expert_takes_all():
    experts, x = mixture(count=4, chosen=1), torch.rand(1, 50, D, dtype=torch.float64)
    with torch.no_grad():
        experts.router.weight.zero_()[2] = 100
    assert experts(x).abs().sum(-1).min() > 0 and experts.routing.chosen.unique().tolist() == [2]
    assert experts.routing.balance_loss().item() == pytest.approx(4, rel=1e-6), "as uneven as can be"


def test_a_copy_has_no_routing():
    """Which belongs to the graph of a forward, and cannot be copied."""
    experts = mixture()
    experts(torch.randn(1, 3, D, dtype=torch.float64))
    assert copy.deepcopy(experts).routing is None and experts.routing is not None


@pytest.mark.parametrize("padding", [False, True])
def test_balance_loss_equals_mixtral(padding):
    logits = torch.randn(3, 9, 5, dtype=torch.float64)
    shares = logits.softmax(-1)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = mask[2] = not padding
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), 5, 2, mask.long() if padding else None)
    close(Routing(shares, shares.topk(2).indices).balance_loss(mask if padding else None), theirs.double(), 1e-6)


def test_balance_loss_is_added_in_training_only():
    heavy, free = ({"experts": {"count": 4, "balance": b}} for b in (10.0, 0.0))
    model, ids = build("jamba", style=heavy), tokens(2)
    plain = build("jamba", style=free)
    plain.load_state_dict(model.state_dict())
    close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ours, theirs = (m.train()(ids, labels=ids, attention_mask=mask).loss for m in (model, plain))
    routing = model.model.backbone.layers[1].mlp.routing
    assert routing is None, "what routers did is forgotten with the loss"
    model(input_ids=ids, attention_mask=mask)
    routing = model.model.backbone.layers[1].mlp.routing
    close(ours - theirs, 10 * routing.balance_loss(mask.bool()))


@pytest.mark.parametrize("rows", [1, 2])
def test_balance_loss_of_packed_rows_takes_a_mask(rows):
    model, ids = build("jamba", style={"experts": {"count": 4}}).train(), tokens(rows)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]] * rows)
    expected = model(ids, labels=ids, position_ids=places).loss
    assert torch.equal(model(ids, labels=ids, position_ids=places, attention_mask=torch.ones_like(ids)).loss, expected)


def test_a_router_computes_in_float32_under_autocast():
    experts, x = mixture().float(), torch.randn(1, 999, D)
    routing, weights = experts.route(x)
    with torch.autocast("cpu", torch.bfloat16):
        found, likewise = experts.route(x)
    assert all(map(torch.equal, (*routing[:2], weights), (*found[:2], likewise)))


def test_the_balance_loss_of_frozen_layers_needs_no_gradient():
    model, ids = build("jamba", style={"experts": {"count": 4}}).train(), tokens(2)
    expected = model(ids, labels=ids).loss
    model.model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, expected) and model.model.norm.weight.grad.any()


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_accumulated_step_adds_the_balance_loss_once(name):
    """transformers' Trainer adds up the losses of a step's parts, each divided by the number of the whole's items."""
    model, ids = build("jamba", style={"experts": {"count": 4, "balance": 10.0}}).train(), tokens(2)
    plain = build("jamba", style={"experts": {"count": 4, "balance": 0.0}}).train()
    plain.load_state_dict(model.state_dict())
    targets = ids.clone()
    targets[1, 3:] = IGNORED
    kept = targets[:, 1:] if name == "labels" else targets
    items = (kept != IGNORED).sum(1)
    paid, balances = 0.0, 0.0
    for i in range(2):
        given = {name: targets[i : i + 1], "num_items_in_batch": items.sum()}
        paid = paid + model(ids[i : i + 1], **given).loss - plain(ids[i : i + 1], **given).loss
        model(ids[i : i + 1])
        routing = model.model.backbone.layers[1].mlp.routing
        balances = balances + 10 * routing.balance_loss() * items[i] / items.sum()
    close(paid, balances)


def test_invalid_settings_are_refused():
    with pytest.raises(InputError, match=r"experts\.chosen=3 exceeds experts\.count=2; expected 1 to 2"):
        Experts(2, 3)
    gla = zoo.get("gla")
    for layer, missing in ((Layer(gla, "experts"), "experts"), (Layer(gla, shared=True), "shared")):
        with pytest.raises(InputError, match=rf"style\.{missing} is none"):
            Decoder((layer,), BlockStyle())
