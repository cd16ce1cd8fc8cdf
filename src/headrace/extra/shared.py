"""The attention block that several layers of a model share (Zamba, arXiv 2405.16712), and the matrices of low rank that
each of them adds to it (Zamba2, arXiv 2411.15242).

Dimensions: B batch, T tokens, D hidden size.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.base import named
from ..layers.blocks.block import Sizes, build_mlp, build_norm, mixer_settings
from ..spec.stack import SHARED


class Shared(nn.Module):
    """An attention block that several layers share (Zamba, arXiv 2405.16712). Its input is the concatenation of x and
    the embeddings."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.style.shared is not None
        D = sizes.hidden_size
        self.mixer_norm = build_norm(sizes, 2)
        settings = mixer_settings(sizes) | {"hidden_size": 2 * D}
        self.mixer = named(sizes.style.shared.layer(True))(sizes.style.shared, out_size=D, **settings)
        self.mlp_norm = build_norm(sizes)
        self.mlp = build_mlp("one", sizes)

    def forward(
        self, x: Tensor, embedded: Tensor, adapters: "Adapters", states: Any = (None,), *, next_states: list[Any],
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, in_place: bool = False,
    ) -> Tensor:  # fmt: skip
        """x, embedded [B, T, D] -> y [B, T, D], without a residual connection. adapters: the layer's."""
        both = self.mixer_norm(torch.cat([x, embedded], -1))
        where = {"mask": mask, "cu_seqlens": cu_seqlens, "in_place": in_place}
        y, state = self.mixer(both, states[0], **where, projections=adapters.projections(self.mixer))
        next_states.append(state)
        y = self.mlp_norm(y)
        return y if self.mlp is None else self.mlp(y, adapters.mlp)


class Adapters(nn.Module):
    """The matrices of low rank that a layer adds to input projections of a shared block (Zamba2, arXiv 2411.15242)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        D, style, H = sizes.hidden_size, sizes.style, sizes.num_heads
        spec, self.mlp, self.attention = style.shared, None, None
        assert spec is not None
        if style.shared_mlp_rank is not None and sizes.intermediate_size is not None:
            self.mlp = LowRank(D, style.shared_mlp_rank, (1 + style.gated) * sizes.intermediate_size)
        if style.shared_attention_rank is not None:
            queries, (d, _) = spec.num_heads(2 * D, H), spec.head_dims(2 * D, H)
            heads = {"q": queries, "k": spec.kv_heads or queries, "v": spec.kv_heads or queries}
            of = {f"{n}_proj": LowRank(2 * D, style.shared_attention_rank, count * d) for n, count in heads.items()}
            self.attention = nn.ModuleDict(of)

    def projections(self, mixer: Any) -> Any:
        """Returns the projections of q, k and v of a shared block for this layer; None: the block's own."""
        if self.attention is None:
            return None
        return SimpleNamespace(**{n: partial(_sum, getattr(mixer, n), part) for n, part in self.attention.items()})


class LowRank(nn.Sequential):
    """A linear map of low rank."""

    def __init__(self, inputs: int, rank: int, outputs: int):
        super().__init__(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))


def _sum(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return first(x) + second(x)


SHARED.update({"block": f"{__name__}.Shared", "adapters": f"{__name__}.Adapters"})
