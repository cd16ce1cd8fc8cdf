"""Distillation: the model also learns from the distribution of a teacher (arXiv 1503.02531, section 2, temperature 1).

Dimensions: B batch, T tokens, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..convert import load
from ..convert.checkpoint import read_config
from ..ops.call import accumulator
from ..utils.errors import InputError
from .recipes import Recipe


def teacher_of(recipe: Recipe) -> Any:
    """Returns the model of the recipe's teacher; None if it has none. InputError for another vocabulary."""
    if recipe.teacher is None:
        return None
    if (size := read_config(recipe.teacher).vocab_size) != recipe.vocab_size:  # before the weights are read
        raise InputError(
            f"teacher={recipe.teacher!r} has vocab_size={size}; expected that of the model, {recipe.vocab_size}"
        )
    model: Any = load(recipe.teacher)
    return model.requires_grad_(False).eval()


def divergence(teacher: Any, logits: Tensor, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
    """Returns the sum over tokens of KL(teacher ‖ model) in nats.

    Args:
        logits: the model's, [B, T, V].
        batch: what the model was given, for the teacher.
        mask: the positions that have a label, [B, T] or [B, T − 1].
    """
    given = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
    with torch.no_grad():
        target = teacher(**given, use_cache=False).logits
    length = mask.shape[1]
    expected, found = (x[:, :length].to(accumulator(x)).log_softmax(-1) for x in (target, logits))
    return F.kl_div(found, expected, reduction="none", log_target=True).sum(-1).masked_fill(~mask, 0).sum()
