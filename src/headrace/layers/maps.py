"""Attention maps: the weights A [B, H, T, L] of values in what the heads of a mixer read, before skip, norm and gates.
Softmax attention has its probabilities, and a recurrence that is linear in its values its effective attention.

A mixer calls `mixed` where it turns values into outputs. If a map is asked for, `mixed` computes it, by the rows of the
identity matrix as values, and what the heads read as A v, so that the map has a gradient.

Dimensions: B batch, T tokens, L columns of the map, H heads (Hv of the values), V value dimension per head, N sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.checks import require
from ..ops.parallel.context import refuse_parts
from .packing import pad

Mix = Callable[[Tensor], tuple[Any, ...]]


class Wanted(NamedTuple):
    """A map that is asked for in a call of a mixer."""

    mask: Tensor | None  # [B, T] of the call; False marks padding
    found: list[Tensor]


_wanted: dict[int, Wanted] = {}  # by thread; empty unless a map is asked for


def wanted() -> Wanted | None:
    """The map that is asked for in this thread."""
    return _wanted.get(get_ident()) if _wanted else None


@contextmanager
def _asking(call: Wanted | None) -> Iterator[None]:
    before = wanted()
    _set(call)
    try:
        yield
    finally:
        _set(before)


def _set(call: Wanted | None) -> None:
    if call is None:
        _wanted.pop(get_ident(), None)
    else:
        _wanted[get_ident()] = call


def with_map(mixer: Any, maps: list[Tensor | None], x: Tensor, state: Any, **where: Any) -> tuple[Tensor, Any]:
    """Calls a mixer, and appends its map [B, H, T, L] to `maps`, with zeros at the padding; None if it has no map.

    L counts the columns of the state, if it keeps them one by one, and T. The map of softmax attention to sequences
    that are packed is detached."""
    refuse_parts(mixer)
    call = Wanted(where["mask"], [])
    with _asking(call):
        result = mixer.forward(x, state, **where)
    found = call.found
    if len(found) > 1 or (found and found[0].shape[2] != x.shape[1]):  # of each sequence
        found = [_assembled(found, x, call.mask, where["cu_seqlens"])]
    maps.append(next(iter(found), None))
    return result


def mixed(
    mix: Mix, values: Tensor, *, whole: bool = False, columns: Tensor | None = None, linear: Mix | None = None
) -> tuple[Any, ...]:
    """Returns mix(values): (out [B, T, H, V], and more). out is affine in the values [B, T, Hv, V].

    Args:
        whole: whether the values are those of all columns [B, L, Hv, V], with those that the state has.
        columns: the column [B, L] of each of all values, if they are in another order; −1: none.
        linear: computes out for other values, if `mix` does it only for these.
    """
    call = wanted()
    if call is None:
        return mix(values)
    whole, again = whole or columns is not None, linear or mix
    mask, packed = call.mask, call.mask is not None and not whole
    with _asking(None):  # a mixer inside would ask for its own
        _, *more = mix(values)
        base = again(torch.zeros_like(values))[0]  # what is read from the state
        if packed:
            assert mask is not None
            places = mask.flatten().nonzero().squeeze(1)
            rows = _of_identity(again, values, base, places[None] % mask.shape[1], mask.shape[1])
            rows, values = (pad(y, places, mask.shape) for y in (rows, values))
        else:
            given = torch.arange(values.shape[1], device=values.device)[None] if columns is None else columns
            width = int(given.max()) + 1
            rows = _of_identity(again, values, base, given, width)
            values = values if columns is None else _at_columns(values, columns, width)
    A = rows.transpose(1, 2)
    if whole and mask is not None and mask.shape == (A.shape[0], A.shape[2]):
        A = A.masked_fill(~mask[:, None, :, None], 0)
    call.found.append(A)
    out = torch.einsum("bhts,bshv->bthv", A, values.repeat_interleave(A.shape[1] // values.shape[2], 2).to(A.dtype))
    return base + (out.flatten(0, 1)[places][None] if packed else out), *more


def _of_identity(mix: Mix, values: Tensor, base: Tensor, columns: Tensor, width: int) -> Tensor:
    """Returns the weights [B, T, H, width] of values at these columns [B or 1, L]: what is read if each value is a row
    of the identity matrix. As many of its columns as there are channels of a value are read at once."""
    channels, pieces = torch.arange(values.shape[-1], device=values.device), []
    for start in range(0, width, len(channels)):
        identity = (columns[..., None] == channels + start).to(values.dtype)
        pieces.append(mix(identity[:, :, None].expand_as(values))[0] - base)
    return torch.cat(pieces, -1)[..., :width]


def _at_columns(values: Tensor, columns: Tensor, width: int) -> Tensor:
    """Returns values [B, L, Hv, V] at their columns [B, L], as [B, width, Hv, V]; those at −1 are dropped."""
    at = torch.where(columns < 0, width, columns)[..., None, None].expand_as(values)
    return values.new_zeros(len(values), width + 1, *values.shape[2:]).scatter(1, at, values)[:, :width]


def _assembled(pieces: list[Tensor], x: Tensor, mask: Tensor | None, cu_seqlens: Any) -> Tensor:
    """Returns the map of the rows of x [B, T, D] from those of its sequences, [1, H, T_n, T_n] each."""
    (B, T), device = x.shape[:2], x.device
    if mask is not None:
        places = [(row, each.nonzero().squeeze(1)) for row, each in enumerate(mask)]
    else:
        ends = getattr(cu_seqlens, "bounds", cu_seqlens).tolist()
        places = [(0, torch.arange(*bounds, device=device)) for bounds in zip(ends, ends[1:], strict=False)]
    full = pieces[0].new_zeros(B, pieces[0].shape[1], T, T)
    for A, (row, columns) in zip(pieces, places, strict=True):
        own = A.shape[2] == A.shape[3]
        require(own, "maps are asked for of packed sequences that continue a state; expected each in a row of its own")
        full[row][:, columns[:, None], columns] = A[0].detach()
    return full
