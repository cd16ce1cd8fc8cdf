"""The launches of the backend "triton", compiled for GPUs that are not there: their number and their code."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import dry
from headrace import linear_attention
from peers import FAMILIES

pytestmark = pytest.mark.slow
KERNELS = ["prepare", "scan", "prepare", "scan", "reverse_scan", "gradients"]  # two forward, four backward
# Bytes of registers spilled to memory, at most, by (GPU, family). FLA's kernels of the same family spill up to 7,512.
STACK = {
    ("sm_90", "linear"): 0, ("sm_90", "scalar"): 0, ("sm_90", "vector"): 72,
    ("sm_90", "delta"): 16, ("sm_90", "gated-delta"): 16, ("sm_90", "kda"): 368,
    ("sm_100", "scalar"): 40, ("sm_100", "gated-delta"): 192, ("sm_100", "kda"): 408,
    ("sm_80", "scalar"): 0, ("sm_80", "vector"): 352,
    ("sm_120", "scalar"): 8, ("gfx942", "scalar"): 8, ("gfx942", "gated-delta"): 172,
}  # fmt: skip


def launches(gpu: str, family: str) -> list[dry.Launch]:
    """The launches of forward and backward with both gates and an initial state, at K = V = 128."""
    tensors = FAMILIES[family].inputs(T=128, K=128, V=128, dtype=torch.bfloat16)
    shape = tensors["v"].shape
    gates = {name: torch.rand(shape[:3], requires_grad=True) for name in ("read_gate", "write_gate")}
    state = torch.zeros(shape[0], shape[2], 128, 128, requires_grad=True)
    with dry.gpu(gpu) as found:
        results = linear_attention(
            **tensors, **gates, initial_state=state, **FAMILIES[family].options(), backend="triton"
        )
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    return found


@pytest.mark.parametrize(("gpu", "family"), STACK)
def test_launches_and_their_code(gpu, family):
    """Two launches forward and four backward, all on matrix units, in the GPU's shared memory, with little spilled."""
    found = launches(gpu, family)
    assert [x.kernel for x in found] == KERNELS
    assert all(x.code.matrix for x in found)
    assert max(x.code.shared for x in found) <= dry.GPUS[gpu].shared
    assert max(x.code.stack for x in found) <= STACK[gpu, family]
