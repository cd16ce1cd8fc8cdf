"""Splits the inputs of the recurrence into chunks, and assembles the gradients from those of the chunks.

Dimensions: B batch, T tokens, H heads (q and k may have fewer), K key, V value, C chunk, N = B·H. Tiles are [N, C, ·].
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...utils.errors import InputError
from ..call import DIFFERENTIABLE, Call, accumulator
from .decay import NoDecay, ScalarDecay, VectorDecay

Span = tuple[int, int]


class Tile(NamedTuple):
    """The inputs of one chunk in the accumulator's dtype: q, k [N, C, K], v [N, C, V], beta and write [N, C, 1].

    q is q' = scale · r q. Under the additive rule k is β w k, and beta and write are None. A token whose value or gates
    have NaN or an infinity gets a NaN key, through which scores pass NaN to the later tokens. Products over the chunk
    replace its value by zeros, because 0 · NaN would affect the earlier tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    write: Tensor | None
    decay: NoDecay | ScalarDecay | VectorDecay


class Inputs:
    """The inputs of the recurrence and their chunks: one list of chunks for a batch, or one per packed sequence."""

    def __init__(self, call: Call):
        self.call, self.chunk_size, self.dtype = call, chunk_size(call), accumulator(call.q)
        (self.B, T, self.H, self.V), self.K = call.v.shape, call.k.shape[-1]
        # Laid out once for all tokens, because an operation on a small tensor takes as long as on a larger one.
        self.beta, self.write, self.read = (self.per_token(x) for x in (call.beta, call.write_gate, call.read_gate))
        self.strength = call.scale if self.read is None else self.read * call.scale
        # Under the additive rule β and w scale k instead of v, since k usually has fewer columns.
        self.factor = None if call.delta else product(self.beta, self.write)
        # NaN for a token with NaN or an infinity in v, β or w, else 0: see `Tile`.
        self.taint = self.per_token((call.v * 0).sum(-1))
        for gate in (self.beta, self.write):
            self.taint = self.taint if gate is None else self.taint + gate * 0
        ends, C = [0, T] if call.cu_seqlens is None else sequence_ends(call.cu_seqlens, T), self.chunk_size
        self.sequences = [[(t, min(t + C, end)) for t in range(start, end, C)] for start, end in pairwise(ends)]
        self.stride = kept_stride(self.K, self.V, C)
        self.kept = sum(len(self.runs(chunks)) for chunks in self.sequences)
        self.base = 1 if call.log_decay is None or call.log_decay.dim() < 4 else block_of(call.log_decay)
        self._fixed: dict[int, ScalarDecay] = {}

    def runs(self, chunks: list[Span]) -> list[list[Span]]:
        """Groups the chunks of a sequence into runs of `stride` chunks. The state at the start of a run is kept."""
        return [chunks[i : i + self.stride] for i in range(0, len(chunks), self.stride)]

    def by_sequence(self, states: Tensor) -> Tensor:
        """Reshapes states from [sequences, N, K, V] to [B or sequences, H, K, V]."""
        return states.view(states.shape[0] * states.shape[1] // self.H, self.H, self.K, self.V)

    def states(self, like: Tensor | None) -> Tensor:
        """Returns a copy of the given states (None: zeros), [sequences, N, K, V]."""
        N = self.B * self.H if len(self.sequences) == 1 else self.H
        shape = (len(self.sequences), N, self.K, self.V)
        if like is None:
            return self.call.q.new_zeros(shape, dtype=self.dtype)
        return like.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(shape)

    def lay_out(self, x: Tensor, span: Span) -> Tensor:
        """Converts the span of [B, T, H or Hq, ·] to [N, C, ·] in the accumulator's dtype."""
        x = x[:, span[0] : span[1]].to(self.dtype).transpose(1, 2)
        if x.shape[1] != self.H:
            x = x.repeat_interleave(self.H // x.shape[1], 1)
        return x.flatten(0, 1)

    def per_token(self, x: Tensor | None) -> Any:
        """Converts [B, T, H] to [N, T, 1] in the accumulator's dtype."""
        return None if x is None else x.to(self.dtype).transpose(1, 2).flatten(0, 1)[..., None].contiguous()

    def decay(self, span: Span) -> NoDecay | ScalarDecay | VectorDecay:
        g, C = self.call.log_decay, span[1] - span[0]
        if g is None:
            return NoDecay()
        if g.dim() == 4:
            return VectorDecay(self.lay_out(g, span), self.dtype, self.base)
        if g.dim() == 3:
            return ScalarDecay(self.lay_out(g[..., None], span), self.dtype)
        if C not in self._fixed:
            self._fixed[C] = ScalarDecay(g.repeat(self.B)[:, None, None].expand(-1, C, 1), self.dtype)
        return self._fixed[C]

    def tile(self, span: Span) -> Tile:
        q, k, v = (self.lay_out(x, span) for x in self.call[:3])
        q, k = q * during(self.strength, span), product(k, during(self.factor, span)) + during(self.taint, span)
        beta, write = (during(x, span) if self.call.delta else None for x in (self.beta, self.write))
        return Tile(q, k, v, beta, write, self.decay(span))


def sequence_ends(cu_seqlens: Tensor, T: int) -> list[int]:
    """Returns cu_seqlens as a list. Raises InputError unless 0 = c_0 ≤ … ≤ c_N = T. Synchronises a GPU."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise InputError(f"cu_seqlens={ends}; expected 0 = c_0 ≤ … ≤ c_N = T = {T}")
    return ends


def product(x: Tensor | None, y: Tensor | None) -> Any:
    """Returns the product of the factors that are not None; None for two of them."""
    if x is None or y is None:
        return y if x is None else x
    return x * y


def during(x: Tensor | float | None, span: Span) -> Any:
    """Returns the span of a per-token tensor [N, T, 1]. Numbers and None are returned unchanged."""
    return x[:, span[0] : span[1]] if isinstance(x, Tensor) else x


def kept_stride(K: int, V: int, chunk_size: int) -> int:
    """Returns the number of chunks per kept state with which the kept states are no larger than q, k and v."""
    return max(1, -(-K * V // (chunk_size * (2 * K + V))))


def kept_states(T: int, sequences: int, tokens: int) -> int:
    """Returns an upper bound of the number of kept states, one per run of `tokens` tokens of a sequence or its rest.

    The bound depends only on shapes, because a size that depends on cu_seqlens would break a traced graph."""
    return (T - 1) // tokens + sequences


def chunk_size(call: Call) -> int:
    """Returns the call's chunk size, or by default a power of two between 16 and 64 near the mean of K and V: in larger
    chunks the C×C work inside a chunk costs more than the K×V work between chunks saves."""
    return call.chunk_size or min(64, max(16, 1 << ((call.k.shape[-1] + call.v.shape[-1]) // 2 - 1).bit_length()))


def block_of(log_decay: Tensor, longest: int = 16, most: float = 64.0) -> int:
    """Returns the base of VectorDecay: the longest block, a power of two, over which no decay exceeds e^most; 1 if a
    decay is NaN, so that the NaN affects no earlier token."""
    low, high = log_decay.aminmax() if log_decay.numel() else (log_decay.new_zeros(()),) * 2
    steepest = float(torch.maximum(-low, high))
    tokens = longest if steepest * longest <= most else most / steepest
    return 1 << int(tokens).bit_length() - 1 if tokens >= 1 else 1


def finite(x: Tensor) -> Tensor:
    """Replaces NaN and infinities by zeros."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


class Gradients:
    """Gradients to the inputs, filled chunk by chunk. Gradients of per-token inputs are stored as [N, T, 1]."""

    def __init__(self, x: Inputs, call: Call):
        self.x, self.call = x, call
        large = {"q": call.q, "k": call.k, "v": call.v, "log_decay": call.log_decay}
        self.large = {name: empty_like(given, x.dtype) for name, given in large.items() if given is not None}
        whole = (x.B * x.H, call.v.shape[1], 1)
        per_token = {"beta": x.beta, "write_gate": x.write, "read_gate": x.read, "factor": x.factor}
        self.small = {n: call.q.new_empty(whole, dtype=x.dtype) for n, given in per_token.items() if given is not None}

    def add(self, span: Span, grads: dict[str, Tensor]) -> None:
        """Converts the gradients to a chunk's tile to gradients to the inputs, and stores them."""
        x = self.x
        if x.read is not None:
            grads["read_gate"] = self.call.scale * row_dot(x.lay_out(self.call.q, span), grads["q"])
        grads["q"] = grads["q"] * during(x.strength, span)
        if x.factor is not None:
            grads["factor"] = row_dot(x.lay_out(self.call.k, span), grads["k"])
            grads["k"] = grads["k"] * during(x.factor, span)
        for name, grad in grads.items():
            if name in self.small:
                self.small[name][:, span[0] : span[1]] = grad
            else:
                self._store(self.large[name], span, grad)

    def _store(self, into: Tensor, span: Span, x: Tensor) -> None:
        """Inverts `lay_out`, with sums over the heads that share q and k, and over the tokens of a fixed decay."""
        x = x.unflatten(0, (self.x.B, self.x.H)).transpose(1, 2)
        if into.dim() == 1:
            into += x.sum((0, 1, 3))
            return
        x = x.squeeze(-1) if into.dim() == 3 else x
        if x.shape[2] != into.shape[2]:
            x = x.unflatten(2, (into.shape[2], -1)).sum(3)
        into[:, span[0] : span[1]] = x

    def all(self) -> list[Tensor | None]:
        """Returns the gradients to q, …, read_gate in the order of a call; None for inputs that are None."""
        small, x = self.small, self.x
        if "factor" in small:
            small |= {"beta": product(small["factor"], x.write), "write_gate": product(small["factor"], x.beta)}
        gathered = {n: g.squeeze(-1).unflatten(0, (x.B, x.H)).transpose(1, 2) for n, g in small.items()}
        given: Any = {name: getattr(self.call, name, None) for name in gathered}  # `factor` is no input: None
        found = {n: g.to(given[n].dtype).contiguous() for n, g in gathered.items() if given[n] is not None}
        return [(self.large | found).get(name) for name in Call._fields[: DIFFERENTIABLE - 1]]


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty gradient of x in a dtype; zeros for a fixed decay [H], whose gradient is summed over tokens."""
    if x.dim() == 1:
        return torch.zeros_like(x, dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def store(into: Tensor, span: Span, x: Tensor) -> None:
    """Stores a chunk [N, C, V] in a span of [B, T, H, V]."""
    into[:, span[0] : span[1]] = x.unflatten(0, (into.shape[0], into.shape[2])).transpose(1, 2)
