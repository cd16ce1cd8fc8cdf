"""The block sizes of the kernels, and the properties of a GPU that they depend on."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.torch_version import TorchVersion

from ....utils.device import interpreted
from .limits import LARGEST_KEY

ROOM_TO_PREFETCH = 160 * 2**10  # bytes of shared memory with which the next chunk is loaded during this one's products


class GPU(NamedTuple):
    """What the block sizes depend on."""

    amd: bool
    wide: bool  # whether matrix instructions read their operands from shared memory: Hopper and Blackwell's data centre
    stages: int  # 2: the next chunk is loaded during the products of this one
    processors: int = 0  # streaming multiprocessors; 0: not known
    large: bool = False  # whether 64 value channels of more than 128 keys stay in registers: not on Blackwell
    keeps: bool = False  # whether to keep a tile for a second product: in shared memory, and where that spills less
    rounded: str = "tf32"  # Triton's input_precision for products of float32 matrices that may be rounded to TF32
    exact: str = "tf32x3"  # the same for those that may not; three products in TF32 have the digits of float32

    @classmethod
    def of(cls, x: Tensor) -> "GPU":
        if interpreted():
            return cls(False, True, 1)
        about: Any = torch.cuda.get_device_properties(x.device)
        # PyTorch for AMD's GPUs does not tell the size, which is 64 KB or more.
        stages = 2 if getattr(about, "shared_memory_per_block_optin", 0) >= ROOM_TO_PREFETCH else 1
        if torch.version.hip is None:
            # On Hopper, Triton before 3.7.1 miscompiles products of a transposed tile that was loaded for another one.
            large = stages > 1 and about.major < 10
            keeps = large and (about.major < 9 or _at_least(triton.__version__, "3.7.1"))
            return cls(False, about.major in (9, 10), stages, about.multi_processor_count, large, keeps)
        rounded = "tf32" if about.gcnArchName.startswith("gfx942") else "ieee"
        return cls(True, False, stages, rounded=rounded, exact="ieee")


@cache
def _at_least(version: str, wanted: str) -> bool:
    return TorchVersion(version) >= wanted


@cache
def block_sizes(
    kernel: str, K: int, V: int, delta: bool, vector: bool, stored: torch.dtype, rounded: bool, gpu: GPU, few: bool
) -> dict[str, int]:
    """Returns the block sizes, warps and stages of a kernel: the largest blocks that (nearly) stay in registers; and
    for "scan" and "states" KEEP, see scan.py. On Hopper in bfloat16 they are the fastest of those that were timed.

    Args:
        kernel: "prepare", "scan" (also in reverse), "states" (`scan` without an output) or "gradients".
        K, V: the dimensions of a head.
        delta: whether the rule is the delta rule.
        vector: whether the decay is per key channel.
        stored: dtype of the tensors between the kernels.
        rounded: whether float32 products may be rounded to TF32.
        gpu: the GPU that the kernel runs on.
        few: whether the states are so few that blocks of 64 value channels would leave half of the GPU idle.
    """
    BK, half = block(K, LARGEST_KEY), stored == torch.bfloat16
    if not half:  # tiles of as many numbers would not fit into shared memory
        gpu = gpu._replace(wide=False, stages=1, keeps=False)
    timed = half and gpu.wide and gpu.large  # Hopper
    if kernel == "prepare":
        warps, stages = 4 if timed or not vector else 8, 1 if timed else gpu.stages
        return {"BK": min(BK, 32 if vector else 64), **_warps(warps, stages)}
    if kernel == "gradients":
        most = 16 if vector or gpu.amd or not rounded else 64 if gpu.wide else 32
        # A loop of one block would be unrolled, and its products would be a chain (parts.isolated_dot).
        most = max(16, min(BK // 2, most))
        four = timed and (vector or V <= 64)  # some registers spilled cost less than warps that wait for each other
        sizes = {"BK": most, "BV": block(V, 64 if half else 32)}
        return {**sizes, **_warps(4 if four else 8, 1 if vector or four else gpu.stages)}
    first, second = tiles(K) if gpu.wide else (BK, 0)  # elsewhere a second tile spills kilobytes
    two = second > 0 and delta and not vector
    large = gpu.large and (kernel == "states" or not delta or two)
    widest = 64 if gpu.wide and (BK <= 128 or large) else 32 if BK <= 128 or half else 16
    stages = 1 if two and large and kernel == "scan" else gpu.stages  # two would spill
    BV = block(V, 32 if timed and few else widest)
    return {"BK": first, "BK2": second, "BV": BV, "KEEP": gpu.keeps and not vector, **_warps(8, stages)}


def _warps(warps: int, stages: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": stages}


def tiles(K: int) -> tuple[int, int]:
    """Returns the rows of one or two tiles of a state with K keys: powers of two, as few as possible together."""
    whole = block(K, LARGEST_KEY)
    half = whole // 2
    rest = block(K - half, half)
    return (half, rest) if rest < half else (whole, 0)


@cache
def block(size: int, most: int) -> int:
    """Returns the smallest power of two that is not below size, but at least 16 and at most `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))
