"""AdamW and its learning rate, from the fields of a recipe."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from .optimization import Optimization
from .parameters import parameter_groups


def optimizer(model: nn.Module, recipe: Optimization) -> torch.optim.AdamW:
    groups = parameter_groups(model, recipe.weight_decay, recipe.gate_lr * recipe.lr)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


def schedule(adamw: torch.optim.Optimizer, recipe: Optimization) -> LRScheduler:
    """The learning rate: a linear warm-up, then a cosine or a line over the rest of the training."""
    cosine = recipe.schedule == "cosine"
    return get_scheduler(
        "cosine_with_min_lr" if cosine else "linear",
        adamw,
        recipe.warmup_steps,
        recipe.steps,
        scheduler_specific_kwargs={"min_lr_rate": recipe.min_lr} if cosine else {},
    )
