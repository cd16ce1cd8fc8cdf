"""Attention maps: the weights A [B, H, T, L] of values in what the heads of a mixer read, before skip, norm and gates.
Softmax attention has its probabilities, and a recurrence that is linear in its values its effective attention.

    with asking([]) as maps:  # of all mixers that this thread calls, in the order of execution
        model(x)

A mixer calls `mixed` where it turns values into outputs. If a map is asked for, `mixed` computes it, by the rows of the
identity matrix as values, and what the heads read as A v, so that the map has a gradient.

Dimensions: B batch, T tokens, L columns of the map, H heads (Hv of the values), V value dimension per head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import local
from typing import Any, NamedTuple, TypeVar

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
    given: Iterator[Tensor] | None = None  # the maps, if they are known


class Reading(NamedTuple):
    """What the heads of a mixer read: mix(values)[0], which is affine in the values."""

    values: Tensor  # [B, T, Hv, V]
    out: Tensor  # [B, T, H, V]
    mix: Mix


Listener = Callable[[Reading], None]
Asked = TypeVar("Asked", list[Tensor], Wanted, Listener, None)
_thread = local()


def wanted() -> list[Tensor] | Wanted | Listener | None:
    """The list to which every mixer that this thread calls appends its map, the map that is asked for inside a mixer,
    or what is called with the readings of all mixers."""
    return getattr(_thread, "call", None)  # not a ContextVar, which no graph can be compiled with


@contextmanager
def asking(call: Asked) -> Iterator[Asked]:
    """Asks the mixers that this thread calls for maps, for their readings or, in one that is asked, for nothing. Yields
    `call`."""
    outer, _thread.call = wanted(), call
    try:
        yield call
    finally:
        _thread.call = outer


def with_map(mixer: Any, maps: list[Tensor], x: Tensor, state: Any, **where: Any) -> tuple[Tensor, Any]:
    """Calls a mixer, and appends its map [B, H, T, L] to `maps`, with zeros at the padding, if it has one.

    L counts the columns of the state, if it keeps them one by one, and T."""
    refuse_parts(mixer)
    call = Wanted(where["mask"], [])
    with asking(call):
        result = type(mixer).forward(mixer, x, state, **where)
    found = call.found
    if len(found) > 1 or (found and found[0].shape[2] != x.shape[1]):  # of softmax attention, for each sequence
        places = _places(call.mask, where["cu_seqlens"])
        A = _assembled(found, places, x.shape[:2])
        pieces = [A[row][:, columns[:, None], columns][None] for row, columns in places]
        with asking(call._replace(given=iter(pieces))):  # again, so that A has the gradient
            result = type(mixer).forward(mixer, x, state, **where)
        found = [A]
    maps += found[:1]
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
    call, again = wanted(), linear or mix
    if call is None:
        return mix(values)
    if not isinstance(call, Wanted):
        assert callable(call)  # a list is turned into a Wanted before the mixer is called
        call(Reading(values, (result := mix(values))[0], again))
        return result
    rows = None if whole or columns is not None else call.mask  # from which the mixer has taken the padding
    tokens = None if rows is None else rows.flatten().nonzero().squeeze(1)
    with asking(None):  # a mixer inside would ask for its own
        _, *more = mix(values)
        base = again(torch.zeros_like(values))[0]  # what is read from the state
        A = next(call.given) if call.given else _map(again, values, base, columns, tokens, call.mask)
    call.found.append(A)
    if rows is not None and tokens is not None:
        values = pad(values, tokens, rows.shape)
    elif columns is not None:
        values = _at_columns(values, columns, A.shape[3])
    out = torch.einsum("bhts,bshv->bthv", A, values.repeat_interleave(A.shape[1] // values.shape[2], 2).to(A.dtype))
    return base + (out if tokens is None else out.flatten(0, 1)[tokens][None]), *more


def weights(reading: Reading) -> Tensor:
    """Returns the map [B, H, T, T] of sequences that begin with their first value."""
    return _map(reading.mix, reading.values, torch.zeros_like(reading.out), None, None, None)


def _map(
    mix: Mix, values: Tensor, base: Tensor, columns: Tensor | None, tokens: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Returns the map: what is read if each value is the row of the identity matrix for its column. As many columns as
    a value has channels are read at once.

    Args:
        base: what is read if all values are 0.
        columns: [B, L]; None: those of the tokens, or in order.
        tokens: the places of the values in the flattened rows of the mask; None: they lie in rows.
    """
    width = values.shape[1] if columns is None else int(columns.max()) + 1
    if tokens is not None and mask is not None:
        width = mask.shape[1]
        columns = tokens[None] % width
    columns = torch.arange(width, device=values.device)[None] if columns is None else columns
    channels, pieces = torch.arange(values.shape[-1], device=values.device), [base[..., :0]]
    for start in range(0, width, len(channels)):
        identity = (columns[..., None] == channels + start).to(values.dtype)
        pieces.append(mix(identity[:, :, None].expand_as(values))[0] - base)
    rows = torch.cat(pieces, -1)[..., :width]
    if tokens is not None and mask is not None:
        return pad(rows, tokens, mask.shape).transpose(1, 2)
    A = rows.transpose(1, 2)
    return A if mask is None or mask.shape != A.shape[::2] else A.masked_fill(~mask[:, None, :, None], 0)


def _at_columns(values: Tensor, columns: Tensor, width: int) -> Tensor:
    """Returns values [B, L, Hv, V] at their columns [B, L], as [B, width, Hv, V]; those at −1 are dropped."""
    at = torch.where(columns < 0, width, columns)[..., None, None].expand_as(values)
    return values.new_zeros(len(values), width + 1, *values.shape[2:]).scatter(1, at, values)[:, :width]


def _places(mask: Tensor | None, cu_seqlens: Any) -> list[tuple[int, Tensor]]:
    """Returns the row and the columns of each sequence."""
    if mask is not None:
        return [(row, each.nonzero().squeeze(1)) for row, each in enumerate(mask)]
    bounds = getattr(cu_seqlens, "bounds", cu_seqlens)
    return [(0, torch.arange(*ends, device=bounds.device)) for ends in pairwise(bounds.tolist())]


def _assembled(pieces: list[Tensor], places: list[tuple[int, Tensor]], shape: torch.Size) -> Tensor:
    """Returns the map of rows [B, T] from those of their sequences, [1, H, T_n, T_n] each."""
    full = pieces[0].new_zeros(shape[0], pieces[0].shape[1], shape[1], shape[1])
    for A, (row, columns) in zip(pieces, places, strict=True):
        reason = "maps are asked for of packed sequences that continue a state; expected each in a row of its own"
        require(A.shape[2] == A.shape[3], reason)
        full[row][:, columns[:, None], columns] = A[0]
    return full
