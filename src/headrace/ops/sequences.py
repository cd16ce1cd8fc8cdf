"""`Sequences`, the sequences of a batch or of a packed row.

Dimensions: B batch, T tokens, D size of a token, N sequences, h tokens of history.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import as_bounds, check_sequences, sequence_ends
from .parallel.context import current


def avoid_sync(x: Tensor) -> bool:
    """Whether values of x are expensive to know: on another device than the CPU, and in a graph that is compiled."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


class Sequences:
    """The N sequences of x [B, T, D]: the rows, or the sequences packed in one row with bounds cu_seqlens [N + 1].

    Models and layers make it from a user's cu_seqlens by `Sequences.of`, which checks the bounds; a model's layers pass
    it on. `linear_attention`, which takes a tensor, checks its bounds itself. Under `context_parallel`, x is one
    process's part of the row, and positions are those in the whole row."""

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: "Tensor | Sequences | None") -> "Sequences":
        """Returns the checked sequences of x [B, T, ·]; a Sequences, which is of these dimensions, as it is.

        The values of the bounds are checked where nothing has to wait for them, and where x is the whole row.

        Raises:
            InputError: for what is no tensor of integers [N + 1] on the device of x, for several rows, and for bounds
                that do not ascend from 0 to T.
        """
        if isinstance(cu_seqlens, Sequences):
            return cu_seqlens
        bounds = as_bounds(cu_seqlens)
        check_sequences(bounds, x)
        if bounds is not None and current() is None and not avoid_sync(bounds):
            sequence_ends(bounds, x.shape[1])
        return cls(x, bounds)

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None):
        self.B, self.T = x.shape[:2]
        part = current()
        self.borders = None if part is None else part.borders(cu_seqlens, x)
        self.offset = 0 if self.borders is None else self.borders.offset
        self.bounds = cu_seqlens  # in the whole row
        self.cu_seqlens = cu_seqlens if self.borders is None else self.borders.cu_seqlens
        self.count = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cu_seqlens is not None:
            tokens = torch.arange(self.T, device=x.device) + self.offset
            starts = cu_seqlens[:-1].to(tokens)
            self.owner = torch.searchsorted(starts, tokens, right=True) - 1
            self.within = tokens - starts[self.owner]

    @property
    def packed(self) -> bool:
        """Whether the sequences lie in one row with bounds."""
        return self.bounds is not None

    def tokenwise(self, module: Callable[..., Any], x: Tensor, **options: Any) -> Any:
        """Calls a module that computes each token of x [B, T, ·] by itself."""
        return module(x, **options)

    @cached_property
    def ends(self) -> list[int]:
        """cu_seqlens on the host. Synchronizes a GPU, at the first call."""
        assert self.cu_seqlens is not None
        return self.cu_seqlens.tolist()

    def positions(self, seen: Tensor | None, like: Tensor) -> Tensor:
        """Returns each token's position in its sequence, [B or 1, T]. seen [N]: number of tokens before x."""
        if self.cu_seqlens is None:
            if seen is not None and self.T == 1:
                return seen[:, None] + self.offset if self.offset else seen[:, None]
            tokens = torch.arange(self.offset, self.offset + self.T, device=like.device)[None]
            return tokens if seen is None else tokens + seen[:, None]
        return (self.within if seen is None else self.within + seen[self.owner])[None]

    def lengths(self, like: Tensor) -> Tensor:
        """Returns the lengths [N] of the sequences up to the last token of x, on the device of `like`."""
        end = self.offset + self.T
        if self.bounds is None:
            return torch.full((self.B,), end, device=like.device)
        return self.bounds.diff() if self.borders is None else self.bounds.clamp(max=end).diff()

    def counted(self, seen: Tensor | None, like: Tensor) -> Tensor:
        """Returns the number of tokens [N] up to the last one of x, if `seen` [N] are before x."""
        if seen is None:
            return self.lengths(like)
        return seen + (self.offset + self.T if self.bounds is None else self.lengths(like))

    def totals(self, like: Tensor) -> Tensor:
        """Returns the length of each token's sequence, [B, T], or [1, T] packed."""
        lengths = self.lengths(like)
        return lengths[:, None].expand(-1, self.T) if self.cu_seqlens is None else lengths[self.owner][None]

    @property
    def pairs(self) -> Tensor:
        """Which tokens of the packed row are of one sequence, [1, T, T] bool."""
        return (self.owner[:, None] == self.owner)[None]

    def counts(self) -> list[int]:
        """Returns the lengths as a list. Synchronizes a GPU if the sequences are packed."""
        return [self.T] * self.B if not self.packed else [end - start for start, end in pairwise(self.ends)]

    def all_bounds(self) -> Tensor:
        """Returns the bounds [N + 1] of the sequences in the rows one after another; those of rows lie on the CPU."""
        return torch.arange(self.count + 1, device="cpu") * self.T if self.cu_seqlens is None else self.cu_seqlens

    def extend(self, x: Tensor, history: Tensor) -> Tensor:
        """Puts the h tokens of history [N, h, D] before each sequence: [B, h + T, D], or [1, N h + T, D] packed."""
        if self.cu_seqlens is None:
            return torch.cat([history, x], 1)
        h = history.shape[1]
        full = x.new_zeros(1, self.T + self.count * h, x.shape[2])
        begins = self.cu_seqlens[:-1] + h * torch.arange(self.count, device=x.device)
        before = (begins[:, None] + torch.arange(h, device=x.device)).flatten()
        full = full.index_copy(1, before, history.flatten(0, 1)[None])
        return full.index_copy(1, self.places(h) + h, x)

    def shift(self, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the token before each token of x [B, T, D], and the next history [N, 1, D]."""
        history = self.before(x, history, 1)
        return self.drop_history(self.extend(x, history)[:, :-1], 1), self.last(x, history)

    def before(self, x: Tensor, history: Tensor | None, h: int) -> Tensor:
        """Returns the h tokens before each sequence of x, [N, h, D]: history, or zeros for None."""
        history = x.new_zeros(self.count, h, x.shape[2]) if history is None else history.to(x)
        return history if self.borders is None else self.borders.history(x, history)

    def places(self, h: int) -> Tensor:
        """Returns the index in `extend`'s result at which each token's window of h earlier tokens begins (packed)."""
        return torch.arange(self.T, device=self.owner.device) + self.owner * h

    def drop_history(self, windows: Tensor, h: int) -> Tensor:
        """Selects the results of those windows of h + 1 tokens that end at a token of x: [B, T, D]."""
        return windows if self.cu_seqlens is None else windows[:, self.places(h)]

    def last(self, x: Tensor, history: Tensor) -> Tensor:
        """Returns the next history: the last h tokens of history [N, h, D] followed by x, for each sequence."""
        h = history.shape[1]
        if self.cu_seqlens is None:
            if torch.compiler.is_compiling():  # slices of less would make the range of a dynamic T begin above h
                return torch.cat([history, x], 1)[:, self.T :].clone()
            return torch.cat([history[:, self.T :], x[:, -h:]], 1)  # a copy, which shares no memory with x
        # Negative places are in the history.
        places = self.cu_seqlens.diff()[:, None] + torch.arange(-h, 0, device=x.device)
        recent = x[0, (self.cu_seqlens[:-1, None] + places).clamp(min=0)]
        earlier = history.gather(1, (h + places).clamp(max=h - 1)[..., None].expand_as(history))
        return torch.where((places >= 0)[..., None], recent, earlier)
