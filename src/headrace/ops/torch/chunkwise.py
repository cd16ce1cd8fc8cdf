"""The chunkwise form in PyTorch, for all devices, with a hand-written backward.

The tokens are split into chunks of C tokens. A chunk is computed with matrix products, and passes the state S on to the
next. With the operators of decay.py, q' = scale · r q, and E the value to write ("add") or its error ("delta"):

    add:    E = v, with β w k in place of k and 1 in place of β
    delta:  (I + A β) E = w v − rows(k) S,   A = strictly lower scores(k, k)
    out = rows(q') S + scores(q', k) β E         S ← end(S) + cols(k)ᵀ β E

Nothing is divided by β or a gate, so that they may be zero. The backward visits the chunks in reverse order. The
forward keeps the state of every `stride`-th chunk and E, from which the backward recomputes the other states, so that
the kept tensors are no larger than the inputs. (Autograd through a loop over slices would cost O(T²/C), since the
gradient of a slice is as large as its source.)

Dimensions: B batch, T tokens, H heads (q and k may have fewer), K key, V value, C chunk, N = B·H. Tiles are [N, C, ·].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call import Call
from .decay import NoDecay, earlier, later
from .tiles import Gradients, Inputs, Span, Tile, finite, kept_states, product, row_dot, store


def solver(tile: Tile) -> tuple[Tensor, Tensor]:
    """Returns A and (I + A β)⁻¹ of the delta rule. The inverse is computed by substitution, because its entries stay
    bounded when powers of A do not, as for a repeated key."""
    A = tile.decay.scores(tile.k, tile.k).tril(-1)
    identity = torch.eye(A.shape[1], dtype=A.dtype, device=A.device).expand_as(A)
    M = product(A, None if tile.beta is None else tile.beta.mT)
    return A, torch.linalg.solve_triangular(M, identity, upper=False, unitriangular=True)


def advance_(S: Tensor, tile: Tile, E: Tensor) -> Tensor:
    """Updates S to the state after the chunk, in place."""
    return tile.decay.end_(S).baddbmm_(tile.decay.cols(tile.k).mT, product(E, tile.beta))


def chunk_forward(tile: Tile, S: Tensor, delta: bool) -> tuple[Tensor, Tensor]:
    """Returns (out, E) of one chunk."""
    decay, E = tile.decay, tile.v
    if delta:
        wanted = torch.baddbmm(product(E, tile.write), decay.rows(tile.k), S, alpha=-1)
        E = torch.bmm(solver(tile)[1], finite(wanted))
    U = finite(product(E, tile.beta))
    return torch.bmm(decay.scores(tile.q, tile.k), U).baddbmm_(decay.rows(tile.q), S), E


def chunk_backward(
    tile: Tile, E: Tensor, S: Tensor, dS: Tensor, d_out: Tensor, delta: bool, decay_gradient: bool
) -> dict[str, Tensor]:
    """Returns the gradients to the tile by the input's name.

    dS is the gradient to the state after the chunk, and is overwritten with the gradient to the state before it."""
    decay, q, k, U = tile.decay, tile.q, tile.k, product(E, tile.beta)
    A = decay.scores(q, k)
    dU = torch.bmm(A.mT, d_out).baddbmm_(decay.cols(k), dS)
    dq, dk, dg = decay.scores_backward(torch.bmm(d_out, U.mT), q, k, A, decay_gradient)
    read, written = decay.rows(torch.bmm(d_out, S.mT)), decay.cols(torch.bmm(U, dS.mT))
    grads = {"q": dq.add_(read), "k": dk.add_(written), "v": dU}
    if dg is not None and not isinstance(decay, NoDecay):
        dg += decay.per_channel(decay.end_(S * dS).sum(-1)[:, None])
        dg += earlier(k) @ decay.per_channel(written * k) + later(q) @ decay.per_channel(read * q)
        grads["log_decay"] = dg
    decay.end_(dS).baddbmm_(decay.rows(q).mT, d_out)
    if delta:
        _delta_backward_(grads, tile, E, S, dS, decay_gradient)
    return grads


def _delta_backward_(grads: dict[str, Tensor], tile: Tile, E: Tensor, S: Tensor, dS: Tensor, decay_gradient: bool):
    """Adds the gradients through the delta rule's equation of E to `grads` and dS, from the gradient to U = β E, which
    is in grads["v"]. Under the delta rule, k also reads the memory, like q."""
    decay, k, dU = tile.decay, tile.k, grads["v"]
    A, inverse = solver(tile)
    dP = torch.bmm(inverse.mT, product(dU, tile.beta))
    dA = torch.bmm(dP, E.mT).tril_(-1).neg_()
    if tile.beta is not None:
        grads["beta"] = row_dot(dU, E).add_((dA * A).sum(1)[..., None])
        dA = dA * tile.beta.mT
    late, early, dg = decay.scores_backward(dA, k, k, A, decay_gradient)
    read = decay.rows(torch.bmm(dP, S.mT)).neg_()
    grads["k"] += late.add_(early).add_(read)
    dS.baddbmm_(decay.rows(k).mT, dP, alpha=-1)
    if dg is not None and not isinstance(decay, NoDecay):
        grads["log_decay"] += dg + later(k) @ decay.per_channel(read * k)
    grads["v"] = product(dP, tile.write)
    if tile.write is not None:
        grads["write_gate"] = row_dot(tile.v, dP)


def forward(call: Call, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, final state, states kept for the backward, E kept for the backward). The kept tensors are empty
    unless `keep`; E is also empty under the additive rule, where it equals v."""
    x, v = Inputs(call), call.v
    out, final = torch.empty_like(v, memory_format=torch.contiguous_format), x.states(call.initial_state)
    room = kept_states(v.shape[1], len(x.sequences), x.chunk_size * x.stride)
    states = final.new_empty((room, *final.shape[1:]) if keep else 0)
    errors = final.new_empty(v.shape if keep and call.delta else 0)
    slot = 0
    for S, chunks in zip(final, x.sequences, strict=True):
        for i, span in enumerate(chunks):
            if keep and i % x.stride == 0:
                states[slot], slot = S, slot + 1
            tile = x.tile(span)
            o, E = chunk_forward(tile, S, call.delta)
            store(out, span, o)
            if len(errors):
                store(errors, span, E)
            advance_(S, tile, E)
    return out, x.by_sequence(final), states, errors


