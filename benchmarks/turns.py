"""Implementations timed in turn, round after round, so that a busy moment hits them alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from headrace.report.numbers import spread
from peers import Family

CPU, WALL = 0, 1  # clocks


@dataclass
class Runner:
    """One implementation with its own leaf tensors, and the seconds that each round took it."""

    name: str
    call: Callable[[dict[str, Tensor]], Tensor]
    tensors: dict[str, Tensor]
    threads: int = 1
    seconds: list[tuple[float, float]] = field(default_factory=list)  # process, wall
    error: float = 0.0

    def __post_init__(self):
        self.tensors = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in self.tensors.items()}

    def once(self, backward: bool) -> tuple[float, float]:
        torch.set_num_threads(self.threads)
        trained = [x for x in self.tensors.values() if x.requires_grad]
        synchronize(self.tensors)
        start = time.process_time(), time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = self.call(self.tensors)
            if backward and trained:
                torch.autograd.grad(out, trained, torch.ones_like(out))
        synchronize(self.tensors)
        return time.process_time() - start[0], time.perf_counter() - start[1]

    def saved(self) -> float:
        """Bytes kept for backward over the bytes of the inputs; a storage that several tensors share counts once."""
        kept = {}

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no address is used twice
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = self.call(self.tensors)
        given = sum(x.nbytes for x in self.tensors.values())
        del out
        return sum(storage.nbytes() for storage in kept.values()) / given

    def times(self, clock: int) -> list[float]:
        """Seconds of each round, by CPU or WALL."""
        return [s[clock] for s in self.seconds]

    def milliseconds(self, clock: int) -> float:
        return round(1e3 * median(self.times(clock)), 3)

    def spread(self, clock: int) -> float:
        """The interquartile range over the median."""
        return round(spread(self.times(clock)) or 0.0, 3)

    def over(self, other: "Runner", clock: int) -> float:
        """The median over rounds of this one's time over the other's."""
        return median(mine / theirs for mine, theirs in zip(self.times(clock), other.times(clock), strict=False))


def synchronize(tensors: dict[str, Tensor]) -> None:
    if any(x.is_cuda for x in tensors.values()):
        torch.cuda.synchronize()


def take_turns(runners: list[Runner], backward: bool, rounds: int, budget: float = float("inf")) -> None:
    """Runs each runner once to warm up, then in turn in every round while it is within its budget of seconds."""
    for runner in runners:
        runner.once(backward)
    for _ in range(rounds):
        for runner in runners:
            if sum(wall for _, wall in runner.seconds) < budget:
                runner.seconds.append(runner.once(backward))


# --- the floor: no program that computes by chunks can be faster than its flops at the machine's best rate -----------
# Flops a token and head by rule and backward: a · K V + chunk · (k K + v V), causal halves counted once. Backward of
# the additive rules computes the states again, that of the delta rules keeps them.
FLOPS = {
    ("add", False): (4, 1, 1), ("add", True): (14, 4, 3), ("delta", False): (6, 2, 2), ("delta", True): (18, 8, 6)
}  # fmt: skip
CHUNK = {("add", False): 64, ("add", True): 64, ("delta", False): 32, ("delta", True): 64}
VECTOR_CHUNK = 16  # a decay per key and token lets no longer chunk be one product
PEAK = "matrix product"
PEAK_SHAPE, PEAK_TIMES = (4, 128, 256, 128), 16  # heads, rows, inner, columns: within cache, the rate is the best here


def flops(family: Family, tokens_heads: int, K: int, V: int, backward: bool) -> float:
    square, k, v = FLOPS[family.rule, backward]
    vector = family.decay == "BTHK" and family.rule == "add"
    chunk = VECTOR_CHUNK if vector else CHUNK[family.rule, backward]
    return tokens_heads * (square * K * V + chunk * (k * K + v * V))


def peak(threads: int, device: str) -> Runner:
    """Batched float32 matrix products, by torch (MKL on a CPU): what is called 100 %."""
    batch, m, n, p = PEAK_SHAPE
    draw = torch.Generator().manual_seed(0)
    factors = {"a": torch.randn(batch, m, n, generator=draw), "b": torch.randn(batch, n, p, generator=draw)}

    def call(x):
        for _ in range(PEAK_TIMES):
            out = torch.bmm(x["a"], x["b"])
        return out

    return Runner(PEAK, call, {name: x.to(device) for name, x in factors.items()}, threads)


def peak_flops() -> float:
    batch, m, n, p = PEAK_SHAPE
    return 2.0 * PEAK_TIMES * batch * m * n * p
