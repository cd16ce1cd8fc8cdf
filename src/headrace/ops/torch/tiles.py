"""How the op's inputs are cut into chunks, and how the gradients are put together again.

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
    """One chunk's inputs in the accumulator's dtype, by head: [N, C, K], [N, C, V] and per token [N, C, 1].

    q is q', and under the additive rule k is β w k, and beta and write are None. A token that writes NaN or an infinity
    has a key of NaN: scores take that to the tokens after it, and what it writes may be left out of products over the
    chunk, in which 0 · NaN would take it to those before."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    write: Tensor | None
    decay: NoDecay | ScalarDecay | VectorDecay


class Inputs:
    """The op's inputs and how they are cut: a batch is one run of chunks, a pack of sequences is a run for each."""

    def __init__(self, call: Call):
        self.call, self.chunk_size, self.dtype = call, chunk_size(call), accumulator(call.q)
        (self.B, T, self.H, self.V), self.K = call.v.shape, call.k.shape[-1]
        # Laid out once for all tokens: small tensors cost as much as large ones to take apart.
        self.beta, self.write, self.read = (self.per_token(x) for x in (call.beta, call.write_gate, call.read_gate))
        self.strength = call.scale if self.read is None else self.read * call.scale
        # Under the additive rule β and w may as well scale k, which has fewer columns than v.
        self.factor = None if call.delta else product(self.beta, self.write)
        # NaN for a token with NaN or an infinity in what it writes, else 0: see `Tile`.
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
        """A sequence's chunks in runs of `stride`: a state is kept at the start of each."""
        return [chunks[i : i + self.stride] for i in range(0, len(chunks), self.stride)]

    def by_sequence(self, states: Tensor) -> Tensor:
        """[sequences, N, K, V] -> [B or sequences, H, K, V]."""
        return states.view(states.shape[0] * states.shape[1] // self.H, self.H, self.K, self.V)

    def states(self, like: Tensor | None) -> Tensor:
        """A fresh copy of the states given (zeros for None), [sequences, N, K, V]."""
        N = self.B * self.H if len(self.sequences) == 1 else self.H
        shape = (len(self.sequences), N, self.K, self.V)
        if like is None:
            return self.call.q.new_zeros(shape, dtype=self.dtype)
        return like.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(shape)

    def lay_out(self, x: Tensor, span: Span) -> Tensor:
        """[B, T, H or fewer, ·] -> [N, C, ·] in the accumulator's dtype."""
        x = x[:, span[0] : span[1]].to(self.dtype).transpose(1, 2)
        if x.shape[1] != self.H:
            x = x.repeat_interleave(self.H // x.shape[1], 1)
        return x.flatten(0, 1)

    def per_token(self, x: Tensor | None) -> Any:
        """[B, T, H] -> [N, T, 1]."""
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
    """cu_seqlens as numbers. Raises InputError where they are not 0 = c_0 ≤ … ≤ c_N = T."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise InputError(f"cu_seqlens={ends}; expected 0 = c_0 ≤ … ≤ c_N = T = {T}")
    return ends


def product(x: Tensor | None, y: Tensor | None) -> Any:
    """Of those that are not None."""
    if x is None or y is None:
        return y if x is None else x
    return x * y


def during(x: Tensor | float | None, span: Span) -> Any:
    """A per-token tensor's part; numbers and None are the same for all tokens."""
    return x[:, span[0] : span[1]] if isinstance(x, Tensor) else x


def kept_stride(K: int, V: int, chunk_size: int) -> int:
    """Chunks between two kept states, so that these weigh at most as much as q, k and v."""
    return max(1, -(-K * V // (chunk_size * (2 * K + V))))


def kept_states(T: int, sequences: int, tokens: int) -> int:
    """The most states that are kept, one for each run of so many tokens of a sequence and for what is left of it. Known
    from shapes alone: what depends on cu_seqlens would break a traced graph."""
    return (T - 1) // tokens + sequences


def chunk_size(call: Call) -> int:
    """The call's, or a power of two between 16 and 64 near the mean of K and V: beyond it the C×C work inside a chunk
    costs more than the K×V work between chunks saves."""
    return call.chunk_size or min(64, max(16, 1 << ((call.k.shape[-1] + call.v.shape[-1]) // 2 - 1).bit_length()))


def block_of(log_decay: Tensor, longest: int = 16, most: float = 64.0) -> int:
    """The base of VectorDecay: the longest block, a power of two, over which no decay can exceed e^most; where NaN is
    among the decays, 1, so that it stays with its own token."""
    low, high = log_decay.aminmax() if log_decay.numel() else (log_decay.new_zeros(()),) * 2
    steepest = float(torch.maximum(-low, high))
    tokens = longest if steepest * longest <= most else most / steepest
    return 1 << int(tokens).bit_length() - 1 if tokens >= 1 else 1


def finite(x: Tensor) -> Tensor:
    """Zeros for NaN and infinities."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


class Gradients:
    """Gradients to the op's inputs, filled chunk by chunk; those per token are gathered by head, [N, T, 1]."""

    def __init__(self, x: Inputs, call: Call):
        self.x, self.call = x, call
        large = {"q": call.q, "k": call.k, "v": call.v, "log_decay": call.log_decay}
        self.large = {name: empty_like(given, x.dtype) for name, given in large.items() if given is not None}
        whole = (x.B * x.H, call.v.shape[1], 1)
        per_token = {"beta": x.beta, "write_gate": x.write, "read_gate": x.read, "factor": x.factor}
        self.small = {n: call.q.new_empty(whole, dtype=x.dtype) for n, given in per_token.items() if given is not None}

    def add(self, span: Span, grads: dict[str, Tensor]) -> None:
        """One chunk's, from those to its tile to those to the inputs."""
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
        """The inverse of `lay_out`: heads that share q and k add up, and so do the tokens under a fixed decay."""
        x = x.unflatten(0, (self.x.B, self.x.H)).transpose(1, 2)
        if into.dim() == 1:
            into += x.sum((0, 1, 3))
            return
        x = x.squeeze(-1) if into.dim() == 3 else x
        if x.shape[2] != into.shape[2]:
            x = x.unflatten(2, (into.shape[2], -1)).sum(3)
        into[:, span[0] : span[1]] = x

    def all(self) -> list[Tensor | None]:
        """Of q … read_gate, in the order of a call; None for an input that is."""
        small, x = self.small, self.x
        if "factor" in small:
            small |= {"beta": product(small["factor"], x.write), "write_gate": product(small["factor"], x.beta)}
        gathered = {n: g.squeeze(-1).unflatten(0, (x.B, x.H)).transpose(1, 2) for n, g in small.items()}
        given: Any = {name: getattr(self.call, name, None) for name in gathered}  # None: what two gates have in common
        found = {n: g.to(given[n].dtype).contiguous() for n, g in gathered.items() if given[n] is not None}
        return [(self.large | found).get(name) for name in Call._fields[: DIFFERENTIABLE - 1]]


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in this dtype for a fixed decay [H], whose gradient is summed over all tokens."""
    if x.dim() == 1:
        return torch.zeros_like(x, dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def store(into: Tensor, span: Span, x: Tensor) -> None:
    """[N, C, V] into [B, T, H, V]."""
    into[:, span[0] : span[1]] = x.unflatten(0, (into.shape[0], into.shape[2])).transpose(1, 2)
