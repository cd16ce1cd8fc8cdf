"""Batches of sequences: rows of equal length, packed sequences, and padding.

A padded batch is converted to packed sequences before a mixer and back after it, so that padding cannot affect a
convolution, a decay, a memory or a position.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ops.checks import check_tensor, require
from ..ops.modules import is_watched
from ..ops.sequences import Sequences, avoid_sync
from ..utils.errors import InputError


def unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Removes padding: x [B, T, D], mask [B, T] (False: padding) -> (pack [1, tokens, D], cu_seqlens [B + 1], places
    [tokens], the tokens' indices in x.flatten(0, 1))."""
    places = mask.flatten().nonzero().squeeze(1)
    return x.flatten(0, 1)[places][None], F.pad(mask.sum(1).cumsum(0), (1, 0)), places


def pad(x: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Inverts `unpad`: x [1, tokens, D] -> [B, T, D] with zeros at the padding. shape: (B, T)."""
    return x.new_zeros(shape[0] * shape[1], *x.shape[2:]).index_copy(0, places, x[0]).unflatten(0, tuple(shape))


class UnpaddedSequences(Sequences):
    """The sequences of a pack [1, tokens, ·] of a padded batch.

    places: [tokens], the indices of the tokens in the flattened rows. shape: (B, T) of the rows."""

    def __init__(self, pack: Tensor, cu_seqlens: Tensor, places: Tensor, shape: torch.Size):
        super().__init__(pack, cu_seqlens)
        self.from_rows, self.shape = places, shape

    def tokenwise(self, module: Callable[..., Any], x: Tensor, **options: Any) -> Any:
        """As in the base; hooks and adapters of the module see the rows [B, T, ·] of the padded batch."""
        if isinstance(module, nn.Module) and not is_watched(module):
            return module(x, **options)
        result = module(pad(x, self.from_rows, self.shape), **options)
        return tree_map(lambda y: y.flatten(0, 1)[self.from_rows][None], result)


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x [B, T, D] with zeros at the padding. mask [B, T]: False marks padding; None: no padding."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def restarts(position_ids: Tensor, x: Tensor, attention_mask: Tensor | None = None, seen: int = 0) -> Tensor | None:
    """Returns the bounds [N + 1] of the sequences that begin where position_ids restart at 0, over the rows of x one
    after another, or None if every row is one sequence.

    Args:
        position_ids: [B or 1, T].
        x: [B, T, D].
        attention_mask: [B, T] or [B, seen + T]; 0 marks padding, which has no position.
        seen: number of tokens before x.

    Raises:
        InputError: for positions that neither count up nor restart at 0, which a recurrence cannot represent.
    """
    B, T = x.shape[:2]
    check_tensor("position_ids", position_ids)
    shape = list(position_ids.shape)
    require(shape in ([B, T], [1, T]), f"position_ids has shape {shape}; expected [{B}, {T}]")
    positions = position_ids.to(x.device).expand(B, T)
    kept = x.new_ones(B, seen + T, dtype=torch.bool) if attention_mask is None else attention_mask.to(x.device).bool()
    before = kept.shape[1] - T  # not [:, -T:], which for T = 0 is all of them
    if ((positions == (kept.cumsum(1) - 1)[:, before:] + seen - before) | ~kept[:, before:]).all():
        return None
    follows = F.pad(positions[:, 1:] == positions[:, :-1] + 1, (1, 0)) | ((positions == 0) & (seen == 0))
    if not follows.all():
        row, at = follows.logical_not().nonzero()[0].tolist()
        last, wrong = positions[row, max(at - 1, 0)].item(), positions[row, at].item()
        step = f"go from {last} to {wrong}; expected {last + 1}" if at else f"begin with {wrong}; expected {seen}"
        raise InputError(f"position_ids of row {row} {step}" + (", or 0 at the start of a sequence" if at else ""))
    return F.pad((positions.flatten() == 0).nonzero()[:, 0], (0, 1), value=B * T)


def numbered(seq_idx: Tensor, x: Tensor) -> Tensor | None:
    """Returns the bounds [N + 1] of the sequences that seq_idx [B, T] numbers, as in Mamba's kernels, or None if every
    row is one sequence. Raises InputError for numbers that are negative or decrease within a row."""
    B, T = x.shape[:2]
    check_tensor("seq_idx", seq_idx)
    shape = list(seq_idx.shape)
    require(shape == [B, T], f"seq_idx has shape {shape}; expected [{B}, {T}]")
    require(seq_idx.dtype in (torch.int32, torch.int64), f"seq_idx has dtype {seq_idx.dtype}; expected integers")
    rises = seq_idx.to(x.device).diff(dim=1, prepend=seq_idx.new_zeros(B, 1).to(x.device))
    if (rises < 0).any():
        row, at = (rises < 0).nonzero()[0].tolist()
        last, wrong = seq_idx[row, max(at - 1, 0)].item(), seq_idx[row, at].item()
        step = f"falls from {last} to {wrong}" if at else f"begins with {wrong}"
        raise InputError(f"seq_idx of row {row} {step}; expected numbers of at least 0 that do not decrease")
    begins = rises != 0
    begins[:, :1] = True
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=B * T) if begins[:, 1:].any() else None


def sequences(
    x: Tensor, position_ids: Tensor | None, seq_idx: Tensor | None, attention_mask: Tensor | None, seen: int
) -> Tensor | None:
    """Returns the bounds from `restarts` or `numbered`. Raises InputError if both are given and differ."""
    places = None if position_ids is None else restarts(position_ids, x, attention_mask, seen)
    if seq_idx is None:
        return places
    bounds = numbered(seq_idx, x)
    if position_ids is not None and (places is None or bounds is None or not torch.equal(places, bounds)):
        require(places is bounds, "seq_idx marks other sequences than position_ids; expected the same sequences")
    return bounds


def check_marks(x: Tensor, position_ids: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor) -> None:
    """Checks on the device of x [1, T, D] that positions and indices [1, T] mark the sequences of cu_seqlens, so that
    nothing waits for their values; they are compared where all sequences have tokens."""
    pack, expected = Sequences.of(x, cu_seqlens), "expected the sequences of cu_seqlens"
    for name, marks in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if marks is not None:
            require(marks.shape == x.shape[:2], f"{name} is not of shape [1, T]; {expected}")
    if position_ids is not None:
        torch._assert_async((position_ids == pack.within).all(), f"position_ids mark other sequences; {expected}")
    if seq_idx is not None:
        same = (seq_idx.diff() != 0) == (pack.owner.diff() != 0)
        torch._assert_async(same.all(), f"seq_idx marks other sequences; {expected}")


def pack_rows(
    x: Tensor, bounds: Tensor | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Packs the rows of x [B, T, D] into [1, B T, D] if they have bounds, which `sequences` returns.

    Returns (x, cu_seqlens); both are unchanged without bounds. Raises InputError for padding in packed rows, and for
    bounds that differ from cu_seqlens."""
    if cu_seqlens is not None:
        marked = cu_seqlens.new_tensor([0, x.shape[1]]) if bounds is None else bounds.to(cu_seqlens)
        same = torch.equal(marked, cu_seqlens)
        require(same, "position_ids or seq_idx mark other sequences than cu_seqlens; expected the same sequences")
        return x, cu_seqlens
    if bounds is None:
        return x, None
    padded = attention_mask is not None and not attention_mask.all()
    require(not padded, "attention_mask marks padding and position_ids mark packed sequences; expected one of the two")
    return x.reshape(1, -1, x.shape[2]), bounds


def flash_bounds(arguments: dict[str, Any]) -> Tensor | None:
    """Removes the FlashAttention arguments of transformers' collators from `arguments`, and returns the cu_seqlens."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    q, k, *_ = (arguments.pop(name, None) for name in names)
    both = "cu_seq_lens_k differs from cu_seq_lens_q; expected the same sequences for both"
    if q is k:
        return q
    check_tensor("cu_seq_lens_q", q)
    check_tensor("cu_seq_lens_k", k)
    require(q.shape == k.shape, both)
    if avoid_sync(q):
        torch._assert_async((q == k.to(q)).all(), both)
    else:
        require(torch.equal(q, k.to(q)), both)
    return q


def without_padding(run: Callable[..., tuple[Tensor, Any]], x: Tensor, state: Any, mask: Tensor) -> tuple[Tensor, Any]:
    """Applies run(pack, state, sequences) to the tokens of x [B, T, D] that mask [B, T] keeps, if any.

    Returns (y [B, T, D], with zeros at the padding, and the next state)."""
    packed, cu_seqlens, places = unpad(x, mask)
    if packed.shape[1] == 0:
        return pad(packed, places, x.shape[:2]), state
    y, state = run(packed, state, UnpaddedSequences(packed, cu_seqlens, places, x.shape[:2]))
    return pad(y, places, x.shape[:2]), state


def padding_last(run: Callable[..., tuple[Tensor, Any]], x: Tensor, state: Any, mask: Tensor) -> tuple[Tensor, Any]:
    """Computes `without_padding` with shapes that do not depend on the mask, so that nothing waits for a device and one
    graph compiles: the padding becomes one more packed sequence, the last, whose results are dropped."""
    (B, T), N = x.shape[:2], x.shape[0] * x.shape[1]
    if N == 0:
        return x, state
    order = mask.logical_not().flatten().to(torch.uint8).argsort(stable=True)
    pack = zeroed(x, mask).flatten(0, 1)[order][None]
    ends = F.pad(torch.cat([mask.sum(1), mask.logical_not().sum()[None]]).cumsum(0), (1, 0))
    if state is not None:
        state = type(state)(*(None if y is None else torch.cat([y, y.new_zeros(1, *y.shape[1:])]) for y in state))
    y, state = run(pack, state, UnpaddedSequences(pack, ends, order, mask.shape))
    y = y.new_zeros(N, *y.shape[2:]).index_copy(0, order, y[0]).unflatten(0, (B, T))
    return zeroed(y, mask), type(state)(*(z if z is None else z[:-1] for z in state))


def token_mask(attention_mask: Tensor) -> Tensor:
    """Returns a bool mask, False at padding. Raises InputError for values other than 0 and 1, as of masks that number
    the sequences of a pack."""
    if attention_mask.dtype is torch.bool:
        return attention_mask
    mask = attention_mask != 0
    known, expected = attention_mask == mask, "expected 0 for padding and 1 for tokens"
    if avoid_sync(attention_mask):
        torch._assert_async(known.all(), f"attention_mask has other values than 0 and 1; {expected}")
    elif not known.all():
        value, packs = attention_mask[~known][0].item(), "packed sequences are given by seq_idx or position_ids"
        raise InputError(f"attention_mask has the value {value}; {expected} ({packs})")
    return mask


def padding_mask(attention_mask: Tensor | None, x: Tensor, packed: bool, seen: int = 0) -> Tensor | None:
    """Returns the padding mask, bool [B, T], of x [B, T, D], or None without padding. packed: whether x is a pack.

    attention_mask: [B, T], or [B, seen + T], whose last T columns belong to x. Raises InputError for shapes that do not
    fit, for values other than 0 and 1, and for padding in packed sequences."""
    B, T = x.shape[:2]
    if attention_mask is None:
        return None
    check_tensor("attention_mask", attention_mask)
    shape = list(attention_mask.shape)
    if shape not in ([B, T], [B, seen + T]):
        both = f"[{B}, {T}]" + f" or, with the tokens before, [{B}, {seen + T}]" * (seen > 0)
        raise InputError(f"attention_mask has shape {shape}; expected {both}")
    mask = token_mask(attention_mask[:, shape[1] - T :].to(x.device))
    both = "attention_mask marks padding in packed sequences; expected cu_seqlens alone"
    if avoid_sync(x):
        if not packed:
            return mask
        torch._assert_async(mask.all(), both)
        return None
    if mask.all():
        return None
    require(not packed, both)
    return mask


def count_tokens(x: Tensor, seen: Tensor | None, mask: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Returns (the position [B or 1, T] of each token of x [B, T, D] in its sequence, the number of tokens [N] at the
    end of x), both without padding. seen [N]: number of tokens before x."""
    if mask is None:
        return sequences.positions(seen, x), sequences.counted(seen, x)
    positions, new = (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)
    return (positions, new) if seen is None else (positions + seen[:, None], seen + new)
