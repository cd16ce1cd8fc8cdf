"""AdamW that leaves out an update that is not finite, and groups of parameters for it."""

import torch
from torch import Tensor, nn

from ..recipes import Recipe
from ..train.model import gate_parameters


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
    """Matrices decay; norms, biases and gates do not: a gate that decays is pulled towards no competition."""
    gates = {id(p) for p in gate_parameters(model)}
    rest = [p for p in model.parameters() if id(p) not in gates]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        {"params": list(gate_parameters(model)), "weight_decay": 0.0, "lr": recipe.gate_lr * recipe.lr},
    ]
    groups = [group for group in groups if group["params"]]
    return CarefulAdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
