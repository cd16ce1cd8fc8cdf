"""torch.compile and torch.export of a whole model as users and transformers' Trainer call them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from headrace.hf import HeadraceForCausalLM
from tiny import close, config, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # of compilers, which are not ours


def model_of(mixer):
    torch.compiler.reset()
    return HeadraceForCausalLM(config(mixer, num_hidden_layers=1)).train()


def padded(length):
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, : length % 4 + 1] = mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(length):
    """As transformers' DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes it."""
    inner = torch.tensor([0, 3, 5, length][: 3 + length % 2])
    ids = tokens(1, length)
    bounds = torch.cat([inner[:-1], inner.new_tensor([length])]).int()
    places = torch.cat([torch.arange(n) for n in bounds.diff().tolist()])[None]
    flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": length, "max_length_k": length}
    return {"input_ids": ids, "position_ids": places, "labels": ids, **flash}


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(("mixer", "rows"), [("gla", padded), ("gla", packed), ("transformer", padded)])
def test_training_compiles_twice_without_a_break(mixer, rows):
    """Once for the first batch, and once for all others, whose lengths differ. None is short enough for one chunk of
    tokens: PyTorch compiles a size of 1 for itself."""
    model, counter = model_of(mixer), CompileCounterWithBackend("eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    for length in (20, 37, 46):
        batch, found = rows(length), []
        for each in (model, call):
            model.zero_grad()
            loss = each(**batch).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for mine, theirs in zip(*found, strict=True):
            close(mine, theirs, 1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow(seconds=15)
@torch.no_grad()
def test_exported_model_takes_other_sizes():
    model, dynamic = model_of("gla").eval(), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    batch = {name: x for name, x in padded(9).items() if name != "labels"}
    shapes = dict.fromkeys(batch, dynamic) | {"use_cache": None}
    exported = torch.export.export(model, (), batch | {"use_cache": False}, dynamic_shapes=shapes, strict=False)
    other = {name: torch.cat([x, x[:1]]) for name, x in padded(14).items() if name != "labels"}
    close(exported.module()(**other, use_cache=False).logits, model(**other, use_cache=False).logits, 1e-5)
