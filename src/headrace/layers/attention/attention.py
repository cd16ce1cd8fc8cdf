"""Softmax attention, whose state is a key/value cache.

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H query heads, Hkv key/value heads, d head
dimension, N sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...ops.checks import require
from ...ops.parallel.context import refuse_parts
from ...ops.sequences import Sequences
from ...spec.attention import LAYERS, AttentionSpec
from ...utils.errors import InputError
from ..base import ANY, SelfInitialized, check_input, check_state, may_write, named
from ..maps import mixed, wanted, with_map
from ..norms import OffsetRMSNorm
from ..packing import count_tokens, without_padding, zeroed
from ..rotary import Angles, angles, rotate
from .sdpa import attend, weigh


class AttentionState(NamedTuple):
    """The keys and values of all tokens so far. Keys are rotated, unless the frequencies depend on the length."""

    k: Tensor  # [N, L, Hkv, d]; with forget, [N, L, Hkv, d + H/Hkv], where the last are the logits of the gate f
    v: Tensor  # [N, L, Hkv, d]
    valid: Tensor | None = None  # [N, L] bool: False marks padding; None: no padding
    room: int | None = None  # capacity in tokens of the memory of k and v; None: L

    @property
    def seen(self) -> Tensor:
        """Number of tokens so far, [N]."""
        return valid_columns(self.k, self.valid).sum(1)


class WindowState(NamedTuple):
    """The keys, after rotation, and values that later tokens attend to with a pattern; zeros in free slots."""

    k: Tensor  # [N, S, Hkv, d], S slots
    v: Tensor  # [N, S, Hkv, d]
    seen: Tensor  # [N], number of tokens so far


class SoftmaxAttention(SelfInitialized):
    """Softmax attention (arXiv 1706.03762) with Llama's projections, rotary positions (arXiv 2104.09864), grouped
    key/value heads (arXiv 2305.13245) and the options of AttentionSpec.

    Args:
        spec, hidden_size, num_heads, rope_theta: as in LinearMixer.
        layer_idx, num_layers: not used.
        norm_eps: epsilon of the norms of q and k.
        causal: False for an encoder, in which every token attends to all tokens, and for `cross`.
        out_size: size of the output; None: hidden_size.
    """

    weigh: Any = staticmethod(weigh)  # from logits to means of values
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    g_proj: nn.Linear | None
    f_proj: nn.Linear | None
    sinks: nn.Parameter | None

    def __init__(
        self, spec: AttentionSpec, *, hidden_size: int, num_heads: int, layer_idx: int = 0, num_layers: int = 1,
        norm_eps: float = 1e-6, rope_theta: float = 10000.0, causal: bool = True, out_size: int | None = None,
    ):  # fmt: skip
        super().__init__()
        if type(self) is SoftmaxAttention and (layer := spec.layer(causal)) != AttentionSpec.facts.layer:
            raise InputError(f"{spec} has a layer of its own, {layer}; expected headrace.layers.build to make it")
        self.spec, self.rope_theta, self.causal, self.hidden_size = spec, rope_theta, causal, hidden_size
        require(causal or not spec.forget, "forget=True is of causal attention; expected forget=False in an encoder")
        self.state_kind = AttentionState if spec.pattern is None else WindowState
        self.within: Any = None if spec.pattern is None else named(LAYERS["pattern"])
        self.fading: Any = named(LAYERS["forget"]) if spec.forget else None
        self.state_shapes = spec.state_shapes(hidden_size, num_heads, ANY) | {"valid": (ANY,), "seen": ()}
        self.H, (self.head_dim, _) = spec.num_heads(hidden_size, num_heads), spec.head_dims(hidden_size, num_heads)
        self.rotary_dim = self.head_dim
        self.q_norm, self.k_norm, self.g_proj, self.f_proj, self.sinks = None, None, None, None, None
        self._build(norm_eps, out_size or hidden_size)
        self.bias: nn.Module | None = None  # maps distances [B, T, L] to what the logits get

    def _build(self, norm_eps: float, out_size: int) -> None:
        """Adds the modules and parameters."""
        spec, D, H, d = self.spec, self.hidden_size, self.H, self.head_dim
        G, bias = spec.kv_heads or H, spec.bias in (True, "qkv")
        self.q_proj = nn.Linear(D, H * d, bias=bias)
        self.k_proj = nn.Linear(D, G * d, bias=bias)
        self.v_proj = nn.Linear(D, G * d, bias=bias)
        self.o_proj = nn.Linear(H * d, out_size, bias=spec.bias in (True, "o"))
        if spec.qk_norm != "none":
            widths = (H * d, G * d) if spec.qk_norm == "joint" else (d, d)
            kind = OffsetRMSNorm if spec.qk_norm == "head-offset" else nn.RMSNorm
            self.q_norm, self.k_norm = (kind(width, eps=norm_eps) for width in widths)
        if spec.gated:
            self.g_proj = nn.Linear(D, H * d if spec.gate == "channel" else H, bias=bias)
        if spec.forget:
            self.f_proj = nn.Linear(D, H)  # logits of the gate f
        if spec.null == "learned":
            self.sinks = nn.Parameter(torch.zeros(H))  # logits with value 0

    @property
    def static_shapes(self) -> bool:
        """Whether a call without packed sequences needs nothing of their lengths on the host."""
        return self.spec.pattern is None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the logits of the sinks to 0, if there are any."""
        if self.sinks is not None:
            self.sinks.zero_()

    def forward(
        self, x: Tensor, state: Any = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None, in_place: bool = False, projections: Any = None,
    ) -> tuple[Tensor, AttentionState | WindowState]:  # fmt: skip
        """As `Mixer.forward`: x [B, T, D] -> (y [B, T, D], state). projections: q_proj, k_proj and v_proj as
        attributes, in place of the layer's own."""
        if isinstance(maps := wanted(), list):
            return with_map(self, maps, x, state, mask=mask, cu_seqlens=cu_seqlens, projections=projections)
        refuse_parts(self)
        require(self.causal or state is None, "state is given to an encoder, which has none; expected state=None")
        check_input(x, mask, cu_seqlens is not None, self.hidden_size)
        sequences = Sequences.of(x, cu_seqlens)
        if state is not None:
            check_state(state, self.state_kind, self.state_shapes, x, sequences.count)
        if self.spec.pattern is not None and mask is not None:
            forward = SoftmaxAttention.forward  # not a subclass's, which would be in its own call twice
            own = {"projections": projections}
            return without_padding(lambda p, s, pack: forward(self, p, s, cu_seqlens=pack, **own), x, state, mask)
        x = zeroed(x, mask)  # a weight of 0 would let NaN through
        turn = None
        if self.spec.rotary and not self.spec.rope.by_length:
            positions, _ = count_tokens(x, None if state is None else state.seen, mask, sequences)
            turn = self._angles(positions)
        given = x, sequences, turn, projections
        q, k, v = self._query(*given), *self._key_value(*given)
        if self.spec.pattern is not None:
            out, state = self._attend_within(x, (q, k, v), turn, state, sequences)
        elif not sequences.packed:
            state = extended(state, k, v, mask, in_place)
            out = self._read(q, *state[:3])
        elif state is None and torch.compiler.is_compiling():
            out, state = self._read(q, k, v, packed=sequences), by_sequence(k, v, sequences)
        else:
            out, state = attend_packed(self._read, q, k, v, state, sequences.counts())
        return zeroed(sequences.tokenwise(self.o_proj, self._gated(x, out, sequences)), mask), state

    def remember(self, memory: Tensor, mask: Tensor | None = None) -> AttentionState:
        """Returns the keys and values of another sequence [B, L, D], for `cross`. mask [B, L]: False marks padding;
        every row needs a token."""
        return AttentionState(*self._key_value(zeroed(memory, mask), Sequences(memory, None)), mask)

    def cross(self, x: Tensor, memory: AttentionState) -> Tensor:
        """Computes cross-attention, without positions: x [B, T, D] -> [B, T, D]. memory: from `remember`."""
        sequences = Sequences(x, None)
        return self.o_proj(self._gated(x, self._attend(self._query(x, sequences), *memory[:3]), sequences))

    def _query(self, x: Tensor, sequences: Sequences, turn: Angles | None = None, projections: Any = None) -> Tensor:
        q = self._heads(sequences.tokenwise((projections or self).q_proj, x), self.q_norm)
        if self.spec.scale != "key":  # PyTorch's kernels divide by √d
            q = q * query_factor(self.spec.scale, q.shape[-1])
        return q if turn is None else rotate(q, turn)

    def _key_value(
        self, x: Tensor, sequences: Sequences, turn: Angles | None = None, projections: Any = None
    ) -> tuple[Tensor, Tensor]:
        """projections: a module with k_proj and v_proj; None: the layer itself."""
        of = projections or self
        k, v = (sequences.tokenwise(p, x) for p in (of.k_proj, of.v_proj))
        k, v = self._heads(k, self.k_norm), self._heads(v)
        k = k if turn is None else rotate(k, turn)
        if self.f_proj is not None:
            forget = sequences.tokenwise(self.f_proj, x)
            k = torch.cat([k, forget.unflatten(-1, (k.shape[2], -1))], -1)
        return k, v

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Splits x [B, T, H · d] into heads, and normalizes them, one by one or together."""
        if norm is not None and self.spec.qk_norm == "joint":
            return normalize(x, norm).unflatten(-1, (-1, self.head_dim))
        x = x.unflatten(-1, (-1, self.head_dim))
        return x if norm is None else normalize(x, norm)

    def _gated(self, x: Tensor, out: Tensor, sequences: Sequences) -> Tensor:
        """Multiplies the heads' outputs [B, T, H, d] by the gate, and joins them."""
        if self.g_proj is not None:
            out = out * torch.sigmoid(sequences.tokenwise(self.g_proj, x)).unflatten(-1, (out.shape[2], -1))
        return out.flatten(-2)

    def _angles(self, positions: Tensor, lengths: Tensor | None = None) -> Angles:
        return angles(positions, self.spec.rope, self.rope_theta, self.rotary_dim, lengths)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, packed: Sequences | None = None
    ) -> Tensor:
        """Computes attention to the cache, and before it rotations that depend on the length of the sequence. packed:
        the sequences of q, k and v, of which all pairs of tokens are computed."""
        gate = None
        if self.f_proj is not None:
            k, gate = k.split([self.head_dim, k.shape[-1] - self.head_dim], -1)
        q, k = self._rotated(q, k, valid, packed)
        return self._attend(q, k, v, valid if packed is None else packed.pairs, gate)

    def _rotated(
        self, q: Tensor, k: Tensor, valid: Tensor | None, packed: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.spec.rotary or not self.spec.rope.by_length:
            return q, k
        if packed is not None:
            turn = self._angles(packed.positions(None, q), packed.totals(q))
            return rotate(q, turn), rotate(k, turn)
        L = k.shape[1]
        places = torch.arange(L, device=k.device)[None] if valid is None else (valid.cumsum(1) - 1).clamp(min=0)
        cos, sin = self._angles(places, places[:, -1:] + 1)
        first = L - q.shape[1]
        return rotate(q, (cos[:, first:], sin[:, first:])), rotate(k, (cos, sin))

    @property
    def null(self) -> bool | Tensor:
        return self.spec.null is True if self.sinks is None else self.sinks

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """gate: [B, L, Hkv, H/Hkv], the logits of f."""
        k, v = k.to(q.dtype), v.to(q.dtype)  # the cache may come from a call in another precision
        return mixed(lambda v: (self._mix(q, k, v, valid, gate),), v, whole=True)[0]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, gate: Tensor | None) -> Tensor:
        """Computes q [B, T, H, d]; k, v [B, L, Hkv, d] -> [B, T, H, d]."""
        options: dict[str, Any] = {"bias": self.bias, "null": self.null, "weigh": self.weigh}
        if gate is not None:
            return self.fading(q, k, v, gate, valid, **options)
        return attend(q, k, v, valid, causal=self.causal, **options)

    def _attend_within(
        self, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], turn: Angles | None, state: WindowState | None,
        sequences: Sequences,
    ) -> tuple[Tensor, WindowState | None]:  # fmt: skip
        """Computes attention with the pattern."""
        return self.within(self, qkv, state, sequences)


