"""Entropy and load of every competition gate in a model, recorded during forward passes over held-out rows."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.linear.competition import HeadCompetition
from .compiled import uncompiled

UNIFORM = 0.999  # mean entropy / log(heads) above which a gate is uniform
COLLAPSED = 0.95  # mean share of one head above which a gate has collapsed
DEAD = 0.01  # a head is dead if its mean share is below this part of an even share
FAILURES = (
    f"A gate is uniform if its entropy, divided by log(heads), has a mean over tokens above {UNIFORM}. It has "
    f"collapsed if the mean share of one head is above {COLLAPSED:.0%}. A head is dead if its mean share is below "
    f"{DEAD:.0%} of an even share."
)


class Failures(NamedTuple):
    """What is wrong with a gate, by the rules of FAILURES."""

    uniform: bool
    collapsed: int | None  # the head that has nearly everything
    dead: list[int]


def failures(entropy: float, load: Sequence[float]) -> Failures:
    """Judges a gate by its mean entropy over log H and the mean share of each head."""
    most = max(range(len(load)), key=load.__getitem__)
    dead = [head for head, share in enumerate(load) if share * len(load) < DEAD]
    return Failures(entropy > UNIFORM, most if load[most] > COLLAPSED else None, dead)


class GateStatistics:
    """Statistics of one competition. The share of a head is its gate divided by the sum of all gates; softmax gates are
    proportional to their shares already, sigmoid gates and gates with an empty slot are not."""

    def __init__(self, layer: int | str, gate: str):
        self.layer, self.gate = layer, gate
        self.entropy = 0.0
        self.sums = torch.tensor(0)  # [2, H]: of the shares of tokens with a label, and of those without
        self.counts = torch.tensor(0)  # [2]: of these tokens

    def add(self, log_gates: Tensor, labelled: Tensor) -> None:
        shares, kinds = log_gates.softmax(-1).cpu(), torch.stack([labelled, ~labelled]).cpu()  # for float64
        self.entropy -= torch.xlogy(shares, shares).sum().item()
        self.sums = self.sums + torch.stack([shares[kind].sum(0, dtype=torch.double) for kind in kinds])
        self.counts = self.counts + kinds.flatten(1).sum(1)

    def summary(self) -> dict[str, Any]:
        """The statistics over all recorded positions.

        entropy: mean entropy of the shares over log H.
        specialization: entropy of the mean shares over log H, minus `entropy`; from 0 (all tokens have the same shares)
            to 1 (each token selects one head, and all heads are selected equally often).
        load, load_asked, load_other: mean share of each head over all positions, over those with a label and over those
            without; None if there are none.
        """
        maximum = int(self.counts.sum()) * math.log(self.sums.shape[-1])
        load = self.sums.sum(0) / self.counts.sum()
        spread = -torch.xlogy(load, load).sum().item() / math.log(len(load))
        asked, other = ((s / n).tolist() if n else None for s, n in zip(self.sums, self.counts, strict=True))
        return {
            "layer": self.layer,
            "gate": self.gate,
            "entropy": self.entropy / maximum,
            "specialization": spread - self.entropy / maximum,
            "load": load.tolist(),
            "load_asked": asked,
            "load_other": other,
        }


class GateWatch:
    """Collects statistics of all competitions with more than one head. Before each forward pass, the caller sets
    `labelled` [B, T], true at positions with a label, and, for rows with padding, `mask` [B, T], true at tokens, which
    alone are counted."""

    labelled: Tensor
    mask: Tensor | None = None

    def __init__(self) -> None:
        self.statistics: dict[str, GateStatistics] = {}

    def _record(self, name: str, module: nn.Module, args: Any, log_gates: Tensor) -> None:
        by_head = log_gates.detach().unflatten(-1, (-1, module.memories)).logsumexp(-1)  # type: ignore[arg-type]
        if by_head.shape[-1] > 1:
            self.statistics[name].add(*self._tokens(name, by_head))

    def _tokens(self, name: str, log_gates: Tensor) -> tuple[Tensor, Tensor]:
        """The gates of the tokens, and a mask of those with a label. Gates are [B, T, H], or [1, tokens, H] if padding
        was removed. No token of an encoder has a label, and every token of a decoder has one."""
        if "encoder." in name:
            return log_gates, torch.zeros(log_gates.shape[:2], dtype=torch.bool, device=log_gates.device)
        mask = self.labelled if "decoder." in name else self.mask
        if mask is None:
            return log_gates, self.labelled
        mask = mask.bool()
        return log_gates[mask] if log_gates.shape[:2] == mask.shape else log_gates[0], self.labelled[mask]

    def summary(self) -> list[dict[str, Any]]:
        return [gate.summary() for gate in self.statistics.values() if gate.counts.any()]

    @contextmanager
    def on(self, model: nn.Module) -> Iterator["GateWatch"]:
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if isinstance(module, HeadCompetition):
                    found: Any = re.search(r"\.(\d+)\.(parallel\.)?.*?(read|write)_competition", name)
                    layer = f"{found[1]}-parallel" if found[2] else int(found[1])
                    self.statistics[name] = GateStatistics(layer, found[3])
                    hooks.enter_context(module.register_forward_hook(partial(self._record, name)))
            if self.statistics:
                hooks.enter_context(uncompiled(model))
            yield self
