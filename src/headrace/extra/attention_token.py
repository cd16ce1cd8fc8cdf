"""The operations of one token of softmax attention in a program of the native backend.

A cache that keeps all tokens grows by a column in every call, in memory reserved for more; the cache of a sliding
window has a fixed size. What the program does not compute is refused with the reason.

Dimensions: H query heads, Hkv key/value heads, d head dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..layers.attention.attention import query_factor
from ..layers.blocks.token import add_norm
from ..layers.linear.token import TOKENS, add_linear
from ..layers.rotary import frequencies
from ..ops.backends.native.bound import CODES, Bound
from ..ops.backends.native.library import address
from ..ops.backends.native.program import NAMES, Program, UnsupportedError
from ..ops.backends.native.structs import LAYOUTS
from ..ops.derivatives import has_address
from ..spec.attention import AttentionSpec

_LAYOUT = LAYOUTS["hr_attention"]


class AttentionToken(NamedTuple):
    """The fields of hr_attention, and where the rest of them comes from in a call."""

    place: int  # index of its state
    null: bool
    numbers: tuple[float, float]  # scale, amplitude
    sizes: tuple[int, ...]  # H, Hkv, d, turned
    window: tuple[int, int]  # first, window; 0, 0: all tokens are kept
    frequencies: Tensor | None  # [turned / 2] float64
    sinks: int | None  # index of the program's weights

    def packed(self, bound: Bound, state: Any, rows: int) -> bytes | None:
        """Returns hr_attention of a call, or None if the state cannot be updated in place."""
        (first, window), slots = self.window, sum(self.window) - 1
        cached = (slots, slots, None, state.seen) if window else self._growing(bound, state, rows)
        if cached is None:
            return None
        length, room, valid, seen = cached
        sinks = None if self.sinks is None else bound.weights[self.sinks]
        return _LAYOUT.pack(
            CODES[bound.dtype], CODES[bound.dtype if sinks is None else sinks.dtype], self.null, *self.numbers,
            *self.sizes, first, window, length, room, *map(address, (self.frequencies, sinks, state.k, state.v, valid)),
            address(seen),
        )  # fmt: skip

    def empty(self, rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the tensors of a cache without tokens, unless their size is that of a window."""
        _, heads, d, _ = self.sizes
        shape = rows, 0, heads, d
        return {} if self.window[1] else {name: torch.empty(shape, dtype=dtype, device="cpu") for name in "kv"}

    def _growing(self, bound: Bound, state: Any, rows: int) -> tuple[int, int, Tensor | None, None] | None:
        """Returns (columns, room in columns, mask, None) of a cache of all tokens."""
        _, heads, d, _ = self.sizes
        length, room, valid = state.k.shape[1], state.room or 0, state.valid
        shape, strides = (rows, length, heads, d), (room * heads * d, heads * d, d, 1)
        for x in (state.k, state.v):
            fits = x.shape == shape and x.stride() == strides and x.dtype is bound.dtype and x.is_cpu and has_address(x)
            if not fits or x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
                return None
        if valid is not None and not (valid.shape == shape[:2] and valid.dtype is torch.bool and valid.is_contiguous()):
            return None
        increment_version([x for x in (state.k, state.v) if not x.is_inference()])
        return length, room, valid, None


def add_attention(program: Program, mixer: Any, x: int, out: int, place: int, add: bool = False) -> None:
    """Adds softmax attention to a program, with the arguments of `add_mixer`."""
    spec: AttentionSpec = mixer.spec
    _require_known(spec, mixer)
    program.fixed(mixer, "spec", "rope_theta", "causal", "bias")
    H, heads, d = mixer.H, spec.kv_heads or mixer.H, mixer.head_dim
    sizes = {"q_proj": H * d, "k_proj": heads * d, "v_proj": heads * d}
    widths = [-(-size // 16) * 16 for size in sizes.values()]
    start = q = program.columns(sum(widths))
    # Norms of heads may write beyond the last one, into what is computed later.
    for (name, size), at in zip(sizes.items(), (q, q + widths[0], q + sum(widths[:2])), strict=True):
        _add_heads(program, mixer, name, size, x, at)
    gate = -1
    if mixer.g_proj is not None:
        gate = program.columns(H if spec.gate == "head" else H * d)
        add_linear(program, mixer, "g_proj", x, gate)
    read = program.columns(H * d)
    program.add("attend", x=q, out=read, other=gate if spec.gate == "head" else -1, layer=len(program.attentions))
    program.attentions.append(_described(program, mixer, (H, heads, d), place))
    if spec.gate == "channel":
        sigmoid = NAMES["activation"].index("sigmoid")
        program.add("activate", x=gate, other=read, out=read, inputs=H * d, what=sigmoid)
    add_linear(program, mixer, "o_proj", read, out, add)
    program.release(start)


def _require_known(spec: AttentionSpec, mixer: Any) -> None:
    unknown = {
        "an encoder": not mixer.causal,
        "a bias of the logits": mixer.bias is not None,
        "forget=True": spec.forget,
        f"rope.kind={spec.rope.kind!r}, whose frequencies depend on the length": spec.rotary and spec.rope.by_length,
        "random blocks": spec.pattern is not None and spec.pattern.random > 0,
    }
    if reason := next((what for what, there in unknown.items() if there), None):
        raise UnsupportedError(f"it does not support {reason}, in softmax attention")


def _add_heads(program: Program, mixer: Any, name: str, size: int, x: int, at: int) -> None:
    """Adds a projection of x to the columns from `at` on, with the norm of its heads if there is one."""
    norm = f"{name[0]}_norm"
    if name == "v_proj" or getattr(mixer, norm) is None:
        add_linear(program, mixer, name, x, at)
        return
    raw = program.columns(size)
    add_linear(program, mixer, name, x, raw)
    add_norm(program, mixer, norm, raw, at, of=size)
    program.release(raw)


def _described(program: Program, mixer: Any, sizes: tuple[int, int, int], place: int) -> AttentionToken:
    spec, (_, heads, d) = mixer.spec, sizes
    scale = d**-0.5 * (1.0 if spec.scale == "key" else query_factor(spec.scale, d))
    pattern, turned = spec.pattern, (spec.rope.dims or d) if spec.rotary else 0
    if pattern is not None:
        for field in ("k", "v"):
            program.state(place, field, (pattern.slots, heads, d))
        program.state(place, "seen", (), torch.int64)
    return AttentionToken(
        place, bool(spec.null), (scale, spec.rope.scale), (*sizes, turned),
        (0, 0) if pattern is None else (pattern.first, pattern.window),
        frequencies(spec.rope, mixer.rope_theta, turned, torch.zeros(1, 1, device="cpu")) if turned else None,
        program.weight(mixer, "sinks", (sizes[0],)) if spec.null == "learned" else None,
    )  # fmt: skip


TOKENS["headrace.layers.attention.attention.SoftmaxAttention"] = add_attention
