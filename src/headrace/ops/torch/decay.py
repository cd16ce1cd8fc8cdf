"""Decay inside one chunk of C tokens, for the three shapes it can have.

With G_i the sum of log_decay over the chunk's tokens up to and including i (per head, or per head and key channel):

    rows(x)      x_i e^{G_i}                     how much of the incoming state token i still sees
    cols(x)      x_i e^{G_C − G_i}               how much of token i is left at the end of the chunk
    end_(S)      S e^{G_C}                       how much of the incoming state is left at the end
    scores(x,y)  Σ_k x_ik y_jk e^{G_i − G_j}     for j ≤ i, zero elsewhere

G is summed, and differences of it are taken, in float64: −50 followed by −0.01 keeps its digits. Nothing overflows at
any decay: exponents are never positive, but inside blocks so short that it cannot matter. (A positive log_decay makes
the memory grow, and overflows only where that does.) What is above the diagonal of scores is cut off, not multiplied by
zero: NaN stays with the tokens after it.

The gradient to a token's log_decay is the sum, over all pairs of a writer before it and a reader at or after it, of
what passes between them. These crossing pairs are summed as such: differences of larger sums (q·dq − k·dk, accumulated)
leave rounding errors where a strong decay lets nothing pass. Tensors are [N, C, ·], N batch × heads.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = -1000.0  # e^LEAST is 0 in float64 too; differences of sums with −∞ in them would be NaN
Scored = tuple[Tensor, Tensor, Tensor | None]  # gradients to x, y and log_decay


def later(x: Tensor) -> Tensor:
    """[C, C] with which to sum x […, C, ·] over the tokens at and after each."""
    return _ones(x.shape[-2], x.dtype, x.device).triu()


def earlier(x: Tensor) -> Tensor:
    """[C, C] with which to sum x […, C, ·] over the tokens before each."""
    return _ones(x.shape[-2], x.dtype, x.device).tril(-1)


@lru_cache(maxsize=32)
def _ones(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(C, C, dtype=dtype, device=device)


class NoDecay:
    def rows(self, x: Tensor) -> Tensor:
        return x

    cols = rows

    def end_(self, S: Tensor) -> Tensor:
        return S

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm(x, y.mT).tril_()

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor, A: Tensor, decay_gradient: bool) -> Scored:
        """Gradients to x, y and log_decay (None unless asked for), given A = scores(x, y) and the gradient to it.
        That gradient's upper triangle is ignored, and it may be overwritten."""
        dA = dA.tril_()
        return torch.bmm(dA, y), torch.bmm(dA.mT, x), None


class ScalarDecay:
    """One decay per head and token: log_decay [N, C, 1]."""

    def __init__(self, log_decay: Tensor, dtype: torch.dtype):
        G = log_decay.double().clamp(min=LEAST).cumsum(1)
        self.pairs = (G - G.mT).tril_().to(dtype).exp_()  # above the diagonal, which would overflow, 1
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
        """Gradients to the decay of each key channel -> to log_decay's channels, of which there is one."""
        return x.sum(-1, keepdim=True)


class VectorDecay:
    """One decay per head, token and key channel: log_decay [N, C, K].

    e^{G_i − G_j} = e^{G_i − G_m} e^{G_m − G_j} for any m between j and i: with m the middle of a block of tokens both
    factors are at most 1, and the block's lower-left quarter is one matrix product. The two triangles left are blocks
    of half the size, and so on down to blocks of `base` tokens. Those are one product as a whole, with exponents of
    both signs: `base` must be so short that e^{|log_decay| base} stays far from overflow; it may be 1.
    """

    def __init__(self, log_decay: Tensor, dtype: torch.dtype, base: int):
        G = log_decay.double().clamp(min=LEAST).cumsum(1)
        self.length = G.shape[1]
        self.seen = G.to(dtype).exp()
        self.left = (G[:, -1:] - G).to(dtype).exp()
        self.all = self.seen[:, -1, :, None]
        size = max(base, 1 << (self.length - 1).bit_length())
        self.base, self.padding = base, size - self.length
        # Padding tokens keep G as it is: no exponent becomes positive.
        G = torch.cat([G, G[:, -1:].expand(-1, self.padding, -1)], 1) if self.padding else G
        self.levels = [self._level(G, m, dtype) for m in self._halves(size)]
        blocks = G.unflatten(1, (-1, base))
        middle = blocks[:, :, base // 2, None]
        self.ahead = (blocks - middle).to(dtype).exp()
        self.behind = (middle - blocks).to(dtype).exp()

    def _halves(self, size: int) -> list[int]:
        """size/2, size/4, … base."""
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
        """The lower-left quarters of A's diagonal blocks of size 2m, as a view [N, blocks, m, m]."""
        blocks = A.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))[:, :, 1, :, :, 0]
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _blocks(self, A: Tensor) -> Tensor:
        """A's diagonal blocks of size base, as a view [N, blocks, base, base]."""
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
        """By the difference of sums: in blocks of more than one token no decay is so strong that its error counts."""
        if self.base == 1:
            return torch.zeros_like(x)
        difference = (x * dx).addcmul_(y, dy, value=-1).unflatten(1, (-1, self.base))
        return (later(difference) @ difference).flatten(1, 2)

    def per_channel(self, x: Tensor) -> Tensor:
        return x
