"""Decay inside one chunk of C tokens, for the three shapes it can have.

With G_i the sum of log_decay over the chunk's tokens up to and including i (per head, or per head and key channel):

    rows(x)      x_i e^{G_i}                     how much of the incoming state token i still sees
    cols(x)      x_i e^{G_C − G_i}               how much of token i is left at the end of the chunk
    end_(S)      S e^{G_C}                       how much of the incoming state is left at the end
    scores(x,y)  Σ_k x_ik y_jk e^{G_i − G_j}     for j ≤ i, zero elsewhere

No exponent here is ever positive, so nothing overflows at any decay. G is summed, and differences of it are taken, in
float64: −50 followed by −0.01 keeps its digits. Tensors are [N, C, ·] with N = batch × heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class NoDecay:
    def rows(self, x: Tensor) -> Tensor:
        return x

    cols = rows

    def end_(self, S: Tensor) -> Tensor:
        return S

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm(x, y.mT).tril_()

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients to x and y, given the gradient of scores(x, y) (its upper triangle is ignored)."""
        dA = dA.tril()
        return torch.bmm(dA, y), torch.bmm(dA.mT, x)


class ScalarDecay:
    """One decay per head and token: log_decay [N, C, 1]."""

    def __init__(self, log_decay: Tensor, dtype: torch.dtype):
        G = log_decay.double().cumsum(1)
        C = G.shape[1]
        # Masked before exp: e^{G_i − G_j} overflows above the diagonal, and inf · 0 is NaN.
        above = torch.ones(C, C, dtype=torch.bool, device=G.device).triu_(1)
        self.pairs = (G - G.mT).masked_fill_(above, -torch.inf).to(dtype).exp()
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
        return torch.bmm(x, y.mT).mul_(self.pairs)

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        dA = dA * self.pairs
        return torch.bmm(dA, y), torch.bmm(dA.mT, x)


class VectorDecay:
    """One decay per head, token and key channel: log_decay [N, C, K].

    e^{G_i − G_j} = e^{G_i − G_m} e^{G_m − G_j} for any m between j and i: with m the middle of a block both factors are
    at most 1, and the block's lower-left quarter is one matrix product. The two remaining triangles are blocks of half
    the size, down to single tokens.
    """

    def __init__(self, log_decay: Tensor, dtype: torch.dtype):
        G = log_decay.double().cumsum(1)
        self.length = G.shape[1]
        self.seen = G.to(dtype).exp()
        self.left = (G[:, -1:] - G).to(dtype).exp()
        self.all = self.seen[:, -1, :, None]
        self.padding = (1 << (self.length - 1).bit_length()) - self.length
        # Padding tokens keep G as it is: no exponent becomes positive.
        self.levels = list(self._levels(torch.cat([G, G[:, -1:].expand(-1, self.padding, -1)], 1), dtype))

    @staticmethod
    def _levels(G: Tensor, dtype: torch.dtype):
        m = G.shape[1] // 2
        while m:
            first, second = G.unflatten(1, (-1, 2, m)).unbind(2)
            middle = first[:, :, -1:]
            yield m, (second - middle).to(dtype).exp(), (middle - first).to(dtype).exp()
            m //= 2

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

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._padded(x), self._padded(y)
        A = x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
        A.diagonal(dim1=1, dim2=2).copy_((x * y).sum(-1))
        for m, later, earlier in self.levels:
            x_later = x.unflatten(1, (-1, 2, m))[:, :, 1] * later
            y_earlier = y.unflatten(1, (-1, 2, m))[:, :, 0] * earlier
            self._quarters(A, m).copy_(x_later @ y_earlier.mT)
        return A[:, : self.length, : self.length]

    def scores_backward(self, dA: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._padded(x), self._padded(y)
        dA = F.pad(dA, (0, self.padding, 0, self.padding)) if self.padding else dA
        on_diagonal = dA.diagonal(dim1=1, dim2=2)[..., None]
        dx, dy = on_diagonal * y, on_diagonal * x
        for m, later, earlier in self.levels:
            x_later = x.unflatten(1, (-1, 2, m))[:, :, 1] * later
            y_earlier = y.unflatten(1, (-1, 2, m))[:, :, 0] * earlier
            quarter = self._quarters(dA, m)
            dx.unflatten(1, (-1, 2, m))[:, :, 1].addcmul_(quarter @ y_earlier, later)
            dy.unflatten(1, (-1, 2, m))[:, :, 0].addcmul_(quarter.mT @ x_later, earlier)
        return dx[:, : self.length], dy[:, : self.length]
