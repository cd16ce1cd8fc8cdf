"""Stacks of blocks, each with a token mixer and an MLP.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.checks import require
from ..spec.linear import AttentionSpec, Spec
from ..spec.record import NonNegativeFloat, PositiveFloat, PositiveInt, Record
from ..spec.stack import BlockStyle, Layer, as_layers
from . import SoftmaxAttention, build
from .attention.attention import AttentionState
from .attention.positions import sinusoidal
from .base import Mixer, SelfInitialised, check_state
from .moe import MixtureOfExperts
from .packing import count_tokens, must_not_wait

PIECE = 1024  # number of tokens per call in `prefill`


@dataclass(frozen=True)
class Sizes(Record):
    """Settings that all blocks of a stack share."""

    hidden_size: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt | None  # width of the MLP; None: no MLP
    norm_eps: NonNegativeFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    max_positions: PositiveInt = 2048  # number of learned absolute positions
    style: BlockStyle = field(default_factory=BlockStyle)
    causal: bool = True  # False for an encoder, in which every token sees all tokens
    cross: AttentionSpec | None = None  # cross-attention between mixer and MLP; None: no cross-attention


def default_intermediate_size(hidden_size: int, gated: bool = True) -> int:
    """Returns the default width of an MLP: 4 D, or 8/3 D for a gated MLP, whose three matrices then have as many
    parameters as the two of the other (arXiv 2002.05202). 8/3 D is rounded up to a multiple of 256 as in
    flash-linear-attention, or of 16 for D < 256."""
    if not gated:
        return 4 * hidden_size
    multiple = 256 if hidden_size >= 256 else 16
    return -(-(8 * hidden_size // 3) // multiple) * multiple


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) ⊙ W_up x) if the style's MLP is gated (arXiv 2002.05202)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.intermediate_size is not None
        D, width, style = sizes.hidden_size, sizes.intermediate_size, sizes.style
        self.activation = ACTIVATIONS[style.mlp]
        self.gate_proj = nn.Linear(D, width, bias=style.bias) if style.gated else None
        self.up_proj = nn.Linear(D, width, bias=style.bias)
        self.down_proj = nn.Linear(width, D, bias=style.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up
        return self.down_proj(hidden)


def build_norm(sizes: Sizes, inputs: int = 1) -> nn.Module:
    """Returns the style's norm. inputs: number of hidden-size vectors concatenated at the input."""
    width = inputs * sizes.hidden_size
    if sizes.style.norm == "layer":
        return nn.LayerNorm(width, eps=sizes.norm_eps, bias=sizes.style.bias)
    return nn.RMSNorm(width, eps=sizes.norm_eps)


class PositionState(NamedTuple):
    """The state of `Positions`."""

    tokens: Tensor  # [N], number of tokens so far


class Positions(nn.Module):
    """Adds sinusoidal or learned absolute positions to the embeddings. Padding has no position."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        learned = sizes.style.positions == "learned"
        self.table = nn.Embedding(sizes.max_positions, sizes.hidden_size) if learned else None

    def forward(
        self,
        x: Tensor,
        state: PositionState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, PositionState]:
        """x [B, T, D] -> (x [B, T, D], state). Raises InputError for sequences longer than the learned table."""
        if state is not None:
            check_state(state, PositionState, {"tokens": ()}, x, cu_seqlens)
        places, tokens = count_tokens(x, None if state is None else state.tokens, mask, cu_seqlens)
        if self.table is None:
            return x + sinusoidal(places, x.shape[2]).to(x.dtype), PositionState(tokens)
        longest, known = int(tokens.max()), self.table.num_embeddings
        require(longest <= known, f"a sequence has {longest} tokens; expected at most {known}, the learned positions")
        return x + self.table(places), PositionState(tokens)


def build_mlp(kind: str, sizes: Sizes) -> nn.Module | None:
    """Returns the MLP or mixture of experts of a layer, or None. kind: the layer's `mlp`."""
    style, width = sizes.style, sizes.intermediate_size
    if kind == "none" or width is None:
        return None
    if kind == "one":
        return MLP(sizes)
    assert style.experts is not None
    return MixtureOfExperts(style.experts, sizes.hidden_size, width, ACTIVATIONS[style.mlp], style.gated)


def mixer_settings(sizes: Sizes, layer_idx: int = 0, num_layers: int = 1) -> dict[str, Any]:
    """Returns the keyword arguments of a mixer."""
    return {
        "hidden_size": sizes.hidden_size, "num_heads": sizes.num_heads, "layer_idx": layer_idx,
        "num_layers": num_layers, "norm_eps": sizes.norm_eps, "rope_theta": sizes.rope_theta,
    }  # fmt: skip


