"""What a verification returns: relative errors, and the largest that are accepted."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.errors import InputError, require

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


class Row(NamedTuple):
    """The relative error of one mixer in one check (`law`), in the Euclidean norm, and the largest accepted error."""

    mixer: str
    law: str
    error: float
    tolerance: float
    note: str = ""  # the error that a backend raised, whose relative error is infinite

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


def dtype_of(name: str) -> torch.dtype:
    """Returns the data type of an option --dtype. InputError for one without a tolerance."""
    require(name in DTYPES, f"--dtype={name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def law_of(backend: str, dtype: torch.dtype) -> str:
    return f"{backend} in {str(dtype).removeprefix('torch.')}"


def rows_of_check(row: Row, errors: Callable[[], list[float]], more: Sequence[str] = ()) -> list[Row]:
    """Returns the row with the first error, and one for each other, whose law has a suffix of `more`; no rows if a
    backend refuses the call. What a kernel raises breaks a law, and other laws are still to be checked."""
    try:
        first, *others = errors()
    except InputError as refused:
        if "cannot run here" in str(refused):
            return []
        raise
    except Exception as raised:
        return [row._replace(error=float("inf"), note=f"{type(raised).__name__}: {raised}")]
    rows = [row._replace(error=first)]
    for suffix, error in zip(more, others, strict=True):
        tolerance = row.tolerance * (10 if suffix == ", gradients" else 1)
        rows.append(row._replace(law=row.law + suffix, error=error, tolerance=tolerance))
    return rows


def device_failed(device: str, rows: Sequence[Row]) -> bool:
    """Whether an error in one of the rows has left a device that computes nothing any more, as some do on a GPU."""
    if not any(row.note for row in rows):
        return False
    try:
        return torch.ones((), device=device).item() != 1
    except RuntimeError:
        return True


def relative(x: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Relative error |x − reference| / max(|reference|, floor); infinite if x or the reference is not finite."""
    x, reference = (y.detach().cpu().double() for y in (x, reference))  # Apple's GPUs have no float64
    if not bool(x.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    size = max(float(reference.norm()), floor)
    return float((x - reference).norm()) / size if size else float((x - reference).norm())


def worst(computed: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of several gradients, each relative to its own norm, however small it is."""
    return max(relative(g, e) for g, e in zip(computed, expected, strict=True))
