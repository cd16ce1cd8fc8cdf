"""The chunkwise form in PyTorch, for any device, with a hand-written backward.

The tokens are cut into chunks of C. Inside a chunk everything is matrix products; the state S goes from chunk to chunk.
With the operators of decay.py, q' = scale · r q, and E the value to write ("add") or what memory lacks of it ("delta"):

    add:    E = w v
    delta:  (I + A β) E = w v − rows(k) S,   A = strictly lower scores(k, k)
    out = rows(q') S + scores(q', k) β E         S ← end(S) + cols(k)ᵀ β E

β multiplies E and nothing is ever divided by it; gates and β may be exactly zero. The backward runs through the chunks
in reverse, from the states kept at every `stride`-th chunk; those between are recomputed from E, so that what is kept
weighs no more than the inputs. (A loop over slices under autograd would cost O(T²/C): the gradient of a slice is as
large as its source.)

Dimensions: B batch, T tokens, H heads (q and k may have fewer), K key, V value, C chunk, N = B·H. Tiles are [N, C, ·].
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .decay import NoDecay, ScalarDecay, VectorDecay, earlier, later

Span = tuple[int, int]


class Tile(NamedTuple):
    """One chunk's inputs in the accumulator's dtype, by head: [N, C, K], [N, C, V] and per token [N, C, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    write: Tensor | None
    read: Tensor | None
    decay: NoDecay | ScalarDecay | VectorDecay


class Inputs:
    """The op's inputs and how they are cut: a batch is one run of chunks, a pack of sequences is a run for each."""

    def __init__(self, q, k, v, log_decay, beta, write_gate, read_gate, cu_seqlens, chunk_size):
        self.q, self.k, self.v, self.log_decay = q, k, v, log_decay
        self.beta, self.write, self.read = beta, write_gate, read_gate
        (self.B, T, self.H, self.V), self.K = v.shape, k.shape[-1]
        self.dtype = accumulator_dtype(q)
        ends = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
        self.sequences = [
            [(t, min(t + chunk_size, end)) for t in range(start, end, chunk_size)] for start, end in pairwise(ends)
        ]
        self.stride = kept_stride(self.K, self.V, chunk_size)
        self.kept = sum(len(self.runs(chunks)) for chunks in self.sequences)
        self.base = 1 if log_decay is None or log_decay.dim() < 4 else block_of(log_decay)
        self._fixed: dict[int, ScalarDecay] = {}

    def runs(self, chunks: list[Span]) -> list[list[Span]]:
        """A sequence's chunks in runs of `stride`: a state is kept at the start of each."""
        return [chunks[i : i + self.stride] for i in range(0, len(chunks), self.stride)]

    def states(self, like: Tensor | None) -> Tensor:
        """A fresh copy of the states given (zeros for None), [sequences, N, K, V]."""
        N = self.B * self.H if len(self.sequences) == 1 else self.H
        shape = (len(self.sequences), N, self.K, self.V)
        if like is None:
            return self.q.new_zeros(shape, dtype=self.dtype)
        return like.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(shape)

    def lay_out(self, x: Tensor, span: Span) -> Tensor:
        """[B, T, H or fewer, ·] -> [N, C, ·] in the accumulator's dtype."""
        x = x[:, span[0] : span[1]].to(self.dtype).transpose(1, 2)
        if x.shape[1] != self.H:
            x = x.repeat_interleave(self.H // x.shape[1], 1)
        return x.flatten(0, 1)

    def per_token(self, x: Tensor | None, span: Span) -> Tensor | None:
        return None if x is None else self.lay_out(x[..., None], span)

    def decay(self, span: Span) -> NoDecay | ScalarDecay | VectorDecay:
        g, C = self.log_decay, span[1] - span[0]
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
        q, k, v = (self.lay_out(x, span) for x in (self.q, self.k, self.v))
        beta, write, read = (self.per_token(x, span) for x in (self.beta, self.write, self.read))
        return Tile(q, k, v, beta, write, read, self.decay(span))

    def store(self, into: Tensor, span: Span, x: Tensor) -> None:
        """The inverse of `lay_out`: heads that share q and k add up, and so do the tokens under a fixed decay."""
        x = x.unflatten(0, (self.B, self.H)).transpose(1, 2)
        if into.dim() == 1:
            into += x.sum((0, 1, 3))
            return
        x = x.squeeze(-1) if into.dim() == 3 else x
        if x.shape[2] != into.shape[2]:
            x = x.unflatten(2, (into.shape[2], -1)).sum(3)
        into[:, span[0] : span[1]] = x


def accumulator_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def kept_stride(K: int, V: int, chunk_size: int) -> int:
    """Chunks between two kept states, so that these weigh at most as much as q, k and v."""
    return max(1, -(-K * V // (chunk_size * (2 * K + V))))


def default_chunk(K: int, V: int) -> int:
    """A power of two between 16 and 64 near the mean of K and V: beyond it the C×C work inside a chunk costs more than
    the K×V work between chunks saves."""
    return min(64, max(16, 1 << ((K + V) // 2 - 1).bit_length()))


def block_of(log_decay: Tensor, longest: int = 16, most: float = 64.0) -> int:
    """The base of VectorDecay: the longest block, a power of two, over which no decay can exceed e^most."""
    tokens = most / max(float(-log_decay.min()), most / longest)
    return 1 << max(int(tokens), 1).bit_length() - 1


def scaled(x: Tensor, factor: Tensor | float | None) -> Tensor:
    return x if factor is None else x * factor


def read_strength(tile: Tile, scale: float) -> Tensor | float:
    return scale if tile.read is None else tile.read * scale


def solver(tile: Tile) -> tuple[Tensor, Tensor]:
    """(A, (I + A β)⁻¹) of the delta rule. By substitution: the inverse's entries stay bounded where powers of A do not
    (think of one key repeated)."""
    A = tile.decay.scores(tile.k, tile.k).tril(-1)
    identity = torch.eye(A.shape[1], dtype=A.dtype, device=A.device).expand_as(A)
    M = scaled(A, None if tile.beta is None else tile.beta.mT)
    return A, torch.linalg.solve_triangular(M, identity, upper=False, unitriangular=True)


def advance_(S: Tensor, tile: Tile, E: Tensor) -> Tensor:
    """The state after the chunk, in place."""
    return tile.decay.end_(S).baddbmm_(tile.decay.cols(tile.k).mT, scaled(E, tile.beta))


def chunk_forward(tile: Tile, S: Tensor, delta: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, E) of one chunk."""
    decay, E = tile.decay, scaled(tile.v, tile.write)
    if delta:
        E = torch.bmm(solver(tile)[1], torch.baddbmm(E, decay.rows(tile.k), S, alpha=-1))
    q = tile.q * read_strength(tile, scale)
    return torch.bmm(decay.scores(q, tile.k), scaled(E, tile.beta)).baddbmm_(decay.rows(q), S), E


def chunk_backward(
    tile: Tile, E: Tensor, S: Tensor, dS: Tensor, d_out: Tensor, delta: bool, scale: float, decay_gradient: bool
) -> dict[str, Tensor]:
    """Gradients of one chunk by the input's name. dS, the gradient to the state after the chunk, becomes, in place,
    that to the state before it.

    Under the delta rule k also reads, as q does: to find out what memory holds before it writes."""
    decay, k, U, strength = tile.decay, tile.k, scaled(E, tile.beta), read_strength(tile, scale)
    q = tile.q * strength
    A = decay.scores(q, k)
    dU = torch.bmm(A.mT, d_out).baddbmm_(decay.cols(k), dS)
    dq, dk, dg = decay.scores_backward(torch.bmm(d_out, U.mT), q, k, A, decay_gradient)
    read, written = decay.rows(torch.bmm(d_out, S.mT)), decay.cols(torch.bmm(U, dS.mT))
    dq, dk = dq.add_(read), dk.add_(written)
    if dg is not None and not isinstance(decay, NoDecay):
        dg += decay.per_channel(decay.end_(S * dS).sum(-1)[:, None])
        dg += earlier(k) @ decay.per_channel(written * k) + later(q) @ decay.per_channel(read * q)
    decay.end_(dS).baddbmm_(decay.rows(q).mT, d_out)

    dP, d_beta = scaled(dU, tile.beta), None if tile.beta is None else row_dot(dU, E)
    if delta:
        A, inverse = solver(tile)
        dP = torch.bmm(inverse.mT, dP)
        dM = torch.bmm(dP, E.mT).tril_(-1).neg_()
        dA = dM
        if tile.beta is not None and d_beta is not None:
            d_beta += (dM * A).sum(1)[..., None]
            dA = dM * tile.beta.mT
        late, early, dg_late = decay.scores_backward(dA, k, k, A, decay_gradient)
        read = decay.rows(torch.bmm(dP, S.mT)).neg_()
        dk += late.add_(early).add_(read)
        dS.baddbmm_(decay.rows(k).mT, dP, alpha=-1)
        if dg is not None and dg_late is not None and not isinstance(decay, NoDecay):
            dg += dg_late + later(k) @ decay.per_channel(read * k)
    grads = {"q": dq * strength, "k": dk, "v": scaled(dP, tile.write)}
    if dg is not None:
        grads["log_decay"] = dg
    if d_beta is not None:
        grads["beta"] = d_beta
    if tile.write is not None:
        grads["write_gate"] = row_dot(tile.v, dP)
    if tile.read is not None:
        grads["read_gate"] = scale * row_dot(tile.q, dq)
    return grads


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, write_gate: Tensor | None,
    read_gate: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    delta: bool, scale: float, chunk_size: int, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, final state, states kept for the backward, E kept for the backward). The kept ones are empty unless `keep`;
    E is also for the additive rule, where it is w v."""
    x = Inputs(q, k, v, log_decay, beta, write_gate, read_gate, cu_seqlens, chunk_size)
    out, final = torch.empty_like(v, memory_format=torch.contiguous_format), x.states(initial_state)
    states = final.new_empty((x.kept, *final.shape[1:]) if keep else 0)
    errors = final.new_empty(v.shape if keep and delta else 0)
    slot = 0
    for S, chunks in zip(final, x.sequences, strict=True):
        for i, span in enumerate(chunks):
            if keep and i % x.stride == 0:
                states[slot], slot = S, slot + 1
            tile = x.tile(span)
            o, E = chunk_forward(tile, S, delta, scale)
            x.store(out, span, o)
            if len(errors):
                x.store(errors, span, E)
            advance_(S, tile, E)
    return out, final.view(-1, x.H, x.K, x.V), states, errors


def backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    write_gate: Tensor | None, read_gate: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    delta: bool, scale: float, chunk_size: int, states: Tensor, errors: Tensor, decay_gradient: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients to q, k, v, log_decay, beta, write_gate, read_gate (None where the input is) and the initial state."""
    x = Inputs(q, k, v, log_decay, beta, write_gate, read_gate, cu_seqlens, chunk_size)
    inputs = dict(zip(GRADIENTS, (q, k, v, log_decay, beta, write_gate, read_gate), strict=True))
    grads = {name: new_gradient(value) for name, value in inputs.items() if value is not None}
    d_initial, slot = x.states(d_final), len(states)
    for dS, chunks in zip(reversed(d_initial.unbind()), reversed(x.sequences), strict=True):
        for run in reversed(x.runs(chunks)):
            slot -= 1
            for span, tile, E, S in reversed(list(replay(x, run, states[slot], errors))):
                tile_grads = chunk_backward(tile, E, S, dS, x.lay_out(d_out, span), delta, scale, decay_gradient)
                for name, grad in tile_grads.items():
                    x.store(grads[name], span, grad)
    return [grads.get(name) for name in GRADIENTS] + [d_initial.view(-1, x.H, x.K, x.V)]


GRADIENTS = ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate")


def new_gradient(x: Tensor) -> Tensor:
    """Filled chunk by chunk; a fixed decay's is summed into."""
    return torch.zeros_like(x) if x.dim() == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def replay(x: Inputs, run: list[Span], S: Tensor, errors: Tensor) -> Iterator[tuple[Span, Tile, Tensor, Tensor]]:
    """A run of chunks again, from the state kept at its start: (span, tile, E, state before the chunk)."""
    for i, span in enumerate(run):
        tile = x.tile(span)
        E = x.lay_out(errors, span) if len(errors) else scaled(tile.v, tile.write)
        yield span, tile, E, S
        if i + 1 < len(run):
            S = advance_(S.clone(), tile, E)
