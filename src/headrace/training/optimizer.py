"""AdamW that leaves out an update that is not finite."""

import torch
from torch import Tensor, nn

from .parameters import parameter_groups
from .recipes import Recipe


class CarefulAdamW(torch.optim.AdamW):
    """Where a gradient is infinite or NaN nothing is changed, and the step is counted."""

    skipped = 0
    in_a_row = 0

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if bool(full(nn.utils.get_total_norm(gradients)).isfinite()):
            self.in_a_row = 0
            return super().step(closure)
        self.skipped += 1
        self.in_a_row += 1
        return None


def full(x: Tensor) -> Tensor:
    """Of a tensor that is spread over devices, the whole."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def optimizer(model: nn.Module, recipe: Recipe) -> CarefulAdamW:
    groups = parameter_groups(model, recipe.weight_decay, recipe.gate_lr * recipe.lr)
    return CarefulAdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
