"""Attention of an encoder by a pattern: a loop over all pairs of tokens, and the Longformer and BigBird of others."""

import math
import re

import pytest
import torch
from test_bert import from_bert
from torch import nn
from transformers import BigBirdConfig, BigBirdModel, LongformerConfig, LongformerModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from attention_layers import D, H, agree, d
from headrace import layers, zoo
from headrace.extra import gathered
from headrace.history import models
from headrace.history.layers import symmetric
from headrace.history.layers.symmetric import random_blocks
from headrace.spec import AttentionSpec, Pattern
from headrace.verification.verify import relative
from tiny import perturbed


def build(spec):
    """A layer whose weights, biases and projections of global tokens all differ."""
    return perturbed(layers.build(zoo.get(spec), hidden_size=D, num_heads=H, causal=False), 0.3).double()


# --- a loop over all pairs -------------------------------------------------------------------------------------------


def is_global(pattern, t, length):
    return t < pattern.first or t >= length - pattern.last


def sees(pattern, t, s, length, drawn):
    """Whether token t attends to token s. drawn: the random blocks of t's block."""
    if is_global(pattern, t, length) or is_global(pattern, s, length):
        return True
    if not pattern.random:
        return abs(t - s) <= pattern.window // 2
    b = pattern.block
    return abs(t // b - s // b) <= pattern.window // 2 // b or s // b in drawn


def drawn_blocks(pattern, length):
    """The random blocks of each block, whose law has tests of its own."""
    blocks = torch.arange(-(-length // pattern.block))
    return random_blocks(pattern, blocks, torch.full_like(blocks, length)).tolist()


def heads(layer, of, x, name):
    """Projections of the tokens x [T, D] -> [T, heads, d]. q and k are rotated, as complex numbers."""
    y = getattr(of, f"{name}_proj")(x).unflatten(-1, (-1, d))
    if name == "v" or not layer.spec.rotary:
        return y
    angle = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(d // 2, dtype=torch.float64) / (d // 2))
    turned = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def by_pairs(layer, x):
    """The layer's output for one sequence x [T, D]: softmax over the tokens that each token sees, head by head."""
    spec, pattern, T = layer.spec, layer.spec.pattern, len(x)
    drawn = drawn_blocks(pattern, T)
    own = {name: heads(layer, layer, x, name) for name in "qkv"}
    wide = own if layer.global_proj is None else {name: heads(layer, layer.global_proj, x, name) for name in "qkv"}
    out = []
    for t in range(T):
        of = wide if is_global(pattern, t, T) else own
        seen = [s for s in range(T) if sees(pattern, t, s, T, drawn[t // pattern.block])]
        for h in range(H):
            g = h * (spec.kv_heads or H) // H
            logits = of["k"][seen, g] @ of["q"][t, h] / math.sqrt(d)
            if layer.bias is not None:
                logits = logits + layer.bias(t - torch.tensor(seen)[None, None])[0, h, 0]
            weights = logits.exp() / (logits.exp().sum() + spec.null)
            out.append(weights @ of["v"][seen, g])
    return layer.o_proj(torch.stack(out).view(T, H * d))


PATTERNS = {
    "window": Pattern(window=6), "the token alone": Pattern(window=1),
    "longer than the text": Pattern(window=199, first=1),
    "longformer": Pattern(window=7, first=3, global_projections=True),
    "both ends": Pattern(window=4, first=2, last=3, global_projections=True), "last alone": Pattern(window=4, last=1),
    "all global": Pattern(window=2, first=30, last=30),
    "bigbird": Pattern(window=12, first=4, last=4, random=2, block=4, seed=3),
    "ends within a block": Pattern(window=17, first=5, last=7, random=2, block=4),
    "own block": Pattern(window=2, random=2, block=5),
    "few blocks": Pattern(window=8, first=4, random=9, block=4, global_projections=True),
}  # fmt: skip
LENGTHS = (38, 3, 1, 17)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_equals_a_loop_over_pairs(name, monkeypatch):
    """Packed sequences, rows with padding at both ends and in the middle, and one row: outputs and all gradients."""
    monkeypatch.setitem(gathered.COLUMNS, "cpu", 64)  # several pieces
    layer = build(AttentionSpec(kv_heads=2, pattern=PATTERNS[name], null=True, buckets=8, bias=True))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.zeros(len(LENGTHS), 41, dtype=torch.bool)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[2 : 2 + length] = True
    mask[3] = False
    mask[3, torch.randperm(41)[:17]] = True

    def every_way(x):
        rows = torch.full((*mask.shape, D), torch.nan, dtype=torch.float64)
        padded = layer(rows.masked_scatter(mask[..., None], x), mask=mask)[0][mask][None]
        return torch.stack(
            [padded, layer(x, cu_seqlens=ends)[0], torch.cat([layer(y)[0] for y in x.split(LENGTHS, 1)], 1)]
        )

    def alone(x):
        return torch.cat([by_pairs(layer, y[0]) for y in x.split(LENGTHS, 1)])[None].expand(3, 1, -1, -1)

    agree(every_way, alone, torch.randn(1, sum(LENGTHS), D).double(), 5e-13, [*layer.parameters()])


def test_half_precision_trains_all_projections():
    layer = build("longformer(pattern.window=6, buckets=8)").float()
    x = torch.randn(2, 70, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, state = layer(x)
    rounded.float().square().sum().backward()
    assert state is None and rounded.dtype == torch.bfloat16 and relative(rounded.float(), layer(x)[0]) < 2e-2
    assert all(p.grad.norm() > 0 for name, p in layer.named_parameters() if not name.endswith("k_proj.bias"))
    half = layer.bfloat16()(x.detach().bfloat16())[0]
    assert half.dtype == torch.bfloat16 and relative(half.float(), rounded.float()) < 4e-2


@pytest.mark.parametrize("model", ["bert", "t5", "transformer-2017"])
def test_projections_of_global_tokens_begin_as_copies(model):
    built = models.build(f"{model}(mixer=longformer)", vocab_size=9, hidden_size=D, num_heads=H, num_layers=2)
    for block in built.encoder.layers:
        for name, projection in block.mixer.global_proj.named_children():
            assert torch.equal(projection.weight, getattr(block.mixer, name).weight)
            assert projection.weight is not getattr(block.mixer, name).weight
    if model != "bert":
        assert not any("global_proj" in name for name, _ in built.decoder.named_parameters())


# --- random blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [p for p in PATTERNS.values() if p.random] + [Pattern(8, random=3, block=4)])
@pytest.mark.parametrize("length", [1, 17, 33, 71, 160])
def test_random_blocks_are_others_than_window_and_global_tokens(pattern, length):
    b, drawn = pattern.block, drawn_blocks(pattern, length)
    for own, row in enumerate(drawn):
        free = [
            block for block in range(len(drawn)) if abs(own - block) > pattern.window // 2 // b
            and not all(is_global(pattern, t, length) for t in range(block * b, min((block + 1) * b, length)))
        ]  # fmt: skip
        kept = [block for block in row if block >= 0]
        assert len(kept) == len(set(kept)) == min(pattern.random, len(free)) and set(kept) <= set(free)


def test_random_blocks_are_uniform_on_both_sides():
    """Block 5 of 12 draws 2 of 7: 0 and 11 are global, 4, 5 and 6 its window. 4000 draws of share 2/7 vary by 0.007."""
    counts = torch.zeros(12)
    for seed in range(4000):
        counts[drawn_blocks(Pattern(12, first=4, last=4, random=2, block=4, seed=seed), 48)[5]] += 1
    shares = counts / 4000
    assert (shares[[0, 4, 5, 6, 11]] == 0).all() and (shares[[1, 2, 3, 7, 8, 9, 10]] - 2 / 7).abs().max() < 0.035


# --- layers and models of others -------------------------------------------------------------------------------------


V, LAYERS, WIDTH, LONGEST = 72, 2, 48, 72
SIZES = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H, "hidden_act": "gelu",
    "intermediate_size": WIDTH, "max_position_embeddings": LONGEST, "layer_norm_eps": 1e-6, "type_vocab_size": 2,
    "pad_token_id": V - 1, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0,
}  # fmt: skip


@pytest.fixture
def exact_softmax(monkeypatch):
    """Lets Longformer of transformers compute its softmax, for which it asks for float32, in the inputs' precision."""
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def with_weights(expression, theirs):
    """Our model with the parameters of theirs."""
    ours = models.build(
        expression, vocab_size=V, hidden_size=D, num_heads=H, num_layers=LAYERS, intermediate_size=WIDTH,
        max_positions=LONGEST,
    ).double()  # fmt: skip
    mine = dict(ours.named_parameters())
    for name, p in from_bert({f"bert.{name}": p for name, p in theirs.named_parameters()}).items():
        mine[re.sub(r"(\w_proj)_global", r"global_proj.\1", name)].data = p.data
    return ours


def models_agree(ours, theirs, lengths, width, **more):
    """Last hidden states, and gradients of the embeddings, of rows with padding at the end to a width."""
    ids, place = torch.randint(V - 2, (len(lengths), width)), torch.arange(width).expand(len(lengths), -1)
    mask = place < torch.tensor(lengths)[:, None]
    embedded = ours.embedding(ids) + ours.segments(torch.zeros_like(ids))
    other = theirs(ids, mask.long(), position_ids=place, **more).last_hidden_state
    results = ours.encoder(embedded, mask=mask)[0], other
    tables = ours.embedding.weight, theirs.embeddings.word_embeddings.weight
    sums = [(y[mask] * y[mask].detach().sin()).sum() for y in results]
    gradients = [torch.autograd.grad(x, p) for x, p in zip(sums, tables, strict=True)]
    assert relative(*(y[mask] for y in results)) <= 1e-12 and relative(*(g[0] for g in gradients)) <= 1e-11


def test_model_equals_longformer(exact_softmax):
    config = LongformerConfig(**SIZES, attention_window=[16] * LAYERS)
    theirs = perturbed(LongformerModel(config, add_pooling_layer=False)).double()
    mixer = "longformer(rotary=false, bias=true, pattern.window=16, pattern.first=3)"
    ours = with_weights(f"bert(mixer={mixer})", theirs)
    first = (torch.arange(61) < 3).expand(4, -1).long()
    models_agree(ours, theirs, [61, 40, 5, 1], 61, global_attention_mask=first)


BIGBIRD = "bigbird(rotary=false, bias=true, pattern.window=12, pattern.first=4, pattern.block=4, pattern.last={})"


def big_bird(last):
    """Our model, with a number of global tokens at the end, and theirs."""
    config = BigBirdConfig(
        **SIZES | {"hidden_act": "gelu_new"}, block_size=4, num_random_blocks=3, attention_type="block_sparse"
    )
    theirs = perturbed(BigBirdModel(config, add_pooling_layer=False)).double().train()  # in training it draws blocks
    return with_weights(f"bert(mixer={BIGBIRD.format(last)}, style.mlp=gelu-tanh)", theirs), theirs


@pytest.mark.parametrize(("last", "lengths", "width"), [(4, [52, 52], 52), (0, [48, 41, 30], 54)])
def test_model_equals_big_bird(last, lengths, width, monkeypatch):
    """With blocks that their first layer draws for one head. Their last block, which is global, may be padding."""
    ours, theirs = big_bird(last)
    draw, plans = BigBirdBlockSparseAttention._bigbird_block_rand_mask_with_head, []

    def drawn(layer, **sizes):
        plans.append(draw(layer, **sizes | {"num_heads": 1})[0])
        return [plans[0]] * H

    monkeypatch.setattr(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", drawn)
    theirs(torch.zeros(1, width, dtype=torch.long))
    plan = nn.functional.pad(torch.tensor(plans[0]).long(), (0, 0, 1, 1), value=-1)
    assert (plan[1:-1] > 0).all() and plan.shape == (-(-width // 4), 3)
    monkeypatch.setattr(symmetric, "random_blocks", lambda pattern, block, length: plan[block])
    models_agree(ours, theirs, lengths, width)
    assert theirs.attention_type == "block_sparse"


def test_short_text_is_attended_in_full_as_in_big_bird():
    """Up to 4 + random blocks, the pattern has all pairs; they then leave their sparse attention."""
    ours, theirs = big_bird(4)
    models_agree(ours, theirs, [28, 26, 9, 1], 28)
    assert theirs.attention_type == "original_full"
