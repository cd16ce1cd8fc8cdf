"""What a cache has read: the tokens of its columns, from which a state can be computed again.

Dimensions: B batch, C columns, D hidden size.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.errors import InputError

LOOSE = 64  # calls of one token are joined when there are so many


class Call(NamedTuple):
    """The columns from `start` to `end` of a cache, which were read together."""

    start: int
    end: int
    tokens: Tensor | str  # ids [B, C], or [B] of one column; embeddings [B, C, D]; or why they are not kept
    mask: Tensor | None = None  # [B, C] bool; False marks padding

    def part(self, start: int, end: int) -> "Call":
        """Returns the columns from `start` to `end` alone."""
        if (start, end) == self[:2] or isinstance(self.tokens, str):
            return Call(start, end, self.tokens, self.mask)
        columns = slice(start - self.start, end - self.start)
        return Call(start, end, self.tokens[:, columns], None if self.mask is None else self.mask[:, columns])

    @property
    def ids(self) -> Tensor:
        """The ids [B, C]."""
        assert isinstance(self.tokens, Tensor)
        return self.tokens[:, None] if self.tokens.dim() == 1 else self.tokens

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the embeddings [B, C, D]."""
        assert isinstance(self.tokens, Tensor)
        return self.tokens if self.tokens.dim() == 3 else embed(self.ids)

    def padding(self, sequences: int) -> Tensor:
        """Returns the mask [B, C], also without padding."""
        if self.mask is not None:
            return self.mask
        device = self.tokens.device if isinstance(self.tokens, Tensor) else None
        return torch.ones(sequences, self.end - self.start, dtype=torch.bool, device=device)


class Record:
    """The calls that a cache has read, one after another."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._most = LOOSE

    def add(self, start: int, end: int, tokens: Tensor | str, mask: Tensor | None = None) -> None:
        """Adds a call. Its tensors must not be changed afterwards. A compiled graph adds none."""
        if torch.compiler.is_compiling():
            return
        self._fill(start)
        self.calls.append(Call(start, end, tokens, mask))
        if len(self.calls) > self._most:
            self.calls = _joined(self.calls)
            self._most = len(self.calls) + LOOSE

    def _fill(self, end: int) -> None:
        start = self.calls[-1].end if self.calls else 0
        if start < end:
            self.calls.append(Call(start, end, "were read in a compiled graph, which does not keep their tokens"))

    def cut(self, end: int) -> None:
        """Forgets the columns from `end` on."""
        self.calls = [call.part(call.start, min(call.end, end)) for call in self.calls if call.start < end]

    def between(self, start: int, end: int) -> list[Call]:
        """Returns the calls from column `start` to `end`. Raises InputError for tokens that are not kept."""
        self._fill(end)
        calls = [c.part(max(c.start, start), min(c.end, end)) for c in self.calls if c.start < end and c.end > start]
        for call in calls:
            if isinstance(call.tokens, str):
                raise InputError(f"columns {call.start} to {call.end} {call.tokens}")
        return calls

    def ids(self, end: int) -> tuple[Tensor, Tensor] | None:
        """Returns the ids [B, end] and their mask, or None if not all columns are of ids that are kept."""
        self._fill(end)
        calls = [call for call in self.calls if call.start < call.end]
        rows = [call.ids for call in calls if isinstance(call.tokens, Tensor) and call.tokens.dim() < 3]
        if not rows or len(rows) < len(calls):
            return None
        return torch.cat(rows, 1), torch.cat([call.padding(len(rows[0])) for call in calls], 1)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to the rows of all tensors."""
        self.calls = [
            call
            if isinstance(call.tokens, str)
            else call._replace(tokens=function(call.tokens), mask=None if call.mask is None else function(call.mask))
            for call in _joined(self.calls)
        ]


def _joined(calls: list[Call]) -> list[Call]:
    """Joins consecutive calls with ids and without padding."""
    joined = []
    for _, group in groupby(enumerate(calls), lambda pair: -1 if has_ids_alone(pair[1]) else pair[0]):
        members = [call for _, call in group]
        ids = [call.ids for call in members] if len(members) > 1 else []
        joined.append(Call(members[0].start, members[-1].end, torch.cat(ids, 1)) if ids else members[0])
    return joined


def has_ids_alone(call: Call) -> bool:
    return isinstance(call.tokens, Tensor) and call.tokens.dim() < 3 and call.mask is None
