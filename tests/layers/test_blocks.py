"""Blocks of other people's models: orders of norms, parallel mixers, routers, shared blocks, scales.

Each against the literal computation, in float64. Whole models against transformers, with their MLPs, experts and
adapters: tests/convert/test_families.py.
"""

import copy
import pickle
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from headrace import InputError, zoo
from headrace.convert.retrofit import retrofit
from headrace.export.onnx import check_exportable
from headrace.extra.moe import shares_of, within_groups
from headrace.inspection.recorder import record
from headrace.layers.base import tensors
from headrace.layers.blocks.block import ACTIVATIONS, MLP, Block, Sizes
from headrace.spec.attention import AttentionSpec
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer, Order
from tiny import MIXERS, build, close, tokens

D, W, T = 8, 6, 9
GLA = zoo.get("gla")


def randomized(module):
    for value in module.state_dict().values():
        if value.is_floating_point():
            nn.init.normal_(value)
    return module.double().eval()


def sample(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# --- orders of norms, parallel mixers --------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", [*get_args(Order)])
def test_order_of_norms_equals_its_equation(order, own):
    style = BlockStyle() if own else BlockStyle(order=order)
    layer = Layer(GLA, parallel=zoo.get("mamba2"), order=order if own else None)
    block, x = randomized(Block(layer, Sizes(D, 2, W, style=style))), sample(2, T, D)
    n, m = block.mixer_norm, getattr(block, "mlp_norm", None)
    assert (m is None) == (order == "parallel-joint")
    f = lambda u: block.mixer(u)[0] + block.parallel(u)[0]  # noqa: E731
    if order == "pre":
        y = x + f(n(x))
        y = y + block.mlp(m(y))
    elif order == "post":
        y = n(x + f(x))
        y = m(y + block.mlp(y))
    elif order == "both":
        y = x + block.mixer_after(f(n(x)))
        y = y + block.mlp_after(block.mlp(m(y)))
    elif order == "branch":
        y = x + n(f(x))
        y = y + m(block.mlp(y))
    else:
        y = x + f(n(x)) + block.mlp((m or n)(x))
    states = []
    close(block(x, next_states=states), y)
    assert [type(state).__name__ for state in states] == ["MixerState", "MixerState"]


# --- mixtures of experts ---------------------------------------------------------------------------------------------


def test_groups_without_choice_are_minus_infinity():
    merits = torch.tensor([5.0, 0.0, 3.0, 3.0, 4.0, 1.5])
    kept = within_groups(merits, 3, 1, best=2)
    assert kept.isfinite().tolist() == [False, False, True, True, False, False], "two of 3 are better than 5 and 0"
    assert within_groups(merits, 3, 2, best=1).isfinite().tolist() == [True, True, False, False, True, True]
    close(shares_of(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_routers_stay_in_float32(tmp_path):
    """Where the other weights are in bfloat16, in which two experts may be chosen the other way round."""
    experts = {"experts": Experts(4, 2, scores="sigmoid", biased=True)}
    model = build([Layer(GLA, "experts")], style=experts).float()
    model.model.backbone.layers[0].mlp.choice_bias.normal_()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    before, after = (m.model.backbone.layers[0].mlp for m in (model, again))
    assert torch.equal(after.choice_bias, before.choice_bias) and torch.equal(after.router.weight, before.router.weight)
    x = torch.randn(1, T, 32, dtype=torch.bfloat16)
    assert torch.equal(after.route(x)[0].chosen, before.route(x.float())[0].chosen)
    assert after.up.dtype is again(tokens(1)).logits.dtype is torch.bfloat16


# --- shared blocks ---------------------------------------------------------------------------------------------------


def test_layers_use_shared_blocks_in_turn():
    style = {"shared": AttentionSpec(), "shared_count": 2, "shared_mlp_rank": 3}
    layers = [Layer(GLA, "none", shared=i > 0) for i in range(4)]
    model, ids = build(layers, num_hidden_layers=4, style=style), tokens(1)
    calls = []
    for i, block in enumerate(model.model.backbone.shared_blocks):
        block.register_forward_pre_hook(lambda m, args, i=i: calls.append(i))
    model(ids)
    assert calls == [0, 1, 0]


# --- scales ----------------------------------------------------------------------------------------------------------


def test_embeddings_are_scaled_and_logits_bounded():
    style = {"embedding_scale": 5.0, "logits_cap": 2.0, "head_bias": True}
    model, plain, ids = build("gla", style=style), build("gla", style={"head_bias": True}), tokens(2)
    nn.init.normal_(model.lm_head.bias)
    plain.load_state_dict(model.state_dict())
    hidden = plain(inputs_embeds=5.0 * plain.model.embed_tokens(ids), output_hidden_states=True)
    expected = 2 * torch.tanh(hidden.logits / 2)
    close(model(ids).logits, expected)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).float()
    close(model(ids, labels=ids).loss, loss, 1e-6)  # transformers' loss is in float32
    for each, targets in ((model, expected), (plain, plain(ids).logits)):
        loss = F.cross_entropy(targets[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).float()
        close(each(ids, labels=ids, skip_logits=True).loss, loss, 1e-6)


@torch.no_grad()
def test_generation_is_bounded_too():
    """A capped logit changes the probabilities of sampling, in the short loop and in transformers' own."""
    model, ids = build("gla", style={"logits_cap": 0.5}), tokens(1)
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = torch.stack(model.generate(ids, **settings).logits)
    assert logits.abs().max() <= 0.5
    assert torch.equal(model.generate(ids, **settings).sequences, copy.deepcopy(model).generate(ids, max_new_tokens=3))


@torch.no_grad()
def test_parallel_mixers_are_known_everywhere(tmp_path):
    """inspect has a record of each under the index of its layer, retrofit adds gates beside attention, and the graph of
    ONNX, which has one state per layer, refuses both kinds of layers with more."""
    model, ids = build("parallel", tie_word_embeddings=False), tokens(1)
    records = record(model, ids)[1]
    assert [(r.layer, type(r.mixer.spec).__name__) for r in records] == [
        (0, "MixerSpec"), (0, "AttentionSpec"), (1, "MixerSpec"),
    ]  # fmt: skip
    assert zoo.plain(zoo.each_mixer(MIXERS["parallel"], zoo.compete)) == MIXERS["parallel"]
    assert [type(spec).__name__ for spec in model.config.mixers] == ["MixerSpec", "AttentionSpec", "MixerSpec"]
    model.float().save_pretrained(tmp_path)
    assert torch.equal(retrofit(tmp_path)(ids).logits, model(ids).logits)
    for name in ("parallel", "channel mixing"):
        with pytest.raises(InputError, match="several states"):
            check_exportable(build([MIXERS[name].layers[0]], style=MIXERS[name].style))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Experts(8, 2, groups=3), "experts.groups=3, experts.count=8"),
    (lambda: Experts(8, 2, groups=8), "expected equal groups of 2 or more experts"),
    (lambda: Experts(8, 2, groups=2, chosen_groups=3), "experts.chosen_groups=3 exceeds experts.groups=2"),
    (lambda: Experts(8, 5, groups=2), "experts.chosen=5 exceeds the 4 experts of chosen_groups=1"),
    (lambda: Experts(8, 2, shared_gate=True), "experts.shared_gate=True without experts.shared"),
    (lambda: BlockStyle(mlp="rwkv4", experts=Experts()), "mlp='rwkv4' is of its own kind"),
    (lambda: zoo.get("jamba(style.mlp=none)"), "a layer uses experts and style.mlp='none', which has no activation"),
    (lambda: BlockStyle(shared_count=2), "shared_count=2 without a shared block"),
    (lambda: zoo.get("bert(style.mlp=rwkv4)"), "style.mlp='rwkv4' is for decoders alone"),
    (lambda: zoo.get("bert(style.order=parallel)"), "style.order='parallel' is for decoders alone"),
    (lambda: zoo.get("bert(style.head_bias=true)"), "style.head_bias=True is for decoders alone"),
    (lambda: Decoder((Layer(GLA, parallel=AttentionSpec(kv_heads=3)),)).head_dims(D, 4), "kv_heads=3 does not divide"),
])  # fmt: skip
def test_contradictions_are_refused(make, message):
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["hybrid", "shared"])
@torch.no_grad()
def test_states_and_maps_are_the_same_where_what_a_block_is_given_is_copied_and_rounded(name):
    """As FSDP does with a dtype of its own."""
    model, ids = build(name).bfloat16(), tokens(2)
    backbone, results = model.model.backbone, []
    rounded = lambda y: y.bfloat16() if isinstance(y, torch.Tensor) and y.is_floating_point() else y  # noqa: E731
    copied = lambda _, args, kwargs: tree_map(rounded, (args, kwargs))  # noqa: E731
    for hook in (None, copied):
        for module in (*backbone.layers, *backbone.shared_blocks) if hook else ():
            module.register_forward_pre_hook(hook, with_kwargs=True)
        read = model.model(ids, output_attentions=True, use_cache=True)
        last = model.model(ids, past_key_values=read.past_key_values).last_hidden_state
        results.append([last, *read.attentions, *tensors(read.past_key_values.states)])
    expected, found = results
    assert len(expected) > 1 + sum(backbone.state_counts)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_mlp_can_be_pickled(kind):
    mlp, x = MLP(Sizes(8, 2, 16, style=BlockStyle(mlp=kind))), torch.randn(2, 8)
    assert torch.equal(pickle.loads(pickle.dumps(mlp))(x), mlp(x))
