"""The part of the chunkwise form that is sequential: states, and gradients to them, from chunk to chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .tiles import Chunks


class Memory:
    """The state before and after each chunk: before, after [chunks, N, K, V], with N the heads of all rows.

    reverse: the gradients to the states, which pass from the last chunk to the first; "before" is what a chunk gets.

    Without packed sequences, `before` and `after` are the same memory, one chunk apart. With them, `before` is given
    where a sequence begins, and resets [chunks] is true there."""

    def __init__(self, chunks: Chunks, state: Tensor | None, reverse: bool = False):
        """state [B or N, H, K, V]: what the sequences begin with; None: zeros."""
        self.chunks, self.reverse = chunks, reverse
        if chunks.sequences is None:
            room = chunks.new_states(chunks.count + 1)
            edge = room[-1 if reverse else 0]
            _ = edge.zero_() if state is None else edge.copy_(state.reshape(edge.shape))
            self.before, self.after = (room[1:], room[:-1]) if reverse else (room[:-1], room[1:])
        else:
            first = chunks.new_states(len(chunks.sequences.first))
            self.first = first.zero_() if state is None else first.copy_(state)
            self.before, self.after = self.first[chunks.sequences.owner], chunks.new_states(chunks.count)
            self.resets = chunks.sequences.is_at(chunks.sequences.last if reverse else chunks.sequences.first)

    def enter(self, c: int) -> Tensor:
        """Returns the state before chunk c, [N, K, V], once the previous chunk is done."""
        last = c + 1 if self.reverse else c - 1
        if self.chunks.sequences is not None and 0 <= last < self.chunks.count:
            torch.where(self.resets[c], self.before[c], self.after[last], out=self.before[c])
        return self.before[c]

    def pass_on(self, part: range, added: Tensor, through: Tensor | None, removed: Tensor | None = None) -> Tensor:
        """Computes S ← through · S + added − removed S for the chunks of a part, and returns `at(part)`.

        Args:
            added: [M, K, V].
            through: [M, K or 1, 1]; None: 1.
            removed: [M, K, K]; None: 0.
        """
        steps = zip(*(self._by_chunk(x, part) for x in (added, through, removed)), part, strict=True)
        for new, decay, forgotten, c in reversed(list(steps)) if self.reverse else steps:
            S, after = self.enter(c), self.after[c]
            if decay is None:
                torch.add(new, S, out=after)
            else:
                torch.addcmul(new, decay, S, out=after)
            if forgotten is not None:
                after.baddbmm_(forgotten, S, alpha=-1)
        return self.at(part)

    @staticmethod
    def _by_chunk(x: Tensor | None, part: range) -> Sequence[Tensor] | list[None]:
        return [None] * len(part) if x is None else x.tensor_split(len(part))

    def at(self, part: range) -> Tensor:
        """Returns the states before the chunks of a part, [M, K, V]."""
        return self.before[part.start : part.stop].flatten(0, 1)

    def result(self) -> Tensor:
        """Returns what the sequences end with, [B or N, H, K, V]."""
        packed = self.chunks.sequences
        if packed is None:
            edge = self.after[0 if self.reverse else -1]
            return edge.view(self.chunks.B, self.chunks.H, *edge.shape[1:]).clone()
        ends = self.after[packed.first if self.reverse else packed.last]
        return torch.where(packed.empty[:, None, None, None], self.first, ends)
