"""Linear attention with a sliding window of softmax attention beside it, in one weighted mean (LoLCATs, arXiv
2410.10254, equations 5 and 6): the last `window` tokens have softmax attention's weights, and the older ones those of
the learned feature map φ. A token is in exactly one of the two.

    o_t = (γ Σ_{t−w < i ≤ t} e^{x_ti − c_t} v_i + Σ_{i ≤ t−w} φ(q_t)·φ(k_i) v_i) / (the same with v = 1)
    x_ti = q_t·k_i / √K    c_t = max over the window of x_ti    γ = σ(a), a learned for each head

c_t keeps the window's largest weight at γ, as published, so that the older tokens count beside any logits. A token is
written to the memory when it leaves the window, and decays from then on, if there is a decay. The gates of competing
heads multiply the weights of a token in both parts, and what is read.

Dimensions: B batch, T tokens, H heads, G heads of k, Gv of v (G or H), K key, V value dimension per head, N sequences,
w tokens of the window, E queries in rows, C queries per block, M blocks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.linear.project import Heads
from ..layers.linear.recur import Recur
from ..layers.linear.stage import Tokens
from ..layers.linear.token import TOKENS, add_mixer
from ..ops.backends.native.program import UnsupportedError
from ..ops.call import accumulator, gated
from ..ops.sequences import Sequences
from ..spec.decay import DECAYS, DecayShape
from ..spec.linear import Inputs, Read
from ..spec.mixer import Facts, Shapes
from ..spec.record import NonNegativeInt, PositiveInt, asked_for
from ..spec.serialize import TYPES
from ..utils.device import without_autocast
from ..utils.errors import InputError
from .linearized import LinearizedMixer, LinearizedSpec, MapLearned
from .recurrence import Recurrence
from .registration import register_mixer

FIRST = 0.1  # γ at the beginning, as in the configurations of HazyResearch/lolcats


class WindowedState(NamedTuple):
    """The memory of the tokens before the window, and the last w tokens; zeros where there is none."""

    memory: Tensor  # [N, H, rows, V + 1]
    k: Tensor  # [N, w, G, K], after rotation
    v: Tensor  # [N, w, Gv, V + 1], values and a 1, times the write gate
    tokens: Tensor  # [N], number of tokens so far
    decay: Tensor | None = None  # [N, w, H], logarithms of decays that depend on the token


def window_sums(q: Tensor, k: Tensor, v: Tensor, exists: Tensor) -> Tensor:
    """Returns Σ_j e^{q_e·k_j − c_e} v_j over the w keys after k_e, the last of which is that of query e itself, where
    c_e is the largest of these logits: [B, E, H, V].

    q: [B, E, H, K]. k, v: [B, w + E, G or Gv, ·]. exists: [B, w + E], False for keys that are none."""
    E, w, G = q.shape[1], k.shape[1] - q.shape[1], k.shape[2]
    C = min(w, E)
    q, k, v, exists = (F.pad(x, (*(0, 0) * (x.dim() - 2), 0, -E % C)) for x in (q, k, v, exists))
    q = q.unflatten(1, (-1, C)).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5)  # [B, M, G, H/G, C, K]
    k, v, exists = (x.unfold(1, w + C, C) for x in (k, v, exists))  # [B, M, ·, w + C]
    query, key = torch.arange(C, device=q.device)[:, None], torch.arange(w + C, device=q.device)
    seen = (key > query) & (key <= query + w) & exists[:, :, None, None, None]
    logits = (q @ k[:, :, :, None]).masked_fill(~seen, torch.finfo(q.dtype).min)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    out = weights @ v.unflatten(2, (G, -1)).mT  # [B, M, G, H/G, C, V]
    return out.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :E]


class Surroundings:
    """Places tensors of the tokens [B, T, ·] together with those of the w tokens before them. A pack has E places for
    its T tokens, in blocks of w for one sequence each, so that no NaN of another sequence is multiplied by 0."""

    def __init__(self, sequences: Sequences, window: int):
        self.sequences, self.window = sequences, window
        if sequences.packed:
            bounds = sequences.all_bounds()
            blocks = 1 + (bounds.diff() + window - 1) // window
            self.begins = window * (blocks.cumsum(0) - blocks)
            self.places = torch.arange(sequences.T, device=bounds.device) + (self.begins - bounds[:-1])[sequences.owner]
            self.size = sequences.T + 2 * window * sequences.count

    def extend(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns x [B, T, G, ·] with the w tokens `before` each sequence [N, w, G, ·], as [B, w + E, G, ·], and the
        last w tokens of each sequence. before: None for zeros."""
        flat, sizes, w = x.flatten(2), x.shape[2:], self.window
        history = self.sequences.before(flat, None if before is None else before.flatten(2), w)
        if self.sequences.packed:
            full = self._put(flat, self.places + w, w + self.size)
            old = (self.begins[:, None] + torch.arange(w, device=x.device)).flatten()
            full = full.index_copy(1, old, history.flatten(0, 1)[None])
        else:
            full = torch.cat([history, flat], 1)
        return full.unflatten(2, sizes), self.sequences.last(flat, history).unflatten(2, sizes)

    def rows(self, x: Tensor) -> Tensor:
        """Puts x [B, T, ·] at its E places."""
        return self._put(x, self.places, self.size) if self.sequences.packed else x

    def tokens(self, rows: Tensor) -> Tensor:
        """Inverts `rows`. Of extended tensors, it returns what is w tokens before each token."""
        return rows[:, self.places] if self.sequences.packed else rows[:, : self.sequences.T]

    @staticmethod
    def _put(x: Tensor, places: Tensor, size: int) -> Tensor:
        return x.new_zeros(1, size, *x.shape[2:]).index_copy(1, places, x)

    def exist(self, seen: Tensor | None, like: Tensor) -> Tensor:
        """Returns which of the extended tokens exist, as bool, after `seen` [N] tokens; None: after none."""
        ones, ages = like.new_ones(*like.shape[:2], 1), torch.arange(self.window, 0, -1, device=like.device)
        before = None if seen is None else (ages <= seen[:, None])[..., None].to(ones)
        return self.extend(ones, before)[0][..., 0] > 0


