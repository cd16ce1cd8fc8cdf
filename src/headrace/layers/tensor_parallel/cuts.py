"""Which part of each parameter a process of `tensor_parallel` holds.

A dimension of a parameter is a row of segments, each of a kind: "heads" are split evenly over the processes; "groups"
are heads that several heads share (those of q and k, or of keys and values), of which a process holds those that its
heads need; "all" is held by every process.

Dimensions: H heads, G groups, n size of a segment.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.checks import require
from ...spec.read import WIDE_NORMS
from ..linear.competition import HeadCompetition
from ..linear.mixer import LinearMixer

Segments = Sequence[tuple[str, int]]  # (kind, n) of the segments of a dimension


class Cut(NamedTuple):
    """The parts of a parameter: of each process, the indices along a dimension that it holds."""

    dim: int
    parts: list[Tensor]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a process's part of the whole parameter."""
        return whole.index_select(self.dim, self.parts[rank].to(whole.device))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole parameter from the parts of all processes."""
        shape = list(parts[0].shape)
        shape[self.dim] = int(torch.cat(self.parts).max()) + 1
        whole = parts[0].new_empty(shape)
        for index, part in zip(self.parts, parts, strict=True):
            whole.index_copy_(self.dim, index.to(whole.device), part)
        return whole

    @property
    def holders(self) -> Tensor:
        """How many processes hold each index of the whole dimension."""
        return torch.bincount(torch.cat(self.parts))


class Shares:
    """How H heads, of which consecutive ones share one of G groups, are split over `size` processes.

    Raises InputError if they cannot be. names: of H and G in the sentence."""

    def __init__(self, H: int, G: int, size: int, names: tuple[str, str]):
        require(H % size == 0, f"{size} processes cannot share {names[0]}={H} evenly; expected a divisor of {H}")
        fits = G % size == 0 or size % G == 0
        require(fits, f"{size} processes cannot share {names[1]}={G}; expected a divisor or a multiple of {G}")
        self.G, self.size = G, size
        self.heads, self.groups = H // size, max(G // size, 1)  # of one process

    def cut(self, dim: int, segments: Segments) -> Cut:
        return Cut(dim, [self._indices(segments, rank) for rank in range(self.size)])

    def _indices(self, segments: Segments, rank: int) -> Tensor:
        indices, offset = [], 0
        for kind, n in segments:
            indices.append(torch.arange(n)[self._span(kind, n, rank)] + offset)
            offset += n
        return torch.cat(indices)

    def _span(self, kind: str, n: int, rank: int) -> slice:
        if kind == "all":
            return slice(None)
        if kind == "heads":
            return slice(rank * n // self.size, (rank + 1) * n // self.size)
        first, each = rank * self.G // self.size, n // self.G
        return slice(first * each, (first + self.groups) * each)


# Kind and dimension of the parameters that have one segment, by the start of their names.
LINEAR = {
    "o_proj.weight": ("heads", 1), "o_proj.bias": ("all", 0), "bonus": ("heads", 0), "skip": ("heads", 0),
    "power": ("heads", 0),
    "decay.up.": ("heads", 0), "decay.up": ("heads", 1), "decay.": ("heads", 0), "gate.": ("heads", 0),
    "value_gate.": ("heads", 0), "qk_norm.weight": ("all", 0), "qk_norm.bias": ("heads", 1),
    "choice.weight": ("heads", 0), "residual.weight": ("heads", 0), "levels.weight": ("heads", 0),
    "ridge.weight": ("heads", 0), "general.": ("heads", 0), "shift.": ("all", 0),
}  # fmt: skip
ATTENTION = {
    "q_proj.": ("heads", 0), "k_proj.": ("groups", 0), "v_proj.": ("groups", 0), "o_proj.weight": ("heads", 1),
    "o_proj.bias": ("all", 0), "bias.weight": ("heads", 1), "g_proj.": ("heads", 0), "sinks": ("heads", 0),
    "q_norm.": ("all", 0), "k_norm.": ("all", 0), "f_proj.": ("heads", 0),
}  # fmt: skip
PERCEPTRON = {
    "gate_proj.": ("heads", 0), "up_proj.": ("heads", 0), "down_proj.weight": ("heads", 1),
    "down_proj.bias": ("all", 0),
}  # fmt: skip
SCORES = {"head": ("heads", 0), "diag": ("all", 0), "hidden": ("all", 0), "query": ("groups", 1)}  # by the source


def linear_cuts(mixer: LinearMixer, shares: Shares) -> dict[str, Cut]:
    """Returns the cut of each parameter of a LinearMixer."""
    names = [name for name, _ in mixer.named_parameters()]
    low_rank = {part for part in ("decay", "gate") if any(name.startswith(f"{part}.up") for name in names)}
    kinds = {"q": "groups", "k": "groups", "turns": "all", **dict.fromkeys(low_rank, "all")}
    projected = [(kinds.get(name, "heads"), n) for name, n in mixer.parts.items()]
    shared = "heads" if mixer.spec.read.norm in ("group", *WIDE_NORMS) else "all"
    table = LINEAR | {"norm_weight": (shared, 0), "norm_bias": (shared, 0)}
    for name in ("read_competition", "write_competition"):
        if isinstance(gate := getattr(mixer, name), HeadCompetition):
            table[f"{name}.weight"] = SCORES[gate.spec.source]
    cuts = {f"in_proj.{name}": shares.cut(0, projected) for name, _ in mixer.in_proj.named_parameters()}
    if mixer.conv is not None:
        cuts |= {f"conv.{name}": shares.cut(0, projected[:3]) for name, _ in mixer.conv.named_parameters()}
    return cuts | named_cuts(mixer, table, shares, cuts.keys())


def named_cuts(module: torch.nn.Module, table: dict, shares: Shares, done: Collection[str] = ()) -> dict[str, Cut]:
    """Returns the cuts of parameters by a table, whose first key that begins a parameter's name counts."""
    cuts = {}
    for name, p in module.named_parameters():
        if name not in done:
            kind, dim = next(row for start, row in table.items() if name.startswith(start))
            cuts[name] = shares.cut(dim, [(kind, p.shape[dim])])
    return cuts
