"""Attention maps of every mixer: times the values they give the output, and gradients reach them."""

import pytest
import torch

import headrace
from headrace import HeadraceCache, InputError, zoo
from headrace.extra.capped import CappedSpec
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.layers.blocks import stack
from headrace.layers.maps import asking, weights
from headrace.spec import Pattern
from tiny import SIZES, T, build, close, perturbed, tokens

LAYERS = [
    "linear-attention", "retnet", "mamba3", "log-linear-mamba2", "mesa", "rwkv6", "mlstm", "residual-delta", "comba",
    "softmax-gated-deltanet-2", "softmax-gla", "gsa", "rwkv7", "gqa", "longformer", "bigbird", "fox", "flash-reference",
    "mla", "softmax-rnn-norm", CappedSpec(2, null="learned", cap=1.0), CappedSpec(2, pattern=Pattern(3), cap=1.0),
    LateNormSpec(2), GrowingSpec(2, growth=1.0, period=2),
]  # fmt: skip
WITHOUT = ["mamba", "rwkv4", "gla-outer", "softmax-deltaproduct", "channel mixing"]
MASK = torch.ones(2, T, dtype=torch.bool)
MASK[0, 6:] = MASK[1, :3] = False
BOUNDS = torch.tensor([0, 4, 4, T])


def layer_of(name):
    torch.manual_seed(0)
    layer = headrace.Mixer(name, hidden_size=SIZES["hidden_size"], num_heads=4).double()
    return perturbed(layer), torch.randn(2, T, SIZES["hidden_size"], dtype=torch.float64)


def called(layer, x, state=None, **where):
    """(y, state, map, what the heads read by the layer's own path)."""
    readings = []
    with torch.no_grad(), asking(readings.append):
        y, after = layer(x, state, **where)
    with torch.no_grad(), asking([]) as maps:
        mapped, also = layer(x, state, **where)
    close(mapped, y)
    for a, b in zip(after, also, strict=True):
        if isinstance(a, torch.Tensor):
            close(a, b)
    return y, after, maps[0], readings


@pytest.mark.parametrize("name", LAYERS)
def test_maps_times_values_is_what_the_heads_read(name):
    layer, x = layer_of(name)
    y, _, A, (reading,) = called(layer, x)
    values = reading.values.repeat_interleave(A.shape[1] // reading.values.shape[2], 2)
    close(torch.einsum("bhts,bshv->bthv", A, values), reading.out)
    close(A, weights(reading))
    assert A.shape[2:] == (T, T) and not A.triu(1).any()
    *_, padded, _ = called(layer, x, mask=MASK)
    assert not padded[~MASK[:, None, :, None].expand_as(padded)].any()
    assert not padded[~MASK[:, None, None].expand_as(padded)].any()
    close(padded[:1, :, :6, :6], A[:1, :, :6, :6])
    *_, packed, _ = called(layer, x[:1], cu_seqlens=BOUNDS)
    assert not packed[:, :, 4:, :4].any()
    close(packed[:, :, :4, :4], A[:1, :, :4, :4])
    _, state, *_ = called(layer, x[:, :5])
    later, *_, rest, _ = called(layer, x[:, 5:], state)
    close(later, y[:, 5:])
    close(rest, A[:, :, 5:, -rest.shape[3] :])  # all columns of softmax attention, and the last ones of a recurrence
    assert rest.shape[3] == (T if zoo.get(name).facts.cached else T - 5)


@pytest.mark.parametrize("name", ["transformer", "gqa", "flash-reference", "sliding-window"])
def test_maps_of_softmax_attention_are_probabilities_of_queries_and_keys(name):
    layer, x = layer_of(name)
    *_, A, _ = called(layer, x)
    close(A.sum(-1), torch.ones_like(A[..., 0]))
    if name == "transformer":
        plain = headrace.Mixer("transformer(rotary=false)", hidden_size=SIZES["hidden_size"], num_heads=4).double()
        q, k = (getattr(plain, f"{part}_proj")(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in "qk")
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        close(called(plain, x)[2], logits.softmax(-1))


@pytest.mark.parametrize("mixer", ["softmax-gla", "sparse", "hybrid", "gpt", "shared", "parallel", "softmax-rnn-norm"])
def test_models_return_maps_with_gradients(mixer):
    model, ids, mask = build(mixer).eval(), tokens(2), MASK.long()
    for where in ({}, {"attention_mask": mask}):
        out = model(ids, output_attentions=True, **where)
        close(out.logits[MASK], model(ids, **where).logits[MASK])
        for A in out.attentions:
            assert A.shape[::2] == ids.shape
            A.retain_grad()
        out.logits[0, 5].sum().backward()
        assert all(A.grad is not None for A in out.attentions)
    assert len(out.attentions) == len(model.config.mixers) or mixer == "shared"


@pytest.mark.parametrize("mixer", WITHOUT)
def test_models_without_maps_say_so_by_name(mixer):
    name = mixer.replace("channel mixing", "rwkv4")
    with pytest.raises(InputError, match=f"output_attentions=True with {name}, whose heads have no single weight"):
        build(mixer)(tokens(2), past_key_values=(cache := HeadraceCache()), output_attentions=True)
    assert not cache.is_initialized and build(mixer)(tokens(2, 0), output_attentions=True).attentions == ()


def test_maps_are_asked_for_by_the_config_and_returned_by_generate():
    model, ids = build("hybrid").eval(), tokens(2)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    steps = model.generate(ids, output_attentions=True, **options).attentions
    assert [A.shape[2:] for A in steps[2]] == [(1, 1), (1, T + 2)]
    beams = model.generate(ids, output_attentions=True, num_beams=2, **options).attentions
    assert all(A.shape[0] == 4 for step in beams for A in step)
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2
    with pytest.raises(InputError, match="output_attentions='yes'; expected True or False"):
        headrace.hf.HeadraceConfig(output_attentions="yes")


@torch.no_grad()
def test_native_calls_and_long_prompts_do_what_is_asked(monkeypatch):
    """A call that `asking` asks goes through every mixer, once."""
    model, ids, cache = build("gla").float(), tokens(2), HeadraceCache()
    monkeypatch.setattr(stack, "PIECE", 4)
    for part in (ids[:1], ids[:1, :1]):
        readings = []
        with asking(readings.append):
            model(part, past_key_values=cache)
        assert [r.values.shape[1] for r in readings] == [part.shape[1]] * 2
        with asking([]) as maps:
            assert "maps" in model.engine.unsupported_reason(model)
            model(part, past_key_values=HeadraceCache())
        assert len(maps) == 2
    layer, x = headrace.Mixer("gla", hidden_size=32, num_heads=4), torch.randn(1, 1, 32)
    _, state = layer(x)
    with asking(readings.append):
        layer(x, state, in_place=True)
    assert len(readings) == 3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_maps_and_gradients_with_checkpoints(reentrant):
    model, ids = build("hybrid").train(), tokens(2)
    expected = model(ids, output_attentions=True).attentions
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    out = model(ids, labels=ids, output_attentions=True)
    out.loss.backward()
    for A, B in zip(out.attentions, expected, strict=True):
        close(A, B)
        assert reentrant or A.requires_grad