class Block(nn.Module):
    """A residual block: x + mixer(norm(x)), then x + mlp(norm(x)); with post-norm norm(x + mixer(x)), then
    norm(x + mlp(x)). Cross-attention, if any, is a third residual branch between the two."""

    def __init__(self, layer: Layer | Spec, sizes: Sizes, layer_idx: int = 0, num_layers: int = 1):
        super().__init__()
        layer = as_layers(layer)[0]
        self.post = sizes.style.order == "post"
        self.mixer_norm = build_norm(sizes)
        self.mixer = build(layer.mixer, causal=sizes.causal, **mixer_settings(sizes, layer_idx, num_layers))
        self.cross = None
        if sizes.cross is not None:
            self.cross_norm = build_norm(sizes)
            self.cross = SoftmaxAttention(sizes.cross, causal=False, **mixer_settings(sizes))
        self.mlp = build_mlp(layer.mlp, sizes)
        if self.mlp is not None:
            self.mlp_norm = build_norm(sizes)
        self.link = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False) if layer.shared else None

    def forward(
        self, x: Tensor, state: Any = None, beside: Tensor | None = None, *,
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, memory: Any = None, in_place: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Applies the block: x [B, T, D] -> (x [B, T, D], the mixer's next state).

        Args:
            state, mask, cu_seqlens, in_place: as in `Backbone.forward`, with the state of this block's mixer.
            beside: the output [B, T, D] of the shared block, for a layer with shared=True.
            memory: keys and values of the other sequence, for cross-attention.
        """
        read = x if self.link is None else x + self.link(beside)
        where = {"mask": mask, "cu_seqlens": cu_seqlens, "in_place": in_place}
        y, state = self.mixer(self._before(self.mixer_norm, read), state, **where)
        x = self._after(self.mixer_norm, x + y)
        if self.cross is not None:
            require(memory is not None, "memory=None in a block with cross-attention; expected the result of remember")
            x = self._after(self.cross_norm, x + self.cross.cross(self._before(self.cross_norm, x), memory))
        if self.mlp is not None:
            x = self._after(self.mlp_norm, x + self.mlp(self._before(self.mlp_norm, x)))
        return x, state

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.post else norm(x)

    def _after(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.post else x


class Shared(nn.Module):
    """An attention block that several layers share (Zamba, arXiv 2405.16712). Its input is the concatenation of x and
    the embeddings."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.style.shared is not None
        D = sizes.hidden_size
        self.mixer_norm = build_norm(sizes, 2)
        settings = mixer_settings(sizes) | {"hidden_size": 2 * D}
        self.mixer = SoftmaxAttention(sizes.style.shared, out_size=D, **settings)
        self.mlp_norm = build_norm(sizes)
        self.mlp = build_mlp("one", sizes)

    def forward(
        self, x: Tensor, embedded: Tensor, state: Any = None, *,
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, in_place: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """x, embedded [B, T, D] -> (y [B, T, D], state), without a residual connection."""
        both = self.mixer_norm(torch.cat([x, embedded], -1))
        y, state = self.mixer(both, state, mask=mask, cu_seqlens=cu_seqlens, in_place=in_place)
        y = self.mlp_norm(y)
        return y if self.mlp is None else self.mlp(y), state


class Backbone(nn.Module):
    """A stack of blocks with positions and a final norm: a language model without embedding and head."""

    def __init__(self, layers: Sequence[Layer | Spec], sizes: Sizes, block: type[Block] = Block):
        super().__init__()
        self.layers = nn.ModuleList(block(layer, sizes, i, len(layers)) for i, layer in enumerate(layers))
        self.shared: Any = Shared(sizes) if any(layer.link is not None for layer in self.layers) else None
        self.positions = None if sizes.style.positions == "none" else Positions(sizes)
        self.embedding_norm = build_norm(sizes) if sizes.style.embedding_norm else nn.Identity()
        self.norm = build_norm(sizes) if sizes.style.order == "pre" else nn.Identity()

    def forward(
        self,
        x: Tensor,
        states: Sequence[Any] | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs: list[Tensor] | None = None,
        memories: Sequence[Any] | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, list[Any]]:
        """Applies the positions, the blocks and the final norm.

        Args:
            x: [B, T, D].
            states: what the previous call returned; None: x begins its sequences.
            mask: [B, T], bool; False marks padding, at any position.
            cu_seqlens: [N + 1], bounds of N packed sequences; B is 1.
            inputs: a list to which the input of every block is appended.
            memories: the result of `remember` for the other sequence, if blocks have cross-attention.
            in_place: whether `states` may be overwritten, after which they must not be used. Otherwise they are not
                changed.

        Returns:
            (x [B, T, D], the next states: of the positions, if the style has any, then of each layer, preceded by the
            shared block's for a layer that uses it).

        Raises:
            InputError: for states of another stack.
        """
        count = len(self.layers) + (self.positions is not None) + sum(layer.link is not None for layer in self.layers)
        given = count if states is None else len(states)
        require(given == count, f"states has {given} entries; expected {count}, as this stack returns them")
        before, after = repeat(None) if states is None else iter(states), []
        where = {"mask": mask, "cu_seqlens": cu_seqlens}
        if self.positions is not None:
            x, state = self.positions(x, next(before), **where)
            after.append(state)
        x = self.embedding_norm(x)
        embedded, beside = x, None
        for layer, memory in zip(self.layers, memories or [None] * len(self.layers), strict=True):
            if inputs is not None:
                inputs.append(x)
            if layer.link is not None:
                beside, state = self.shared(x, embedded, next(before), **where, in_place=in_place)
                after.append(state)
            x, state = layer(x, next(before), beside, **where, memory=memory, in_place=in_place)
            after.append(state)
        return self.norm(x), after

    def prefill(
        self, x: Tensor, states: Sequence[Any] | None, mask: Tensor | None, in_place: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """Computes `forward` without a gradient. If all layers are recurrent, it computes PIECE tokens at a time, which
        bounds the memory for activations, and overwrites x with the result."""
        if x.shape[1] <= PIECE or not self._recurrent():
            return self(x, states, mask=mask, in_place=in_place)
        for start in range(0, x.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            now = None if mask is None else mask[:, piece]
            x[:, piece], states = self(x[:, piece], states, mask=now, in_place=in_place or start > 0)
        return x, states  # type: ignore[return-value]

    def _recurrent(self) -> bool:
        # The load balance of a mixture of experts is defined over all tokens.
        return self.shared is None and all(
            isinstance(layer.mixer, Mixer) and not isinstance(layer.mlp, MixtureOfExperts) for layer in self.layers
        )

    def remember(self, other: Tensor, mask: Tensor | None = None) -> list[AttentionState]:
        """Returns the keys and values of the other sequence [B, L, D] for the cross-attention of each block. mask
        [B, L]: False marks padding."""
        return [layer.cross.remember(other, mask) for layer in self.layers]  # type: ignore[operator, union-attr]


@torch.no_grad()
def initialise(module: nn.Module, std: float | None = None) -> None:
    """Initialises a module's own parameters, for use with `nn.Module.apply`. Linear and embedding weights are normal.

    std: standard deviation; None: in_features^-1/2 for a linear layer, 1 for an embedding."""
    if isinstance(module, nn.Linear | nn.Embedding):
        inputs = module.in_features if isinstance(module, nn.Linear) else 1
        nn.init.normal_(module.weight, std=inputs**-0.5 if std is None else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, SelfInitialised | nn.Conv1d | nn.RMSNorm | nn.LayerNorm):
        module.reset_parameters()


def padding_mask(attention_mask: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Returns the padding mask, bool [B, T], of x [B, T, D], or None without padding.

    attention_mask: [B, L] with L ≥ T, whose last T columns belong to x. Raises InputError for shapes that do not fit,
    and for padding in packed sequences."""
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        require(B == 1, f"cu_seqlens packs sequences into one row; expected B=1, got B={B}")
        require(cu_seqlens.dim() == 1, f"cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N + 1]")
    if attention_mask is None:
        return None
    shape = list(attention_mask.shape)
    require(
        len(shape) == 2 and shape[0] == B and shape[1] >= T, f"attention_mask has shape {shape}; expected [{B}, {T}]"
    )
    mask = attention_mask[:, -T:].bool()
    both = "attention_mask marks padding in packed sequences; expected cu_seqlens alone"
    if must_not_wait(x):
        if cu_seqlens is None:
            return mask
        torch._assert_async(mask.all(), both)
        return None
    if mask.all():
        return None
    require(cu_seqlens is None, both)
    return mask


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Returns the number of parameters of the module that build() makes; tied ones count once. Allocates no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def match_intermediate_size(build: Callable[[int], nn.Module], target: int) -> int:
    """Returns the MLP width with which the model build(width) has the number of parameters nearest to `target`.

    The number of parameters is linear in the width, so that two models are counted. Raises InputError if the model has
    no MLP, or more than `target` parameters with width 1."""
    one, two = count_parameters(partial(build, 1)), count_parameters(partial(build, 2))
    require(two > one, f"the model has {one} parameters for every MLP width; expected a model with an MLP")
    width = round(1 + (target - one) / (two - one))
    require(width >= 1, f"the model has {one} parameters with the narrowest MLP; expected at most target={target}")
    return width
