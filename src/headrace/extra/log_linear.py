"""Log-linear attention (arXiv 2506.04761): the memory is kept in levels by the age of its tokens, and a token weights
what it reads of each level (`levels`).

Token s is at level ℓ for token t if ℓ is the number of binary digits of t XOR s: level 0 is the token itself, and level
ℓ is an aligned block of 2^(ℓ−1) tokens before it (a Fenwick tree). The last level also has all older tokens.

    o_t = Σ_ℓ λ_t,ℓ q_t S_t,ℓ    λ_t,ℓ = softplus(a_ℓ · (W x_t)_ℓ)    S_t,ℓ: the memory of the tokens of level ℓ

Every update of `linear_attention` is linear in S and v, and so defines the memory of some of the tokens. At level ℓ the
second half of each 2^ℓ tokens reads the first, whose v alone is not 0, so that each level is one call of the op:
O(T log T). The last level is a difference of outputs. In blocks of 2^BITS tokens the weights of all pairs are computed.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences, L levels, C
tokens per block, M blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import zoo
from ..layers.linear.mixer import LinearMixer
from ..layers.linear.stage import Tokens
from ..ops.sequences import Sequences, avoid_sync
from ..spec.linear import MixerSpec
from ..spec.mixer import Facts
from ..spec.record import Range
from ..spec.serialize import TYPES
from .chunks import recomputed
from .recurrence import ModuleRecur, RecurrenceModule
from .registration import register_mixer

BITS = 5  # logarithm of the number of tokens in a block whose pairs are computed
FAR = 2**50  # a position at the last level for every token


class Places(NamedTuple):
    """The places of the tokens x [B, T, ·] in their sequences."""

    sequences: Sequences
    seen: Tensor  # [N], number of tokens of each sequence before x
    before: Tensor  # [B, T], the same for each token
    position: Tensor  # [B, T], of each token
    memory: Tensor | None  # the memory before x; None: x begins its sequences

    def begins(self, size: int | None) -> Tensor:
        """Returns the indices, among all B T tokens, of those at which a sequence or a block of `size` tokens begins.
        They are padded with B T to the largest number there may be, so that nothing waits for their number."""
        begins = (self.position == self.before) | (self.position % (size or FAR) == 0)
        n, N = begins.numel(), self.sequences.count
        indices = torch.where(begins.flatten(), torch.arange(n, device=begins.device), n)
        return indices.sort().values[: N if size is None else (n + N * (2 * size - 2)) // size]

    def per_token(self, x: Tensor) -> Tensor:
        """[N, ·] -> [B or 1, 1 or T, ·]."""
        return x[:, None] if self.sequences.cu_seqlens is None else x[self.sequences.owner][None]


def level(t: Tensor, s: Tensor, last: int) -> Tensor:
    """Returns the level of token s for token t, at most `last`."""
    return torch.bucketize(t ^ s, 1 << torch.arange(last, device=t.device), right=True)


class LogLinear(RecurrenceModule):
    """Computes the recurrence with levels.

    Args:
        levels: L ≥ 2.
        num_heads: H.
    """

    no_weight_decay = ("weight",)

    def __init__(self, levels: int, num_heads: int):
        super().__init__()
        self.last = levels - 1
        self.weight = nn.Parameter(torch.empty(num_heads, levels))  # a
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)

    def compute(self, op: Callable, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """x has levels [B, T, H, L], W x. The memory [N, H, K, (L − 1) V] is levels 1 to L − 1 for the next token."""
        v, (B, T) = x["v"], x["v"].shape[:2]
        x = {name: y.expand(B, T, -1) if y.dim() == 1 else y for name, y in x.items()}  # blocks are padded
        weight = F.softplus(self.weight.to(v) * x.pop("levels"))
        within = sequences.positions(None, v).expand(B, T)
        seen = within.new_zeros(sequences.count) if state is None else state.tokens
        before = sequences.positions(seen, v) - within
        memory = None if state is None else state.memory.to(v)
        places = Places(sequences, seen, before, within + before, memory)
        out = self._new(op, x, weight, places)
        ended = recomputed(self._ended, op, x, places) if torch.is_grad_enabled() else self._ended(op, x, places)
        if memory is not None:
            read, kept = self._old(op, x, weight, places, memory)
            out, ended = out + read, ended + kept
        return out, ended

    def _new(self, op: Callable, x: dict[str, Tensor], weight: Tensor, places: Places) -> Tensor:
        """Returns what the tokens read of each other."""
        T, position = x["v"].shape[1], places.position
        bits = min(BITS, self.last - 1) if T > 1 else 0
        near, out = self._blocks(op, x, weight, places, bits)
        # Level of a pair of these tokens, if they begin their sequences.
        farthest = min(self.last, (T - 1).bit_length()) if position.shape[0] else 0
        if places.memory is not None and T > 1 and position.shape[0]:  # a GPU does not wait for their positions
            farthest = self.last if avoid_sync(position) else int(level(position, places.before, self.last).max())
        for i in range(bits + 1, farthest + 1):
            begins = places.begins(2**i if i < self.last else None)
            bounds = torch.cat([begins, begins.new_full((1,), position.numel())])
            reads = (position[..., None, None] >> (i - 1)) % 2 == 1  # [B, T, 1, 1], the second halves
            v = x["v"] if i == self.last else x["v"].masked_fill(reads, 0)
            flat = {name: y.flatten(0, 1)[None] for name, y in (x | {"v": v}).items()}
            far = op(**flat, cu_seqlens=bounds)[0][0].unflatten(0, position.shape)
            far = far - near if i == self.last else far.masked_fill(~reads, 0)
            out, near = out + weight[..., i, None] * far, near + far
        return out

    def _blocks(self, op: Callable, x: dict[str, Tensor], weight: Tensor, places: Places, bits: int):
        """Returns what the tokens read of their blocks of C = 2^bits tokens, with λ = 1 and with λ."""
        C, begins = 2**bits, places.begins(2**bits)
        i, tokens = torch.arange(C, device=begins.device), torch.arange(places.position.numel(), device=begins.device)
        at = (torch.searchsorted(begins, tokens, right=True) - 1) * C + places.position.flatten() % C

        def lay_out(y: Tensor) -> Tensor:
            return y.new_zeros(len(begins) * C, *y.shape[2:]).index_copy(0, at, y.flatten(0, 1)).unflatten(0, (-1, C))

        pieces = {name: lay_out(y) for name, y in x.items()}
        v = pieces["v"]
        each = torch.eye(C, dtype=v.dtype, device=v.device)[None, :, None].expand(*v.shape[:3], -1)
        scores, _ = op(**pieces | {"v": each})  # [M, C, H, C], what each token reads of the value of each
        by_level = level(i[:, None], i, self.last)[None, :, None].expand_as(scores)
        weighted = scores * lay_out(weight).gather(-1, by_level)
        read = (torch.einsum("mihj,mjhv->mihv", y, v) for y in (scores, weighted))
        return (y.flatten(0, 1)[at].unflatten(0, places.position.shape) for y in read)

    def _ended(self, op: Callable, x: dict[str, Tensor], places: Places) -> Tensor:
        """Returns the memory of the tokens at the end of their sequences. In the backward it is computed again, because
        its values are L times as large as v."""
        end = places.before + places.sequences.totals(x["v"])
        own = F.one_hot(level(end, places.position, self.last) - 1, self.last).to(x["v"])
        v = (x["v"][..., None, :] * own[:, :, None, :, None]).flatten(-2)
        return op(**x | {"v": v}, cu_seqlens=places.sequences.bounds)[1]

    def _old(self, op: Callable, x: dict[str, Tensor], weight: Tensor, places: Places, memory: Tensor):
        """Returns what the tokens read of the memory before them, and what remains of it."""
        v, seen, slots = x["v"], places.seen[:, None], torch.arange(1, self.last + 1, device=memory.device)
        starts = torch.where(slots < self.last, seen >> slots << slots, FAR)  # [N, L − 1], a token of each level
        none = v.new_zeros(1).expand(*v.shape[:3], memory.shape[-1])
        read, kept = op(**x | {"v": none}, initial_state=memory, cu_seqlens=places.sequences.bounds)
        by_level = level(places.position[..., None], places.per_token(starts), self.last)
        by_level = by_level[:, :, None].expand(-1, -1, v.shape[2], -1)
        out = (read.unflatten(-1, (self.last, -1)) * weight.gather(-1, by_level)[..., None]).sum(-2)
        after = level(seen + places.sequences.lengths(v)[:, None], starts, self.last).clamp(min=1) - 1
        kept = kept.unflatten(-1, (self.last, -1))
        return out, torch.einsum("nhkiv,nij->nhkjv", kept, F.one_hot(after, self.last).to(kept)).flatten(-2)


class Levels(ModuleRecur):
    """The recurrence with levels."""

    name = "levels"

    def build(self, mixer: Any) -> None:
        super().build(mixer)
        levels = mixer.spec.levels
        mixer.levels = LogLinear(levels, mixer.H * mixer.spec.memories_per_head)
        mixer.parts["levels"] = mixer.H * levels

    def __call__(self, mixer: Any, t: Tokens) -> None:
        of_heads = t.parts["levels"].unflatten(-1, (mixer.H, -1))
        given = self.tensors(t) | {"levels": of_heads.repeat_interleave(mixer.spec.memories_per_head, 2)}
        t.out, t.after["memory"] = mixer.levels(self.op(mixer), given, t.state, t.sequences)


class LogLinearMixer(LinearMixer):
    """The layer of a LogLinearSpec."""

    PARTS = *LinearMixer.PARTS[:-1], "levels", LinearMixer.PARTS[-1]
    RECURRENCES = (Levels,)


@dataclass(frozen=True)
class LogLinearSpec(MixerSpec):
    """A linear mixer with levels."""

    # L: memories of 1, 1, 2, 4, 8, … tokens back; the last has all older tokens
    levels: Annotated[int, Range("2 to 40", lambda n: 2 <= n <= 40)] = 15

    facts = Facts("headrace.extra.log_linear.LogLinearMixer")

    def _objections(self):
        yield from super()._objections()
        read, write = self.read, self.write
        plain = not self.sums and not read.bonus and write.residual_chunk is None and write.beta != "trapezoid"
        yield (
            not (plain and write.steps == 1 and write.erase == "beta"),
            f"levels={self.levels} weights what is read of each level; expected read.bonus=False, no sum in read.norm, "
            "write.residual_chunk=None, write.steps=1, write.erase='beta', and write.beta neither 'exp' nor "
            "'trapezoid'",
        )

    @property
    def matrices(self) -> int:  # type: ignore[override]
        """One for each level but that of the token itself."""
        return self.levels - 1

    @property
    def counts_tokens(self) -> bool:
        return True

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        """As of a MixerSpec, but a token is added to one level. The delta rule changes all of them."""
        every = super().flops_per_token(hidden_size, num_heads)
        level = math.prod(self.state_shapes(hidden_size, num_heads)["memory"]) // self.matrices
        return every if self.write.rule == "delta" else every - 2 * (self.matrices - 1) * level


def with_levels(spec: MixerSpec, **changes: Any) -> LogLinearSpec:
    """Returns a linear mixer with levels. changes: fields that differ."""
    own = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return LogLinearSpec(**own | changes)


TYPES["log-linear"] = LogLinearSpec
MAMBA2, GATED_DELTANET = zoo.get("mamba2"), zoo.get("gated-deltanet")
register_mixer(
    "log-linear-mamba2",
    with_levels(MAMBA2),
    about="Mamba-2 with a memory for each power of two of tokens back, which a token weights when it reads.",
    paper="https://arxiv.org/abs/2506.04761",
)
register_mixer(
    "log-linear-gated-deltanet",
    # HanGuo97/log-linear-attention, h_gated_deltanet_mid: 6 heads with head_dim 192 at a hidden size of 1536
    with_levels(GATED_DELTANET, heads=replace(GATED_DELTANET.heads, width=384)),
    about="Gated DeltaNet with a memory for each power of two of tokens back, which a token weights when it reads.",
    paper="https://arxiv.org/abs/2506.04761",
)
