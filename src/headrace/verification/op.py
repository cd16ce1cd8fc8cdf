"""Verifies the op itself at the sizes of large models, whose kernels on a GPU are others than those of small ones."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import linear_attention
from ..ops.reference import literal
from ..utils.device import float64
from .errors import Row, law_of, relative, rows_of_check, worst

OP = "linear_attention"  # what the rows have in place of a mixer
# The literal loop takes the rounded inputs, so that only the kernels' own rounding is left: in bfloat16 that of the
# operands of eight products, by 2^-9 each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8 * 2**-9}


class Recurrence(NamedTuple):
    """A call of the op, by the shape of its decay and its sizes."""

    decay: str  # the dimensions of log_decay: "", "H", "BTH" or "BTHK"
    rule: str
    B: int
    T: int
    H: int
    K: int
    V: int
    queries: int = 1  # heads of q that read each of the H states

    @property
    def about(self) -> str:
        decay = f"log_decay [{', '.join(self.decay)}]" if self.decay else "no decay"
        grouped = f" {self.queries} queries per state" if self.queries > 1 else ""
        return f"{self.rule}, {decay}, B={self.B} T={self.T} K={self.K} V={self.V}{grouped}"

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Returns random float64 inputs, with both gates and an initial state."""
        draw, (B, T, H, K, V, queries) = torch.Generator().manual_seed(seed), self[2:]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        q, k = random(B, T, H * queries, K), F.normalize(random(B, T, H, K), dim=-1)
        inputs = {"q": q, "k": k, "v": random(B, T, H, V)}
        if self.decay:
            inputs["log_decay"] = -0.1 * random(*(self._asdict()[size] for size in self.decay)).sigmoid()
        if self.rule == "delta":
            inputs["beta"] = random(B, T, H).sigmoid()
        inputs |= {"read_gate": random(B, T, H * queries).sigmoid(), "write_gate": random(B, T, H).sigmoid()}
        return inputs | {"initial_state": random(B, H, K, V)}


# The heads of models with 340M parameters.
RECURRENCES = (
    Recurrence("", "add", 1, 1024, 4, 256, 256), Recurrence("H", "add", 1, 512, 4, 256, 512),
    Recurrence("BTH", "add", 2, 1024, 4, 128, 128), Recurrence("BTHK", "add", 2, 512, 4, 128, 256),
    Recurrence("", "delta", 2, 512, 4, 128, 128), Recurrence("BTH", "delta", 1, 512, 4, 192, 384),
    Recurrence("BTHK", "delta", 1, 512, 4, 192, 384), Recurrence("BTH", "delta", 1, 1024, 4, 128, 128),
    Recurrence("BTH", "delta", 1, 512, 2, 128, 128, queries=4),
)  # fmt: skip


def op_laws(
    device: str, seed: int, backends: Sequence[str], recurrences: Sequence[Recurrence] = RECURRENCES
) -> Iterator[Row]:
    """Three rows, outputs, final state and gradients, for each recurrence and backend in float32 and in bfloat16."""
    for case in recurrences:
        for dtype in (torch.float32, torch.bfloat16):
            rounded = {name: x.to(device, dtype) for name, x in case.tensors(seed).items()}
            exact = results(literal, {name: float64(x) for name, x in rounded.items()}, case.rule)
            for backend in backends:
                row = Row(OP, f"{case.about}, {law_of(backend, dtype)}", 0.0, TOLERANCE[dtype])
                errors = partial(op_errors, partial(linear_attention, backend=backend), rounded, case.rule, exact)
                yield from rows_of_check(row, errors, [", state", ", gradients"])


def op_errors(op: Callable[..., tuple], tensors: dict[str, Tensor], rule: str, exact: list[Tensor]) -> list[float]:
    """Returns the errors of output, final state and gradients, in the order of `results`."""
    out, state, *gradients = results(op, tensors, rule)
    return [relative(out, exact[0]), relative(state, exact[1]), worst(gradients, exact[2:])]


def results(op: Callable[..., tuple], tensors: dict[str, Tensor], rule: str) -> list[Tensor]:
    """Returns output, final state, and the gradients of a weighted sum of both to all tensors."""
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = op(**inputs, rule=rule)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), weights)]
