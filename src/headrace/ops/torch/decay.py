"""The decay inside one chunk of C tokens, for the three shapes of log_decay.

With G_i the sum of log_decay over the chunk's tokens up to and including i (per head, or per head and key channel):

    rows(x)      x_i e^{G_i}                     decay from the incoming state to token i
    cols(x)      x_i e^{G_C − G_i}               decay from token i to the end of the chunk
    end_(S)      S e^{G_C}                       decay of the incoming state over the chunk
    scores(x,y)  Σ_k x_ik y_jk e^{G_i − G_j}     for j ≤ i, zero elsewhere: decay from token j to token i

G and its differences are float64, so that −50 followed by −0.01 keeps its digits. No decay overflows: exponents are at
most 0, except within blocks that are short enough. (A positive log_decay makes the memory grow, and overflows only if
the memory does.) The upper triangle of scores is set to zero, not multiplied by zero, so that a NaN affects only the
tokens after it.

The gradient to a token's log_decay is the sum of the contributions of all pairs of an earlier writer and a reader at or
after the token. These pairs are summed directly: the difference of larger sums (q·dq − k·dk, accumulated) would leave
rounding errors when a strong decay makes the contributions small. Tensors are [N, C, ·], with N = batch × heads.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = -1000.0  # lower bound of log_decay: e^LEAST is 0 in float64, and −∞ would give NaN differences of sums
Scored = tuple[Tensor, Tensor, Tensor | None]  # gradients to x, y and log_decay


def later(x: Tensor) -> Tensor:
    """Returns the matrix [C, C] that sums x […, C, ·] over each token and the later ones."""
    return _ones(x.shape[-2], x.dtype, x.device).triu()


def earlier(x: Tensor) -> Tensor:
    """Returns the matrix [C, C] that sums x […, C, ·] over the tokens before each token."""
    return _ones(x.shape[-2], x.dtype, x.device).tril(-1)


@lru_cache(maxsize=32)
def _ones(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(C, C, dtype=dtype, device=device)


class NoDecay:
    """No decay, and the interface of the three classes."""

    def rows(self, x: Tensor) -> Tensor:
        return x

    cols = rows

    def end_(self, S: Tensor) -> Tensor:
        return S

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm(x, y.mT).tril_()

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor, A: Tensor, decay_gradient: bool) -> Scored:
        """Returns the gradients to x, y and, if decay_gradient, log_decay, given A = scores(x, y) and its gradient dA.

        The upper triangle of dA is ignored, and dA may be overwritten."""
        dA = dA.tril_()
        return torch.bmm(dA, y), torch.bmm(dA.mT, x), None


class ScalarDecay:
    """A decay per head and token: log_decay [N, C, 1]."""

    def __init__(self, log_decay: Tensor, dtype: torch.dtype):
        G = log_decay.double().clamp(min=LEAST).cumsum(1)
        self.pairs = (G - G.mT).tril_().to(dtype).exp_()  # tril_ makes the upper triangle 1, which would overflow
        self.seen = G.to(dtype).exp()
        self.left = self.pairs[:, -1, :, None]
        self.all = self.seen[:, -1:]

    def rows(self, x: Tensor) -> Tensor:
        return x * self.seen

    def cols(self, x: Tensor) -> Tensor:
        return x * self.left

    def end_(self, S: Tensor) -> Tensor:
        return S.mul_(self.all)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm(x, y.mT).mul_(self.pairs).tril_()

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor, A: Tensor, decay_gradient: bool) -> Scored:
        dg = None
        if decay_gradient:
            passing = torch.matmul(later(A), dA * A).tril_(-1)
            dg = passing.sum(-1, keepdim=True)
        dA = dA.mul_(self.pairs).tril_()
        return torch.bmm(dA, y), torch.bmm(dA.mT, x), dg

    def per_channel(self, x: Tensor) -> Tensor:
        """Converts gradients per key channel to gradients per channel of log_decay, which has one."""
        return x.sum(-1, keepdim=True)


class VectorDecay:
    """A decay per head, token and key channel: log_decay [N, C, K].

    e^{G_i − G_j} = e^{G_i − G_m} e^{G_m − G_j} for any m between j and i. With m the middle of a block of tokens, both
    factors are at most 1, and the block's lower-left quarter is one matrix product. The two remaining triangles are
    blocks of half the size, down to blocks of `base` tokens. A block of `base` tokens is one product with exponents of
    both signs: `base` must be small enough that e^{|log_decay| base} does not overflow; it may be 1.
    """

    def __init__(self, log_decay: Tensor, dtype: torch.dtype, base: int):
        G = log_decay.double().clamp(min=LEAST).cumsum(1)
        self.length = G.shape[1]
        self.seen = G.to(dtype).exp()
        self.left = (G[:, -1:] - G).to(dtype).exp()
        self.all = self.seen[:, -1, :, None]
        size = max(base, 1 << (self.length - 1).bit_length())
        self.base, self.padding = base, size - self.length
        # Padding repeats the last G, so that no exponent becomes positive.
        G = torch.cat([G, G[:, -1:].expand(-1, self.padding, -1)], 1) if self.padding else G
        self.levels = [self._level(G, m, dtype) for m in self._halves(size)]
        blocks = G.unflatten(1, (-1, base))
        middle = blocks[:, :, base // 2, None]
        self.ahead = (blocks - middle).to(dtype).exp()
        self.behind = (middle - blocks).to(dtype).exp()

    def _halves(self, size: int) -> list[int]:
        """Returns size/2, size/4, …, base."""
        return [size >> i for i in range(1, size.bit_length()) if size >> i >= self.base]

    @staticmethod
    def _level(G: Tensor, m: int, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        first, second = G.unflatten(1, (-1, 2, m)).unbind(2)
        middle = first[:, :, -1:]
        return m, (second - middle).to(dtype).exp(), (middle - first).to(dtype).exp()

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.padding)) if self.padding else x

    def rows(self, x: Tensor) -> Tensor:
        return x * self.seen

    def cols(self, x: Tensor) -> Tensor:
        return x * self.left

    def end_(self, S: Tensor) -> Tensor:
        return S.mul_(self.all)

    @staticmethod
    def _quarters(A: Tensor, m: int) -> Tensor:
        """Returns a view [N, blocks, m, m] of the lower-left quarters of A's diagonal blocks of size 2m."""
        blocks = A.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))[:, :, 1, :, :, 0]
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _blocks(self, A: Tensor) -> Tensor:
        """Returns a view [N, blocks, base, base] of A's diagonal blocks of size base."""
        blocks = A.unflatten(2, (-1, self.base)).unflatten(1, (-1, self.base))
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _based(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.unflatten(1, (-1, self.base)) * self.ahead, y.unflatten(1, (-1, self.base)) * self.behind

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._padded(x), self._padded(y)
        A = x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
        ahead, behind = self._based(x, y)
        self._blocks(A).copy_((ahead @ behind.mT).tril_())
        for m, after, before in self.levels:
            x_after = x.unflatten(1, (-1, 2, m))[:, :, 1] * after
            y_before = y.unflatten(1, (-1, 2, m))[:, :, 0] * before
            self._quarters(A, m).copy_(x_after @ y_before.mT)
        return A[:, : self.length, : self.length]

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor, A: Tensor, decay_gradient: bool) -> Scored:
        x, y = self._padded(x), self._padded(y)
        dA = F.pad(dA, (0, self.padding, 0, self.padding)) if self.padding else dA
        ahead, behind = self._based(x, y)
        block = self._blocks(dA).tril()
        dx, dy = ((block @ behind) * self.ahead).flatten(1, 2), ((block.mT @ ahead) * self.behind).flatten(1, 2)
        dg = self._crossing_in_blocks(x, y, dx, dy) if decay_gradient else None
        for m, after, before in self.levels:
            x_after = x.unflatten(1, (-1, 2, m))[:, :, 1]
            y_before = y.unflatten(1, (-1, 2, m))[:, :, 0]
            quarter = self._quarters(dA, m)
            dx_after = (quarter @ (y_before * before)).mul_(after)
            dy_before = (quarter.mT @ (x_after * after)).mul_(before)
            dx.unflatten(1, (-1, 2, m))[:, :, 1] += dx_after
            dy.unflatten(1, (-1, 2, m))[:, :, 0] += dy_before
            if dg is not None:
                first, second = dg.unflatten(1, (-1, 2, m)).unbind(2)
                second += later(second) @ (x_after * dx_after)
                first += earlier(first) @ (y_before * dy_before)
        return dx[:, : self.length], dy[:, : self.length], None if dg is None else dg[:, : self.length]

    def _crossing_in_blocks(self, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
        """Returns the gradient to log_decay from pairs within a block, as a difference of sums. Blocks of several
        tokens are only used for decays weak enough that its rounding errors are small."""
        if self.base == 1:
            return torch.zeros_like(x)
        difference = (x * dx).addcmul_(y, dy, value=-1).unflatten(1, (-1, self.base))
        return (later(difference) @ difference).flatten(1, 2)

    def per_channel(self, x: Tensor) -> Tensor:
        return x
