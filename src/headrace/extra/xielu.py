"""An MLP with xIELU, an activation whose slopes are trained (arXiv 2411.13010), as Apertus has it."""

from math import expm1, log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..spec.stack import MLPS

SLOPES = 0.8, 0.8  # a⁺ and a⁻ at first


class XIELU(SelfInitialized):
    """a⁺ x² + b x for x > 0, and a⁻ (e^min(x, ε) − 1 − x) + b x for others. a⁺ = log(1 + e^p), a⁻ = b + log(1 + e^n)
    for parameters p and n; b and ε are constants, which a checkpoint may set."""

    no_weight_decay = ("alpha_p", "alpha_n")
    beta: Tensor
    eps: Tensor

    def __init__(self):
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in range(2))
        for name in ("beta", "eps"):
            self.register_buffer(name, torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)
        self.alpha_p.fill_(log(expm1(SLOPES[0])))
        self.alpha_n.fill_(log(expm1(SLOPES[1] - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        p, n, beta, eps = (y.to(x.dtype) for y in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        below = torch.expm1(torch.minimum(x, eps)) - x
        return torch.where(x > 0, F.softplus(p) * x * x, (beta + F.softplus(n)) * below) + beta * x


class SlopedMLP(nn.Module):
    """W_down xIELU(W_up x)."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.activation = XIELU()
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


MLPS["xielu"] = f"{__name__}.SlopedMLP"
