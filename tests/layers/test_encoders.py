"""Layers that see a whole sequence, or another one: against PyTorch's and transformers' layers, and runs by hand."""

import pytest
import torch
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from attention_layers import D, H, agree, d, layer
from headrace.extra.encoder import BothWays, over_all
from headrace.history import models
from headrace.history.layers import flash
from headrace.history.layers.flash import flash_attention
from headrace.history.specs.stack import TransformerSpec
from headrace.layers.attention.sdpa import attend
from headrace.layers.blocks.block import Block, Sizes
from headrace.ops.parallel import context
from headrace.spec import AttentionSpec, MixerSpec, Read, Rope, Write
from headrace.spec.stack import BlockStyle
from headrace.utils.errors import InputError
from headrace.verification.verify import relative
from tiny import perturbed

PLAIN = AttentionSpec(rotary=False)
T5 = AttentionSpec(rotary=False, buckets=32, scale="one")
LENGTHS = (9, 5, 1)  # of the rows below


def build(spec, dtype=torch.float64, **settings):
    return perturbed(layer(spec, dtype, **settings), 0.3)


def rows():
    """x [B, T, D] with large padding in front, at the end and in the middle of rows; mask [B, T]."""
    x, mask = torch.full((3, 9, D), 10.0, dtype=torch.float64), torch.zeros(3, 9, dtype=torch.bool)
    mask[0], mask[1, [1, 2, 5, 6, 7]], mask[2, 8] = True, True, True
    x[mask] = torch.randn(sum(LENGTHS), D, dtype=torch.float64)
    return x, mask


# --- against others --------------------------------------------------------------------------------------------------


def torch_weights(theirs):
    q, k, v = theirs.in_proj_weight.split(D)
    weights = {"q": q, "k": k, "v": v, "o": theirs.out_proj.weight}
    return {f"{name}_proj.weight": x.detach() for name, x in weights.items()}


@pytest.mark.parametrize("form", ["sdpa", "tiles"])
def test_bidirectional_and_cross_attention_equal_torch(form):
    theirs = nn.MultiheadAttention(D, H, bias=False, batch_first=True)
    ours = build(AttentionSpec(rotary=False, form=form), torch.float32, causal=False)
    ours.load_state_dict(torch_weights(theirs))
    memory, mask = rows()
    memory = memory.float()
    spoilt = memory.masked_fill(~mask[..., None], torch.nan)
    for x, expected in ((memory, lambda x: theirs(x, x, x)[0]), (torch.randn(3, 4, D), None)):
        across = lambda x: theirs(x, memory, memory, key_padding_mask=~mask)[0]  # noqa: E731
        read = (lambda x: ours(x)[0]) if expected else lambda x: ours.cross(x, ours.remember(spoilt, mask))
        agree(read, expected or across, x.clone(), 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_layer_equals_t5(causal):
    config = T5Config(d_model=D, d_kv=d, num_heads=H, is_decoder=causal)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    ours = build(T5, torch.float32, causal=causal)
    renamed = {name: f"{name}_proj" for name in "qkvo"} | {"relative_attention_bias": "bias"}
    weights = (name.split(".") for name in theirs.state_dict())
    ours.load_state_dict({f"{renamed[name]}.{kind}": theirs.state_dict()[f"{name}.{kind}"] for name, kind in weights})
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None] if causal else None
    agree(lambda x: ours(x)[0], lambda x: theirs(x, mask=mask)[0], torch.randn(2, 40, D), 1e-5)


# --- by hand ---------------------------------------------------------------------------------------------------------

