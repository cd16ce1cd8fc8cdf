"""Kernels with the mistakes that `memory.watch` is there to find, and their like without."""

import pytest
import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def copy(x, y, SIZE: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Program p copies the row p + READ to the row p · WRITTEN."""
    p, at = tl.program_id(0), tl.arange(0, SIZE)
    tl.store(y + p * WRITTEN * SIZE + at, tl.load(x + (p + READ) * SIZE + at))


@triton.jit
def reverse(x, SIZE: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, SIZE)
    y = tl.load(x + SIZE - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, y)


@triton.jit
def through_memory(x, SIZE: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, at.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + SIZE + at, tl.load(x + SIZE - 1 - at))


@triton.jit
def into_one(x, SIZE: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at * 0, at.to(tl.float32), mask=at < (1 if MASKED else SIZE))


def fails(why: str):
    return pytest.raises(triton.runtime.errors.InterpreterError, match=why)


def test_rows_of_its_own():
    x, y = torch.randn(2, SIZE), torch.zeros(2, SIZE)
    copy[(2,)](x, y, SIZE, READ=0, WRITTEN=1)
    assert torch.equal(x, y)


@pytest.mark.parametrize("read", [-1, 1])
def test_outside_of_a_tensor(read):
    """The row is of the same storage, and not of the tensor."""
    with fails("not given"):
        copy[(2,)](torch.randn(4, SIZE)[1:3], torch.zeros(2, SIZE), SIZE, READ=read, WRITTEN=1)


@pytest.mark.parametrize("read", [-(1 << 24), 1 << 24])
def test_outside_of_all_storages(read):
    with fails("not given"):
        copy[(1,)](torch.randn(1, SIZE), torch.zeros(1, SIZE), SIZE, READ=read, WRITTEN=1)


def test_between_the_elements_of_a_view():
    with fails("not given"):
        copy[(1,)](torch.randn(1, 2 * SIZE)[:, ::2], torch.zeros(1, SIZE), SIZE, READ=0, WRITTEN=1)


def test_two_programs_store_one_row():
    with fails("stores what another program has stored"):
        copy[(2,)](torch.randn(2, SIZE), torch.zeros(2, SIZE), SIZE, READ=0, WRITTEN=0)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [(1, 0, "stores what another program has loaded"), (0, 1, "loads what another program has stored")],
)
def test_a_program_loads_what_another_stores(source, target, why):
    """Rows of one tensor move by one."""
    x = torch.randn(3, SIZE)
    with fails(why):
        copy[(2,)](x[source:], x[target:], SIZE, READ=0, WRITTEN=1)


@pytest.mark.parametrize(
    ("kernel", "why"), [(reverse, "stores what it has loaded"), (through_memory, "loads what it has stored")]
)
def test_threads_of_a_program_need_a_barrier(kernel, why):
    with fails(why):
        kernel[(1,)](torch.randn(2 * SIZE), SIZE, BARRIER=False)
    x = torch.arange(2.0 * SIZE)
    kernel[(1,)](x, SIZE, BARRIER=True)
    assert torch.equal(x[SIZE:] if kernel is through_memory else x[:SIZE], torch.arange(SIZE - 1.0, -1, -1))


def test_threads_of_a_program_store_one_element():
    with fails("twice at once"):
        into_one[(1,)](torch.zeros(SIZE), SIZE, MASKED=False)
    into_one[(1,)](torch.zeros(SIZE), SIZE, MASKED=True)


def test_memory_that_no_kernel_has_set_is_not_a_number():
    assert torch.empty(SIZE).isnan().all()
