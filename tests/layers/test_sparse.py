"""Attention by a pattern, against a dense mask written down here from its definition and other implementations."""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BigBirdConfig, LongformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from attention_layers import D, H, agree, d, layer, plain
from headrace import zoo
from headrace.extra import gathered
from headrace.extra.pattern import CachedPlaces
from headrace.history.layers.attention import reservoir
from headrace.spec import AttentionSpec, Pattern
from headrace.verification.verify import relative

# --- what is seen, from its definition -------------------------------------------------------------------------------


def visible(pattern, T):
    """[T, T]: the window, the first tokens, and a reservoir of the blocks that have left the window."""
    seen = torch.zeros(T, T, dtype=torch.bool)
    window, block = pattern.window, pattern.block
    held, left = {}, 0
    for t in range(T):
        if pattern.random and t % block == 0:
            leaving = t // block - window // block
            if leaving * block >= pattern.first:
                draw = int(random.Random(f"{pattern.seed} {left}").random() * (left + 1))
                slot = left if left < pattern.random else draw
                if slot < pattern.random:
                    held[slot] = leaving
                left += 1
        for s in range(t + 1):
            seen[t, s] = t - s < window or s < pattern.first or s // block in held.values()
    return seen


PATTERNS = {
    "sliding-window": Pattern(window=6), "the token alone": Pattern(window=1),
    "longer than the text": Pattern(window=99), "longformer": Pattern(window=5, first=3),
    "first longer than window": Pattern(window=2, first=9),
    "bigbird": Pattern(window=8, first=6, random=2, block=4, seed=3),
    "window and blocks out of step": Pattern(window=10, first=2, random=2, block=4),
    "window within a block": Pattern(window=2, random=2, block=5), "random alone": Pattern(window=3, random=3, block=3),
}  # fmt: skip


@pytest.mark.parametrize("T", [1, 4, 71])
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_equals_a_dense_mask(name, T, monkeypatch):
    monkeypatch.setitem(gathered.COLUMNS, "cpu", 64)  # several pieces
    spec = AttentionSpec(kv_heads=2, pattern=PATTERNS[name], null=True, buckets=8)
    ours, seen = layer(spec), visible(spec.pattern, T)
    dense = copy.copy(ours)  # with the same weights
    dense.spec = replace(spec, pattern=None)
    places = torch.arange(T)

    def masked(q, k, v):
        """Softmax plus one, by its equation."""
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        logits = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d)
        logits = (logits + ours.bias((places[:, None] - places)[None])).masked_fill(~seen, -torch.inf)
        weights = logits.exp() / (1 + logits.exp().sum(-1, keepdim=True))
        return torch.einsum("bhts,bshd->bthd", weights, v)

    dense._attend = lambda q, k, v, *others: masked(q, k, v)
    agree(*(lambda x, m=m: m(x)[0] for m in (ours, dense)), torch.randn(2, T, D).double(), 1e-12, [*ours.parameters()])


def test_half_precision_and_frozen_parameters_work():
    """Under autocast as in the precision itself; what is not trained gets no gradient and stops none."""
    ours, x = layer("longformer(buckets=8)", torch.float32), torch.randn(1, 100, D, requires_grad=True)
    ours.bias.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, state = ours(x)
        ours(x[:, :1], state)
    rounded.float().square().sum().backward()
    assert rounded.dtype == torch.bfloat16 and relative(rounded.float(), ours(x)[0]) < 2e-2
    assert x.grad.isfinite().all() and ours.q_proj.weight.grad.norm() > 0 and ours.bias.weight.grad is None


