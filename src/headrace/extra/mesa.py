"""The read of MesaNet (arXiv 2506.05233): a head reads the prediction that ridge regression on all pairs (k, v) so far
makes for q (`ridge_steps`). The solution x of a linear system takes the place of q:

    M_t = e^{g_t} M_{t−1} + β_t k_tᵀ k_t    S_t = e^{g_t} S_{t−1} + β_t k_tᵀ v_t
    (M_t + diag(λ)) x_t = q_t               o_t = x_t S_t

S and M are one memory, of the values (v, k). Conjugate gradients solve the systems of all tokens at once; the product
of M_t with a vector of each token is `linear_attention` with k as values. The gradient is that of the exact solution:
the system is symmetric, and so its gradient with respect to q is the solution of the same system.

The layer of the paper (appendix G.2) convolves q and k alone, and its β has a bias. Here v is convolved too, and β has
no bias. The paper's training also multiplies e^g by 1 − 0.0025 β² (G.5), which flash-linear-attention leaves out, too.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.linear.mixer import LinearMixer
from ..ops.derivatives import apply_function, first_order
from ..ops.sequences import Sequences
from ..spec.decay import DECAYS, Decay, DecayShape
from ..spec.linear import Heads, Inputs, MixerSpec, Read, Write
from ..spec.mixer import Facts
from ..spec.record import PositiveInt
from ..spec.serialize import TYPES
from .recurrence import ModuleRecur, RecurrenceModule
from .registration import register_mixer


class RidgeRead(RecurrenceModule):
    """Computes the recurrence with this read.

    Args:
        steps: largest number of steps of conjugate gradients. K steps suffice but for rounding.
        num_heads, key_dim: H and K.
    """

    FIRST, LEAST = 1.0, 0.25  # λ at the beginning, and its lower bound
    no_weight_decay = ("weight",)

    def __init__(self, steps: int, num_heads: int, key_dim: int):
        super().__init__()
        self.steps = min(steps, key_dim)
        self.weight = nn.Parameter(torch.empty(num_heads, key_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(math.log(math.expm1(self.FIRST - self.LEAST)))

    def compute(self, op: Callable, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The memory [N, H, K, V + K] is S and M. op has the additive rule and a scale of 1."""
        v = x["v"]
        x |= {name: x[name].repeat_interleave(v.shape[2] // x[name].shape[2], 2) for name in "qk"}
        x["v"] = torch.cat([v, x["k"]], -1)
        where = {"initial_state": None if state is None else state.memory.to(v), "cu_seqlens": sequences.bounds}
        x["q"] = self._solution(op, x, where, sequences)
        out, memory = op(**x, **where)
        return out[..., : v.shape[-1]], memory

    def _solution(self, op: Callable, x: dict[str, Tensor], where: dict[str, Any], sequences: Sequences) -> Tensor:
        """Returns the x of all tokens, [B, T, H, K]."""
        ridge = F.softplus(self.weight.to(x["q"])) + self.LEAST
        keys = x | {"v": x["k"]}
        M = None if where["initial_state"] is None else where["initial_state"][..., -ridge.shape[-1] :]

        def times(p: Tensor) -> Tensor:
            """(M_t + diag(λ)) p_t."""
            return op(**keys | {"q": p}, **where | {"initial_state": M})[0] + ridge * p

        if x["q"].shape[1] == 1 and not sequences.packed:  # one product instead of the op
            after = op(**keys, **where | {"initial_state": M})[1][:, None]

            def times(p: Tensor) -> Tensor:
                return (p[..., None, :] @ after)[..., 0, :] + ridge * p

        def solve(b: Tensor) -> Tensor:
            with torch.no_grad():
                return conjugate_gradients(times, b, self.steps)

        solution = solve(x["q"])
        if not torch.is_grad_enabled():
            return solution
        return apply_function(Solution, "ridge_steps", x["q"] - times(solution), solution, solve)


class Solution(torch.autograd.Function):
    """Returns the solution x of A x = b, with the gradient of its residual b − A x to first order: A⁻¹."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solution: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return solution.clone()

    @staticmethod
    @first_order("ridge_steps")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.solve(grad), None, None


def conjugate_gradients(times: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solves A x = b for vectors b [..., K], where times(p) = A p, with a symmetric, positive definite A for each
    vector. A vector that is solved exactly stays as it is."""
    x, r, p, size = torch.zeros_like(b), b, b, b.square().sum(-1, keepdim=True)
    for _ in range(steps):
        product = times(p)
        rate = ratio(size, (p * product).sum(-1, keepdim=True))
        x, r, last = x + rate * p, r - rate * product, size
        size = r.square().sum(-1, keepdim=True)
        p = r + ratio(size, last) * p
    return x


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b > 0, a / b, 0)


class Ridge(ModuleRecur):
    """The recurrence with this read."""

    name = "ridge"

    def build(self, mixer: Any) -> None:
        super().build(mixer)
        heads = mixer.H * mixer.spec.memories_per_head
        mixer.ridge = RidgeRead(mixer.spec.ridge_steps, heads, mixer.spec.memory_rows(mixer.K))


class MesaMixer(LinearMixer):
    """The layer of a MesaSpec."""

    RECURRENCES = (Ridge,)


@dataclass(frozen=True)
class MesaSpec(MixerSpec):
    """A linear mixer that reads the prediction of ridge regression."""

    ridge_steps: PositiveInt = 30  # steps of conjugate gradients that solve (Σ β kᵀk + λ) x = q

    facts = Facts("headrace.extra.mesa.MesaMixer")

    def _objections(self):
        yield from super()._objections()
        read, write, decay = self.read, self.write, DECAYS.get(self.decay.kind)
        scalar = decay is None or decay.shape is not DecayShape.VECTOR
        plain = not self.sums and not read.bonus and write.rule == "add" and write.beta != "trapezoid"
        yield (
            not (plain and scalar and read.scale == "one"),
            f"ridge_steps={self.ridge_steps} is of a memory Σ β kᵀv that decays by one number per head; expected "
            "write.rule='add', no decay per key channel, read.scale='one', read.norm without a sum, read.bonus=False, "
            "and write.beta neither 'exp' nor 'trapezoid'",
        )
        gate = self.competition
        yield (
            gate is not None and gate.freeze and gate.write != "beta",
            "competition.freeze=True with ridge_steps keeps no memory, as M has no values that a gate could multiply; "
            "expected competition.write='beta'",
        )

    def columns(self, K: int, V: int) -> int:
        return super().columns(K, V) + self.memory_rows(K)

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        rows = self.memory_rows(self.head_dims(hidden_size, num_heads)[0])
        numbers = self.num_heads(hidden_size, num_heads) * self.memories_per_head * rows**2
        return super().flops_per_token(hidden_size, num_heads) + 2 * min(self.ridge_steps, rows) * numbers


TYPES["mesa"] = MesaSpec
register_mixer(
    "mesa",
    MesaSpec(
        Heads(width=128),  # MesaNetConfig of flash-linear-attention: head_dim 128
        Inputs(conv=4, qk_norm="l2"),
        Decay("sigmoid-head", temperature=1.0),
        Write(beta="sigmoid"),
        Read("rms", scale="one"),
    ),
    about="A token reads the prediction of ridge regression on all keys and values so far, by conjugate gradients.",
    paper="https://arxiv.org/abs/2506.05233",
)