class Blend(Recur):
    """The mean of the window and of the memory of the older tokens."""

    @staticmethod
    def applies(spec: Any) -> bool:
        return spec.window > 0

    def build(self, mixer: Any) -> None:
        mixer.state_kind = WindowedState
        mixer.window_factor = nn.Parameter(torch.empty(mixer.H))  # a, of γ = σ(a)
        mixer.near, mixer.far = Recurrence(), Recurrence()  # modules, so that a hook can remove what one of them reads

    def reset(self, mixer: Any) -> None:
        mixer.window_factor.fill_(math.log(FIRST / (1 - FIRST)))

    def native(self, mixer: Any) -> dict[str, Any]:
        for name in ("competition", "read.skip"):
            if asked_for(mixer.spec, name):
                raise UnsupportedError(f"it does not support {name} with a window")
        return super().native(mixer) | {"window": mixer.spec.window, "scale": 1.0, "sum_eps": 0.0}

    def settings(self, mixer: Any) -> dict[str, Any]:
        return super().settings(mixer) | {"scale": 1.0, "normalize": False}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        with without_autocast(t.v):  # the memory is float32 or float64 by definition
            near, acc = Surroundings(t.sequences, mixer.spec.window), accumulator(t.v)
            G = mixer.spec.kv_heads or mixer.H
            v = gated(F.pad(t.v.to(acc), (0, 1), value=1.0), t.write)
            k, t.after["k"] = near.extend(_of_groups(t.k.to(acc), G), t.before("k"))
            v, t.after["v"] = near.extend(_of_groups(v, mixer.H if t.write is not None else G), t.before("v"))
            of_window = mixer.near(self._near, mixer, t, near, k, v)
            of_memory, t.after["memory"] = mixer.far(self._far, mixer, t, near, *_features(mixer, t, near.tokens(k)), v)
            least = torch.finfo(acc).tiny ** 0.5  # a smaller γ would divide by numbers whose inverse is infinite
            factor = mixer.window_factor.to(acc).sigmoid().clamp_min(least)
            t.out = gated(_mean(factor, of_window, of_memory), t.read_gate)

    def _near(self, mixer: Any, t: Tokens, near: Surroundings, k: Tensor, v: Tensor) -> Tensor:
        """Returns what the tokens read of the window, [B, T, H, V + 1]."""
        q = t.q.to(k) * mixer.logit_scale
        return near.tokens(window_sums(near.rows(q), k, v, near.exist(t.before("tokens"), q)))

    def _far(self, mixer: Any, t: Tokens, near: Surroundings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the features q read of the tokens before the window, [B, T, H, V + 1], and the next memory."""
        v, decay = near.tokens(v), t.log_decay
        if decay is not None and decay.dim() > 1:
            decay, t.after["decay"] = near.extend(decay.to(v), t.before("decay"))
            decay = near.tokens(decay)
        v = v.repeat_interleave(mixer.H // v.shape[2], 2)
        return self.recur(mixer, t, {"q": q, "k": k, "v": v, "log_decay": decay})


def _features(mixer: Any, t: Tokens, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns φ(q) of the tokens and φ(k) of those that leave the window, [B, T, H, ·]; k: [B, T, G, K]."""
    root = mixer.logit_scale**0.5
    return mixer.learned_map(t.q.to(k) * root, k.repeat_interleave(mixer.H // k.shape[2], 2) * root)


def _mean(factor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Returns (γ near + far) / (γ n + m) of sums of weighted values [..., V + 1], whose last are n and m, of weights.

    It is written as the mean of the window and what the older tokens change, so that without them it is that mean bit
    for bit, and γ has no gradient. A sum of weights is 0 where gates are 0, or where a hook removes a part."""
    near, n, far, m = near[..., :-1], near[..., -1:], far[..., :-1], far[..., -1:]
    window = _quotient(near, n)
    return window + _quotient(far - m * window, factor[:, None] * n + m)


def _quotient(x: Tensor, weight: Tensor) -> Tensor:
    """x / weight, and 0 where the weight is 0. A weight whose square is 0, by which a gradient is divided, has none."""
    small = weight < torch.finfo(weight.dtype).tiny ** 0.5
    fixed = (x.detach() / weight.detach()).masked_fill(weight == 0, 0)
    return torch.where(small, fixed, x / torch.where(small, 1, weight))


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Returns one of the equal heads of each group: [B, T, H, ·] -> [B, T, G, ·]."""
    return x[:, :, :: x.shape[2] // groups]


class GroupedHeads(Heads):
    """Divides k and v into fewer heads than q, and repeats them."""

    def build(self, mixer: Any) -> None:
        groups = mixer.spec.kv_heads or mixer.H
        mixer.parts |= {"k": groups * mixer.K, "v": groups * mixer.V}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        for name, size in (("k", mixer.K), ("v", mixer.V)):
            x = t.parts[name].unflatten(-1, (-1, size))
            t.parts[name] = x.repeat_interleave(mixer.H // x.shape[2], 2).flatten(2)
        super().__call__(mixer, t)


class WindowedMap(MapLearned):
    """The learned feature map, which the recurrence applies where a window has q and k without it."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        if not mixer.spec.window:
            super().__call__(mixer, t)


REPLACED: dict[Any, Any] = {Heads: GroupedHeads, MapLearned: WindowedMap}


class WindowedMixer(LinearizedMixer):
    """The layer of a WindowedSpec."""

    INPUTS = tuple(REPLACED.get(stage, stage) for stage in LinearizedMixer.INPUTS)
    RECURRENCES = (Blend, Recur)
    near: nn.Module
    far: nn.Module

    @property
    def summands(self) -> dict[str, nn.Module]:
        """The two parts of the mean, as modules; none without a window."""
        return {"window": self.near, "memory": self.far} if isinstance(self.recur, Blend) else {}


@dataclass(frozen=True)
class WindowedSpec(LinearizedSpec):
    """A linear mixer with a window of softmax attention."""

    window: NonNegativeInt = 64  # w, number of tokens with softmax attention's weights, among them the token itself
    kv_heads: PositiveInt | None = None  # number of heads of k and v, shared by consecutive heads of q; None: one each

    facts = Facts("headrace.extra.windowed.WindowedMixer")

    def _objections(self):
        yield from super()._objections()
        inputs, own = self.inputs, ("rotary", "rotary_first", "bias", "value_map")
        plain = inputs == Inputs(**{name: getattr(inputs, name) for name in own})
        decay = DECAYS.get(self.decay.kind)
        scalar = decay is None or decay.shape is not DecayShape.VECTOR
        yield (
            not (plain and scalar and self.heads.qk_groups is None and self.read.norm == "sum")
            or self.write.beta != "one"
            or self.memories_per_head > 1,
            f"window={self.window} is of a mean with the weights of a learned map; expected map='softmax' or 'exp', "
            "read.norm='sum', write.beta='one', no decay per key channel, heads.qk_groups=None, one memory per head, "
            f"and no other fields of inputs than {', '.join(own)}",
        )

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        H = self.num_heads(hidden_size, num_heads)
        if self.kv_heads is not None and H % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads} does not divide num_heads={H}")
        return super().head_dims(hidden_size, num_heads)

    @property
    def counts_tokens(self) -> bool:
        return super().counts_tokens or self.window > 0

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        shapes = super().state_shapes(hidden_size, num_heads, tokens)
        if not self.window:
            return shapes
        H, (K, V) = self.num_heads(hidden_size, num_heads), self.head_dims(hidden_size, num_heads)
        G = self.kv_heads or H
        writes = self.competition is not None and self.competition.write != "none"
        shapes |= {"k": (self.window, G, K), "v": (self.window, H if writes else G, V + 1)}
        frozen = self.competition is not None and self.competition.freeze  # a fixed decay then differs by token
        if self.decay.kind != "none" and (frozen or not DECAYS[self.decay.kind].fixed):
            shapes["decay"] = (self.window, H)
        return shapes

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        """Also of the window, whose logits and means are matrix products of a token with its cache."""
        H, (K, V) = self.num_heads(hidden_size, num_heads), self.head_dims(hidden_size, num_heads)
        return super().flops_per_token(hidden_size, num_heads) + 2 * self.window * H * (K + V + 1)


TYPES["windowed"] = WindowedSpec
TOKENS[WindowedSpec.facts.layer] = add_mixer
register_mixer(
    "lolcats",
    WindowedSpec(inputs=Inputs(rotary=True, rotary_first=True), read=Read("sum")),
    about="One mean of the last 64 tokens by softmax attention and of all older ones by linear attention with a "
    "learned feature map.",
    paper="https://arxiv.org/abs/2410.10254",
)
