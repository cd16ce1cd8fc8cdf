"""Causal softmax attention to a sliding window and the first tokens (spec.Pattern), in time linear in T and with a
cache of fixed size.

The keys of a group of queries are in the columns

    first tokens | those of a subclass | window − 1 tokens before the group | the group itself

and gathered into a small dense attention. The cache is the same list for the group that begins with the next token,
without the group itself, so that one function maps positions to places of the cache and of the new tokens.

Dimensions: N sequences, T tokens of all of them together, G groups of `size` queries, S cache slots, C = S + size
columns, H query heads, Hkv key/value heads, d head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention.attention import WindowState
from ..layers.attention.sdpa import weigh
from ..layers.maps import mixed, wanted
from ..ops.sequences import Sequences
from ..spec.attention import LAYERS, Pattern
from .gathered import Groups, Places, attend_gathered, gather


class CachedPlaces(Places):
    """Places of the tokens of a causal layer: the N · S tokens of the cache, then the T new tokens."""

    def key_positions(self, sequence: Tensor, start: Tensor, size: int) -> Tensor:
        device, pattern = start.device, self.pattern
        first = torch.arange(pattern.first, device=device).expand(len(start), -1)
        before = pattern.window - 1
        if size > 1:  # at most as many as there are: a window may be much longer than a prompt
            before = min(before, max(start.tolist(), default=0))
        near = start[:, None] + torch.arange(-before, size, device=device)
        return torch.cat([first, self.drawn(start), near], 1)

    def drawn(self, start: Tensor) -> Tensor:
        """Returns further positions [G, random · block], which only subclasses have."""
        return start.new_empty(len(start), 0)

    def find(self, position: Tensor, sequence: Tensor) -> Tensor:
        slots, seen = self.pattern.slots, self.tokens[sequence, None]
        end = seen + self.lengths[sequence, None]
        position = torch.minimum(position, end - 1)
        column = torch.arange(position.shape[1], device=position.device)
        recent = position > seen - self.pattern.window
        cached = torch.where(recent, position - seen + slots, column).clamp(0, slots - 1) + sequence[:, None] * slots
        new = len(self.tokens) * slots + self.starts[sequence, None] + position - seen
        return torch.where(position >= seen, new, cached)

    def cached_positions(self, end: Tensor) -> Tensor:
        """Returns the positions [N, S] of the keys that are cached after `end` [N] tokens; −1: none."""
        position = self.key_positions(torch.arange(len(end), device=end.device), end, 0)
        return position.masked_fill((position < 0) | (position >= end[:, None]), -1)

    def next_cache(self, store: Tensor, end: Tensor) -> Tensor:
        """Returns the cache [N, S, Hkv, d] after `end` [N] tokens, the last of which are the new ones."""
        position = self.cached_positions(end)
        places = self.find(position, torch.arange(len(end), device=end.device))
        return gather(store, places).masked_fill((position < 0)[..., None, None], 0)


def attend_within(
    layer: Any, qkv: tuple[Tensor, Tensor, Tensor], state: WindowState | None, sequences: Sequences,
    of: type[CachedPlaces] = CachedPlaces,
) -> tuple[Tensor, WindowState | None]:  # fmt: skip
    """Computes attention with the pattern of a causal layer. Rows of a batch are treated as packed sequences of equal
    length. of: which keys.

    q [B, T, H, d]; k, v [B, T, Hkv, d] -> (out [B, T, H, d], the next state)."""
    q, k, v = qkv
    B, T = q.shape[:2]
    if T == 0:
        return q, state
    cu_seqlens, pattern = sequences.bounds, layer.spec.pattern
    ends = torch.arange(0, B * T + 1, T, device=q.device) if cu_seqlens is None else cu_seqlens
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    softmax = PatternSoftmax(pattern, layer.bias, layer.null, layer.weigh)

    def mix(v: Tensor, state: WindowState | None = state) -> tuple[Tensor, WindowState]:
        out, state = window_attention(q, k, v.flatten(0, 1), state, ends, softmax, of)
        return out.unflatten(0, (B, T)), state

    if state is None or cu_seqlens is not None or wanted() is None:
        return mixed(mix, v)
    kept = state.v.shape[1]
    cached = of(pattern, ends, state.seen).cached_positions(state.seen)
    new = state.seen[:, None] + torch.arange(T, device=q.device)

    def mix_all(v: Tensor) -> tuple[Tensor, WindowState]:
        return mix(v[:, kept:], state._replace(v=v[:, :kept]))

    return mixed(mix_all, torch.cat([state.v, v], 1), columns=torch.cat([cached, new], 1))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, state: WindowState | None, cu_seqlens: Tensor, softmax: "PatternSoftmax",
    of: type[CachedPlaces],
) -> tuple[Tensor, WindowState]:  # fmt: skip
    """Computes attention with the pattern for packed sequences. of: which keys.

    q [T, H, d]; k, v [T, Hkv, d] -> (out [T, H, d], the next state)."""
    pattern = softmax.pattern
    if state is None:
        none = k.new_zeros(len(cu_seqlens) - 1, pattern.slots, *k.shape[1:])
        state = WindowState(none, none, torch.zeros_like(cu_seqlens[1:], dtype=torch.long))
    places = of(pattern, cu_seqlens, state.seen)
    k, v = (torch.cat([old.flatten(0, 1), new]) for old, new in ((state.k, k), (state.v, v)))
    groups, mine = places.all_groups()
    # The cache may come from a call in another precision.
    out = attend_gathered(softmax, groups, q, k.to(q.dtype), v.to(q.dtype), softmax.parameters)
    end = state.seen + places.lengths
    return out[mine], WindowState(places.next_cache(k, end), places.next_cache(v, end), end)


@dataclass(frozen=True)
class PatternSoftmax:
    """The dense attention of the groups, with the pattern's mask and the options of the softmax."""

    pattern: Pattern
    bias: nn.Module | None  # of the logits, by the distances in tokens
    null: bool | Tensor  # as in `weigh`
    weigh: Any = weigh

    @property
    def parameters(self) -> list[Any]:
        own = [] if self.bias is None else [*self.bias.parameters()]
        return [*own, self.null] if isinstance(self.null, Tensor) else own

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
        own, position = groups.own[:, :, None], groups.position[:, None]
        bias = None if self.bias is None else self.bias(own - position)
        return self.weigh(q, k, v, self.allowed(own, position)[:, None], bias, null=self.null)

    def allowed(self, own: Tensor, position: Tensor) -> Tensor:
        """Returns the mask [G, size, C] of queries own [G, size, 1] and keys position [G, 1, C].

        A token in the window is only attended to in the window's columns, because it may also be a first token or in a
        random block."""
        near = torch.arange(position.shape[2], device=position.device) >= self.pattern.far
        distance = own - position
        return (position >= 0) & (distance >= 0) & ((distance < self.pattern.window) == near)


LAYERS["pattern"] = f"{__name__}.{attend_within.__name__}"
