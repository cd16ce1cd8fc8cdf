"""A random order of rows that needs no memory, whatever their number."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from ..files.splitmix import splitmix64

ROUNDS = 8
TOGETHER = 1 << 12  # rows whose places are computed together


class Shuffled(Sampler[int]):
    """The first `count` of `rows` rows in a random order, which is another one in each epoch.

    Args:
        rows: number of rows.
        count: number of rows in an epoch.
        seed: of the orders.
    """

    def __init__(self, rows: int, count: int, seed: int):
        self.rows, self.count, self.seed, self.epoch = rows, count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        keys = np.random.default_rng([self.seed, self.epoch]).integers(2**64, size=ROUNDS, dtype=np.uint64)
        for first in range(0, self.count, TOGETHER):
            places = np.arange(first, min(first + TOGETHER, self.count), dtype=np.uint64)
            yield from permuted(places, self.rows, keys).tolist()


def permuted(places: np.ndarray, rows: int, keys: np.ndarray) -> np.ndarray:
    """The values of a pseudo-random permutation of the integers below `rows` at some places (uint64).

    A Feistel network permutes the integers of an even number of bits; an integer that it takes to `rows` or more goes
    through it again until it is below (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)."""
    half = np.uint64(max((rows - 1).bit_length() + 1, 2) // 2)
    values = _feistel(places, half, keys)
    while len(outside := np.flatnonzero(values >= rows)):
        values[outside] = _feistel(values[outside], half, keys)
    return values


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return left << half | right
