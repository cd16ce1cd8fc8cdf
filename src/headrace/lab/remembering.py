"""What a memory still knows of each token, by its age: a linear probe of the state."""

import torch
from torch import Generator, Tensor

from .. import zoo
from .base import Finding, Row, draw, panels
from .capacity import first_weights, seeds_of

D, TOKENS, VOCABULARY, ROWS = 16, 32, 16, 1200
FADING = ("retnet", "mamba2", "gla", "rwkv6", "gated-deltanet", "kda")
RIDGES = (0.1, 3.0, 100.0)  # per number of the state


def past(generator: Generator) -> Finding:
    """What the state remembers: how much of the token of each age a linear probe reads from the memory of every mixer
    of the zoo, with its first weights. All of it together is at most one token per D numbers of the state."""
    embedding = draw(generator, VOCABULARY, D)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    (seed,), found, room = seeds_of(generator, 1), {}, {}
    for name in (variant for base in zoo.LINEAR for variant in (base, f"softmax-{base}")):
        memory = first_weights(name, D, seed).float()(embedding[tokens].float())[1].memory.flatten(1).double()
        found[name] = probed(memory, embedding[tokens.flip(1)])
        room[name] = memory.shape[1] / D
    table = torch.stack(list(found.values()))
    figure, (ax,) = panels(1, 8.2, 5.6)
    image = ax.imshow(table.clamp(min=0).numpy(), cmap="YlGnBu", vmin=0, vmax=0.5, aspect="auto")
    ax.set_yticks(range(len(found)), found, fontsize=8)
    ax.set(xlabel="age of the token (0: the last one read)")
    ax.grid(False)
    figure.colorbar(image, extend="max", label="R² of a linear probe, held-out sequences")
    total = {name: float(r.sum()) for name, r in found.items()}
    rows = [
        *(Row(f"{name}: tokens read back", total[name], "≤", room[name]) for name in found),
        Row("linear-attention knows no order: spread over ages", float(found["linear-attention"].std()), "≤", 0.02),
        *(Row(f"{name}: R² of the last token", float(found[name][0]), "≥", float(found[name][16])) for name in FADING),
    ]
    plain = list(zoo.LINEAR)
    best, worst = (pick(plain, key=lambda name: total[name]) for pick in (max, min))
    reach = {name: int((found[name] > 0.1).sum()) for name in plain}
    up = sum(total[f"softmax-{name}"] > total[name] for name in plain)
    said = ", ".join(f"{reach[name]} ({name})" for name in plain if reach[name])
    return Finding(
        rows,
        f"Of {TOKENS} tokens the probe reads back {total[best]:.1f} in all from {best} and {total[worst]:.1f} from "
        f"{worst}; R² is above 0.1 for {said} of them; with random competition more is left in {up} of {len(plain)}.",
        figure,
    )


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
