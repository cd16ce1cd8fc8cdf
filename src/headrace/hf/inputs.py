"""What a model is given, as its layers take it: tokens, their padding, and the sequences of a pack.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

from typing import Any

from torch import Tensor

from ..layers.packing import check_marks, flash_bounds, pack_rows, padding_mask, sequences
from ..ops.checks import as_bounds, require
from ..ops.parallel.context import current
from ..ops.sequences import Sequences, avoid_sync


def boundaries(cu_seqlens: Tensor | None, flash: dict[str, Any]) -> Tensor | None:
    """Returns cu_seqlens [N + 1], which can be given under the names of transformers' collators."""
    bounds = flash_bounds(flash)
    require(bounds is None or cu_seqlens is None, "cu_seqlens and cu_seq_lens_q are both given; expected one")
    if flash:
        raise TypeError(f"forward() got an unexpected argument {min(flash)!r}")
    return as_bounds(cu_seqlens if bounds is None else bounds)


def arranged(
    x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, position_ids: Tensor | None,
    seq_idx: Tensor | None, seen: int,
) -> tuple[Tensor, Tensor | None, Sequences | None]:  # fmt: skip
    """Returns (x [B, T, D], or its tokens as one row; which tokens are no padding, or None; the pack, or None). seen:
    number of columns before x."""
    if position_ids is not None or seq_idx is not None:
        require(current() is None, "position_ids or seq_idx under context_parallel; expected cu_seqlens of the row")
        padding_mask(attention_mask, x, False, seen)  # checks the shape
        if cu_seqlens is not None and not seen and avoid_sync(x):
            check_marks(x, position_ids, seq_idx, cu_seqlens)
        else:
            marked, rows = sequences(x, position_ids, seq_idx, attention_mask, seen), x.shape
            x, cu_seqlens = pack_rows(x, marked, attention_mask, cu_seqlens)
            attention_mask = attention_mask if x.shape == rows else None
    pack = None if cu_seqlens is None else Sequences.of(x, cu_seqlens)
    return x, padding_mask(attention_mask, x, pack is not None, seen), pack


def kept_positions(logits_to_keep: int | Tensor | None) -> slice | Tensor:
    """Returns the index of the positions with logits."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep
    last = logits_to_keep or 0
    at_least_0 = hasattr(last, "__index__") and last >= 0
    require(at_least_0, f"logits_to_keep={logits_to_keep!r}; expected at least 0, or a tensor of positions")
    return slice(-last, None)
