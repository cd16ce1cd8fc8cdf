"""Linear mixers of encoders. The memory of one that is additive is the sum over all tokens of a sequence, which every
token reads: the bidirectional form of arXiv 2507.23632, appendix C, of any order, with its denominators.

    S = Σ_s β_s k_sᵀ (w_s v_s),    o_t = scale · r_t · q_t S    or, normalized, over scale · q_t · z + ε

Dimensions: B batch, T tokens, H heads, K key, V value dimension per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.linear.mixer import LinearMixer
from ..ops.call import NORMALIZER_EPS, accumulator, gated
from ..ops.checks import require
from ..ops.parallel.context import refuse_parts
from ..ops.sequences import Sequences
from ..spec.linear import LAYERS
from ..utils.device import without_autocast


class EncoderMixer(LinearMixer):
    """The layer of a spec that is additive: without a decay, a delta rule or anything else that has an order."""

    causal = False
    splits = static_shapes = False  # a token reads all of its sequence, whose length the host reads

    def __init__(self, spec: Any, **settings: Any):
        super().__init__(spec, **settings)
        self.op: Any = over_all

    def run(self, x: Tensor, state: None, sequences: Sequences, in_place: bool = False) -> tuple[Tensor, Any]:
        require(state is None, "state is given to an encoder, which has none; expected state=None")
        y, _ = super().run(x, None, sequences)
        return y, None


def over_all(
    q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor | None, write_gate: Tensor | None, read_gate: Tensor | None,
    scale: float, normalize: bool, cu_seqlens: Tensor | None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes the equations above, with the arguments of `linear_attention`.

    q, k [B, T, H, K]; v [B, T, H, V]; the gates and β [B, T, H] -> (o [B, T, H, V], None)."""
    kept = {"rule": "add", "log_decay": None, "bonus": None, "initial_state": None}
    assert all(others[name] == value for name, value in kept.items()), others
    acc, dtype = accumulator(q), v.dtype
    ones = [torch.ones_like(v[..., :1])] if normalize else []
    v = torch.cat([v, *ones], -1).to(acc)
    v = gated(gated(v, beta), write_gate)
    with without_autocast(q):  # the memory is float32 or float64
        out = torch.cat([_read(scale, *each) for each in _sequences(cu_seqlens, q.to(acc), k.to(acc), v)], 1)
    if normalize:
        out = out[..., :-1] / (out[..., -1:] + NORMALIZER_EPS)
    return gated(out, read_gate).to(dtype), None


def _read(scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scale * torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bthk,bthv->bhkv", k, v))


def _sequences(cu_seqlens: Tensor | None, *tensors: Tensor) -> Any:
    """Yields the tensors of each sequence, or those of all rows."""
    if cu_seqlens is None:
        return [tensors]
    lengths = cu_seqlens.diff().tolist()
    return zip(*(x.split(lengths, 1) for x in tensors), strict=True)


class BothWays(nn.Module):
    """The sum of a causal mixer's output on the sequence and another one's on the reversed sequence.

    Both include the current token. Padding is reversed with the tokens, and each mixer removes it."""

    def __init__(self, forwards: nn.Module, backwards: nn.Module):
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(
        self, x: Tensor, state: None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None, in_place: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """x [B, T, D] -> (y [B, T, D], None). Raises InputError for a state: an encoder needs whole sequences."""
        refuse_parts(self)
        require(state is None, "state is given to an encoder, which has none; expected state=None")
        if cu_seqlens is not None:
            cu_seqlens = Sequences.of(x, cu_seqlens).bounds
        y, _ = self.forwards(x, mask=mask, cu_seqlens=cu_seqlens)
        mask = None if mask is None else mask.flip(1)
        cu_seqlens = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
        reverse, _ = self.backwards(x.flip(1), mask=mask, cu_seqlens=cu_seqlens)
        return y + reverse.flip(1), None


LAYERS["encoder"] = f"{__name__}.EncoderMixer"
LAYERS["both-ways"] = f"{__name__}.BothWays"
