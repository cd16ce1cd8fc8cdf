"""Long sequences in segments that are computed at the same time, where sequences and heads are too few to fill the GPU.

The state after a segment is affine in the state before it, S_out = M S_in + E; M is diagonal for an additive update.

    E      the states after all segments at once, each from zeros
    M      the same without values, from the identity or, for a diagonal, from a column of ones
    S      the states between segments, one after another; then the outputs of all segments at once

In reverse, dS_in = Mᵀ dS_out + dE, with dE the gradient from zeros after the segment. To the kernels a segment is a
packed sequence.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call import TOKENWISE, Call
from ..torch.tiles import check_bounds

FEWEST = 4  # fewer segments gain less than the further passes cost
MOST = 16  # the states are passed on from segment to segment by three launches each
CHUNKS = 4  # the fewest chunks in a segment


class Segments(NamedTuple):
    """The segments of all sequences: as many in each row of a batch, or in packed sequences as their lengths need."""

    bounds: Tensor  # the first token of each segment, and the number of tokens
    rows: int  # whose states are passed on at the same time; 1 for packed sequences
    first: Tensor | None = None  # [N + 1], the first segment of each packed sequence
    owner: Tensor | None = None  # [segments], the packed sequence of a segment

    @property
    def of_a_row(self) -> int:
        return (self.bounds.shape[0] - 1) // self.rows

    def apply(self, call: Call) -> Call:
        """Returns the call with a packed sequence for each segment."""
        joined: dict[str, Any] = {name: _joined(getattr(call, name)) for name in TOKENWISE}
        return call._replace(cu_seqlens=self.bounds, initial_state=None, **joined)

    def relay(self, entry: Tensor, across: Tensor, added: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the states before all segments [segments, H, K, V] and those after all sequences [N, H, K, V].

        entry: the states before the sequences. across: M [segments, H, K, K], or a diagonal, [segments, H, K, 1].
        added: E [segments, H, K, V]. Under `back` all of them, and the results, are the gradients of the other ends."""
        across, added = (x.unflatten(0, (self.rows, -1)) for x in (across, added))
        through = torch.mul if across.shape[-1] == 1 else torch.matmul
        if back and through is torch.matmul:
            across = across.mT
        entries, begins, n = self._entries(entry), self._ends(not back), self.of_a_row
        state, before, after = torch.zeros_like(added[:, 0]), [added[:, 0]] * n, [added[:, 0]] * n
        for i in reversed(range(n)) if back else range(n):
            before[i] = state = torch.where(begins[i], entries[:, i], state)
            after[i] = state = through(across[:, i], state) + added[:, i]
        joined, passed = (torch.stack(states, 1).flatten(0, 1) for states in (before, after))
        return joined, self.last(passed, entry, back)

    def last(self, x: Tensor, entry: Tensor, back: bool = False) -> Tensor:
        """Returns what [segments, ...] has for the last segment of each sequence, or under `back` for the first; for a
        sequence without segments `entry` [N, ...]."""
        if self.first is None:
            return x.unflatten(0, (self.rows, -1))[:, 0 if back else -1].contiguous()
        place = (self.first[:-1] if back else self.first[1:] - 1).clamp(0, x.shape[0] - 1)
        return torch.where((self.first.diff() > 0)[:, None, None, None], x[place], entry)

    def _entries(self, x: Tensor) -> Tensor:
        """Returns what [N, ...] has for the sequence of each segment, [rows, segments of a row, ...]."""
        return x[:, None].expand(-1, self.of_a_row, *x.shape[1:]) if self.owner is None else x[self.owner][None]

    def _ends(self, left: bool) -> Tensor:
        """Returns whether segments are the first (`left`) or the last of their sequence, [segments of a row]."""
        place = torch.arange(self.of_a_row, device=self.bounds.device)
        if self.first is None or self.owner is None:
            return place == (0 if left else self.of_a_row - 1)
        return place == (self.first[self.owner] if left else self.first[self.owner + 1] - 1)


def segments(call: Call, chunk: int, programs: int, processors: int) -> Segments | None:
    """Returns segments of whole chunks, of which as many run at the same time as the GPU has processors; None if whole
    sequences, `programs` at the same time, are as good."""
    (B, T), bounds = call.v.shape[:2], call.cu_seqlens
    length = T if bounds is None else T // max(1, call.sequences)
    n = 1 if programs == 0 else min(processors // programs, length // (CHUNKS * chunk), MOST)
    if n < FEWEST:
        return None
    size = -(-length // (n * chunk)) * chunk
    if bounds is None:
        rows, places = (torch.arange(count, device=call.v.device) for count in (B, n))
        begins = (rows[:, None] * T + (places * size).clamp(max=T)).flatten()
        return Segments(F.pad(begins, (0, 1), value=B * T), B)
    first, owner = pieces(bounds, T, size)
    place = torch.arange(len(owner), device=bounds.device) - first[owner]
    begins = torch.minimum(bounds[owner] + place * size, bounds[owner + 1])
    return Segments(F.pad(begins, (0, 1), value=T), 1, first, owner)


def pieces(bounds: Tensor, T: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the first piece of each of N packed sequences and the number of pieces [N + 1], and the sequence of each
    piece. A piece has `size` tokens, the last of a sequence fewer.

    There is room for as many pieces as any lengths could need, so that nothing waits for the device. Those left over
    belong to the last sequence and begin after its end."""
    check_bounds(bounds, T)
    first = F.pad((bounds.diff() + (size - 1)).div(size, rounding_mode="floor").cumsum(0), (1, 0))
    N = len(bounds) - 1
    owner = torch.searchsorted(first, torch.arange(T // size + N, device=first.device), right=True) - 1
    return first, owner.clamp(max=N - 1)


def _joined(x: Tensor | None) -> Tensor | None:
    """Returns all rows as one; a decay [H] as it is."""
    return x if x is None or x.dim() == 1 else x.flatten(0, 1)[None]