def normalize(x: Tensor, norm: Any) -> Tensor:
    """Applies a norm in the precision of its weight, which under autocast is not that of x."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def attend_packed(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, lengths: list[int]
) -> tuple[Tensor, AttentionState]:
    """Calls `attend` once per packed sequence, so that pairs of tokens of different sequences cost nothing."""
    out, keys, values = [], [], []
    for n, (qn, kn, vn) in enumerate(zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True)):
        if state is not None:
            past = valid_columns(state.k, state.valid)[n]
            kn, vn = torch.cat([state.k[n, past], kn]), torch.cat([state.v[n, past], vn])
        out.append(attend(qn[None], kn[None], vn[None])[0])
        keys.append(kn)
        values.append(vn)
    seen = torch.tensor([len(kn) for kn in keys], device=k.device)
    valid = torch.arange(max(map(len, keys)), device=k.device) < seen[:, None]
    return torch.cat(out)[None], AttentionState(pad_sequence(keys, True), pad_sequence(values, True), valid)


def by_sequence(k: Tensor, v: Tensor, sequences: Sequences) -> AttentionState:
    """Returns the state of `attend_packed` without the lengths on the host: with as many columns as k and v [1, T, …]
    have tokens."""
    column = torch.arange(sequences.T, device=k.device)
    valid = column < sequences.lengths(k)[:, None]
    place = (sequences.all_bounds()[:-1, None] + column).clamp(max=sequences.T - 1)
    k, v = (x[0, place].masked_fill(~valid[..., None, None], 0) for x in (k, v))
    return AttentionState(k, v, valid)


def query_factor(scale: float | str, d: int) -> float:
    """Returns what q is multiplied by for a scale of the logits, which PyTorch's kernels divide by √d."""
    return scale * d**0.5 if isinstance(scale, float) else d**0.5 if scale == "one" else 2**0.5


