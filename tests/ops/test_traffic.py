"""What a block moves and keeps in a training step, counted without a GPU."""

import pytest
import torch

import traffic
from headrace import zoo
from headrace.layers.blocks import compiled
from headrace.layers.blocks.block import Block, Sizes

# Uncompiled: (units of the residual stream outside products and recurrence, kernels, bytes kept per token). Before the
# convolution had kernels of its own, Gated DeltaNet moved 255 in 114 kernels and kept 84,990 bytes.
COUNTS = {
    "gla": (105, 31, 51_232), "gated-deltanet": (203, 108, 68_018), "softmax-gated-deltanet": (234, 148, 72_995),
}  # fmt: skip


@pytest.mark.parametrize("mixer", COUNTS)
def test_uncompiled_blocks_move_and_keep_no_more_than_they_did(mixer):
    found = traffic.uncompiled(mixer)
    moved, kernels, kept = COUNTS[mixer]
    assert found.outside <= moved + 1
    assert found.kernels <= kernels
    assert sum(found.kept.values()) <= kept


def kept(block: Block, backend) -> int:
    """Bytes that a compiled block keeps for the backward, each storage once."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch._dynamo.reset()
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.compile(block, backend=backend, fullgraph=True)(torch.randn(2, 64, 64, requires_grad=True))
    return sum(size for place, size in storages.items() if place not in weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own import
def test_compiled_blocks_recompute_norms_and_activations(monkeypatch):
    """The backend of `compile_blocks`, in which another compiler partitions alike and generates no code."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition
    from torch._inductor import compile_fx

    block = Block(zoo.mixer("linear-attention"), Sizes(64, 2, 176)).train()
    most = kept(block, aot_eager_decomp_partition)
    monkeypatch.setattr(compile_fx, "compile_fx", aot_eager_decomp_partition)
    hidden, normalized = 4 * 2 * 64 * 176, 4 * 2 * 64 * 64  # bytes of the input of down_proj and of a norm's output
    assert kept(block, compiled.recomputing) <= most - hidden - normalized
