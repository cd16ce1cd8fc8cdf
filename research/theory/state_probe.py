"""A linear probe of the state: how much of each past token can be recovered, by the token's age."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace import load
from headrace.utils.errors import InputError

from .base import MIXERS, Check, format_values, normal, subplots
from .mixer_capacity import draw_seeds, initial_layer

D, TOKENS, VOCABULARY, ROWS = 16, 32, 16, 1200
DECAYING = ("retnet", "mamba2", "gla", "rwkv6", "gated-deltanet", "kda")
RIDGES = (0.1, 3.0, 100.0)  # penalty, per element of the state
RECOVERED = 0.1  # smallest R² at which an age counts as recovered


class Probe:
    """Results of linear probes of several memories."""

    r2: dict[str, Tensor]  # memory -> R² of the token of each age [ages]
    capacity: dict[str, float]  # memory -> size of the state / size of a token

    @property
    def total(self) -> dict[str, float]:
        """Recovered tokens: the sum of R² over ages."""
        return {name: float(r2.sum()) for name, r2 in self.r2.items()}

    @property
    def ages(self) -> dict[str, float]:
        """The number of ages with R² above RECOVERED, of each memory that has any."""
        return {name: count for name, r2 in self.r2.items() if (count := int((r2 > RECOVERED).sum()))}

    def checks(self) -> list[Check]:
        return [
            Check(f"{name}: recovered tokens", total, "≤", min(self.capacity[name], TOKENS))
            for name, total in self.total.items()
        ]

    def figure(self) -> Figure:
        table = torch.stack(list(self.r2.values())).clamp(min=0)
        figure, (ax,) = subplots(1, 8.2, max(3.4, 1.6 + len(table) / 6))
        image = ax.imshow(table.numpy(), cmap="YlGnBu", vmin=0, vmax=0.5, aspect="auto")
        ax.set_yticks(range(len(table)), self.r2, fontsize=8)
        ax.set(xlabel="age of the token (0: the most recent)")
        ax.grid(False)
        figure.colorbar(image, extend="max", label="R² of a linear probe on held-out sequences")
        return figure


@dataclass
class StateProbe(Probe):
    """Linear probe of the state: how much of the token of each age can be recovered from the state of every initialized
    mixer of the zoo or, with --checkpoint, of every layer of a trained model. The total is at most the size of the
    state divided by the size of a token."""

    r2: dict[str, Tensor]
    capacity: dict[str, float]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        embedding = normal(generator, VOCABULARY, D)
        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        (seed,), targets, found = draw_seeds(generator, 1), embedding[tokens.flip(1)], cls({}, {})
        for name in (variant for base in MIXERS for variant in (base, f"softmax-{base}")):
            memory = initial_layer(name, D, seed).float()(embedding[tokens].float())[1].memory.flatten(1).double()
            found.r2[name], found.capacity[name] = probe(memory, targets), memory.shape[1] / D
        return found

    def checks(self) -> list[Check]:
        spread = float(self.r2["linear-attention"].std())
        order = Check("linear-attention has no order: standard deviation of R² over ages", spread, "≤", 0.02)
        decaying = {name: self.r2[name][[0, 16]].tolist() for name in DECAYING}
        return [
            *super().checks(), order,
            *(Check(f"{name}: R² at age 0 ≥ R² at age 16", new, "≥", old) for name, (new, old) in decaying.items()),
        ]  # fmt: skip

    def summary(self) -> str:
        total = {name: self.total[name] for name in MIXERS}
        best, worst = (pick(total, key=lambda name: total[name]) for pick in (max, min))
        up = sum(self.total[f"softmax-{name}"] > total[name] for name in total)
        ages = format_values({name: count for name, count in self.ages.items() if name in total}, ".0f")
        return (
            f"Of {TOKENS} tokens, the probe recovers {total[best]:.1f} in total from {best} and {total[worst]:.1f} "
            f"from {worst}. The number of ages with R² above {RECOVERED} is {ages}. Head competition with random "
            f"weights raises the total in {up} of {len(total)} mixers."
        )


@dataclass
class CheckpointProbe(Probe):
    """Linear probe of every recurrent layer of a trained model on random sequences of VOCABULARY of its tokens.

    The sequences are random because a probe could predict part of a real text from its grammar."""

    checkpoint: str
    r2: dict[str, Tensor]
    capacity: dict[str, float]

    @classmethod
    def measure(cls, generator: Generator, checkpoint: Path) -> Self:
        """Raises InputError for a folder without a headrace model, and for a model without a state of fixed size."""
        model: Any = load(checkpoint)
        embedding, vocabulary = normal(generator, VOCABULARY, D), sample_tokens(generator, model.config.vocab_size)
        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        targets, found = embedding[tokens.flip(1)], cls(str(checkpoint), {}, {})
        for name, memory in memories(model, vocabulary[tokens]).items():
            found.r2[name], found.capacity[name] = probe(memory, targets), memory.shape[1] / D
        if not found.r2:
            raise InputError(f"--checkpoint {str(checkpoint)!r} has no layer with a memory of fixed size")
        return found

    def summary(self) -> str:
        return (
            f"Of {TOKENS} random tokens, the probe recovers {format_values(self.total, '.1f')} in total from the "
            f"layers of {self.checkpoint}. The number of ages with R² above {RECOVERED} is "
            f"{format_values(self.ages, '.0f')}."
        )


def sample_tokens(generator: Generator, vocabulary: int) -> Tensor:
    """VOCABULARY different token ids below `vocabulary`."""
    if vocabulary < VOCABULARY:
        raise InputError(f"the checkpoint's vocabulary has {vocabulary} tokens; expected at least {VOCABULARY}")
    return torch.randperm(vocabulary, generator=generator)[:VOCABULARY]


def memories(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The memory of each recurrent layer after the token ids [rows, T]: layer -> [rows, size of the memory]."""
    pieces = [model.model(rows, use_cache=True).past_key_values.states for rows in ids.split(100)]
    return {
        f"layer {i}": torch.cat([state.memory.flatten(1).double() for state in states])
        for i, states in enumerate(zip(*pieces, strict=True)) if hasattr(states[0], "memory")
    }  # fmt: skip


def probe(memory: Tensor, targets: Tensor) -> Tensor:
    """R² by age [ages] of a ridge regression from memory [rows, size] to targets [rows, ages, D].

    The first third of the rows is fitted, the second selects the ridge of each age, the last is scored."""
    n, ages = len(memory) // 3, targets.shape[1]
    x = (memory - memory[:n].mean(0)) / memory[:n].std(0).clamp(min=1e-12)
    y = (targets - targets[:n].mean(0)).flatten(1)
    gram, r2 = x @ x[:n].mT, []
    for ridge in RIDGES:
        a = torch.linalg.solve(gram[:n] + ridge * x.shape[1] * torch.eye(n), y[:n])  # as many unknowns as rows
        lost = (y - gram @ a).square().view(3, n, ages, -1).sum((1, 3))
        r2.append(1 - lost / y.square().view(3, n, ages, -1).sum((1, 3)))
    scores = torch.stack(r2)
    best = scores[:, 1].argmax(0)
    return scores[best, 2, torch.arange(ages)]
