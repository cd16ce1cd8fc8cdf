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


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(("mixer", "rows"), [("transformer", padded)])
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
