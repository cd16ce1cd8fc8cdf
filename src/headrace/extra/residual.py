"""A delta rule whose write strength β_t depends on the token and on the residual r_t = v_t − k_t S
(write.residual_chunk):

    β_t = σ(logit_t + a_h · (|r_t|² − |v_t|²) / (|r_t|² + |v_t|²))

The fraction, the surprise, is −1 if the memory stores v_t under k_t, 0 if it stores nothing, and up to 1 if it stores
another value. a_h > 0 prefers to write new values, a_h < 0 to keep stored ones. Initially a_h = 0.

S is the memory before the token's chunk, decayed up to the token, so that all β of a chunk are known before its delta
rule is solved in parallel. Chunks of one token give the exact residual. Chunks are counted from the start of a
sequence, independently of its division into calls.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences, C tokens per
chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.linear.stage import STAGES, Tokens
from ..layers.maps import mixed, wanted
from ..ops.call import accumulator, gated
from ..ops.sequences import Sequences
from ..spec.linear import RULES, MixerSpec, Write
from ..utils.device import without_autocast
from ..zoo.mixers import GATED_DELTANET
from .chunks import Chunks, carry
from .recurrence import ModuleRecur, Recurrence
from .registration import register_mixer

TINY = 1e-12  # added to the denominator: the surprise of an empty memory and a zero value is 0


class ResidualDelta(SelfInitialized, Recurrence):
    """Computes the recurrence with this β.

    Args:
        chunk: chunk size in tokens.
        num_heads: number of weights a_h.
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
        """Computes the output and the next state, with the arguments of `RecurrenceModule`; beta is β's logit.

        Returns:
            (out [B, T, H, V], the next memory, the next `before`, that of the state's chunk, or None for chunk=1).
        """
        with without_autocast(x["v"]):  # the memory is float32 or float64 by definition
            # A fixed decay is expanded to all tokens, because the padding of incomplete chunks must not decay.
            given = {n: y.expand(x["v"].shape[:3]) if y.dim() == 1 else y for n, y in x.items() if y is not None}
            memories, places = self._start(given, state, sequences)
            out, memories = self._run(op, given, memories, places, sequences)
        return out, memories[:, 0], memories[:, 1] if self.chunk > 1 else None

    def strengths(self, op: Callable, x: dict[str, Any], state: Any, sequences: Sequences) -> Tensor:
        """Returns β of all tokens, [B, T, H]. Arguments are those of `forward`."""

        def told(**chunk: Any) -> tuple[Tensor, Tensor]:
            return chunk["beta"][..., None].expand_as(chunk["v"]), op(**chunk)[1]

        return self(told, x, state, sequences)[0][..., 0]

    def _start(self, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns memory and `before` [N, 2, H, K, V], and the position of the next token in its chunk [N]."""
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
        weight = self.weight.to(memories.dtype)  # cast once, because its gradient is summed over chunks

        def advance(memories: Tensor, *pieces: Tensor) -> Tensor:
            now, before = memories.unbind(1)
            y, *after = self._chunk(op, dict(zip(x, pieces, strict=True)), now, now if out else before, weight)
            out.append(y)
            return torch.stack(after, 1)

        v = x["v"]
        if v.shape[1] == 1 and sequences.cu_seqlens is None:
            memories = advance(memories, *x.values())
            return out[0], memories
        chunks = Chunks(sequences, v, self.chunk, places)
        _, memories = carry(advance, memories[chunks.order], chunks.counts, *(chunks.lay_out(y) for y in x.values()))
        return chunks.take_back(torch.cat([v.new_zeros(0, self.chunk, *v.shape[2:]), *out])), memories[chunks.rank]

    def _chunk(self, op: Callable, x: dict[str, Tensor], now: Tensor, before: Tensor, weight: Tensor):
        """Computes one chunk [n, C, ·] of n sequences: (out, the memory after it, `before` decayed to its end)."""
        acc, faded = accumulator(x["v"]), before
        k = x["k"].to(acc).repeat_interleave(x["v"].shape[2] // x["k"].shape[2], 2)
        v = gated(x["v"].to(acc), x.get("write_gate"))
        if (g := x.get("log_decay")) is not None:
            left = (g if g.dim() == 4 else g[..., None]).cumsum(1).exp()
            k, faded = k * left, before * left[:, -1, ..., None]
        wrong = (v - torch.einsum("nthk,nhkv->nthv", k, before)).square().sum(-1)
        size = v.square().sum(-1)
        surprise = (wrong - size) / (wrong + size + TINY)
        beta = torch.sigmoid(x["beta"] + weight * surprise)
        return *op(**x | {"beta": beta}, initial_state=now), faded


class Residual(ModuleRecur):
    """The recurrence with this β."""

    name = "residual"
    static_shapes = False  # the lengths of the sequences lay out its chunks

    def build(self, mixer: Any) -> None:
        super().build(mixer)
        heads = mixer.H * mixer.spec.memories_per_head
        mixer.residual = ResidualDelta(mixer.spec.write.residual_chunk, heads)

    def mixed(self, mixer: Any, mix: Callable[..., tuple[Any, ...]], t: Tokens) -> tuple[Any, ...]:
        """Returns mix(v), whose map is that of the β of v."""
        if wanted() is None:
            return mix(t.v)
        v, R = t.v, mixer.spec.memories_per_head
        given = self.tensors(t) | {"v": v.repeat_interleave(R, 2)}
        strengths = mixer.residual.strengths(self.op(mixer), given, t.state, t.sequences)
        return mixed(mix, v, linear=partial(mix, strengths=strengths))

    def __call__(self, mixer: Any, t: Tokens) -> None:
        if t.strengths is not None:
            t.out, t.after["memory"] = self.recur(mixer, t, self.tensors(t) | {"beta": t.strengths})
            return
        t.out, *after = mixer.residual(self.op(mixer), self.tensors(t), t.state, t.sequences)
        t.after["memory"], t.after["before"] = after


def rules(spec: MixerSpec) -> Iterator[tuple[bool, str]]:
    """Objections to this β."""
    write = spec.write
    yield (
        write.rule != "delta" or write.beta != "sigmoid",
        f"write.residual_chunk={write.residual_chunk} makes β depend on what the delta rule corrects; expected "
        f"write.rule='delta' and write.beta='sigmoid', got {write.rule!r} and {write.beta!r}",
    )


RULES["write.residual_chunk"] = rules


STAGES["residual"] = Residual
register_mixer(
    "residual-delta",
    replace(GATED_DELTANET, write=Write("delta", "sigmoid", residual_chunk=16)),
    about="Gated DeltaNet whose write strength β also depends on the error v − k S of the memory at the start of "
    "each chunk of 16 tokens, with a weight initialized to 0. Original to this library.",
    paper="https://arxiv.org/abs/2412.06464",
)
