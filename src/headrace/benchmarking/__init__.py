"""Efficiency: memory, throughput and latency of mixers with and without competition, and of models of transformers."""

from ..spec.expression import split
from ..utils.errors import InputError, require

MEASURED = ("memory", "training", "prefill", "decoding")


def measurements(text: str) -> tuple[str, ...]:
    """Returns the measurements of --what. Raises InputError for an unknown one, before PyTorch is imported."""
    what = split(text)
    if unknown := [name for name in what if name not in MEASURED]:
        raise InputError(f"--what={unknown[0]}; expected some of {', '.join(MEASURED)}")
    require(what, f"--what names none; expected some of {', '.join(MEASURED)}")
    return what
