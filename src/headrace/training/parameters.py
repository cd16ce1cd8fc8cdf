"""Groups of parameters for the optimiser, and first values of gates."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from ..layers.parts import Gate, HeadCompetition


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Gate):
            yield from module.parameters()


GateInit = Literal["normal", "orthogonal"]


def initialise_gates(model: nn.Module, std: float, kind: GateInit) -> None:
    """Draw the weights of all scores with this standard deviation; of orthogonal ones, heads ask for directions that
    have nothing in common, each as long as a normal one is expected to be. 0 leaves them at zero, as they are built."""
    for module in model.modules():
        if std and isinstance(module, HeadCompetition):
            if kind == "normal":
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.orthogonal_(module.weight, gain=std * math.sqrt(module.weight.shape[-1]))


def parameter_groups(model: nn.Module, weight_decay: float, gate_lr: float) -> list[dict[str, Any]]:
    """For AdamW: matrices decay; norms, biases and gates do not: a gate that decays is pulled towards no competition.
    The last group are the gates, where there are any, at a learning rate of their own."""
    gates = list(gate_parameters(model))
    known = {id(p) for p in gates}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        {"params": gates, "weight_decay": 0.0, "lr": gate_lr},
    ]
    return [group for group in groups if group["params"]]
