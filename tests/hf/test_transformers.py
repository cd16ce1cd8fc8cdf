"""Encoder-decoders of attention against PyTorch's and transformers', weights copied; decoding against the whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from headrace import InputError, zoo
from headrace.history import models
from headrace.history.models.encoder_decoder import shift_right
from headrace.verification.verify import relative
from tiny import gradients_agree, perturbed

V, D, H, WIDTH, LAYERS = 29, 32, 4, 48, 2
MODELS = ["transformer-2017", "t5", "t5(mixer=softmax-gla)", "transformer-2017(mixer=mamba)"]


def build(name):
    sizes = {"vocab_size": V, "hidden_size": D, "num_heads": H, "num_layers": LAYERS, "intermediate_size": WIDTH}
    return perturbed(models.build(zoo.get(name), **sizes), 0.2).eval()


def batch(padded="end"):
    """Sources of 9 and 5 tokens, targets of 7 and 4."""
    ids, labels, mask = torch.randint(2, V, (2, 9)), torch.randint(2, V, (2, 7)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, slice(5, None) if padded == "end" else slice(4)] = False
    labels[1, 4:] = -100
    return ids, mask, labels


def agree(ours, theirs, pairs, parameters):
    """Pairs of results, and the gradients of the first to ours, and of the second to their namesakes."""
    for a, b in pairs:
        assert relative(a, b) <= 1e-10
    weight = torch.randn_like(pairs[0][0])
    gradients = []
    for model, result in zip((ours, theirs), pairs[0], strict=True):
        named = dict(model.named_parameters())
        outcome = torch.autograd.grad((result * weight).sum(), [*named.values()])
        gradients.append(dict(zip(named, outcome, strict=True)))
    gradients_agree(gradients[0], parameters(gradients[1]), 1e-10)


# --- PyTorch's modules -----------------------------------------------------------------------------------------------


class Torch2017(nn.Module):
    """The paper from PyTorch's layers; positions and scale written out."""

    def __init__(self):
        super().__init__()
        settings = {"dropout": 0.0, "batch_first": True, "layer_norm_eps": 1e-6}
        self.embedding = nn.Embedding(V, D)
        encoder = nn.TransformerEncoderLayer(D, H, WIDTH, **settings)
        self.encoder = nn.TransformerEncoder(encoder, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, WIDTH, **settings), LAYERS)

    def embed(self, ids):
        place = torch.arange(ids.shape[1]).double()[:, None] / 10000 ** (torch.arange(0, D, 2) / D).double()
        waves = torch.stack([place.sin(), place.cos()], -1).flatten(1).float()  # a table in float32, as ours
        return self.embedding(ids) * math.sqrt(D) + waves

    def forward(self, ids, mask, target):
        memory = self.encoder(self.embed(ids), src_key_padding_mask=~mask)
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        x = self.decoder(self.embed(target), memory, tgt_mask=future, memory_key_padding_mask=~mask)
        return x @ self.embedding.weight.T


def from_torch(theirs):
    """Their parameters under our names."""
    renamed = {
        "self_attn.out_proj": "mixer.o_proj", "multihead_attn.out_proj": "cross.o_proj", "linear1": "mlp.up_proj",
        "linear2": "mlp.down_proj", "norm1": "mixer_norm",
    }  # fmt: skip
    mine = {}
    for name, value in theirs.items():
        norms = {"norm2": "mlp_norm"} if name.startswith("encoder") else {"norm2": "cross_norm", "norm3": "mlp_norm"}
        for old, new in (renamed | norms).items():
            name = name.replace(old, new)
        for old, new in {"self_attn.in_proj_": "mixer", "multihead_attn.in_proj_": "cross"}.items():
            if old in name:
                start, kind = name.split(old)
                mine |= {f"{start}{new}.{n}_proj.{kind}": x for n, x in zip("qkv", value.split(D), strict=True)}
        if "in_proj" not in name:
            mine[name] = value
    return mine


