"""What a stage of gpu_stages.py is given, and what it yields."""

from typing import NamedTuple

Found = tuple[str, str, str, float, str, str]  # subject, shape, measure, value, unit, note


class Sizes(NamedTuple):
    """The sizes of all stages. A shape of the op is (B, T, H, K, V)."""

    copied: int  # numbers
    square: int  # rows of a square matrix
    correct: tuple[tuple[int, int, int, int, int], ...]
    timed: tuple[tuple[int, int, int, int, int], ...]
    long: tuple[tuple[int, int, int, int, int], ...]  # few long rows
    families: tuple[str, ...]
    rounds: int
    budget: float  # seconds for the rounds of one call


ALL = "scalar", "gated-delta", "vector", "linear", "kda", "delta", "fixed", "bonus"
FULL = Sizes(
    copied=2**30,
    square=8192,
    correct=((2, 512, 8, 128, 128), (2, 512, 4, 256, 256), (2, 512, 4, 192, 384), (1, 2048, 2, 64, 64)),
    timed=((8, 4096, 8, 128, 128), (8, 4096, 4, 256, 256), (8, 4096, 4, 192, 384)),
    long=((1, 32768, 4, 128, 128),),
    families=ALL,
    rounds=20,
    budget=1.0,
)
DRY = Sizes(
    copied=2**12,
    square=32,
    correct=((1, 70, 2, 16, 16),),
    timed=((1, 70, 2, 16, 16), (1, 40, 1, 16, 16)),
    long=((1, 140, 1, 16, 16),),
    families=ALL,
    rounds=1,
    budget=1.0,
)


def failure(subject: str, shape: str, error: Exception) -> Found:
    return subject, shape, "failed", 1.0, "", told(error)


def told(error: Exception) -> str:
    """Returns the kind of an error and the first line of its text, if any."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
