"""Matrices in FP8 with a scale for each block of rows and columns (arXiv 2412.19437, section 3.3), as DeepSeek-V3 was
released. They are read as float32.

Dimensions: R rows, C columns.
"""

from collections.abc import Collection, Iterator
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from ..files.checks import read_json
from ..ops.checks import require
from .fields import Config
from .files import Header, TensorFiles

SCALES = "_scale_inv"  # end of the name of the tensor that has the scales of a matrix


def block_of(described: Config) -> tuple[int, int] | None:
    """Returns the rows and columns of a block by a config.json; None for one without such blocks."""
    packed = described.get("quantization_config")
    if not isinstance(packed, dict) or packed.get("quant_method") != "fp8":
        return None
    match packed.get("weight_block_size"):
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    return None


class ScaledBlocks(TensorFiles):
    """The tensors of a folder of safetensors, with matrices that have scales as products with them."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.block, self.scales = block_of(read_json(folder / "config.json", {})), dict[str, Header]()
        for name in [name for name in self.headers if self.block and name.endswith(SCALES)]:
            scales, matrix = self.headers.pop(name), name.removesuffix(SCALES)
            require(matrix in self.headers, f"it has no tensor {matrix!r}")
            shape, dtype = self.headers[matrix].shape, self.headers[matrix].dtype
            blocks = [ceil(n / size) for n, size in zip(shape, self.block or (), strict=False)]
            known = dtype is torch.float8_e4m3fn and len(shape) == 2 and scales.dtype in (torch.float32, torch.bfloat16)
            what = f"tensor {matrix!r} has {dtype}, shape {shape} and scales {scales.shape} in {scales.dtype}"
            expected = f"expected float8_e4m3fn and a scale of float32 or bfloat16 for each block of {self.block}"
            require(known and blocks == scales.shape, f"{what}; {expected}")
            self.scales[matrix] = scales
            self.headers[matrix] = self.headers[matrix]._replace(dtype=torch.float32)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(names):
            if name in self.scales:
                tensor = scaled(tensor, self.stored(name + SCALES, self.scales[name]), self.block or (1, 1))
            yield name, tensor


def scaled(matrix: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """matrix [R, C], scales [⌈R / rows⌉, ⌈C / columns⌉] -> [R, C] in float32."""
    for dim, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, matrix.shape[dim])
    return matrix.float() * scales.float()
