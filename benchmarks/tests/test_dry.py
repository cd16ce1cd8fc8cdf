"""Triton kernels compiled for GPUs that are not there."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

import dry


@triton.jit
def product(a, b, out, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(n):
        total += tl.dot(tl.load(a + at + i * SIZE * SIZE), tl.load(b + at + i * SIZE * SIZE))
    tl.store(out + at, total)


def launch(kernel=product, size=64, grid=(3, 2), **options):
    a, out = torch.zeros(4, size, size, dtype=torch.bfloat16), torch.zeros(size, size)
    kernel[grid](a, a, out, 4, **({"SIZE": size} if kernel is product else {}), **options)


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_launches_are_recorded(gpu):
    with dry.gpu(gpu) as launches:
        launch(num_warps=4)
    assert [(found.kernel, found.grid, found.warps) for found in launches] == [("product", (3, 2, 1), 4)]
    code = launches[0].code
    assert 0 < code.registers <= 512 and code.stack == 0 and 0 < code.shared <= dry.GPUS[gpu].shared
    assert 0 < code.matrix < code.instructions
    if gpu == "sm_100":  # its matrix instructions do not tell their size
        assert code.macs is None and any(loop.macs is None for loop in code.loops)
    else:  # whatever number of iterations the compiler has unrolled
        assert code.macs % 64**3 == 0 and sum(loop.macs > 0 and loop.macs % 64**3 == 0 for loop in code.loops) == 1


def test_register_spills_are_seen():
    with dry.gpu("sm_90") as launches:
        launch(size=128, num_warps=1)
    code = launches[0].code
    assert code.stack > 0 and any(loop.spills for loop in code.loops)


def test_shared_memory_overflow_is_an_error():
    with dry.gpu("sm_120") as launches, pytest.raises(OutOfResources, match="shared memory"):
        launch(size=128, num_warps=8, num_stages=4)
    assert launches == []
