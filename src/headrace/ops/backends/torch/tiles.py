"""Splits the tokens of a call into chunks of equal length, and joins them again.

The number and the length of the chunks depend on shapes only, so that nothing waits for a device: a packed batch of N
sequences has at most T // C + N chunks, and a chunk never has tokens of two sequences. Tokens that fill up a chunk are
zeros, which neither change the memory nor decay it.

Dimensions: B batch, T tokens, H heads of v (q and k may have fewer; q may have r for each), N sequences, C tokens per
chunk, K key, V value. A tile is a chunk of one head; M = chunks · B · H tiles, the chunks outermost. What belongs to
queries has r·C rows in a tile: the C tokens of the first query of a group, then those of the next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call import Call, accumulator, product
from ...checks import check_bounds
from .decay import NoDecay, ScalarDecay, VectorDecay, block_length


class Grid(NamedTuple):
    """The chunks of a call: their number, their length, and whether the forward keeps their states."""

    chunks: int
    length: int
    keeps: bool


def grid(call: Call) -> Grid:
    """Returns the grid of a call, from its shapes alone."""
    (_, T, _, V), K, C = call.v.shape, call.k.shape[-1], chunk_size(call)
    keeps = K * V <= C * (2 * K + V)  # where the states of whole chunks are no larger than q, k and v
    if call.cu_seqlens is None:
        chunks = -(-T // C)
        C = -(-T // chunks)  # balanced: 65 tokens in chunks of 64 are two chunks of 33
    else:
        C = min(C, T)
        chunks = T // C + call.sequences
    if call.log_decay is not None and call.log_decay.dim() == 4:
        C = -(-C // block_length(C)) * block_length(C)
    return Grid(chunks, C, keeps)


def chunk_size(call: Call) -> int:
    """Returns the call's chunk size, or by default a power of two between 16 and 64 near the mean of K and V: in larger
    chunks the C×C work inside a chunk costs more than the K×V work between chunks saves."""
    return call.chunk_size or min(64, max(16, 1 << ((call.k.shape[-1] + call.v.shape[-1]) // 2 - 1).bit_length()))


def at_once(device: torch.device) -> bool:
    """Whether all chunks are computed at once. A CPU computes them one by one, while they are in its caches."""
    return device.type != "cpu"


class Chunks:
    """The chunks of a call, on its device."""

    def __init__(self, call: Call):
        self.count, self.length, self.keeps = grid(call)
        (self.B, self.T, self.H, self.V), self.K = call.v.shape, call.k.shape[-1]
        self.groups, self.dtype, self.device = self.H // call.k.shape[2], accumulator(call.q), call.v.device
        self.queries = call.queries
        self.sequences = None if call.cu_seqlens is None else Packed(call.cu_seqlens, self.T, self.count, self.length)

    def parts(self) -> list[tuple[range, slice]]:
        """Returns the parts that are computed at once: their chunks, and where their tiles are."""
        tiles, size = self.B * self.H, self.count if at_once(self.device) else 1
        starts = range(0, self.count, size)
        return [(range(c, c + size), slice(c * tiles, (c + size) * tiles)) for c in starts]

    def new_states(self, count: int) -> Tensor:
        """Returns room for the states of chunks or sequences, [count, N, K, V] or [count, H, K, V] of one row."""
        return torch.empty(count, self.B * self.H, self.K, self.V, dtype=self.dtype, device=self.device)

    def split(self, *tensors: Tensor | None) -> list[Any]:
        """Converts tensors [B, T, H or H/groups, ·] or [B, T, H], if not None, to tiles [M, C, ·]; those of r queries
        per head, [B, T, H r, ·] or [B, T, H r], have r times as many columns."""
        columns = [None if x is None else self._columns(x) for x in tensors]
        given = [x for x in columns if x is not None]
        x = self._rows(torch.cat(given, -1).flatten(2, 3))
        x = x.unflatten(1, (self.count, self.length)).permute(1, 0, 3, 2, 4)
        x = x.to(self.dtype, memory_format=torch.contiguous_format).flatten(0, 2)
        parts = iter(x.split([y.shape[-1] for y in given], -1))
        return [None if x is None else next(parts) for x in columns]

    def _columns(self, x: Tensor) -> Tensor:
        """Converts one of `split`'s tensors to [B, T, H/groups, groups, ·]."""
        if x.dim() == 3:
            x = x[..., None]
        if x.shape[2] > self.H:
            x = x.unflatten(2, (self.H, -1)).flatten(3)
        if x.shape[2] == self.H:
            return x.unflatten(2, (-1, self.groups))
        return x[:, :, :, None].expand(-1, -1, -1, self.groups, -1)

    def _rows(self, x: Tensor) -> Tensor:
        """Puts the tokens of x [B, T, ·] into the rows of their chunks: [B, chunks · C, ·]."""
        size = self.count * self.length
        if self.sequences is None:
            return F.pad(x, (0, 0, 0, 0, 0, size - self.T)) if size > self.T else x
        return x.new_zeros(x.shape[0], size, *x.shape[2:]).index_copy_(1, self.sequences.rows, x)

    def by_query(self, x: Tensor | None) -> Tensor | None:
        """Converts one of `split`'s results for r queries per head, [M, C, r ·], to [M, r·C, ·]."""
        if x is None or self.queries == 1:
            return x
        return x.unflatten(2, (self.queries, -1)).transpose(1, 2).flatten(1, 2)

    def new_tiles(self, columns: int, dtype: torch.dtype, queries: int = 1) -> Tensor:
        """Returns room for the tiles of all chunks, [chunks, B, H, r, C, columns], with tokens in order in memory."""
        shape = (self.B, self.count, self.length, self.H, queries, columns)
        return torch.empty(shape, dtype=dtype, device=self.device).permute(1, 0, 3, 4, 2, 5)

    def join(self, tiles: Tensor) -> Tensor:
        """Returns the tokens [B, T, H r, ·] of `new_tiles`."""
        rows = tiles.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
        if self.sequences is not None:
            return rows.index_select(1, self.sequences.rows)
        return rows[:, : self.T].contiguous() if rows.shape[1] > self.T else rows

    def store(self, tiles: Tensor, part: range, function: Callable, *tensors: Tensor | None) -> None:
        """Computes a function of tensors [M, ·, ·] of a part of the chunks, into their place in `new_tiles`."""
        tile, C = (len(part), self.B, self.H), self.length
        views = [x if x is None else x.view(*tile, x.shape[1] // C, C, x.shape[2]) for x in tensors]
        function(*views, out=tiles[part.start : part.stop])


class Packed:
    """The chunks of packed sequences with bounds cu_seqlens [N + 1].

    rows [T]: each token's row among the rows of all chunks. first, last [N]: each sequence's first and last chunk.
    empty [N]: whether a sequence has no tokens. owner [chunks]: the sequence of each chunk; chunks without tokens
    belong to the last one."""

    def __init__(self, cu_seqlens: Tensor, T: int, chunks: int, length: int):
        check_bounds(cu_seqlens, T)
        ends = cu_seqlens.long()
        counts = (ends.diff() + length - 1) // length
        after = counts.cumsum(0)
        first = after - counts
        self.first, self.last, self.empty = first.clamp(max=chunks - 1), (after - 1).clamp_(min=0), counts == 0
        tokens, self.places = torch.arange(T, device=ends.device), torch.arange(chunks, device=ends.device)
        shift = first * length - ends[:-1]
        self.rows = tokens + shift[torch.searchsorted(ends[1:], tokens, right=True)]
        self.owner = torch.searchsorted(after, self.places, right=True).clamp_(max=len(counts) - 1)

    def is_at(self, edges: Tensor) -> Tensor:
        """Returns whether each chunk is the first or the last of its sequence, [chunks]. edges: `first` or `last`."""
        return self.places == edges[self.owner]


def plus_product(total: Tensor | None, x: Tensor, y: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Returns total + x y, with None for total = 0 and y = 1."""
    if total is None:
        return product(x, y, out)
    return torch.add(total, x, out=out) if y is None else torch.addcmul(total, x, y, out=out)


class Tiles(NamedTuple):
    """The inputs of chunks in the accumulator's dtype, [M, C, ·], or None. d_out: the gradient to the output. factor:
    what scales k where it writes: β, and w under the additive rule, since k usually has fewer columns than v."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    write_gate: Tensor | None
    read_gate: Tensor | None
    d_out: Any
    factor: Any
    delta: bool
    kind: type[NoDecay]

    @classmethod
    def of(cls, call: Call, chunks: Chunks, d_out: Tensor | None = None) -> "Tiles":
        """Returns the tiles of all chunks."""
        g = call.log_decay
        g = g.expand(call.v.shape[:3]) if g is not None and g.dim() == 1 else g
        kind = kind_of(g)
        tensors = (call.q, call.k, call.v, g, call.beta, call.write_gate, call.read_gate, d_out)
        q, k, v, g, beta, write_gate, read_gate, d_out = chunks.split(*tensors)
        q, read_gate, d_out = (chunks.by_query(x) for x in (q, read_gate, d_out))
        factor = beta if call.delta else product(beta, write_gate)
        return cls(q, k, v, g, beta, write_gate, read_gate, d_out, factor, call.delta, kind)  # type: ignore[arg-type]

    def part(self, where: slice) -> "Tiles":
        """Returns some of the tiles."""
        return Tiles._make(x[where] if isinstance(x, Tensor) else x for x in self)

    def new_gradients(self, chunks: Chunks, decay_gradient: bool) -> dict[str, Tensor]:
        """Returns room for the gradient of each input that has one."""
        wanted = Tiles._fields[:3] + Tiles._fields[3 if decay_gradient else 4 : 7]
        given = {name: x for name in wanted if (x := getattr(self, name)) is not None}
        return {n: chunks.new_tiles(x.shape[2], chunks.dtype, x.shape[1] // chunks.length) for n, x in given.items()}

    def decay(self, taint: Tensor | None = None) -> NoDecay:
        """Returns the operators for the readers and writers. taint [M, C, 1], if any, is added to the writers."""
        y, q = plus_product(taint, self.k, self.factor), product(self.q, self.read_gate)
        return self.kind(torch.cat([q, self.k], 1) if self.delta else q, y, self.log_decay, self.delta)


def kind_of(log_decay: Tensor | None) -> type[NoDecay]:
    """Returns the class of a decay None, [B, T, H] or [B, T, H, K]."""
    if log_decay is None:
        return NoDecay
    return ScalarDecay if log_decay.dim() == 3 else VectorDecay
