"""S4 and S4D: a time-invariant linear system per channel, computed as a convolution for many tokens and as a recurrence
for one.

Dimensions: B batch, T tokens, D hidden size and channels, S = 2n state numbers per channel, N sequences.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...extra.recurrence import Recurrence
from ...extra.scan import ScanState
from ...extra.specs.scan import ScanSpec
from ...layers.base import Mixer
from ...layers.linear.decays import finite_exp
from ...ops.call import accumulator
from ...ops.checks import require
from ...ops.sequences import Sequences
from ...utils.device import WITHOUT_FLOAT64, without_autocast
from .linear_system import Diagonal, LowRank, Response


class S4D(Mixer):
    """Diagonal systems (arXiv 2206.11893), then skip, GELU and a gated projection (arXiv 2111.00396, section 3.4)."""

    state_kind = ScanState
    no_weight_decay: tuple[str, ...] = "log_damping", "frequency"

    def __init__(self, spec: ScanSpec, *, hidden_size: int, **unused):
        super().__init__()
        assert spec.state_size is not None
        self.shape = (hidden_size, spec.state_size // 2)
        self.state_shapes = spec.state_shapes(hidden_size, 1)
        self.log_dt = nn.Parameter(torch.empty(hidden_size))
        self.log_damping = nn.Parameter(torch.empty(self.shape))  # poles are −e^damping + i frequency
        self.frequency = nn.Parameter(torch.empty(self.shape))
        self.C = nn.Parameter(torch.empty(*self.shape, 2))
        self.skip = nn.Parameter(torch.empty(hidden_size))
        self.out_proj = nn.Linear(hidden_size, 2 * hidden_size)
        self.recurrence = Recurrence()
        self._build_input()
        self.reset_parameters()

    def _build_input(self) -> None:
        """Creates the parameters that S4 has in addition."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the poles as in S4D-Lin, and the step sizes between 0.001 and 0.1."""
        self.log_dt.uniform_(math.log(1e-3), math.log(1e-1))
        self.log_damping.fill_(math.log(0.5))
        self.frequency.copy_(torch.pi * torch.arange(self.shape[1]).expand(self.shape))
        self.C.normal_(std=0.5**0.5)
        self.skip.normal_()

    def system(self, dtype: torch.dtype) -> Diagonal | LowRank:
        """Returns the discretized systems of all channels."""
        return Diagonal(*self._dynamics(dtype), _complex(self.C, dtype))

    def _dynamics(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        poles = torch.complex(-finite_exp(self.log_damping.to(dtype)), self.frequency.to(dtype))
        return self.log_dt.to(dtype).exp()[:, None], poles

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        with without_autocast(x):
            u = x.to(accumulator(x))
            y, memory = self.recurrence(self._respond, u, None if state is None else state.memory.mT, sequences)
            y = F.gelu(y + self.skip.to(u.dtype) * u).to(x.dtype)
        return F.glu(sequences.tokenwise(self.out_proj, y), -1), ScanState(memory.mT)

    def _respond(self, u: Tensor, memory: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """u [B, T, D] and memory [N, D, S] -> (y [B, T, D], the next memory)."""
        if not sequences.packed and u.shape[1] == 1:
            before = u.new_zeros(len(u), self.shape[0], 2 * self.shape[1]) if memory is None else memory
            y, memory = self.system(u.dtype).step(before, u[:, 0])
            return y[:, None], memory
        where = f"x is on {u.device}, which has no float64; expected the CPU or a GPU of another kind"
        require(u.device.type not in WITHOUT_FLOAT64, where)
        system = self.system(torch.float64)
        if not sequences.packed:
            return Response(system, u.shape[1])(u, memory)
        lengths = sequences.counts()
        response = Response(system, max(lengths))
        befores = [None] * len(lengths) if memory is None else memory.split(1)
        answers = [response(piece, x) for piece, x in zip(u.split(lengths, 1), befores, strict=True)]
        return torch.cat([y for y, _ in answers], 1), torch.cat([x for _, x in answers])


class S4(S4D):
    """S4: systems initialized to HiPPO-LegS, as a diagonal minus a matrix of rank one, which S4D omits.

    The initial B is that of HiPPO-LegS with imaginary parts clipped to ±2, as in the authors' code, not the paper."""

    no_weight_decay = (*S4D.no_weight_decay, "P", "B")

    def _build_input(self) -> None:
        self.P = nn.Parameter(torch.empty(*self.shape, 2))
        self.B = nn.Parameter(torch.empty(*self.shape, 2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        frequency, P, B = hippo_diagonal_plus_low_rank(2 * self.shape[1])
        self.frequency.copy_(frequency.expand(self.shape))
        self.P.copy_(torch.view_as_real(P).expand_as(self.P))
        B = torch.complex(B.real, B.imag.clamp(-2, 2))  # as in state-spaces/s4: B grows with the frequency
        self.B.copy_(torch.view_as_real(B).expand_as(self.B))

    def system(self, dtype: torch.dtype) -> LowRank:
        P, B, C = (_complex(x, dtype) for x in (self.P, self.B, self.C))
        return LowRank(*self._dynamics(dtype), P, B, C)


def _complex(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts real [..., 2] to complex [...]: as a view, which saves time per token, if it begins at an even place in
    its memory. A graph that is compiled knows no places."""
    x = x.to(dtype)
    copied = torch.compiler.is_compiling() or x.storage_offset() % 2
    return torch.complex(*x.unbind(-1)) if copied else torch.view_as_complex(x)


def hippo(S: int) -> tuple[Tensor, Tensor]:
    """Returns A [S, S] and B [S] of HiPPO-LegS (arXiv 2111.00396, equation 2)."""
    k = torch.arange(S, dtype=torch.float64, device="cpu")
    B = (2 * k + 1).sqrt()
    return -torch.tril(B[:, None] * B, -1) - torch.diag(k + 1), B


def hippo_diagonal_plus_low_rank(S: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns HiPPO-LegS in the basis where A = diag(−½ + i frequency) − P P*: (frequency, P, B), [S / 2] each.

    A + P Pᵀ + ½ is skew-symmetric for P_k = √(k + ½) (appendix C.1), so that its eigenvectors are orthogonal. They are
    scaled to have real first entries, as by LAPACK, because the clipping of B depends on their phase."""
    A, B = hippo(S)
    P = (torch.arange(S, dtype=A.dtype, device=A.device) + 0.5).sqrt()
    skew = A + P[:, None] * P + 0.5 * torch.eye(S, dtype=A.dtype, device=A.device)
    frequency, basis = torch.linalg.eigh(-1j * skew)
    above = frequency > 0
    basis = basis[:, above] * basis[0, above].sgn().conj()
    to_basis = basis.conj().T
    return frequency[above], to_basis @ P.to(basis), to_basis @ B.to(basis)
