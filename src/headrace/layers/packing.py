"""Sequences side by side in a batch, or one after another in a pack: where each begins, and what came before it.

Padding is lowered to packing: padded tokens are taken out before a mixer and put back after it, so they cannot reach a
convolution, a decay, a memory or a position by construction.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.checks import require
from ..ops.native import convolution
from ..utils.errors import InputError


def unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, D] and mask [B, T] (False: padding) -> (pack [1, tokens, D], cu_seqlens [B + 1], places [tokens])."""
    places = mask.flatten().nonzero().squeeze(1)
    cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))
    return x.flatten(0, 1)[places][None], cu_seqlens, places


def pad(x: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `unpad`, with zeros at the padding. shape: (B, T)."""
    full = x.new_zeros(shape[0] * shape[1], *x.shape[2:])
    return full.index_copy(0, places, x[0]).unflatten(0, tuple(shape))


def restarts(position_ids: Tensor, x: Tensor, attention_mask: Tensor | None = None, seen: int = 0) -> Tensor | None:
    """Where positions [B or 1, T] begin again at 0 within a row: the bounds [N + 1] of the sequences of x [B, T, D],
    row after row. None: position_ids count what attention_mask keeps, or all columns after the `seen` first.

    Raises InputError for any other positions, which no recurrence has."""
    B, T = x.shape[:2]
    shape = list(position_ids.shape)
    require(shape in ([B, T], [1, T]), f"position_ids has shape {shape}; expected [{B}, {T}]")
    positions = position_ids.to(x.device).expand(B, T)
    kept = x.new_ones(B, seen + T, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    expected = (kept.cumsum(1) - 1)[:, -T:]
    if ((positions == expected) | ~kept[:, -T:]).all():
        return None
    follows = F.pad(positions[:, 1:] == positions[:, :-1] + 1, (1, 0)) | ((positions == 0) & (seen == 0))
    if not follows.all():
        row, at = follows.logical_not().nonzero()[0].tolist()
        last, wrong = positions[row, max(at - 1, 0)].item(), positions[row, at].item()
        found = f"go from {last} to {wrong}; expected {last + 1}" if at else f"begin with {wrong}; expected {seen}"
        raise InputError(f"position_ids of row {row} {found}" + (", or 0 where a sequence begins" if at else ""))
    return F.pad((positions.flatten() == 0).nonzero()[:, 0], (0, 1), value=B * T)


def numbered(seq_idx: Tensor, x: Tensor) -> Tensor | None:
    """The same bounds from the number [B, T] of each token's sequence, as Mamba's kernels take it; None: each row is
    one sequence. Raises InputError for numbers that fall within a row, or are negative, as of padding."""
    B, T = x.shape[:2]
    shape = list(seq_idx.shape)
    require(shape == [B, T], f"seq_idx has shape {shape}; expected [{B}, {T}]")
    require(seq_idx.dtype in (torch.int32, torch.int64), f"seq_idx has dtype {seq_idx.dtype}; expected integers")
    rises = seq_idx.to(x.device).diff(dim=1, prepend=seq_idx.new_zeros(B, 1).to(x.device))
    if (rises < 0).any():
        row, at = (rises < 0).nonzero()[0].tolist()
        last, wrong = seq_idx[row, max(at - 1, 0)].item(), seq_idx[row, at].item()
        found = f"falls from {last} to {wrong}" if at else f"begins with {wrong}"
        raise InputError(f"seq_idx of row {row} {found}; expected 0 or more, and more where a sequence begins")
    begins = rises != 0
    begins[:, :1] = True
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=B * T) if begins[:, 1:].any() else None


def sequences(
    x: Tensor, position_ids: Tensor | None, seq_idx: Tensor | None, attention_mask: Tensor | None, seen: int
) -> Tensor | None:
    """The bounds that `restarts` or `numbered` finds. InputError where both are asked and differ."""
    places = None if position_ids is None else restarts(position_ids, x, attention_mask, seen)
    if seq_idx is None:
        return places
    found = numbered(seq_idx, x)
    if position_ids is not None and (places is None or found is None or not torch.equal(places, found)):
        require(places is found, "seq_idx marks other sequences than position_ids; expected the same")
    return found


def pack_rows(
    x: Tensor, bounds: Tensor | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, D] and the bounds of its sequences, from `restarts` -> (one pack [1, B T, D], cu_seqlens); without
    bounds both are as they were."""
    if cu_seqlens is not None:
        found = cu_seqlens.new_tensor([0, x.shape[1]]) if bounds is None else bounds.to(cu_seqlens)
        require(torch.equal(found, cu_seqlens), "position_ids mark other sequences than cu_seqlens; expected the same")
        return x, cu_seqlens
    if bounds is None:
        return x, None
    padded = attention_mask is not None and not attention_mask.all()
    require(not padded, "attention_mask marks padding where position_ids mark a pack; expected one of them")
    return x.reshape(1, -1, x.shape[2]), bounds


def flash_bounds(arguments: dict[str, Any]) -> Tensor | None:
    """The cu_seqlens in arguments that transformers' collators make for FlashAttention, which are taken out."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    q, k, *_ = (arguments.pop(name, None) for name in names)
    same = q is k or (q is not None and k is not None and torch.equal(q, k))
    require(same, "cu_seq_lens_k differs from cu_seq_lens_q; expected the same sequences for both")
    return q


def without_padding(run: Callable[..., tuple[Tensor, Any]], x: Tensor, state: Any, mask: Tensor) -> tuple[Tensor, Any]:
    """run(pack, state, cu_seqlens) on the tokens of x [B, T, D] that mask [B, T] keeps, if there are any
    -> (y [B, T, D], state)."""
    packed, cu_seqlens, places = unpad(x, mask)
    y, state = run(packed, state, cu_seqlens) if packed.shape[1] else (packed, state)
    return pad(y, places, x.shape[:2]), state


def count_tokens(
    x: Tensor, seen: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How many tokens, not counting padding, came before each of x [B, T, D], [B or 1, T], and in all by its end, [N].

    seen [N]: how many came before x."""
    if mask is None:
        sequences = Sequences(x, cu_seqlens)
        positions, new = sequences.positions(seen, x), sequences.lengths(x)
    else:
        positions, new = (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)
        positions = positions if seen is None else positions + seen[:, None]
    return positions, new if seen is None else seen + new


class Sequences:
    """How the tokens of x [B, T, D] divide into N sequences: a row each, or by cu_seqlens [N + 1] within one row."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None):
        self.B, self.T = x.shape[:2]
        self.cu_seqlens = cu_seqlens
        self.count = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cu_seqlens is not None:
            tokens = torch.arange(self.T, device=x.device)
            starts = cu_seqlens[:-1].to(tokens)
            self.owner = torch.searchsorted(starts, tokens, right=True) - 1
            self.within = tokens - starts[self.owner]

    def positions(self, seen: Tensor | None, like: Tensor) -> Tensor:
        """Each token's place in its sequence, [B or 1, T]; seen [N]: how many tokens came before x."""
        if self.cu_seqlens is None:
            tokens = torch.arange(self.T, device=like.device)[None]
            return tokens if seen is None else tokens + seen[:, None]
        return (self.within if seen is None else self.within + seen[self.owner])[None]

    def lengths(self, like: Tensor) -> Tensor:
        if self.cu_seqlens is None:
            return torch.full((self.B,), self.T, device=like.device)
        return self.cu_seqlens.diff()

    def totals(self, like: Tensor) -> Tensor:
        """The length of each token's own sequence, [B or 1, T]."""
        lengths = self.lengths(like)
        return lengths[:, None].expand(-1, self.T) if self.cu_seqlens is None else lengths[self.owner][None]

    def counts(self) -> list[int]:
        """The lengths as numbers, which a pack's tensor on a GPU has to be waited for."""
        return [self.T] * self.B if self.cu_seqlens is None else self.cu_seqlens.diff().tolist()

    def extend(self, x: Tensor, history: Tensor) -> Tensor:
        """x with the h tokens of history [N, h, D] before each sequence: [B, h + T, D], or [1, N h + T, D] packed."""
        if self.cu_seqlens is None:
            return torch.cat([history, x], 1)
        h = history.shape[1]
        full = x.new_zeros(1, self.T + self.count * h, x.shape[2])
        before = (self._begins(h)[:, None] + torch.arange(h, device=x.device)).flatten()
        full = full.index_copy(1, before, history.flatten(0, 1)[None])
        return full.index_copy(1, self.places(h) + h, x)

    def convolve(self, conv: nn.Conv1d, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """A causal depthwise convolution and SiLU over x [B, T, D] -> (the same shape, the next call's history).

        history [N, width − 1, D]: the tokens before x; None: zeros."""
        history = self._before(x, history, conv.kernel_size[0] - 1)
        if convolution.refuses(conv, x):
            y = self.own(F.silu(conv(self.extend(x, history).mT).mT), history.shape[1])
        else:
            y = convolution.run(conv, x, history, self.cu_seqlens)
        return y, self.last(x, history)

    def shift(self, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """The token before each of x [B, T, D] -> (the same shape, the next call's history [N, 1, D])."""
        history = self._before(x, history, 1)
        return self.own(self.extend(x, history)[:, :-1], 1), self.last(x, history)

    def _before(self, x: Tensor, history: Tensor | None, h: int) -> Tensor:
        return x.new_zeros(self.count, h, x.shape[2]) if history is None else history.to(x)

    def places(self, h: int) -> Tensor:
        """Where each own token's window of h earlier tokens begins in what `extend` returns (packed only)."""
        return torch.arange(self.T, device=self.owner.device) + self.owner * h

    def own(self, windows: Tensor, h: int) -> Tensor:
        """Results of windows of h + 1 tokens over an extended tensor -> those of the own tokens, [B, T, D]."""
        return windows if self.cu_seqlens is None else windows[:, self.places(h)]

    def last(self, x: Tensor, history: Tensor) -> Tensor:
        """The last h tokens of each sequence of x, after those of history [N, h, D]: the history of what comes next."""
        h = history.shape[1]
        if self.cu_seqlens is None:
            return torch.cat([history[:, self.T :], x[:, -h:]], 1)  # in memory of its own
        if self.T == 0:
            return history
        places = self.cu_seqlens.diff()[:, None] + torch.arange(-h, 0, device=x.device)  # negative: in the history
        recent = x[0, (self.cu_seqlens[:-1, None] + places).clamp(min=0)]
        earlier = history.gather(1, (h + places).clamp(max=h - 1)[..., None].expand_as(history))
        return torch.where((places >= 0)[..., None], recent, earlier)

    def _begins(self, h: int) -> Tensor:
        assert self.cu_seqlens is not None
        return self.cu_seqlens[:-1] + h * torch.arange(self.count, device=self.cu_seqlens.device)
