"""Classification of scikit-learn's handwritten digits, 8 × 8 pixels with 17 grey levels, as a sequence of pixels.

    input      0  0  5  13  9  1  0  0  0  0  …  0
    answer                                       0        at the last pixel

Causal models read the pixels row by row; bert and bert(mixer=gla) are bidirectional. A fixed fifth of the 1,797
pictures is held out, and a tenth is for tuning.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import require
from ..utils.extras import require_packages
from .base import Batch, ByToken, Part, Sampled

GREYS, PIXELS, CLASSES = 17, 64, 10


@dataclass(frozen=True)
class Digits(Sampled, ByToken):
    """Classification of handwritten digits."""

    name: ClassVar[str] = "digits"
    vocab_size: ClassVar[int] = GREYS + CLASSES
    length: ClassVar[int] = PIXELS
    chance: ClassVar[float] = 1 / CLASSES

    def resized(self, length: int) -> "Digits":
        require(length == PIXELS, f"length={length}; expected {PIXELS}, the pixels of a picture of the task digits")
        return self

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        pictures, digits = load()["training"]
        return labelled(pictures, digits, torch.randint(len(digits), (rows,), generator=generator))

    def held_out(self, rows: int, part: Part = "held-out") -> Batch:
        pictures, digits = load()[part]
        return labelled(pictures, digits, torch.arange(min(rows, len(digits))))


def labelled(pictures: Tensor, digits: Tensor, rows: Tensor) -> Batch:
    labels = torch.full((len(rows), PIXELS), IGNORED)
    labels[:, -1] = GREYS + digits[rows]
    return {"input_ids": pictures[rows], "shift_labels": labels}


@lru_cache(maxsize=1)
def load() -> dict[Part, tuple[Tensor, Tensor]]:
    """(pictures [n, 64], digits [n]) of each part."""
    require_packages("the task digits", "sklearn")
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pictures, digits = (torch.from_numpy(x[order]).long() for x in (data.data, data.target))
    first, second = len(digits) // 5, len(digits) * 3 // 10
    parts: dict[Part, slice] = {
        "held-out": slice(first), "tuning": slice(first, second), "training": slice(second, None)
    }  # fmt: skip
    return {part: (pictures[rows], digits[rows]) for part, rows in parts.items()}