def test_random_blocks_are_uniform_and_independent_of_length():
    pattern = Pattern(window=4, random=2, block=4)
    with torch.device("meta"):  # that of a model which is made without memory does not matter
        short = reservoir(pattern, 20)
    assert torch.equal(reservoir(pattern, 64)[:20], short)
    counts = torch.zeros(8)
    for seed in range(2000):
        row = reservoir(Pattern(window=4, random=2, block=4, seed=seed), 9)[8]
        counts[row] += 1
    assert counts.sum() == 4000
    assert (counts / 2000 - 2 / 8).abs().max() < 0.04, "each of 8 blocks is held by two slots with probability 1/4"


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that is made."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.size = max([self.size, *(x.numel() for x in made if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["sliding-window", "longformer", "bigbird", "flash-reference"])
def test_memory_grows_linearly(name, causal):
    sizes = []
    for T in (1024, 2048):
        ours, x = layer(name, torch.float32, causal=causal), torch.randn(1, T, D, requires_grad=True)
        with Largest() as made:
            ours(x)[0].sum().backward()
        sizes.append(made.size)
    assert sizes[1] <= 2.1 * sizes[0] and sizes[1] < 2048**2


def test_a_window_longer_than_the_text_has_no_empty_columns():
    for lengths, columns in (((5, 7), 7), ((5, 200), 98 + 99)):  # a group of 99 and what is before it
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        groups, _ = CachedPlaces(Pattern(window=99), bounds, torch.zeros(2, dtype=torch.long)).all_groups()
        assert groups.position.shape[1] == columns


def test_cache_of_a_pattern_is_bounded():
    ours, spec = layer("bigbird"), zoo.get("bigbird")
    sizes = {tuple(ours(torch.randn(1, T, D).double())[1].k.shape) for T in (1, 50, 300)}
    assert sizes == {(1, 16 + 3 * 16 + 47, H, d)} == {(1, *spec.state_shapes(D, H, tokens=300)["k"])}


# --- layers of others ------------------------------------------------------------------------------------------------


def test_layer_equals_longformer():
    """Theirs sees both ways: at the last token of a text the two ways are one. Each prefix is a row, padded behind."""
    T, window, first = 48, 8, 3
    config = LongformerConfig(hidden_size=D, num_attention_heads=H, attention_window=[2 * window])
    theirs = LongformerSelfAttention(config, 0).eval()
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(theirs, name).bias.zero_()
            getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    pattern = Pattern(window + 1, first=first)
    weights = theirs.query.weight, theirs.key.weight, theirs.value.weight, torch.eye(D)
    ours = plain(AttentionSpec(pattern=pattern), *weights)
    place, length = torch.arange(T), torch.arange(1, T + 1)[:, None]
    kind = torch.where(place >= length, -1e4, torch.where(place < first, 1e4, 0.0))

    def of_prefixes(x):
        more = {"is_index_masked": kind < 0, "is_index_global_attn": kind > 0, "is_global_attn": True}
        rows = theirs(x.expand(T, -1, -1), kind, **more)[0]
        return rows[place, place]

    agree(lambda x: ours(x)[0][0], of_prefixes, torch.randn(1, T, D), 1e-5)


def test_layer_equals_big_bird(monkeypatch):
    """As above; and theirs has a window of whole blocks, which is ours at the last token of a block. Random blocks are
    given to it: at all prefixes those that we draw."""
    block, blocks = 4, 12
    T, pattern = block * blocks, Pattern(2 * block, first=block, random=1, block=block)
    config = BigBirdConfig(hidden_size=D, num_attention_heads=H, block_size=block, num_random_blocks=1, use_bias=False)
    theirs = BigBirdBlockSparseAttention(config)
    weights = theirs.query.weight, theirs.key.weight, theirs.value.weight, torch.eye(D)
    ours = plain(AttentionSpec(pattern=pattern), *weights)
    drawn = reservoir(pattern, blocks)[1:-1]
    drawn = torch.where(drawn < 0, blocks - 1, drawn)  # none yet: their last block, which is padding in all rows
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **_: [drawn.numpy()] * H)
    ends = torch.arange(3 * block - 1, T - 2 * block, block)  # their first, second and last two blocks are special
    real = (torch.arange(T) <= ends[:, None]).float()
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, block)

    def of_prefixes(x):
        out = theirs(x.expand(len(ends), -1, -1), band, rows, columns, blocked, blocked)[0]
        return out[torch.arange(len(ends)), ends]

    agree(lambda x: ours(x)[0][0, ends], of_prefixes, torch.randn(1, T, D), 1e-5)