ENCODERS = {
    "attention": PLAIN, "rotary": AttentionSpec(), "t5": T5, "tiles": AttentionSpec(form="tiles"),
    "longformer": "longformer(pattern.window=2)", "bigbird": "bigbird(pattern.block=2, pattern.window=2)",
    "one memory": "softmax-linear-attention",
    "softmax-gla": "softmax-gla", "gated-deltanet": "gated-deltanet", "rwkv6": "rwkv6", "mamba": "mamba", "s4d": "s4d",
    "softmax-rnn-gate": "softmax-rnn-gate",
    "softmax-rnn-norm": "softmax-rnn-norm(numerator=cosine, denominator=input-length)",
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_padding_and_packing_do_not_matter(name):
    encoder, (x, mask) = build(ENCODERS[name], causal=False), rows()
    alone = torch.cat([encoder(row[kept][None])[0][0] for row, kept in zip(x, mask, strict=True)])
    assert relative(encoder(x, mask=mask)[0][mask], alone) <= 1e-10
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    assert relative(encoder(x[mask][None], cu_seqlens=ends)[0][0], alone) <= 1e-10


def test_the_order_of_tokens_does_not_matter_to_an_additive_memory():
    encoder, x = build("softmax-linear-attention", causal=False), torch.randn(2, 20, D, dtype=torch.float64)
    order = torch.randperm(20)
    agree(lambda x: encoder(x)[0][:, order], lambda x: encoder(x[:, order])[0], x, 1e-12, [*encoder.parameters()])
    decoder = build("softmax-linear-attention")
    assert sum(p.numel() for p in encoder.parameters()) == sum(p.numel() for p in decoder.parameters())


@pytest.mark.parametrize("mixer", ["softmax-gla", "softmax-deltanet", "mamba"])
def test_bidirectional_layer_is_two_causal_runs(mixer):
    encoder, x = build(mixer, causal=False), torch.randn(2, 70, D, dtype=torch.float64)

    def by_hand(x):
        there, back = (m(y)[0] for m, y in ((encoder.forwards, x), (encoder.backwards, x.flip(1))))
        return there + back.flip(1)

    agree(lambda x: encoder(x)[0], by_hand, x, 1e-12, [*encoder.parameters()])


@pytest.mark.parametrize("mixer", ["transformer", "longformer", "gla", "softmax-rnn-gate"])
def test_an_encoder_has_no_state(mixer):
    x = torch.randn(1, 3, D, dtype=torch.float64)
    _, state = build(mixer)(x)
    with pytest.raises(InputError, match="expected state=None"):
        build(mixer, causal=False)(x, state)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["linear-attention", "retnet"])
def test_the_tokens_of_an_encoder_are_not_split_over_processes(mixer, monkeypatch):
    monkeypatch.setattr(context, "_active", [object()])
    with pytest.raises(InputError, match=r"context_parallel cannot split the tokens of (EncoderMixer|BothWays)"):
        build(mixer, causal=False)(torch.randn(1, 5, D).double())


def test_the_memory_of_all_tokens_is_not_rounded_under_autocast():
    shapes = {"q": (2, 40, 2, 8), "k": (2, 40, 2, 8), "v": (2, 40, 2, 8)}
    x = {name: torch.rand(shape) for name, shape in shapes.items()}
    options = {"beta": None, "write_gate": None, "read_gate": None, "scale": 1.0, "normalize": True, "cu_seqlens": None}
    options |= {"rule": "add", "log_decay": None, "bonus": None, "initial_state": None}
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = over_all(**x, **options)
    assert torch.equal(out, over_all(**x, **options)[0])


def test_a_strength_with_a_running_maximum_has_an_order():
    made = build(MixerSpec(write=Write(beta="exp"), read=Read("none")), causal=False)
    assert isinstance(made, BothWays) and made(torch.randn(1, 5, D, dtype=torch.float64))[0].isfinite().all()


def test_cross_attention_has_no_frequencies_and_needs_a_second_sequence():
    spec = TransformerSpec(mixer=AttentionSpec(rope=Rope(theta=500000.0)))
    assert spec.cross == AttentionSpec(rotary=False)
    with pytest.raises(InputError, match="memory=None"):
        Block(PLAIN, Sizes(D, H, 16, cross=PLAIN))(torch.randn(1, 3, D))


@torch.no_grad()
def test_cross_attention_has_a_norm_of_its_input_and_one_of_its_output():
    block = Block(PLAIN, Sizes(D, H, None, cross=PLAIN, style=BlockStyle(order="both")))
    x, memory = torch.randn(1, 3, D), block.cross.remember(torch.randn(1, 5, D))
    y = x + block.mixer_after(block.mixer(block.mixer_norm(x))[0])
    expected = y + block.cross_after(block.cross.cross(block.cross_norm(y), memory))
    torch.testing.assert_close(block(x, memory=memory), expected)


def test_tiles_of_the_pairs_of_a_pack():
    """[B, T, L], as compiled graphs have them, of more than one tile."""
    T, ends = flash.TILE + 40, torch.tensor([50, flash.TILE + 40])
    owner = torch.searchsorted(ends, torch.arange(T), right=True)
    pairs = (owner[:, None] == owner)[None]
    q, k, v = (torch.randn(1, T, 2, 8, dtype=torch.float64) for _ in range(3))
    agree = flash_attention(q, k, v, causal=False, valid=pairs), attend(q, k, v, pairs, causal=False)
    assert relative(*agree) < 1e-12


def test_labels_have_the_shape_of_the_tokens():
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
    model, ids = models.build("transformer-2017", **sizes), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(InputError, match=r"labels have shape \[2, 2\]; expected \[2, 5\]"):
        model(ids, labels=ids[:, :2], decoder_input_ids=ids)
    bert = models.build("bert", **sizes)
    with pytest.raises(InputError, match=r"labels have shape \[5, 2\]; expected \[2, 5\]"):
        bert(ids, labels=ids.T)
    with pytest.raises(InputError, match=r"input_ids has shape \[2, 0\]; expected at least one token"):
        bert(ids[:, :0])
