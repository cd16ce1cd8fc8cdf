"""AdamW with its parameter groups and its learning rate, from the fields of a recipe; and the initialization of
competition gates."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from ..layers.linear.competition import Gate, HeadCompetition
from .optimization import Optimization


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all competition gates of a model."""
    for module in model.modules():
        if isinstance(module, Gate):
            yield from module.parameters()


def undecayed(module: nn.Module) -> list[str]:
    """Returns the names of the module's own parameters to which an optimizer applies no weight decay: vectors, and what
    the module names in `no_weight_decay`, the parameters of its dynamics."""
    named = getattr(module, "no_weight_decay", ())
    return [name for name, p in module._parameters.items() if p is not None and (p.dim() <= 1 or name in named)]


def initialize_gates(model: Any, std: float, kind: Literal["normal", "orthogonal"]) -> Any:
    """Draws the score weights of all competition gates with standard deviation `std`, and returns the model; 0 leaves
    them at zero. "orthogonal" makes those of the heads orthogonal vectors, with the expected norm of "normal" ones."""
    for module in model.modules():
        if std and isinstance(module, HeadCompetition):
            if kind == "normal":
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.orthogonal_(module.weight, gain=std * math.sqrt(module.weight.shape[-1]))
    return model


def parameter_groups(model: nn.Module, weight_decay: float, gate_lr: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices with weight decay; norms, biases and what a module names in
    `no_weight_decay`, the parameters of its dynamics, without; and the weights of gates with the learning rate
    `gate_lr` and, unless `competition.weight_decay` is set, without weight decay, which would pull them towards no
    competition."""
    gates = {id(p) for p in gate_parameters(model)}
    free = {id(module._parameters[name]) for module in model.modules() for name in undecayed(module)}
    groups: list[dict[str, Any]] = []
    for of_gates, without in itertools.product((False, True), (False, True)):
        members = [p for p in model.parameters() if (id(p) in gates, id(p) in free) == (of_gates, without)]
        group = {"params": members, "weight_decay": 0.0 if without else weight_decay}
        groups.append(group | ({"lr": gate_lr} if of_gates else {}))
    return [group for group in groups if group["params"]]


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
