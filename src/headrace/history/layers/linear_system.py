"""Discretized linear systems x' = A x + B u, y = C x, one per channel, for S4 and S4D.

A is real with eigenvalues in conjugate pairs. One complex number represents a pair, so that a state of S = 2n real
numbers (n real parts, then n imaginary parts) is a complex vector [n]; y = 2 Re(C x), and B* x means 2 Re(conj(B) x).

Kernels and matrices of a system are computed in float64 for sequences of any precision, because a step size of 0.001
gives sums of thousands of terms that nearly cancel, above all in gradients. The cost is independent of the batch size.

Dimensions: B batch, T tokens, H channels, n pairs, S = 2n, c tokens of a chunk, F frequencies.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ...extra.chunks import recomputed

CHUNK = 64
CAUCHY = 2**22  # number of entries of a Cauchy matrix that are computed at once


def real(z: Tensor) -> Tensor:
    """Converts complex [..., n] to real [..., 2n]."""
    return torch.cat([z.real, z.imag], -1)


def paired(x: Tensor) -> Tensor:
    """Converts real [..., 2n] to complex [..., n]; the inverse of `real`."""
    return torch.complex(*x.chunk(2, -1))


def real_output(C: Tensor) -> Tensor:
    """Returns the real weights w with w · real(x) = 2 Re(C x)."""
    return 2 * torch.cat([C.real, -C.imag], -1)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Returns a* b over all conjugate pairs, [..., 1]."""
    return 2 * (a.conj() * b).real.sum(-1, keepdim=True)


