"""The chunkwise form in PyTorch, for all devices, with a hand-written backward.

The tokens are split into chunks of C tokens, which are computed with matrix products; the state S passes from chunk to
chunk. With the operators of decay.py, writers y = β w k under the additive rule and β k under the delta rule,
A = scores(q, y), and E the value to write ("add") or its error ("delta"):

    add:    E = v
    delta:  (I + L) E = w v − reads(k) S,   L = scores(k, y), which is strictly lower
    out = scale · r (reads(q) S + A E)         S ← through · S + writes(y)ᵀ E

Nothing is divided by β or a gate, so that they may be zero.

Chunks are computed in parts (tiles.py): each by itself on a CPU, whose caches they fit, and all at once on other
devices, where only S passes from chunk to chunk in a loop (scan.py). For the delta rule, E then depends on a state that
is not known yet: E = W − Y S with W = (I + L)⁻¹ w v and Y = (I + L)⁻¹ reads(k), so that

    S ← through · S + writes(y)ᵀ W − writes(y)ᵀ Y S

The backward passes the gradient to S through the chunks in reverse order in the same way. Given E, the delta rule is
the additive rule with one more kind of reader: a key reads like a query, and the gradient to what it has read is −dE,
where dE is the gradient to w v.

Dimensions: C tokens per chunk, K key, V value, M tiles (see tiles.py), R kinds of readers: queries, and keys under the
delta rule.
"""

from typing import Any

import torch
from torch import Tensor

from ...call import TOKENWISE, Call, product
from .decay import NoDecay, identity
from .scan import Memory
from .tiles import Chunks, Tiles, plus_product


def inverse(L: Tensor) -> Tensor:
    """Returns (I + L)⁻¹ for the lower triangle of L [M, C, C]. It is computed by substitution, because its entries stay
    bounded when powers of L do not, as for a repeated key."""
    one = identity(L.shape[1], L.dtype, L.device).expand_as(L)
    return torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)


def finite(x: Tensor) -> Tensor:
    """Replaces NaN and infinities by zeros."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def row_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.sum(x, -1, keepdim=True, out=out)


def write(E: Tensor, decay: NoDecay, memory: Memory, part: range, delta: bool) -> Tensor:
    """Passes the state through the chunks of a part, and returns E, given the value w v or v."""
    C, V = E.shape[1:]
    if not delta:
        memory.pass_on(part, torch.bmm(decay.writes.mT, E), decay.through)
        return E
    solve, reads = inverse(decay.scores[:, C:]), decay.reads[:, C:]
    if len(part) == 1:
        E = torch.bmm(solve, finite(torch.baddbmm(E, reads, memory.enter(part[0]), alpha=-1)))
        memory.pass_on(part, torch.bmm(decay.writes.mT, E), decay.through)
        return E
    solved = torch.bmm(solve, finite(torch.cat([E, reads], -1)))
    added, removed = torch.bmm(decay.writes.mT, solved).tensor_split([V], -1)
    W, Y = solved.tensor_split([V], -1)
    return torch.baddbmm(W, Y, memory.pass_on(part, added, decay.through, removed), alpha=-1)


def write_backward(D: Tensor, decay: NoDecay, memory: Memory, part: range, delta: bool) -> tuple[Tensor, Tensor]:
    """Passes the gradient to the state through the chunks of a part, in reverse order. Returns the gradients to w v or
    v, and to the state after each chunk.

    D [M, R·C, V]: the gradients to what the readers read. Those of the queries are given, those of keys computed here.
    """
    C, V = decay.writes.shape[1], D.shape[2]
    of_queries, of_keys = D[:, :C], D[:, C:]
    dE, reads, writes = torch.bmm(decay.scores[:, :C].mT, of_queries), decay.reads[:, :C], decay.writes
    if not delta:
        dS = memory.pass_on(part, torch.bmm(reads.mT, of_queries), decay.through)
        return dE.baddbmm_(writes, dS), dS
    solve = inverse(decay.scores[:, C:]).mT
    if len(part) == 1:
        dS = memory.enter(part[0])
        dE = torch.bmm(solve, dE.baddbmm_(writes, dS))
        torch.neg(dE, out=of_keys)
        memory.pass_on(part, torch.bmm(decay.reads.mT, D), decay.through)
        return dE, dS
    solved = torch.bmm(solve, torch.cat([dE, writes], -1))
    moved, removed = torch.bmm(decay.reads[:, C:].mT, solved).tensor_split([V], -1)
    dS = memory.pass_on(part, torch.baddbmm(moved, reads.mT, of_queries, beta=-1), decay.through, removed)
    P, Q = solved.tensor_split([V], -1)
    dE = torch.baddbmm(P, Q, dS)
    torch.neg(dE, out=of_keys)
    return dE, dS


def forward(call: Call, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, final state, states kept for the backward, E kept for the backward). The kept tensors are empty
    unless `keep`; the states also where they would be larger than q, k and v, and E under the additive rule, where it
    equals v."""
    chunks = Chunks(call)
    tiles, memory = Tiles.of(call, chunks), Memory(chunks, call.initial_state)
    out = chunks.new_tiles(chunks.V, call.v.dtype)
    E = tiles.v.new_empty(tiles.v.shape if keep and call.delta else 0)
    for part, where in chunks.parts():
        tile = tiles.part(where)
        value = product(tile.v, tile.write_gate) if call.delta else tile.v
        # A token whose value is not finite gets a NaN writer, through which scores pass NaN to the later tokens. In
        # products over the chunk its value is zero, because 0 · NaN would affect the earlier tokens.
        decay = tile.decay(row_sum(value * 0))
        errors = write(value, decay, memory, part, call.delta)
        if len(E):
            E[where] = errors
        read = torch.bmm(decay.reads[:, : chunks.length], memory.at(part))
        A, scale = decay.scores[:, : chunks.length], call.scale
        chunks.store(out, part, product, read.baddbmm_(A, finite(errors), beta=scale, alpha=scale))
    states = memory.before if keep and chunks.keeps else E.new_empty(0)
    return chunks.join(out), memory.result(), states, E


