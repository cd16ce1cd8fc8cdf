"""How many pairs a memory holds: n ≲ d_k, d_k being its rows (arXiv 2102.11174, section 4.1)."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .. import mixers, zoo
from ..recurrence import linear_attention
from .base import BLUE, RED, YELLOW, Finding, Row, competition, draw, panels, read, unit, written

BATCH, HEADS, WIDTH = 8, 4, 32
COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # pairs per row of memory


class Kind(NamedTuple):
    rule: str = "add"
    decay: float = 1.0
    compete: bool = False


KINDS = {
    "additive": (Kind(), BLUE, "-"),
    "additive, heads compete": (Kind(compete=True), BLUE, "--"),
    "decay 0.98": (Kind(decay=0.98), YELLOW, "-"),
    "delta": (Kind("delta"), RED, "-"),
    "delta, heads compete": (Kind("delta", compete=True), RED, "--"),
}


def capacity(generator: Generator) -> Finding:
    """Capacity: sums of d_k random pairs, in a memory of d_k rows, have as much error as signal; other rules and
    competition have no room for more, but which value it was can be told for longer."""
    figure, (left, right) = panels(2)
    recalls = {(name, d): recalled(kind, d, generator) for name, (kind, *_) in KINDS.items() for d in (32, 64)}
    for (name, d), (wrong, right_ones) in recalls.items():
        look: Any = {"color": KINDS[name][1], "ls": KINDS[name][2], "lw": 2 if d == 64 else 1}
        left.plot(SHARES, wrong, **look, label=name if d == 64 else None)
        right.plot(SHARES, 100 * right_ones, **look)
    best = torch.tensor([math.sqrt(max(0, 1 - 1 / share)) for share in SHARES])
    left.plot(SHARES, best, color="#333", ls=":", lw=2, label="best matrix of this size")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="pairs n / rows d_k (thin: 32 rows, bold: 64)")
        ax.set_xticks(SHARES[::2], [f"{share:g}" for share in SHARES[::2]])
        ax.minorticks_off()
    left.set(ylabel="retrieval error (of values of length 1)")
    right.set(ylabel="nearest value is the right one (%)")
    left.legend(fontsize=8)
    at = SHARES.index(1.0)
    error = {key: float(e[at]) for key, (e, _) in recalls.items()}
    rows = [
        Row(f"additive, d_k = {d}: error at n = d_k, distance from 1", abs(error["additive", d] - 1), "≤", 0.15)
        for d in (32, 64)
    ]
    rows += [
        Row(f"{name}, d_k = {d}: least error above that of the best matrix", float((e - best).min()), "≥", -0.05)
        for (name, d), (e, _) in recalls.items()
    ]
    rows += [Row(f"{name}: error at n = d_k", error[name, 64], "≥", 0.4) for name in KINDS]
    hits = {name: 100 * float(recalls[name, 64][1][at]) for name in KINDS}
    said = ", ".join(f"{error[name, 64]:.2f} and {hits[name]:.0f} % ({name})" for name in KINDS)
    return Finding(rows, f"At n = d_k = 64 the error and the share of values still recognised are {said}.", figure)


def recalled(kind: Kind, d: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """(error, share recognised) by SHARES. With competition d rows are those of all heads together."""
    H = HEADS if kind.compete else 1
    gates = competition(20 * draw(generator, H, d // H))
    found: list[list[Tensor]] = []
    for share in SHARES:
        n = int(share * d)
        k, v = unit(generator, BATCH, n, H, d // H), unit(generator, BATCH, n, 1, d).expand(-1, -1, H, -1)
        log_decay = torch.full((H,), math.log(kind.decay), dtype=torch.float64)
        gate = gates(k) if kind.compete else None
        strength: dict[str, Any] = {"beta": gate} if kind.rule == "delta" else {"write_gate": gate}
        state = written(k, v, rule=kind.rule, log_decay=log_decay, **strength)
        out, v = read(state, k, read_gate=gate).sum(2), v[:, :, 0]
        found.append([(out - v).square().sum(-1).mean().sqrt(), recognised(out, v).mean()])
    return torch.tensor(found, dtype=torch.float64).unbind(1)  # type: ignore[return-value]


def recognised(out: Tensor, v: Tensor) -> Tensor:
    """Whether what is read [B, n, V] is nearest, by its direction, to the value that was stored: [B, n], 0 or 1."""
    return ((F.normalize(out, dim=-1) @ F.normalize(v, dim=-1).mT).argmax(-1) == torch.arange(v.shape[1])).double()


def backbones(generator: Generator) -> Finding:
    """Capacity by mixer: the pairs of which each mixer of the zoo, with its first weights, recognises half, with and
    without competition."""
    seeds = seeds_of(generator, 3)
    found = {name: (half(name, seeds), half(f"softmax-{name}", seeds)) for name in zoo.LINEAR}
    names = sorted(found, key=lambda name: found[name][0])
    figure, (ax,) = panels(1, 6.6, 4.6)
    for i, (label, colour, mark) in enumerate((("plain", BLUE, "o"), ("heads compete", RED, "D"))):
        ax.plot([found[name][i][0] for name in names], range(len(names)), mark, color=colour, ms=7, label=label)
    ax.axvline(1, color="#333", ls=":", label="as many pairs as rows")
    ax.set_yticks(range(len(names)), names)
    ax.set(xscale="log", xlabel="pairs half of which are recognised / rows of the memory")
    ax.legend(fontsize=8, loc="lower right")
    rows = [
        Row(f"{label}{name}: pairs per row over d_v / (2 ln n)", pairs / limit, "≤", 1.25)
        for name in names for label, (pairs, limit) in zip(("", "softmax-"), found[name], strict=True)
    ]  # fmt: skip
    more = [name for name in names if found[name][1][0] > 1.1 * found[name][0][0]]
    less = [name for name in names if found[name][1][0] < 0.9 * found[name][0][0]]
    return Finding(
        rows,
        f"Half the pairs are recognised up to {found[names[0]][0][0]:.2g} ({names[0]}) to {found[names[-1]][0][0]:.2g} "
        f"({names[-1]}) pairs per row; competition with random scores raises it by more than a tenth in {len(more)} of "
        f"{len(names)} ({', '.join(more) or 'none'}) and lowers it by as much in {len(less)}.",
        figure,
    )


def half(name: str, seeds: list[int]) -> tuple[float, float]:
    """(pairs per row at which layers with random inputs recognise half of their values, what noise allows)."""
    score = torch.tensor([[recalled_by(name, n, seed) for n in COUNTS] for seed in seeds]).mean(0).tolist()
    layer = first_weights(name, WIDTH, 0)
    k, v, *_ = pairs_of(layer, torch.zeros(1, 2, WIDTH, dtype=torch.float64))
    i = next((i for i, s in enumerate(score) if s < 0.5), len(COUNTS) - 1)
    share = (score[i - 1] - 0.5) / (score[i - 1] - score[i]) if i else 0.0
    pairs = COUNTS[max(i - 1, 0)] * 2**share
    return pairs / k[0, 0].numel(), v[0, 0].numel() / (2 * math.log(pairs))


def recalled_by(name: str, n: int, seed: int) -> float:
    """The share of n values that a layer recognises by their keys."""
    x = draw(torch.Generator().manual_seed(seed + n), 4, n, WIDTH)
    k, v, gate, state, normalise = pairs_of(first_weights(name, WIDTH, seed), x)
    out = linear_attention(k, 0 * k, 0 * v, initial_state=state, normalise=normalise, read_gate=gate)[0]
    return float(recognised(out.flatten(2), v.flatten(2)).mean())


def first_weights(name: str, D: int, seed: int) -> torch.nn.Module:
    """A layer as it begins, but with random scores for its competition: X and softmax-X have the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = mixers.build(zoo.get(name), hidden_size=D, num_heads=2).double()
        for path, parameter in layer.named_parameters():
            if "competition" in path:
                parameter.normal_()
    return layer


def seeds_of(generator: Generator, count: int) -> list[int]:
    return torch.randint(2**31, (count,), generator=generator).tolist()


def pairs_of(layer: Any, x: Tensor) -> tuple[Any, ...]:
    """The keys, values and write gates that a layer makes of x, its memory after them, and whether it divides."""
    calls: list[dict[str, Any]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, **arguments: Any):
        calls.append({"k": k, "v": v, **arguments})
        return linear_attention(q, k, v, **arguments)

    layer.op = noted
    state = layer(x)[1]
    # residual-delta calls it for each chunk, the last of which may be longer than what is left of x
    k, v, gate = (
        None if calls[0].get(part) is None else torch.cat([call[part] for call in calls], 1)[:, : x.shape[1]]
        for part in ("k", "v", "write_gate")
    )
    return k, v, gate, state.memory, calls[0]["normalise"]
