"""Experts in MXFP4, as gpt-oss was released: blocks of 32 numbers of 4 bits, two of them in a byte, with one power of 2
(OCP Microscaling Formats, version 1.0). They are read as bfloat16, which represents them without rounding.

Dimensions: E experts, R rows, G blocks per row.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..ops.checks import require
from .files import Header, TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors that a matrix of experts has
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of three bits; the fourth, highest one is the sign
BIAS, LARGEST = 127, 252  # of the exponents; the largest one with which 6 is a number of bfloat16


class PackedExperts(TensorFiles):
    """The tensors of a folder of safetensors, with those in MXFP4 as matrices [E, 32 G, R]."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.packed: dict[str, tuple[Header, Header]] = {}
        for name in [name.removesuffix(BLOCKS) for name in self.headers if name.endswith(BLOCKS)]:
            require(name + SCALES in self.headers, f"it has no tensor {name + SCALES!r}")
            blocks, scales = (self.headers.pop(name + kind) for kind in (BLOCKS, SCALES))
            known = blocks.dtype == scales.dtype == torch.uint8 and len(blocks.shape) == 4 and blocks.shape[3] == 16
            what = f"tensor {name + BLOCKS!r} has shape {blocks.shape} and scales {scales.shape}"
            require(known and blocks.shape[:3] == scales.shape, f"{what}; expected bytes [E, R, G, 16] and [E, R, G]")
            E, R, G, _ = blocks.shape
            self.packed[name] = blocks, scales
            self.headers[name] = Header(blocks.file, [E, 32 * G, R], torch.bfloat16)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors([name for name in names if name not in self.packed])
        for name in self.packed.keys() & {*names}:
            kinds = zip((BLOCKS, SCALES), self.packed[name], strict=True)
            parts = [self.stored(name + kind, header) for kind, header in kinds]
            largest = int(parts[1].max())
            known = f"expected at most 2^{LARGEST - BIAS}"
            require(largest <= LARGEST, f"tensor {name + SCALES!r} has a scale of 2^{largest - BIAS}; {known}")
            yield name, dequantized(*parts)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [E, R, G, 16], scales [E, R, G] -> [E, 32 G, R] in bfloat16."""
    E, R, G, _ = blocks.shape
    half = torch.tensor([*NUMBERS, *(-x for x in NUMBERS)], dtype=torch.bfloat16)
    both = torch.stack([half.repeat(16), half.repeat_interleave(16)], 1)  # of each byte, the lower half first
    both = both.view(torch.int32).flatten()  # of which a row is read at once
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - BIAS).bfloat16()
    out = torch.empty(E, 32 * G, R, dtype=torch.bfloat16)
    for matrix, block, scale in zip(out, blocks, scales, strict=True):  # one at a time takes little memory
        numbers = both.index_select(0, block.flatten().int()).view(torch.bfloat16).view(R, G, 32)
        matrix.copy_((numbers * powers[scale.int()][..., None]).flatten(1).T)
    return out