def backward(
    d_out: Tensor, d_final: Tensor, call: Call, states: Tensor, errors: Tensor, decay_gradient: bool
) -> list[Tensor | None]:
    """Returns the gradients to q, k, v, log_decay, beta, write_gate, read_gate (None for inputs that are None) and the
    initial state."""
    x = Inputs(call)
    grads, d_initial, slot = Gradients(x, call), x.states(d_final), x.kept
    for dS, chunks in zip(reversed(d_initial.unbind()), reversed(x.sequences), strict=True):
        for run in reversed(x.runs(chunks)):
            slot -= 1
            for span, tile, E, S in reversed(list(replay(x, run, states[slot], errors))):
                grads.add(span, chunk_backward(tile, E, S, dS, x.lay_out(d_out, span), call.delta, decay_gradient))
    return [*grads.all(), x.by_sequence(d_initial)]


def replay(x: Inputs, run: list[Span], S: Tensor, errors: Tensor) -> Iterator[tuple[Span, Tile, Tensor, Tensor]]:
    """Recomputes a run of chunks from the state kept at its start. Yields (span, tile, E, state before the chunk)."""
    for i, span in enumerate(run):
        tile = x.tile(span)
        E = x.lay_out(errors, span) if x.call.delta else tile.v
        yield span, tile, E, S
        if i + 1 < len(run):
            S = advance_(S.clone(), tile, E)
