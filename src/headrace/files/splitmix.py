"""SplitMix64's mixing of bits (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""

import numpy as np


def splitmix64(x: np.ndarray) -> np.ndarray:
    """A permutation of the 64-bit integers (uint64) whose values look random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
