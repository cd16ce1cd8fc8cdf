"""A write strength that sees the mistake it corrects: β_t depends on the residual r_t = v_t − k_t S too, where other
delta rules know the token alone.

    β_t = σ(logit_t + a_h · (|r_t|² − |v_t|²) / (|r_t|² + |v_t|²))

The fraction is the surprise: −1 where memory holds v_t under k_t, 0 where it holds nothing, up to 1 where it holds
something else. a_h > 0 writes what is new, a_h < 0 keeps what is held; with a_h = 0, where it begins, β is the token's.

S is the memory before the token's chunk, faded up to the token: so all β of a chunk are known before its delta rule is
solved, in parallel. With chunks of one token it is the exact residual, one token at a time. Chunks are counted from the
beginning of a sequence, however it is cut into calls.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences, C tokens per
chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.call import accumulator
from ..utils.device import without_autocast
from .matrix.chunks import Chunks, carry
from .packing import Sequences
from .parts import SelfInitialised

TINY = 1e-12  # added to the squares: an empty memory and a value of zero are no surprise


class ResidualDelta(SelfInitialised):
    """The delta rule with such a β, in place of the op.

    Args: chunk: tokens from one look at the memory to the next.
    """

    def __init__(self, chunk: int, num_heads: int):
        super().__init__()
        self.chunk = chunk
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()

    def forward(
        self, op: Callable, x: dict[str, Any], state: Any, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Args:
            op: the delta rule for what x names.
            x: q, k [B, T, Hq, K] and what else the op takes per token [B, T, H, ·] or not at all (None), with the logit
                of β in its place.
            state: with memory, before (the memory before the chunk, faded up to now) and tokens; None: none yet.
        Returns:
            (out [B, T, H, V], the memory and, unless a chunk is one token, before, after the last tokens [N, H, K, V]).
        """
        with without_autocast(x["v"]):  # the precision of the memory is part of the definition
            # A fixed decay is told for every token: what a chunk lacks in tokens must not fade.
            given = {n: y.expand(x["v"].shape[:3]) if y.dim() == 1 else y for n, y in x.items() if y is not None}
            memories, places = self._start(given, state, sequences)
            out, memories = self._run(op, given, memories, places, sequences)
        return out, memories[:, 0], memories[:, 1] if self.chunk > 1 else None

    def _start(self, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The memory and that before the chunk, [N, 2, H, K, V], and the place in its chunk of what comes next, [N]."""
        q, v = x["q"], x["v"]
        if state is None:
            zeros = q.new_zeros(sequences.count, 2, v.shape[2], q.shape[-1], v.shape[-1], dtype=accumulator(v))
            return zeros, torch.zeros(sequences.count, dtype=torch.long, device=q.device)
        places = state.tokens % self.chunk
        memory = state.memory.to(accumulator(v))
        before = memory if state.before is None else state.before.to(memory)
        before = torch.where((places == 0)[:, None, None, None], memory, before)
        return torch.stack([memory, before], 1), places

    def _run(self, op: Callable, x: dict[str, Tensor], memories: Tensor, places: Tensor, sequences: Sequences):
        out: list[Tensor] = []
        weight = self.weight.to(memories.dtype)  # here, for its gradient is summed chunk by chunk

        def advance(memories: Tensor, *pieces: Tensor) -> Tensor:
            now, before = memories.unbind(1)
            y, *after = self.look(op, dict(zip(x, pieces, strict=True)), now, now if out else before, weight)
            out.append(y)
            return torch.stack(after, 1)

        v = x["v"]
        if v.shape[1] == 1 and sequences.cu_seqlens is None:
            memories = advance(memories, *x.values())
            return out[0], memories
        chunks = Chunks(sequences, v, self.chunk, places)
        _, memories = carry(advance, memories[chunks.order], chunks.counts, *(chunks.lay_out(y) for y in x.values()))
        return chunks.take_back(torch.cat([v.new_zeros(0, self.chunk, *v.shape[2:]), *out])), memories[chunks.rank]

    def look(self, op: Callable, x: dict[str, Tensor], now: Tensor, before: Tensor, weight: Tensor):
        """A chunk of every sequence, [n, C, ·]: (out, the memory after it, that before it faded to its end)."""
        acc, faded = accumulator(x["v"]), before
        k, v = x["k"].to(acc).repeat_interleave(x["v"].shape[2] // x["k"].shape[2], 2), x["v"].to(acc)
        if (gate := x.get("write_gate")) is not None:
            v = v * gate[..., None]
        if (g := x.get("log_decay")) is not None:
            left = (g if g.dim() == 4 else g[..., None]).cumsum(1).exp()
            k, faded = k * left, before * left[:, -1, ..., None]
        wrong = (v - torch.einsum("nthk,nhkv->nthv", k, before)).square().sum(-1)
        size = v.square().sum(-1)
        surprise = (wrong - size) / (wrong + size + TINY)
        beta = torch.sigmoid(x["beta"] + weight * surprise)
        return *op(**x | {"beta": beta}, initial_state=now), faded