def replay(call: Call, chunks: Chunks, tiles: Tiles, E: Tensor) -> Tensor:
    """Returns the states before all chunks, [chunks, N, K, V], that writing E leads to."""
    memory = Memory(chunks, call.initial_state)
    for part, where in chunks.parts():
        decay = tiles.part(where).decay()
        memory.pass_on(part, torch.bmm(decay.writes.mT, E[where]), decay.through)
    return memory.before


def backward(
    d_out: Tensor, d_final: Tensor, call: Call, states: Tensor, errors: Tensor, decay_gradient: bool
) -> list[Tensor | None]:
    """Returns the gradients to q, k, v, log_decay, beta, write_gate, read_gate (None for inputs that are None) and the
    initial state."""
    chunks = Chunks(call)
    tiles, gradients = Tiles.of(call, chunks, d_out), Memory(chunks, d_final, reverse=True)
    E = errors if call.delta else tiles.v
    states = (states if chunks.keeps else replay(call, chunks, tiles, E)).flatten(0, 1)
    grads = {name: chunks.new_tiles(columns, chunks.dtype) for name, columns in tiles.columns(decay_gradient).items()}
    for part, where in reversed(chunks.parts()):
        tile, S, errors = tiles.part(where), states[where], E[where]
        decay = tile.decay()
        M, rows, _ = decay.reads.shape
        D = E.new_empty(M, rows, chunks.V)
        torch.mul(tile.d_out, call.scale, out=D[:, : chunks.length])
        dE, dS = write_backward(D, decay, gradients, part, call.delta)
        passed = None
        if "log_decay" in grads and decay.through is not None:
            passed = row_sum(S * dS).mul_(decay.through).mT
        read, written = torch.bmm(D, S.mT), torch.bmm(errors, dS.mT)
        dx, dy, dg = decay.backward(torch.bmm(D, errors.mT), read, written, passed)
        for name, terms in to_inputs(tile, dx, dy, dE, dg).items():
            chunks.store(grads[name], part, *terms)
    joined = (
        shaped(chunks.join(grads[name]), x) if name in grads else None
        for name, x in zip(TOKENWISE, call.tensors, strict=False)
    )
    return [*joined, None if call.initial_state is None else gradients.result()]


def to_inputs(tile: Tiles, dx: Tensor, dy: Tensor, dE: Tensor, dg: Tensor | None) -> dict[str, tuple]:
    """Converts the gradients to readers, writers and w v (v under the additive rule) to those to the inputs: each is a
    function and its arguments."""
    C = dy.shape[1]
    queries = dx[:, :C]
    grads: dict[str, tuple] = {"q": (product, queries, tile.read_gate)}
    if dg is not None:
        grads["log_decay"] = product, dg
    if tile.read_gate is not None:
        grads["read_gate"] = row_sum, tile.q * queries
    if tile.delta:
        grads |= {"k": (plus_product, dx[:, C:], dy, tile.factor), "v": (product, dE, tile.write_gate)}
        if tile.beta is not None:
            grads["beta"] = row_sum, tile.k * dy
        if tile.write_gate is not None:
            grads["write_gate"] = row_sum, tile.v * dE
    else:
        grads |= {"k": (product, dy, tile.factor), "v": (product, dE)}
        d_factor = None if tile.factor is None else row_sum(tile.k * dy)
        if tile.beta is not None:
            grads["beta"] = product, d_factor, tile.write_gate
        if tile.write_gate is not None:
            grads["write_gate"] = product, d_factor, tile.beta
    return grads


def shaped(grad: Tensor, like: Any) -> Tensor:
    """Sums a gradient [B, T, H, ·] over what `like` shares: the tokens of a fixed decay, or groups of heads."""
    if like.dim() == 1:
        return grad.sum((0, 1, 3))
    if like.dim() == 4 and like.shape[2] != grad.shape[2]:
        return grad.unflatten(2, (like.shape[2], -1)).sum(3)
    return grad.view(like.shape)
