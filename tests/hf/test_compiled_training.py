"""torch.compile and torch.export of a whole model as users and transformers' Trainer call them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from headrace import HeadraceForCausalLM, Mixer
from headrace.extra.capped import CappedSpec
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from tiny import close, config, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # of compilers, which are not ours
SIZES = (2, 20), (3, 37), (4, 46)


def model_of(mixer):
    torch.compiler.reset()
    return HeadraceForCausalLM(config(mixer, num_hidden_layers=1 if isinstance(mixer, str) else len(mixer)))


def plain(rows, length):
    ids = tokens(rows, length)
    return {"input_ids": ids, "labels": ids}


def padded(rows, length):
    ids = tokens(rows, length)
    mask = torch.ones_like(ids)
    mask[0, : length % 4 + 1] = mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(rows, length):
    ids = tokens(1, rows * length)
    ends = torch.tensor([0, 1, length // 2, length // 2, rows * length])  # one token, and none
    return {"input_ids": ids, "labels": ids, "cu_seqlens": ends}


def trained(model, call, batch):
    model.zero_grad()
    found = call(**batch)
    found.loss.backward()
    return [found.loss, found.logits, *(p.grad.clone() for p in model.parameters())]


def assert_compiles_twice(model, kind, run):
    """Once for the first batch, and once for all others. run(model, call, batch) -> tensors, which are to be those of
    the model itself. A graph reads padding too, as a sequence of its own: what is summed over tokens is then summed in
    another order, with as many roundings."""
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    for rows, length in SIZES:
        batch = kind(rows, length)
        for mine, theirs in zip(run(model, call, batch), run(model, model, batch), strict=True):
            close(mine, theirs, 0 if kind is plain else rows * length * 2**-24)
    assert counter.frame_count <= 2


@pytest.mark.slow(seconds=15)
def test_training_compiles_twice_without_a_break():
    """The native recurrence, convolution and scan, and a matrix memory, with padding."""
    assert_compiles_twice(model_of(["gla", "mamba", "rwkv7"]).train(), padded, trained)


@pytest.mark.slow
def test_packed_attention_compiles_twice_without_a_break():
    """A graph computes all pairs of tokens, and the layer by itself each sequence."""
    layers = ["fox", "mla", "gqa(rope.kind=dynamic, rope.original=8, null=learned)", CappedSpec(2)]
    layers += [LateNormSpec(2), GrowingSpec(2, period=2)]
    assert_compiles_twice(model_of(layers).train(), packed, trained)


@torch.no_grad()
def test_the_state_of_packed_attention_in_a_graph_goes_on():
    layer, x = Mixer("transformer", hidden_size=32, num_heads=2), torch.randn(1, 9, 32)
    ends, tokens = torch.tensor([0, 1, 4, 4, 9]), torch.randn(4, 2, 32)
    torch.compiler.reset()
    (_, kept), (_, expected) = (
        call(x, cu_seqlens=ends) for call in (torch.compile(layer, fullgraph=True, backend="eager"), layer)
    )
    assert torch.equal(kept.seen, expected.seen)
    close(layer(tokens, kept)[0], layer(tokens, expected)[0], 1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_compiles_twice_without_a_break():
    """That a model makes when it evaluates: its number of columns is one of the sizes."""
    assert_compiles_twice(model_of("transformer").eval(), plain, lambda model, call, batch: [call(**batch).logits])


@pytest.mark.slow
@torch.no_grad()
def test_exported_model_takes_other_sizes():
    model, dynamic = model_of("gla").eval(), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    batch, other = ({name: x for name, x in padded(*size).items() if name != "labels"} for size in SIZES[:2])
    shapes = dict.fromkeys(batch, dynamic) | {"use_cache": None}
    exported = torch.export.export(model, (), batch | {"use_cache": False}, dynamic_shapes=shapes)
    close(exported.module()(**other, use_cache=False).logits, model(**other, use_cache=False).logits, 1e-6)


@torch.no_grad()
def test_exported_short_convolution_takes_fewer_tokens_than_its_width():
    mixer = Mixer("mamba2", hidden_size=32, num_heads=2).eval()
    tokens = torch.export.Dim("tokens", min=2, max=2048)
    exported = torch.export.export(mixer, (torch.randn(2, 8, 32),), dynamic_shapes=({1: tokens},)).module()
    for T in (2, 3, 70):
        x = torch.randn(2, T, 32)
        (y, state), (expected, after) = exported(x), mixer(x)
        close(y, expected, 1e-6)
        close(state.conv, after.conv, 1e-6)
