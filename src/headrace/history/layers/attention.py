"""Softmax attention with what the papers of 2019 to 2022 added: T5's bias (distance.py), FlashAttention's tiles
(flash.py), random blocks, and the patterns of encoders (symmetric.py).

Dimensions: B batch, T new tokens, D hidden size, H query heads, Hkv key/value heads, d head dimension, G groups.
"""

import random
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...extra.pattern import CachedPlaces, attend_within
from ...layers.attention.attention import SoftmaxAttention, WindowState
from ...layers.rotary import Angles
from ...ops.call import accumulator
from ...ops.sequences import Sequences
from ...spec.attention import AttentionSpec, Pattern
from ...utils.device import kept_on_cpu
from .distance import DistanceBias
from .flash import flash_attention
from .symmetric import SymmetricSoftmax, attend_to_all, global_tokens, symmetric_attention


@kept_on_cpu
def reservoir(pattern: Pattern, blocks: int) -> Tensor:
    """Returns the random blocks [blocks, random] that the queries of each block attend to; −1: none yet.

    Algorithm R (Vitter, 1985): the n-th block that begins to leave the window takes a slot with probability random / n.
    The draw depends only on seed and n, so that it is the same for all lengths. A block keeps its slot until another
    one replaces it, and is in the cache or among the new tokens when it takes the slot.
    """
    held, rows = [-1] * pattern.random, []
    begin, delay = -(-pattern.first // pattern.block), pattern.window // pattern.block
    for current in range(blocks):
        count = current - delay - begin  # number of blocks that left the window before this one
        if count >= 0:
            draw = random.Random(f"{pattern.seed} {count}").random()
            slot = count if count < pattern.random else int(draw * (count + 1))
            if slot < pattern.random:
                held[slot] = current - delay
        rows.append(list(held))
    return torch.tensor(rows, device="cpu")


class ReservoirPlaces(CachedPlaces):
    """Places of the tokens of a causal layer with random blocks."""

    def drawn(self, start: Tensor) -> Tensor:
        if not self.pattern.random:
            return super().drawn(start)
        block = start // self.pattern.block
        last = int(block.max()) if len(block) else 0
        rows = 1 << last.bit_length()  # a power of two, so that few tables are cached
        chosen = reservoir(self.pattern, rows).to(start.device)[block]
        within = torch.arange(self.pattern.block, device=start.device)
        return (chosen[..., None] * self.pattern.block + within).flatten(1)


class EarlyAttention(SoftmaxAttention):
    """SoftmaxAttention with `buckets`, `form="tiles"`, random blocks, and in an encoder with the symmetric form of
    patterns."""

    def __init__(self, spec: AttentionSpec, *, hidden_size: int, num_heads: int, causal: bool = True, **settings: Any):
        super().__init__(spec, hidden_size=hidden_size, num_heads=num_heads, causal=causal, **settings)
        if spec.buckets is not None:
            H = spec.num_heads(hidden_size, num_heads)
            self.bias = DistanceBias(spec.buckets, H, hidden_size=hidden_size, bidirectional=not causal)
        self.global_proj, pattern = None, spec.pattern
        if not causal and pattern is not None and pattern.global_projections and pattern.first + pattern.last:
            own = {f"{name}_proj": deepcopy(getattr(self, f"{name}_proj")) for name in "qkv"}
            self.global_proj = nn.ModuleDict(own)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Also copies the projections to those of the global tokens (arXiv 2004.05150, section 3.1)."""
        super().reset_parameters()
        if self.global_proj is not None:
            for name, projection in self.global_proj.named_children():
                projection.load_state_dict(getattr(self, name).state_dict())

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, gate: Tensor | None) -> Tensor:
        if self.spec.form == "tiles":
            return flash_attention(q, k, v, causal=self.causal, valid=valid)
        return super()._mix(q, k, v, valid, gate)

    def _attend_within(
        self, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], turn: Angles | None, state: WindowState | None,
        sequences: Sequences,
    ) -> tuple[Tensor, WindowState | None]:  # fmt: skip
        """Also computes attention with the pattern in an encoder."""
        if self.causal:
            return attend_within(self, qkv, state, sequences, ReservoirPlaces)
        assert self.spec.pattern is not None
        B, T = x.shape[:2]
        if B * T == 0:
            return qkv[0], None
        q, k, v = (y.flatten(0, 1) for y in qkv)
        ends = torch.arange(0, B * T + 1, T, device=x.device) if sequences.bounds is None else sequences.bounds
        softmax = SymmetricSoftmax(self.spec.pattern, self.bias, self.null)
        out = symmetric_attention(q, k, v, ends, softmax)
        tokens = global_tokens(self.spec.pattern, sequences.counts(), x.device)
        rows = torch.cat([t.rows.flatten() for t in tokens])
        if len(rows):
            q, k, v = self._global(x, (q, k, v), turn, rows, sequences)
            out = out.index_copy(0, rows, attend_to_all(q, k, v, tokens, softmax))
        return out.unflatten(0, (B, T)), None

    def _global(
        self, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], turn: Angles | None, rows: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries [R, H, d] of the global tokens, at these rows of all tokens, and the keys and values
        [B · T, Hkv, d] for them."""
        q, k, v = qkv
        if self.global_proj is None:
            return q[rows], k, v
        own: Any = None
        if turn is not None:
            angles = (y.to(accumulator(x)).to(x.device) for y in turn)
            own = tuple(y.expand(*x.shape[:2], 1, -1).flatten(0, 1)[rows][None] for y in angles)
        k, v = self._key_value(x, sequences, turn, self.global_proj)
        x = x.flatten(0, 1)[rows][None]
        q = self._query(x, Sequences(x, None), own, self.global_proj)
        return q[0], k.flatten(0, 1), v.flatten(0, 1)
