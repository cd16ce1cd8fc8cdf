"""Softmax attention and its options against other implementations and its equation. Whole models of Llama and others:
tests/convert/test_families.py."""

import math

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from attention_layers import D, H, agree, d, layer
from headrace import InputError, layers, zoo
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from headrace.history.layers.distance import DistanceBias, bucket
from headrace.history.layers.flash import flash_attention
from headrace.layers.attention.sdpa import attend
from headrace.layers.blocks.stack import sinusoidal
from headrace.verification.verify import relative


@pytest.mark.filterwarnings("ignore")  # by torch.jit, of itself and of each number that it takes as a constant
@pytest.mark.parametrize("mixer", ["transformer", "gqa(kv_heads=2)"])
def test_model_is_traced(mixer):
    config = HeadraceConfig(mixer=mixer, vocab_size=29, hidden_size=48, num_heads=6)
    model = HeadraceForCausalLM(config).eval().requires_grad_(False)  # as torch.jit takes constants

    def logits(ids):
        return model(ids, use_cache=False).logits

    traced = torch.jit.trace(logits, torch.randint(29, (2, 9)))
    other = torch.randint(29, (2, 5))
    assert torch.equal(traced(other), logits(other))


# --- layers of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_distance_buckets_equal_t5(bidirectional):
    theirs = T5Attention(T5Config(d_model=D, d_kv=d, num_heads=H), has_relative_attention_bias=True, layer_idx=0)
    distance = torch.arange(-300, 301)
    expected = theirs._relative_position_bucket(-distance, bidirectional=bidirectional)
    assert torch.equal(bucket(distance, 32, bidirectional=bidirectional), expected)


# --- the softmax and its options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "L"), [(150, 150), (70, 131), (1, 90)])
def test_tiled_attention_equals_sdpa(causal, T, L):
    sizes = ((T, H), (L, 2), (L, 2))
    inputs = [torch.randn(2, n, heads, d, dtype=torch.float64, requires_grad=True) for n, heads in sizes]
    results = []
    for function in (flash_attention, attend):
        out = function(*inputs, causal=causal)
        results.append((out, *torch.autograd.grad((out * out.detach().sin()).sum(), inputs)))
    assert all(relative(a, b) <= 1e-12 for a, b in zip(*results, strict=True))


def test_layer_in_tiles_equals_one_without():
    tiled, whole = layer("flash-reference"), layer("transformer")
    whole.load_state_dict(tiled.state_dict())
    x = torch.randn(2, 140, D, dtype=torch.float64)
    agree(lambda x: tiled(x)[0], lambda x: whole(x)[0], x, 1e-12)


def test_tiled_attention_with_padding_and_large_logits():
    q, k, v = torch.randn(3, 2, 140, H, d, dtype=torch.float64).unbind()
    valid = torch.rand(2, 140) < 0.5
    valid[0, :100] = False
    assert relative(flash_attention(q * 1e3, k, v, valid=valid), attend(q * 1e3, k, v, valid)) <= 1e-12


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bias", [None, DistanceBias(8, H, hidden_size=D, bidirectional=True).double()])
@pytest.mark.parametrize("null", [False, True])
def test_bidirectional_and_cross_attention_equal_their_equation(padded, bias, null):
    """Against their equation, softmax plus one being its own."""
    T, L = (9, 9) if bias else (5, 9)  # distances are those within one sequence
    q, k, v = (torch.randn(2, n, H, d).double() for n in (T, L, L))
    valid = torch.ones(2, L, dtype=torch.bool)
    valid[0, 4:] = not padded
    logits = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d)
    if bias:
        place = torch.arange(L)
        logits = logits + bias((place[:, None] - place)[None])
    weights = logits.masked_fill(~valid[:, None, None], -torch.inf).exp()
    weights = weights / (null + weights.sum(-1, keepdim=True))
    out = attend(q, k, v, valid if padded else None, causal=False, bias=bias, null=null)
    expected = torch.einsum("bhts,bshd->bthd", weights, v)
    rows = valid if bias else ...  # what padding reads of its own sequence means nothing
    assert relative(out[rows], expected[rows]) <= 1e-12


def test_sinusoidal_positions_equal_their_equation():
    """Entry by entry; and the product of two depends on their distance alone."""
    place, width = torch.tensor([0, 1, 7, 500]), 10
    made = sinusoidal(place, width)
    for row, t in enumerate(place.tolist()):
        for i in range(0, width, 2):
            angle = t / 10000 ** (i / width)
            torch.testing.assert_close(made[row, i : i + 2], torch.tensor([math.sin(angle), math.cos(angle)]))
    near, far = sinusoidal(torch.tensor([3, 8]), 16), sinusoidal(torch.tensor([103, 108]), 16)
    torch.testing.assert_close(near[0] @ near[1], far[0] @ far[1])
    assert sinusoidal(place, 7).shape == (4, 7)


def test_kv_heads_must_divide_the_heads():
    with pytest.raises(InputError, match="kv_heads=2 does not divide num_heads=3"):
        layers.build(zoo.get("gqa"), hidden_size=48, num_heads=3)


# --- a state that may be written into -------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [[1] * 40, [3, 1, 7, 1, 1, 20, 2]], ids=["tokens", "pieces"])
def test_in_place_state_equals_the_copied_state(lengths):
    """What is kept, to the bit; what is read of it, up to the order of sums over keys that lie elsewhere."""
    made = layers.build(zoo.get("gqa"), hidden_size=32, num_heads=4).double()
    x = torch.randn(2, 8 + sum(lengths), 32, dtype=torch.float64)
    with torch.no_grad():
        copied, storages = made(x[:, :8])[1], set()
        own = copied
        for piece in x[:, 8:].split(lengths, 1):
            expected, copied = made(piece, copied)
            actual, own = made(piece, own, in_place=True)
            assert relative(actual, expected) <= 1e-12 and all(map(torch.equal, own[:2], copied[:2]))
            storages.add(own.k.untyped_storage().data_ptr())
    assert 1 < len(storages) < len(lengths)


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_cloned_state_continues_in_place(rows):
    """A clone of one row has the strides of memory for more tokens, and not the memory."""
    made, x = layers.build(zoo.get("gqa"), hidden_size=32, num_heads=4), torch.randn(rows, 12, 32)
    state = made(x[:, 8:9], made(x[:, :8])[1], in_place=True)[1]
    assert state.room > 9
    state = state._replace(k=state.k.clone(), v=state.v.clone())
    for t in range(9, 12):
        y, state = made(x[:, t : t + 1], state, in_place=True)
    torch.testing.assert_close(y, made(x)[0][:, 11:])


def test_state_is_copied_where_autograd_forbids_in_place():
    made, x = layers.build(zoo.get("transformer"), hidden_size=32, num_heads=4), torch.randn(1, 12, 32)
    with torch.inference_mode():
        own = made(x[:, 8:9], made(x[:, :8])[1], in_place=True)[1]
    expected = made(x)[0]
    with torch.no_grad():  # PyTorch lets no inference tensor be written into here
        torch.testing.assert_close(made(x[:, 9:10], own, in_place=True)[0], expected[:, 9:10])
    y, after = made(x[:, 9:10].requires_grad_(), own, in_place=True)
    y.sum().backward()
    assert after.room is None
