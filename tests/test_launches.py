"""The launches of the backend "triton", compiled for GPUs that are not there: their number and what they need."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import dry
from headrace import linear_attention
from peers import FAMILIES

pytestmark = pytest.mark.slow


def launches(gpu: str, family: str, T: int = 256, K: int = 128, V: int = 128) -> list[dry.Launch]:
    """The launches of forward and backward, with both gates."""
    tensors = FAMILIES[family].inputs(T=T, K=K, V=V, dtype=torch.bfloat16)
    with dry.gpu(gpu) as found:
        out, state = linear_attention(**tensors, **FAMILIES[family].options(), backend="triton")
        torch.autograd.backward([out, state], [torch.ones_like(out), torch.ones_like(state)])
    return found


@pytest.mark.parametrize("family", ["linear", "scalar", "vector", "delta", "gated-delta", "kda"])
def test_two_launches_forward_and_four_backward(family):
    found = launches("sm_90", family)
    assert [x.kernel for x in found] == ["prepare", "scan", "prepare", "scan", "reverse_scan", "gradients"]
    assert all(x.code.matrix for x in found)
