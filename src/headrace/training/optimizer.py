"""AdamW that skips updates with a non-finite gradient."""

import torch
from torch import Tensor, nn

from .optimization import Optimization
from .parameters import parameter_groups


class SkipNonFiniteAdamW(torch.optim.AdamW):
    """Skips a step if any gradient is infinite or NaN: no parameter or moment changes. `skipped` counts the skipped
    steps, `in_a_row` the consecutive ones up to now."""

    skipped = 0
    in_a_row = 0

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if bool(unsharded(nn.utils.get_total_norm(gradients)).isfinite()):
            self.in_a_row = 0
            return super().step(closure)
        self.skipped += 1
        self.in_a_row += 1
        return None


def unsharded(x: Tensor) -> Tensor:
    """The full tensor of a tensor sharded over devices."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def optimizer(model: nn.Module, recipe: Optimization, kind: type[torch.optim.AdamW] = SkipNonFiniteAdamW):
    """The optimizer of a recipe, of class `kind`."""
    groups = parameter_groups(model, recipe.weight_decay, recipe.gate_lr * recipe.lr)
    return kind(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
