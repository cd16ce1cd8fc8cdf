"""What the heads do: entropy and load of every competition in a model, recorded while held-out rows pass through it."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.parts import HeadCompetition


class GateStatistics:
    """The shares of one competition's heads: its gates [B, T, H], divided by their sum over heads.

    A softmax's gates are shares already, up to a factor; sigmoid gates and those with an empty slot become so here.
    """

    def __init__(self, layer: int, gate: str):
        self.layer, self.gate = layer, gate
        self.entropy, self.count = 0.0, 0
        self.asked: list[Tensor] = []
        self.other: list[Tensor] = []

    def add(self, log_gates: Tensor, asked: Tensor) -> None:
        shares = log_gates.softmax(-1)
        self.entropy -= torch.xlogy(shares, shares).sum().item()
        self.count += asked.numel()
        self.asked.append(shares[asked])
        self.other.append(shares[~asked])

    def summary(self) -> dict[str, Any]:
        """Entropy as a part of its maximum, log H; how much of that the token decides, from 0 (all tokens have the same
        shares) to 1 (each has one head, and all heads have as many); and each head's mean share of the positions that
        are asked for an answer, of the others (None: there are none) and of all."""
        asked, other = torch.cat(self.asked), torch.cat(self.other)
        everything = torch.cat([asked, other])
        maximum = self.count * math.log(everything.shape[-1])
        load = everything.mean(0)
        spread = -torch.xlogy(load, load).sum().item() / math.log(len(load))
        return {
            "layer": self.layer,
            "gate": self.gate,
            "entropy": self.entropy / maximum,
            "specialisation": spread - self.entropy / maximum,
            "load": mean(everything),
            "load_asked": mean(asked),
            "load_other": mean(other),
        }


def mean(shares: Tensor) -> list[float] | None:
    return shares.mean(0).tolist() if len(shares) else None


class GateWatch:
    """Collects statistics of all competitions of more than one head. Before each forward pass `asked` [B, T] is set,
    and `mask` [B, T] where rows have padding, which takes a mixer's tokens into a pack."""

    def __init__(self) -> None:
        self.asked, self.mask = torch.empty(0), torch.empty(0)
        self.statistics: dict[str, GateStatistics] = {}

    def _record(self, name: str, module: nn.Module, args: Any, log_gates: Tensor) -> None:
        by_head = log_gates.detach().unflatten(-1, (-1, module.memories)).logsumexp(-1)  # type: ignore[arg-type]
        if by_head.shape[-1] > 1:
            self.statistics[name].add(by_head, self._asked(name, by_head))

    def _asked(self, name: str, log_gates: Tensor) -> Tensor:
        """Which gates are of a token that is asked for an answer: of an encoder none, it reads what is given."""
        shape = log_gates.shape[:2]
        if "encoder." in name:
            return torch.zeros(shape, dtype=torch.bool, device=log_gates.device)
        return self.asked if self.asked.shape == shape else self.asked[self.mask.bool()][None]

    def summary(self) -> list[dict[str, Any]]:
        return [found.summary() for found in self.statistics.values() if found.count]

    @contextmanager
    def on(self, model: nn.Module) -> Iterator["GateWatch"]:
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, HeadCompetition):
                layer, gate = re.search(r"\.(\d+)\..*?(read|write)_competition", name).groups()  # type: ignore[union-attr]
                self.statistics[name] = GateStatistics(int(layer), gate)
                handles.append(module.register_forward_hook(partial(self._record, name)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
