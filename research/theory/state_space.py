"""State space models: one system as recurrence, convolution and masked attention (arXiv 2111.00396, 2405.21060)."""

from dataclasses import dataclass
from typing import Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace.history.layers.linear_system import LowRank
from headrace.history.layers.s4 import S4
from headrace.layers import build
from headrace.ops.attention import linear_attention
from headrace.zoo import get

from .base import BLUE, GREEN, RED, YELLOW, Check, check_equal, normal, plot_lines, softmax_weights, subplots

CHANNELS, T = 4, 256
STATES, TOKENS = (4, 16), 64


@dataclass
class StateSpace:
    """State space models: S4 read token by token is a convolution with the kernel C Āᵗ B̄. Mamba-2 is masked attention
    with the T×T matrix L ⊙ (C Bᵀ), of which every block below the diagonal has at most the rank of its state."""

    kernels: Tensor  # S4: C Āᵗ B̄ [channels, T]
    response: Tensor  # S4's output to a single input, token by token [channels, T]
    singular: dict[str, Tensor]  # matrix -> singular values of its lower left quarter, over the first
    dual: list[Check]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            layer = build(get("s4"), hidden_size=CHANNELS, num_heads=1)
        assert isinstance(layer, S4)
        system = layer.system(torch.float64)
        singular, dual = {}, []
        for n in STATES:
            matrix, predicted = masked(generator, n)
            singular[f"Mamba-2, state of {n}"] = block_values(matrix)
            dual.append(check_equal(f"Mamba-2, state of {n}: the matrix is L ⊙ (C Bᵀ)", matrix, predicted))
        q, k = normal(generator, 1, TOKENS, 1, 16), normal(generator, 1, TOKENS, 1, 16)
        causal = softmax_weights(q, k)[0, :, 0].tril()
        singular["softmax attention"] = block_values(causal / causal.sum(-1, keepdim=True))
        return cls(system.kernel(T), impulse(system), singular, dual)

    def checks(self) -> list[Check]:
        rank = [
            Check(f"{name}: singular value {n + 1} over the first", float(self.singular[name][n]), "≤", 1e-10)
            for n in STATES
            for name in [f"Mamba-2, state of {n}"]
        ]
        return [check_equal("S4: kernel = response token by token", self.kernels, self.response), *self.dual, *rank]

    def summary(self) -> str:
        error = float((self.kernels - self.response).abs().max() / self.response.abs().max())
        ranks = [f"{int((values > 1e-10).sum())} ({name})" for name, values in self.singular.items()]
        return (
            f"S4's kernel and its response token by token differ by {error:.0e}. The rank of the {TOKENS // 2}×"
            f"{TOKENS // 2} block below the diagonal is {', '.join(ranks)}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2)
        scaled = self.kernels / self.kernels.abs().amax(1, keepdim=True)
        lines = {f"channel {i}": kernel for i, kernel in enumerate(scaled)}
        plot_lines(
            left, torch.arange(T) + 1, lines, (BLUE, RED, YELLOW, GREEN), xscale="log",
            xlabel="age of the input (tokens)", ylabel="S4's kernel, over its largest value",
        )  # fmt: skip
        index = torch.arange(TOKENS // 2) + 1
        shown = {name: values.clamp(min=1e-17) for name, values in self.singular.items()}
        plot_lines(
            right, index, shown, (BLUE, RED, "#333"), yscale="log",
            xlabel="singular value of the block below the diagonal", ylabel="over the first",
        )  # fmt: skip
        return figure


def impulse(system: LowRank) -> Tensor:
    """The outputs [channels, T] of a system to one input of 1, token by token."""
    memory, outputs = torch.zeros(1, *system.B.shape[:1], 2 * system.B.shape[1], dtype=torch.float64), []
    for t in range(T):
        y, memory = system.step(memory, torch.full((1, CHANNELS), float(t == 0), dtype=torch.float64))
        outputs.append(y[0])
    return torch.stack(outputs, -1)


def masked(generator: Generator, n: int) -> tuple[Tensor, Tensor]:
    """The T×T matrix that a recurrence with a decay per token computes, measured by one-hot values, and L ⊙ (C Bᵀ)."""
    C, B = normal(generator, 1, TOKENS, 1, n), normal(generator, 1, TOKENS, 1, n)
    log_decay = -0.2 * torch.rand(1, TOKENS, 1, generator=generator, dtype=torch.float64)
    one_hot = torch.eye(TOKENS, dtype=torch.float64)[None, :, None]
    matrix = linear_attention(C, B, one_hot, log_decay=log_decay, scale=1.0)[0][0, :, 0]
    since = log_decay[0, :, 0].cumsum(0)
    L = (since[:, None] - since).exp().tril()
    return matrix, L * (C[0, :, 0] @ B[0, :, 0].mT)


def block_values(matrix: Tensor) -> Tensor:
    """The singular values of the quarter of the matrix in which the second half of the tokens reads the first."""
    values = torch.linalg.svdvals(matrix[TOKENS // 2 :, : TOKENS // 2])
    return values / values[0]