def test_transformer_2017_equals_torch():
    """With biases in the projections too, which PyTorch has and the paper has not."""
    ours = build("transformer-2017(mixer=transformer(rotary=false, bias=true))").double()
    theirs = perturbed(Torch2017(), 0.2).eval().double()
    ours.load_state_dict(from_torch(theirs.state_dict()))
    ids, mask, labels = batch()
    target = shift_right(labels, 0)
    logits = ours(ids, mask, decoder_input_ids=target).logits
    expected = theirs(ids, mask, target)
    agree(ours, theirs, [(logits, expected)], from_torch)
    loss = ours.train()(ids, mask, labels).loss  # smoothed in training alone
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(label_smoothing=0.1)(expected.mT, labels))
    torch.testing.assert_close(ours.eval()(ids, mask, labels).loss, F.cross_entropy(expected.mT, labels))


# --- transformers' T5 ------------------------------------------------------------------------------------------------

T5 = {
    "shared": "embedding", "SelfAttention": "mixer", "EncDecAttention": "cross", "layer.0.layer_norm": "mixer_norm",
    "encoder.block.0.layer.1.layer_norm": "encoder.block.0.mlp_norm", "layer.2.layer_norm": "mlp_norm",
    "encoder.block.1.layer.1.layer_norm": "encoder.block.1.mlp_norm", "layer.1.layer_norm": "cross_norm",
    "DenseReluDense.wo": "mlp.down_proj", "wi_0": "gate_proj", "wi_1": "up_proj", "wi": "up_proj",
    "DenseReluDense": "mlp", "relative_attention_bias": "bias", "layer.0.": "", "layer.1.": "", "layer.2.": "",
    "block": "layers", "final_layer_norm": "norm",
}  # fmt: skip


def from_t5(theirs):
    """Their parameters under our names: there is one bias for distances, which each of our layers shows."""
    mine = {}
    for name, value in theirs.items():
        if "embed_tokens" in name or "lm_head" in name:
            continue
        for old, new in T5.items():
            name = name.replace(old, new)
        for part in ("mixer", "cross"):
            for n in "qkvo":
                name = name.replace(f"{part}.{n}.", f"{part}.{n}_proj.")
        mine[name] = value
        if "bias" in name:
            mine[name.replace("layers.0", "layers.1")] = value
    return mine


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
@pytest.mark.parametrize("padded", ["end", "start"])
def test_t5_equals_transformers(monkeypatch, activation, padded):
    """In float64, their norms too, whose variance is in float32 whatever they are given."""
    norm = lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)  # noqa: E731
    monkeypatch.setattr(T5LayerNorm, "forward", norm)
    name = "t5" if activation == "relu" else "t5(style.mlp=geglu)"
    config = T5Config(
        vocab_size=V, d_model=D, d_kv=D // H, d_ff=WIDTH, num_layers=LAYERS, num_heads=H, feed_forward_proj=activation,
        dense_act_fn=activation.removeprefix("gated-"), decoder_start_token_id=0,
    )  # fmt: skip
    theirs = T5ForConditionalGeneration(config)
    theirs.config.dense_act_fn = activation.removeprefix("gated-")
    ours, theirs = build(name).double(), perturbed(theirs, 0.2).eval().double()
    ours.load_state_dict(from_t5(theirs.state_dict()))
    ids, mask, labels = batch(padded)
    actual, expected = ours(ids, mask, labels), theirs(input_ids=ids, attention_mask=mask, labels=labels)
    agree(ours, theirs, [(actual.logits, expected.logits), (actual.loss, expected.loss)], from_t5)
    written = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=1)
    mine = ours.generate(ids, mask, max_new_tokens=12)
    assert torch.equal(mine, written[:, 1 : 1 + mine.shape[1]])


# --- every mixer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_decoding_equals_the_full_forward(name):
    model = build(name).double()
    ids, mask, _ = batch("start")
    target, state, steps = torch.randint(V, (2, 60)), None, []
    whole = model(ids, mask, decoder_input_ids=target).logits
    source = model.encode(ids, mask)
    for token in target.split(1, 1):
        logits, _, state = model.decode(token, source, state)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9)


def test_source_of_padding_alone_is_refused():
    model, ids = build("t5"), torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(InputError, match="row without tokens; expected a token in each row"):
        model(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]), decoder_input_ids=ids)
