"""No tokens at all, or padding alone: nothing comes out, nothing is forgotten, nothing fails."""

import pytest
import torch

from headrace import HeadraceCache, zoo
from headrace.layers.blocks import stack
from tiny import MIXERS, SIZES, build, by_state, close, layer, tokens

D, T = 32, 7
STATES = by_state(zoo.names())
ENCODERS = ["transformer", "longformer", "bigbird", "gla", "mamba", "flash-reference"]


@pytest.mark.parametrize("how", ["none", "padding", "pack"])
@pytest.mark.parametrize("name", STATES)
def test_empty_input_keeps_the_state(name, how):
    """Before, between and after a sequence's tokens."""
    made, x = layer(name, torch.float64), torch.randn(2, T, D, dtype=torch.float64)
    nothing = {"none": (x[:, :0], {}), "padding": (x[:, :3], {"mask": torch.zeros(2, 3, dtype=torch.bool)}),
               "pack": (x[:1, :0], {"cu_seqlens": torch.zeros(3, dtype=torch.long)})}[how]  # fmt: skip
    results, state = [], None
    for piece in (None, x[:, :4], None, x[:, 4:5], x[:, 5:], None):
        y, state = made(piece, state) if piece is not None else made(nothing[0], state, **nothing[1])
        if piece is not None:
            results.append(y)
            continue
        assert y.shape == nothing[0].shape and y.isfinite().all()
    close(torch.cat(results, 1), made(x)[0])


@pytest.mark.parametrize("name", STATES)
def test_empty_input_has_a_gradient(name):
    """That of the state, which it keeps."""
    made, x = layer(name, torch.float64), torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    state = made(x)[1]
    y, after = made(x[:, :0], state)
    losses = [sum(s.sin().sum() for s in tensors if s is not None and s.requires_grad) for tensors in (state, after)]
    expected, found = (torch.autograd.grad(loss + y.sum(), x, retain_graph=True)[0] for loss in losses)
    assert expected.any()
    close(found, expected)


@pytest.mark.parametrize("name", STATES)
def test_empty_batch_runs(name):
    """As a process has with fewer rows than processes."""
    made, x = layer(name, torch.float64), torch.randn(0, T, D, dtype=torch.float64, requires_grad=True)
    y, state = made(x)
    assert y.shape == x.shape and made(x[:, :1], state)[0].shape == (0, 1, D)
    gradients = torch.autograd.grad(y.sum(), list(made.parameters()), allow_unused=True)
    assert not any(g.any() for g in gradients if g is not None)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_of_no_tokens(name):
    made, x = layer(name, torch.float64, causal=False), torch.randn(2, T, D, dtype=torch.float64)
    assert made(x[:, :0])[0].shape == (2, 0, D) and made(x[:0])[0].shape == (0, T, D)
    assert not made(x, mask=torch.zeros(2, T, dtype=torch.bool))[0].any()
    ends = torch.tensor([0, 0, 3, 3, T, T])
    close(made(x[:1], cu_seqlens=ends)[0][:, 3:], made(x[:1, 3:])[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_generation_after_an_all_padding_piece(mixer, monkeypatch):
    model, ids, mask = build(mixer), tokens(2, T), torch.tensor([[0] * 4 + [1] * 3, [0] * 5 + [1] * 2])
    options = {"attention_mask": mask, "max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    whole = model.generate(ids, **options)
    monkeypatch.setattr(stack, "PIECE", 2)
    assert torch.equal(model.generate(ids, **options), whole)
    assert torch.equal(model.generate(ids, prefill_chunk_size=2, **options), whole)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_empty_prompt_can_precede_tokens(mixer):
    """Of no columns, and of padding alone; the cache is moved and multiplied as any other."""
    model, ids = build(mixer), tokens(2, T)
    for columns in (0, 3):
        cache = HeadraceCache()
        mask = torch.zeros(2, columns, dtype=torch.long)
        out = model(ids[:, :columns], attention_mask=mask, past_key_values=cache)
        assert out.logits.shape == (2, columns, SIZES["vocab_size"])
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        close(model(ids, attention_mask=mask, past_key_values=cache).logits, model(ids).logits)
        assert cache.get_seq_length() == columns + T and cache.batch_size == 2


@torch.no_grad()
def test_no_tokens_may_have_positions():
    model, ids, cache = build("gla"), tokens(2, T), HeadraceCache()
    model(ids, past_key_values=cache)
    out = model(ids[:, :0], position_ids=ids[:, :0], past_key_values=cache)
    assert out.logits.shape[:2] == (2, 0) and cache.get_seq_length() == T
