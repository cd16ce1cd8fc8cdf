"""Runs the laws on a subject. A law that breaks is run again on smaller inputs, until the smallest that breaks it."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...utils.device import WITHOUT_FLOAT64
from ...utils.errors import InputError, reading, require
from ..errors import TOLERANCE, relative
from . import laws
from .adapters import NotOfferedError


class Law(NamedTuple):
    check: Callable
    needs: tuple[str, ...] = ()  # arguments of the adapter's forward, other parts of it, or float64 of the device
    scale: float = 1.0  # its tolerance, in tolerances of the dtype


class Case(NamedTuple):
    """An input of B rows of T tokens, and a place `at` in it where a law splits, pads or crops."""

    B: int
    T: int
    at: int


LAWS = {
    "causal": Law(laws.causal),
    "packed = separate": Law(laws.packed, ("cu_seqlens",)),
    "packed by positions": Law(laws.packed_by_positions, ("positions",)),
    "left-padded = bare": Law(laws.left_padded, ("mask",)),
    "right-padded = bare": Law(laws.right_padded, ("mask",)),
    "left-padded in pieces": Law(laws.left_padded_pieces, ("mask", "state")),
    "left-padded in decoding": Law(laws.left_padded_decoding, ("mask", "state")),
    "pieces = whole": Law(laws.in_pieces, ("state",)),
    "cached = uncached": Law(laws.cached, ("use_cache",)),
    "decoding = whole": Law(laws.decoding, ("state",)),
    "cropped = recomputed": Law(laws.cropped, ("state", "crop")),
    "copied state": Law(laws.copied, ("state",)),
    "reordered state": Law(laws.reordered, ("state", "reorder")),
    "batch order": Law(laws.batch_order),
    "batch size": Law(laws.batch_size),
    "NaN in a row": Law(laws.nan_in_row, ("embed",)),
    "NaN in padding": Law(laws.nan_in_padding, ("embed", "mask")),
    "gradients = float64": Law(laws.gradients, ("float64",), 10),
    "gradients = differences": Law(laws.differences, ("float64",)),
    "state dtype": Law(laws.state_dtype, ("state",)),
    "compile = eager": Law(laws.compiled),
    "saved = loaded": Law(laws.saved),
}
# Tolerances that do not depend on the dtype. Differences are taken in float64; those of modules that compute in float32
# all the same have two or three digits.
OWN_TOLERANCE = {"gradients = differences": 1e-2, "state dtype": torch.finfo(torch.float32).eps}
# More than a chunk of 64, and inputs shorter than a convolution. Gradients need no long ones.
CASES = (Case(3, 67, 33), Case(2, 6, 1), Case(2, 6, 4), Case(2, 6, 5))
SHORT = {law: (Case(2, 9, 4),) for law in ("gradients = float64", "gradients = differences", "compile = eager")}
SHORT |= {"state dtype": (Case(1, 12, 8),), "saved = loaded": (Case(2, 9, 4),)}


class Verdict(NamedTuple):
    law: str
    verdict: str  # holds, breaks, raises or not offered
    error: float | None = None  # relative, the largest of all cases
    tolerance: float | None = None
    case: Case | None = None  # the smallest that breaks the law, or the one that raised
    note: str = ""  # what was raised, what is not offered, or what else the law tells


def verify(
    adapter: Callable[[], dict[str, Any]], only: Iterable[str] | None = None, device: str = "cpu",
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Iterator[Verdict]:  # fmt: skip
    """Yields a verdict for each law on a layer or model, which its adapter describes.

    Args:
        adapter: returns a dict with `module`, an nn.Module; `forward(module, x, ...) -> (y, state)`, whose other
            arguments, of `state`, `mask`, `cu_seqlens`, `positions` and `use_cache`, are those that the module offers;
            `vocabulary`, for token ids [B, T], or `width`, for hidden states [B, T, width]; and, where it offers them,
            `crop(module, x, remove) -> state`, `reorder(state, order) -> state`, `embed(module, ids) -> hidden states`,
            `recurrent(state) -> tensors`, `cast(module, dtype) -> module` and `reload(module) -> module`. mask is
            [B, tokens so far], 1 for a token and 0 for padding; cu_seqlens [N + 1] has the boundaries of N sequences
            in one row.
        only: names of laws; None: all.

    Raises:
        InputError: an unknown law, or an adapter that lacks a part or whose forward cannot run at all.
    """
    names = list(LAWS) if only is None else list(only)
    if unknown := [name for name in names if name not in LAWS]:
        raise InputError(f"--laws={unknown[0]!r}; expected some of {', '.join(LAWS)}")
    require(dtype in TOLERANCE, f"dtype={dtype}; expected one of {', '.join(map(str, TOLERANCE))}")

    offers = offered(adapter) | ({"float64"} if torch.device(device).type not in WITHOUT_FLOAT64 else set())
    subject = laws.prepared(adapter, seed, device, dtype)
    tolerance = tolerated(subject, dtype, seed)
    for name in names:
        if missing := [part for part in LAWS[name].needs if part not in offers]:
            yield Verdict(name, "not offered", note=f"no {' or '.join(missing)}")
        else:
            yield verdict(name, subject, OWN_TOLERANCE.get(name, LAWS[name].scale * tolerance), seed)


def tolerated(subject: SimpleNamespace, dtype: torch.dtype, seed: int) -> float:
    """The dtype's tolerance, or 20 times the distance of the outputs from those of a copy in float64 if that is more,
    because the rounding of many steps adds up; at most 1e-3 in float32. InputError if the module cannot run at all."""
    x = laws.inputs(subject, *CASES[0][:2], seed)
    with torch.no_grad():
        with reading("the adapter's forward(module, x) cannot run"):
            y = fork(subject).run(x)[0]
        try:
            x = x.double() if x.is_floating_point() else x
            exact = subject.forward(laws.in_dtype(subject, torch.float64), x)[0]
        except Exception:  # no float64 there: the laws about gradients say so
            return TOLERANCE[dtype]
    return max(TOLERANCE[dtype], min(20 * relative(y, exact), 1e-3)) if dtype != torch.float64 else TOLERANCE[dtype]


def fork(subject: SimpleNamespace) -> SimpleNamespace:
    """The subject with a module that has not run yet: some keep states of their own."""
    other = SimpleNamespace(**vars(subject))
    other.module = copy.deepcopy(subject.module)
    other.run = lambda x, **parts: other.forward(other.module, x, **parts)
    return other


def offered(adapter: Callable[[], dict[str, Any]]) -> set[str]:
    """The names of what an adapter offers. InputError for one that raises or lacks what every adapter has."""
    with reading("the adapter raises"):
        parts = adapter()
    expected = "expected a dict with module, forward, and vocabulary or width"
    require(isinstance(parts, dict), f"the adapter returns {type(parts).__name__}; {expected}")
    if missing := [part for part in ("module", "forward") if part not in parts]:
        raise InputError(f"the adapter has no {missing[0]!r}; {expected}")
    require(parts.keys() & {"vocabulary", "width"}, f"the adapter has no 'vocabulary' and no 'width'; {expected}")
    return {*parts, *inspect.signature(parts["forward"]).parameters, *(["embed"] if "width" in parts else [])}


def verdict(name: str, subject: SimpleNamespace, tolerance: float, seed: int) -> Verdict:
    largest, note = 0.0, ""
    for case in SHORT.get(name, CASES):
        try:
            error, note = measured(name, fork(subject), case, seed)
        except NotOfferedError as refusal:
            return Verdict(name, "not offered", note=last_line(refusal))
        except Exception as raised:
            return Verdict(name, "raises", None, tolerance, case, last_line(raised))
        largest = max(largest, error)
        if not error <= tolerance:
            smallest = shrunk(name, subject, case, tolerance, seed)
            return Verdict(name, "breaks", error, tolerance, smallest, note)
    return Verdict(name, "holds", largest, tolerance, note=note)


def measured(name: str, subject: SimpleNamespace, case: Case, seed: int) -> tuple[float, str]:
    with torch.no_grad():
        result = LAWS[name].check(subject, laws.inputs(subject, case.B, case.T, seed), case.at)
    return result if isinstance(result, tuple) else (result, "")


def shrunk(name: str, subject: SimpleNamespace, broken: Case, tolerance: float, seed: int) -> Case:
    """The first case that breaks a law, of those with fewer tokens, then with fewer rows."""
    for T, B in product((*range(2, 11), 17, 33, 64, 65), (1, 2, 3)):
        if T > broken.T or B > broken.B:
            continue
        for at in sorted({1, T // 2, T - 1}):
            try:
                if not measured(name, fork(subject), Case(B, T, at), seed)[0] <= tolerance:
                    return Case(B, T, at)
            except Exception:  # another fault, at another size, than the one to show
                continue
    return broken


def last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
