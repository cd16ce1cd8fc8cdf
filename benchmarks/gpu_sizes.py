"""What a stage of gpu.py is given, and what it yields."""

from typing import NamedTuple

Found = tuple[str, str, str, float, str, str]  # subject, shape, measure, value, unit, note


class Sizes(NamedTuple):
    """The sizes of all stages. A shape of the op is (B, T, H, K, V)."""

    copied: int  # numbers
    square: int  # rows of a square matrix
    correct: tuple[tuple[int, int, int, int, int], ...]
    timed: tuple[tuple[int, int, int, int, int], ...]
    long: tuple[tuple[int, int, int, int, int], ...]  # rows that are computed in segments
    families: tuple[str, ...]
    mixers: tuple[str, ...]
    layers: int
    hidden: int
    vocabulary: int
    batch: tuple[int, int]  # B and T of a training step
    streams: tuple[int, ...]  # sequences that are decoded at once
    rounds: int
    budget: float  # seconds for the rounds of one call


ALL = "scalar", "gated-delta", "vector", "linear", "kda", "delta", "fixed", "bonus"
FULL = Sizes(
    2**30, 8192, ((2, 512, 4, 128, 128), (1, 512, 4, 256, 256), (1, 512, 2, 192, 384), (1, 2048, 2, 64, 64)),
    ((8, 4096, 8, 128, 128), (8, 4096, 4, 256, 256), (8, 4096, 4, 192, 384)), ((1, 32768, 4, 128, 128),), ALL,
    ("gla", "softmax-gla", "gated-deltanet", "softmax-gated-deltanet", "retnet", "softmax-retnet"),
    24, 1024, 32_000, (4, 4096), (1, 64, 256), 20, 1.0,
)  # fmt: skip
DRY = Sizes(
    2**12, 32, ((1, 70, 2, 16, 16),), ((1, 70, 2, 16, 16),), ((1, 140, 1, 16, 16),), ALL, ("gla", "softmax-gla"), 1, 32,
    64, (1, 70), (1,), 1, 1.0,
)  # fmt: skip


def failure(subject: str, shape: str, error: Exception) -> Found:
    return subject, shape, "failed", 1.0, "", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
