"""The stages of gpu.py and their sizes."""

from collections.abc import Callable, Iterator

from gpu_compile import compiling
from gpu_measure import Machine
from gpu_models import decode, layers, train
from gpu_op import ceilings, correctness, long, op, shapes
from gpu_sizes import DRY, FULL, Found, Sizes

__all__ = ["DRY", "FULL", "STAGES", "Sizes"]

STAGES: dict[str, Callable[[Machine, Sizes], Iterator[Found]]] = {
    "compiling": compiling,
    "ceilings": ceilings,
    "correctness": correctness,
    "layers": layers,
    "op": op,
    "train": train,
    "decode": decode,
    "shapes": shapes,
    "long": long,
}