def valid_columns(k: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mask [N, L] of keys k [N, L, …], also without padding."""
    return torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if mask is None else mask


def extended(
    state: AttentionState | None, k: Tensor, v: Tensor, mask: Tensor | None, in_place: bool = False
) -> AttentionState:
    """Appends k and v [N, T, Hkv, d] to a state; in place, in memory reserved for more tokens, if allowed."""
    if state is None:
        return AttentionState(k, v, mask)
    L, T = state.k.shape[1], k.shape[1]
    if not in_place or not may_write(state[:2]) or torch.compiler.is_compiling():
        valid = _extended_mask(state, T, mask)
        return AttentionState(torch.cat([state.k, k], 1), torch.cat([state.v, v], 1), valid)
    longer = lengthened(state, T, mask, torch.promote_types(torch.promote_types(state.k.dtype, state.v.dtype), k.dtype))
    longer.k[:, L:], longer.v[:, L:] = k, v
    return longer


def lengthened(
    state: AttentionState, T: int, mask: Tensor | None = None, dtype: torch.dtype | None = None
) -> AttentionState:
    """Returns a state with T more columns, which are not set, in memory reserved for more tokens. dtype: that of the
    memory; None: as it is."""
    past, room, total = [state.k, state.v], state.room or 0, state.k.shape[1] + T
    if not all(_has_room(x, room, total, dtype or x.dtype) for x in past):
        room = total + total // 4
        past = [_moved(x, room, dtype or x.dtype) for x in past]
    k, v = [x.as_strided((x.shape[0], total, *x.shape[2:]), x.stride()) for x in past]
    return AttentionState(k, v, _extended_mask(state, T, mask), room)


def _extended_mask(state: AttentionState, T: int, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of a state and T more columns, whose own is given; None: no padding."""
    if state.valid is None and mask is None:
        return None
    new = torch.ones(len(state.k), T, dtype=torch.bool, device=state.k.device) if mask is None else mask
    return torch.cat([valid_columns(state.k, state.valid), new], 1)


def _has_room(past: Tensor, room: int, total: int, dtype: torch.dtype) -> bool:
    """Whether past [N, L, …] begins memory of this dtype for `room` tokens per sequence, at least `total`."""
    if room < total or past.dtype is not dtype or past.stride(0) != room * past.stride(1):
        return False
    # The strides alone say nothing: a clone of one sequence keeps them, and not the room.
    end = past.storage_offset() + past.shape[0] * past.stride(0)
    return past.untyped_storage().nbytes() >= end * past.element_size()


def _moved(past: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    buffer = past.new_empty(len(past), room, *past.shape[2:], dtype=dtype)
    buffer[:, : past.shape[1]] = past
    return buffer