class Diagonal:
    """A = diag(poles), discretized by zero-order hold (S4D, arXiv 2206.11893).

    dt [H, 1]; poles and C [H, n], complex. B = 1, because a factor of B is equivalent to a factor of C."""

    def __init__(self, dt: Tensor, poles: Tensor, C: Tensor):
        self.C, self.rate = C, dt * poles
        self.B = torch.expm1(self.rate) / poles

    def power(self, exponents: Tensor) -> Tensor:
        """Returns powers of Ā, [H, exponents, n]: rows of a Vandermonde matrix."""
        return torch.exp(exponents[:, None] * self.rate[:, None])

    def kernel(self, T: int) -> Tensor:
        """Returns C Ā^t B̄ for t < T, [H, T]. The Vandermonde matrix is not stored: it is the product of a matrix over
        chunks and a matrix within a chunk."""
        within = torch.arange(CHUNK, device=self.rate.device)
        chunks = torch.arange(0, T, CHUNK, device=self.rate.device)
        left, right = (self.C * self.B)[:, None] * self.power(chunks), self.power(within)
        return 2 * torch.matmul(left, right.mT).real.flatten(1)[:, :T]

    def writes(self, c: int) -> Tensor:
        """Returns Ā^{c−1−j} B̄, the contribution of token j to the state after c tokens, [H, c, S]."""
        return real(self.B[:, None] * self.power(torch.arange(c - 1, -1, -1, device=self.rate.device)))

    def reads(self, c: int) -> Tensor:
        """Returns C Ā^{j+1}, the contribution of the state before c tokens to the output of token j, [H, c, S]."""
        return real_output(self.C[:, None] * self.power(torch.arange(1, c + 1, device=self.rate.device)))

    def advance_by(self, x: Tensor, T: int) -> Tensor:
        """Returns Ā^T x for x [..., H, S]."""
        return real(torch.exp(T * self.rate) * paired(x))

    def step(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Computes one token: state x [B, H, S] and input u [B, H] -> (y [B, H], the next state)."""
        z = torch.exp(self.rate) * paired(x) + self.B * u[..., None]
        return 2 * (self.C * z).real.sum(-1), real(z)


class LowRank:
    """A = diag(poles) − P P*, discretized by the bilinear rule: S4 (arXiv 2111.00396, section 3 and appendix C), with
    the stable sign of arXiv 2202.09729. Since A + A* < 0, Ā is a contraction, whose powers are computed by squaring.

    dt [H, 1]; poles, P, B and C [H, n], complex."""

    def __init__(self, dt: Tensor, poles: Tensor, P: Tensor, B: Tensor, C: Tensor):
        self.rate, self.P, self.dtP, self.dtB, self.C = dt * poles, P, dt * P, dt * B, C
        self.resolvent = 1 / (1 - self.rate / 2)
        self.B = self.solve(self.dtB)

    def solve(self, w: Tensor) -> Tensor:
        """Returns (1 − dt/2 A)⁻¹ w, computed by Woodbury's identity in O(n)."""
        y, left = self.resolvent * w, self.resolvent * self.dtP / 2
        return y - left * (inner(self.P, y) / (1 + inner(self.P, left)))

    def advance(self, z: Tensor) -> Tensor:
        """Returns Ā z = (1 − dt/2 A)⁻¹ (1 + dt/2 A) z for z [..., H, n]."""
        return self.solve((1 + self.rate / 2) * z - self.dtP / 2 * inner(self.P, z))

    @cached_property
    def squares(self) -> list[Tensor]:
        """Ā, Ā², Ā⁴, … as real matrices [H, S, S]; `square` extends the list."""
        H, n = self.rate.shape
        units = torch.eye(2 * n, dtype=self.rate.real.dtype, device=self.rate.device)[:, None].expand(-1, H, -1)
        return [real(self.advance(paired(units))).permute(1, 2, 0)]

    def square(self, k: int) -> Tensor:
        """Returns Ā^(2^k) as a real matrix [H, S, S]."""
        while len(self.squares) <= k:
            self.squares.append(self.squares[-1] @ self.squares[-1])
        return self.squares[k]

    def kernel(self, T: int) -> Tensor:
        """Returns C Ā^t B̄ for t < T, [H, T], from the values of Σ_t C Ā^t B̄ z^t at roots of unity (appendix C.3)."""
        k = max(T - 1, 1).bit_length()
        rest = torch.matmul(real_output(self.C)[:, None], self.square(k))[:, 0]
        cut = real_output(self.C) - rest  # C (1 − Ā^L), for the sum of L = 2^k terms
        C = torch.complex(*(cut / 2).chunk(2, -1)).conj()
        size = max(CAUCHY // (self.rate.shape[1] * 2 ** (k - 1)), 1)
        parts = zip(*(x.split(size) for x in (self.rate, self.P, self.dtP, self.dtB, C)), strict=True)
        blocks = [recomputed(cauchy_kernel, *part, 2**k) for part in parts]
        return torch.cat(blocks)[:, :T]  # type: ignore[arg-type]

    def writes(self, c: int) -> Tensor:
        return self._krylov(real(self.B), c, transposed=False).flip(1)

    def reads(self, c: int) -> Tensor:
        first = torch.matmul(real_output(self.C)[:, None], self.square(0))[:, 0]
        return self._krylov(first, c, transposed=True)

    def _krylov(self, x: Tensor, c: int, transposed: bool) -> Tensor:
        """Returns x, M x, …, M^{c−1} x, [H, c, S], with M = Ā or its transpose. Each pass doubles their number."""
        rows, k = x[:, None], 0
        while rows.shape[1] < c:
            square = self.square(k)
            rows, k = torch.cat([rows, rows @ (square if transposed else square.mT)], 1), k + 1
        return rows[:, :c]

    def advance_by(self, x: Tensor, T: int) -> Tensor:
        for k in range(T.bit_length()):
            if T >> k & 1:
                x = torch.matmul(self.square(k), x[..., None])[..., 0]
        return x

    def step(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        z = self.advance(paired(x)) + self.B * u[..., None]
        return 2 * (self.C * z).real.sum(-1), real(z)


def cauchy_kernel(rate: Tensor, P: Tensor, dtP: Tensor, dtB: Tensor, C: Tensor, L: int) -> Tensor:
    """Returns the first L terms of C Ā^t B̄, [H, L], given C (1 − Ā^L) in place of C.

    With α = 1 − z and β = (1 + z)/2 the generating function is C (α − β dt A)⁻¹ dt B, which has no singularity on the
    unit circle. Woodbury's identity reduces it to four sums over poles of x y / (α − β rate), in which a conjugate pair
    has the common denominator α² − 2 Re(rate) α β + |rate|² β²."""
    angle = torch.arange(L // 2 + 1, dtype=rate.real.dtype, device=rate.device) * (-2 * torch.pi / L)
    z = torch.polar(torch.ones_like(angle), angle)
    alpha, beta = 1 - z, (1 + z) / 2
    quadratic = torch.stack([torch.ones_like(rate.real), -2 * rate.real, rate.real**2 + rate.imag**2], -1)
    shared = torch.matmul(quadratic.to(z.dtype), torch.stack([alpha**2, alpha * beta, beta**2])).reciprocal()
    products = torch.stack([C * dtB, C * dtP, P.conj() * dtB, P.conj() * dtP], 1)
    weights = torch.cat([products.real, (products * rate.conj()[:, None]).real], 1)
    above, below = torch.matmul((2 * weights).to(z.dtype), shared).chunk(2, 1)
    CB, CP, PB, PP = (above * alpha - below * beta).unbind(1)
    return torch.fft.irfft(CB - beta * CP * PB / (1 + beta * PP), n=L)


class Response:
    """Applies a system in float64 to sequences of up to T tokens."""

    def __init__(self, system: Diagonal | LowRank, T: int):
        self.system, self.T = system, T

    @cached_property
    def kernel(self) -> Tensor:
        return self.system.kernel(self.T)

    @cached_property
    def writes(self) -> Tensor:
        return self.system.writes(CHUNK)

    @cached_property
    def reads(self) -> Tensor:
        return self.system.reads(CHUNK)

    def __call__(self, u: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """u [B, T, H] and the state x [B, H, S] (None: zeros) -> (y [B, T, H], the next state)."""
        T, y, after = u.shape[1], self._convolve(u), self._written(u)
        if x is not None:
            y = y + self._remembered(x.double(), T).to(u.dtype)
            after = after + self.system.advance_by(x.double(), T)
        return y, after.to(u.dtype)

    def _convolve(self, u: Tensor) -> Tensor:
        if not u.numel():  # which FFTs refuse
            return u
        padded = 2 << (u.shape[1] - 1).bit_length()
        kernel = self.kernel[:, : u.shape[1]].to(u.dtype)
        spectrum = torch.fft.rfft(u.mT, n=padded) * torch.fft.rfft(kernel, n=padded)
        return torch.fft.irfft(spectrum, n=padded)[..., : u.shape[1]].mT

    def _written(self, u: Tensor) -> Tensor:
        """Returns the state after u from a zero state: a product per chunk, and a recurrence over chunks."""
        u = F.pad(u, (0, 0, -u.shape[1] % CHUNK, 0)).unflatten(1, (-(-u.shape[1] // CHUNK), CHUNK))
        own = torch.einsum("bmch,hcs->mbhs", u, self.writes.to(u.dtype)).double()
        x = own.new_zeros(own.shape[1:])
        for chunk in own.unbind():
            x = self.system.advance_by(x, CHUNK) + chunk
        return x

    def _remembered(self, x: Tensor, T: int) -> Tensor:
        """Returns the contribution of the initial state x to the outputs of T tokens, [B, T, H]."""
        starts = [x]
        for _ in range(CHUNK, T, CHUNK):
            starts.append(self.system.advance_by(starts[-1], CHUNK))
        return torch.einsum("mbhs,hcs->bmch", torch.stack(starts), self.reads).flatten(1, 2)[:, :T]
