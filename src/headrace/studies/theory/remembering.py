"""What a memory still knows of each token, by its age: a linear probe of the state."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ... import zoo
from ...hf import load
from ...utils.errors import InputError
from .base import Row, draw, listed, panels
from .crowding import first_weights, seeds_of

D, TOKENS, VOCABULARY, ROWS = 16, 32, 16, 1200
FADING = ("retnet", "mamba2", "gla", "rwkv6", "gated-deltanet", "kda")
RIDGES = (0.1, 3.0, 100.0)  # per number of the state
SEEN = 0.1  # R² from which an age counts as remembered


class Probed:
    """R² of each token by a linear probe, by age [ages], of some memories, and how many tokens each has room for."""

    r2: dict[str, Tensor]
    room: dict[str, float]

    @property
    def total(self) -> dict[str, float]:
        """Tokens read back, all ages together."""
        return {name: float(r2.sum()) for name, r2 in self.r2.items()}

    @property
    def reach(self) -> dict[str, float]:
        """Of how many ages something is read back."""
        return {name: count for name, r2 in self.r2.items() if (count := int((r2 > SEEN).sum()))}

    def laws(self) -> list[Row]:
        return [
            Row(f"{name}: tokens read back", total, "≤", min(self.room[name], TOKENS))
            for name, total in self.total.items()
        ]

    def figure(self) -> Figure:
        table = torch.stack(list(self.r2.values())).clamp(min=0)
        figure, (ax,) = panels(1, 8.2, max(3.4, 1.6 + len(table) / 6))
        image = ax.imshow(table.numpy(), cmap="YlGnBu", vmin=0, vmax=0.5, aspect="auto")
        ax.set_yticks(range(len(table)), self.r2, fontsize=8)
        ax.set(xlabel="age of the token (0: the last one read)")
        ax.grid(False)
        figure.colorbar(image, extend="max", label="R² of a linear probe, held-out sequences")
        return figure


@dataclass
class Past(Probed):
    """What the state remembers: how much of the token of each age a linear probe reads from the memory of every mixer
    of the zoo, with its first weights, or with --checkpoint of every layer of a trained model. All of it together is at
    most one token per D numbers of the state."""

    r2: dict[str, Tensor]
    room: dict[str, float]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        embedding = draw(generator, VOCABULARY, D)
        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        (seed,), targets, seen = seeds_of(generator, 1), embedding[tokens.flip(1)], cls({}, {})
        for name in (variant for base in zoo.LINEAR for variant in (base, f"softmax-{base}")):
            memory = first_weights(name, D, seed).float()(embedding[tokens].float())[1].memory.flatten(1).double()
            seen.r2[name], seen.room[name] = probed(memory, targets), memory.shape[1] / D
        return seen

    def laws(self) -> list[Row]:
        spread = float(self.r2["linear-attention"].std())
        order = Row("linear-attention knows no order: spread over ages", spread, "≤", 0.02)
        fading = {name: self.r2[name][[0, 16]].tolist() for name in FADING}
        return [
            *super().laws(), order,
            *(Row(f"{name}: R² of the last token", new, "≥", old) for name, (new, old) in fading.items()),
        ]  # fmt: skip

    def sentence(self) -> str:
        total = {name: self.total[name] for name in zoo.LINEAR}
        best, worst = (pick(total, key=lambda name: total[name]) for pick in (max, min))
        up = sum(self.total[f"softmax-{name}"] > total[name] for name in total)
        said = listed({name: reach for name, reach in self.reach.items() if name in total}, ".0f")
        return (
            f"Of {TOKENS} tokens the probe reads back {total[best]:.1f} in all from {best} and {total[worst]:.1f} from "
            f"{worst}; R² is above {SEEN} for {said} of them; with random competition more is left in {up} of "
            f"{len(total)}."
        )


@dataclass
class Trained(Probed):
    """The same of every recurrent layer of a trained model, which reads random rows of VOCABULARY of its tokens: what
    the grammar of a text would let a probe guess is not memory."""

    checkpoint: str
    r2: dict[str, Tensor]
    room: dict[str, float]

    @classmethod
    def measure(cls, generator: Generator, checkpoint: Path) -> Self:
        """InputError for a folder that holds no model of ours, and a model without a memory of fixed size."""
        model: Any = load(checkpoint)
        embedding, words = draw(generator, VOCABULARY, D), some(generator, model.config.vocab_size)
        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        targets, seen = embedding[tokens.flip(1)], cls(str(checkpoint), {}, {})
        for name, memory in memories(model, words[tokens]).items():
            seen.r2[name], seen.room[name] = probed(memory, targets), memory.shape[1] / D
        if not seen.r2:
            raise InputError(f"--checkpoint {str(checkpoint)!r} has no layer with a memory of fixed size")
        return seen

    def sentence(self) -> str:
        return (
            f"Of {TOKENS} random tokens the probe reads back {listed(self.total, '.1f')} in all from the layers of "
            f"{self.checkpoint}; R² is above {SEEN} for {listed(self.reach, '.0f', 'none')} of them."
        )


def some(generator: Generator, vocabulary: int) -> Tensor:
    """VOCABULARY different tokens, or all."""
    if vocabulary < VOCABULARY:
        raise InputError(f"the checkpoint's vocabulary has {vocabulary} tokens; expected at least {VOCABULARY}")
    return torch.randperm(vocabulary, generator=generator)[:VOCABULARY]


def memories(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Each recurrent layer's memory after rows of tokens, [rows, numbers]."""
    pieces = [model.model(rows, use_cache=True).past_key_values.states for rows in ids.split(100)]
    return {
        f"layer {i}": torch.cat([state.memory.flatten(1).double() for state in states])
        for i, states in enumerate(zip(*pieces, strict=True)) if hasattr(states[0], "memory")
    }  # fmt: skip


def probed(memory: Tensor, targets: Tensor) -> Tensor:
    """R² by age of a ridge regression: memory [rows, numbers], targets [rows, ages, D] -> [ages]. A third of the rows
    is fitted, one chooses the ridge for each age, one is scored."""
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
