"""Stacks of blocks.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

from collections import UserList
from collections.abc import Callable, Sequence
from itertools import cycle, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.checks import require
from ...ops.parallel.context import current
from ...ops.sequences import Sequences
from ...spec.serialize import Spec
from ...spec.stack import SHARED, Layer
from ...utils.device import float64
from ..attention.attention import AttentionState
from ..base import Carried, SelfInitialized, check_state, named
from ..packing import count_tokens
from .block import Block, Sizes, build_norm

PIECE = 1024  # number of tokens per call in `prefill`


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
        self, x: Tensor, state: PositionState | None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None,
    ) -> tuple[Tensor, PositionState]:  # fmt: skip
        """x [B, T, D] -> (x [B, T, D], state). Raises InputError for sequences longer than the learned table."""
        sequences = Sequences.of(x, cu_seqlens)
        if state is not None:
            check_state(state, PositionState, {"tokens": ()}, x, sequences.count)
        places, tokens = count_tokens(x, None if state is None else state.tokens, mask, sequences)
        if self.table is None:
            return x + sinusoidal(places, x.shape[2]).to(x.dtype), PositionState(tokens)
        longest, known = int(tokens.max()) if tokens.shape[0] else 0, self.table.num_embeddings
        require(longest <= known, f"a sequence has {longest} tokens; expected at most {known}, the learned positions")
        return x + self.table(places.clamp(max=known - 1)), PositionState(tokens)  # padding may be after the last one


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """Returns sinusoidal embeddings (arXiv 1706.03762, section 3.5): positions [...] -> [..., width], float32.

    Channels 2i and 2i + 1 are sine and cosine of position / 10000^(2i/width). Angles are float64."""
    places = float64(positions)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=places.device, dtype=torch.float64) / width)
    angle = places[..., None] * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width].float().to(positions.device)


class Backbone(nn.Module):
    """A stack of blocks with positions and a final norm: a language model without embedding and head."""

    layers: Any  # blocks

    def __init__(self, layers: Sequence[Layer | Spec], sizes: Sizes, block: type[Block] = Block):
        super().__init__()
        blocks = [block(layer, sizes, i, len(layers)) for i, layer in enumerate(layers)]
        self.layers, self.block_class = nn.ModuleList(blocks), block
        uses = sum(layer.link is not None for layer in self.layers)
        shared = [named(SHARED["block"])(sizes) for _ in range(min(uses, sizes.style.shared_count))]
        self.shared: Any = nn.ModuleList(shared) if len(shared) > 1 else next(iter(shared), None)
        self.positions = None if sizes.style.positions == "none" else Positions(sizes)
        self.embedding_norm = build_norm(sizes) if sizes.style.embedding_norm else nn.Identity()
        self.embedding_scale = sizes.style.embedding_scale
        self.norm = nn.Identity() if sizes.style.order == "post" else build_norm(sizes)
        self.before_layer: Callable[[], None] | None = None  # called before each layer

    def forward(
        self, x: Tensor, states: Sequence[Any] | None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None, inputs: list[Tensor] | None = None,
        memories: Sequence[Any] | None = None, in_place: bool = False, keep: bool = True,
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
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
            keep: whether to return the next states, which a checkpointed block of a graph cannot; False: [].

        Returns:
            (x [B, T, D], the next states: of the positions, if the style has any, then of each layer: of the shared
            block if the layer uses it, of the mixer, of the parallel mixer if there is one, and of an MLP that has a
            state).

        Raises:
            InputError: for states of another stack.
        """
        count = (self.positions is not None) + sum(self.state_counts)
        state_count = count if states is None else len(states)
        require(state_count == count, f"states has {state_count} entries; expected {count}, as this stack returns them")
        before, after = repeat(None) if states is None else iter(states), []
        where = {"mask": mask, "cu_seqlens": None if cu_seqlens is None else Sequences.of(x, cu_seqlens)}
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.positions is not None:
            x, state = self.positions(x, next(before), **where)
            after.append(state)
        x = self.embedding_norm(x)
        embedded, beside, shared, carried = x, None, cycle(self.shared_blocks), Carried()
        how: dict[str, Any] = {"in_place": in_place}
        memories = memories or [None] * len(self.layers)
        for layer, memory in zip(self.layers, memories, strict=True):
            if self.before_layer is not None:
                self.before_layer()
            if inputs is not None:
                inputs.append(x)
            new: Any = UserList()  # FSDP would pass on a copy of a list, and round the tensors in it
            if layer.link is not None:
                own = UserList([next(before)])
                beside = next(shared)(x, embedded, layer.adapters, own, **where, **how, next_states=new)
                after += new.data
            own, new = UserList(islice(before, layer.states)), UserList()  # a compiled block takes an empty one
            kept = new if keep else None
            x = layer(x, own, beside, **where, memory=memory, carried=carried, **how, next_states=kept)
            after += new.data
        return self.norm(x), after if keep else []

    def prefill(self, x: Tensor, states: Sequence[Any] | None, mask: Tensor | None) -> tuple[Tensor, list[Any]]:
        """Computes `forward` in place, without a gradient. If all layers are recurrent, it computes PIECE tokens at a
        time, which bounds the memory for activations, but not under context_parallel, where each call is of a part of
        the whole row. The first of several pieces leaves `states` as they are: a later one may fail."""
        if x.shape[1] <= PIECE or not self.recurrent or current() is not None:
            return self(x, states, mask=mask, in_place=True)
        y = torch.empty_like(x)
        for start in range(0, x.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            now = None if mask is None else mask[:, piece]
            y[:, piece], states = self(x[:, piece], states, mask=now, in_place=start > 0)
        return y, states  # type: ignore[return-value]

    @property
    def state_counts(self) -> list[int]:
        """Number of states of each layer, with that of the shared block if the layer uses it."""
        return [layer.states + (layer.link is not None) for layer in self.layers]

    @property
    def shared_blocks(self) -> list[nn.Module]:
        """The blocks that layers share."""
        several = isinstance(self.shared, nn.ModuleList)
        return list(self.shared) if several else [] if self.shared is None else [self.shared]

    @property
    def recurrent(self) -> bool:
        """Whether tokens can be computed in pieces at no other cost: all states have a size that does not depend on the
        number of tokens, and there is no mixture of experts, whose load balance is defined over all tokens."""
        return all(layer.recurrent and not getattr(layer.mlp, "routes", False) for layer in self.layers)

    def remember(self, other: Tensor, mask: Tensor | None = None) -> list[AttentionState]:
        """Returns the keys and values of the other sequence [B, L, D] for the cross-attention of each block. mask
        [B, L]: False marks padding."""
        return [layer.cross.remember(other, mask) for layer in self.layers]


@torch.no_grad()
def initialize(module: nn.Module, std: float | None = None) -> None:
    """Initializes a module's own parameters, for use with `nn.Module.apply`. Linear and embedding weights are normal.

    std: standard deviation; None: in_features^-1/2 for a linear layer, 1 for an embedding."""
    if isinstance(module, nn.Linear | nn.Embedding):
        inputs = module.in_features if isinstance(module, nn.Linear) else 1
        nn.init.normal_(module.weight, std=inputs**-0.5 if std is None else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, SelfInitialized):
        module.initialize(std)
    elif isinstance(module, nn.Conv1d | nn.RMSNorm | nn.LayerNorm):
        module.reset_parameters()
