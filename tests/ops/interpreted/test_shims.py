"""The interpreter's products of matrices are those of a GPU with the shims, and wrong without them."""

import pytest
import shims
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def product(a, b, out, SIZE: tl.constexpr, PRECISION: tl.constexpr = "ieee"):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


def error(dtype: torch.dtype, precision: str = "ieee") -> float:
    a, b = torch.randn(2, 16, 16).to(dtype)
    out = torch.full((16, 16), torch.nan)
    product[(1,)](a, b, out, SIZE=16, PRECISION=precision)
    exact = a.double() @ b.double()
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bit_numbers(dtype, precision):
    """The operands are exact, and sums of 16 products in float32 err by at most 16 roundings."""
    assert error(dtype, precision) <= 16 * 2**-24


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("ieee", 0, 16 * 2**-24), ("tf32", 2**-14, 2 * 2**-11), ("tf32x3", 0, (3 * 16 + 4 + 4) * 2**-24)],
)
def test_products_of_float32(precision, least, most):
    """TF32 rounds each operand by up to 2^-11. Three products sum 48 numbers, and leave out up to 2^-22 for the lower
    parts' product and 2^-22 for the roundings of the two lower parts."""
    assert least <= error(torch.float32, precision) <= most


def test_without_the_shim_bfloat16_is_wrong(monkeypatch):
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", builder.create_dot.__wrapped__)
    assert not error(torch.bfloat16) < 1


def test_autotuning_takes_the_first_configuration():
    tuned = triton.autotune([triton.Config({"SIZE": 16}), triton.Config({"SIZE": 8})], key=[])(product)
    a, b, out = torch.randn(3, 16, 16)
    tuned[(1,)](a, b, out)
    assert tuned.best_config.kwargs == {"SIZE": 16} and shims.first_configuration is type(tuned).run
    torch.testing.assert_close(out, a @ b)
