"""Kernels with the mistakes that `memory.watch` is there to find, one of each kind, and their like without."""

import pytest
import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def copy(x, y, SIZE: tl.constexpr, WRITTEN: tl.constexpr):
    """Program p copies the row p to the row p · WRITTEN."""
    p, at = tl.program_id(0), tl.arange(0, SIZE)
    tl.store(y + p * WRITTEN * SIZE + at, tl.load(x + p * SIZE + at))


@triton.jit
def reverse(x, SIZE: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, SIZE)
    y = tl.load(x + SIZE - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, y)


@triton.jit
def into_one(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at * 0, at.to(tl.float32))


rows = torch.zeros(3, SIZE)
MISTAKES = {
    "not given": lambda: copy[(2,)](rows[:1], torch.zeros(2, SIZE), SIZE, WRITTEN=1),
    "stores what another program has stored": lambda: copy[(2,)](rows, torch.zeros(2, SIZE), SIZE, WRITTEN=0),
    "stores what another program has loaded": lambda: copy[(2,)](rows[1:], rows, SIZE, WRITTEN=1),
    "loads what another program has stored": lambda: copy[(2,)](rows, rows[1:], SIZE, WRITTEN=1),
    "stores what it has loaded": lambda: reverse[(1,)](rows, SIZE, BARRIER=False),
    "twice at once": lambda: into_one[(1,)](rows, SIZE),
}  # fmt: skip


@pytest.mark.parametrize("why", MISTAKES)
def test_mistakes_are_found(why):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=why):
        MISTAKES[why]()


def test_kernels_without_them_run():
    x, y = torch.arange(2.0 * SIZE).view(2, SIZE), torch.zeros(2, SIZE)
    copy[(2,)](x, y, SIZE, WRITTEN=1)
    reverse[(1,)](y, SIZE, BARRIER=True)
    assert torch.equal(y, torch.stack([x[0].flip(0), x[1]])) and torch.empty(SIZE).isnan().all()
