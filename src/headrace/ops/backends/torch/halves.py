"""A decay per key channel on a CPU: fewer operations than `VectorDecay`, in more calls, and dependent on the values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay import Gradients, NoDecay, crossing, summed

LEAST = -1000.0  # lower bound of log_decay: e^LEAST is 0 in float64, and −∞ would give NaN differences of sums
LONGEST, MOST = 16, 64.0  # tokens of a block, and the largest exponent in it


class HalvedDecay(NoDecay):
    """A decay per head, token and key channel: log_decay [M, C, K].

    e^{G_i − G_j} = e^{G_i − G_m} e^{G_m − G_j} for any m between j and i, where G sums log_decay from the start of the
    chunk. With m the middle of a block of tokens, both factors are at most 1, and the block's lower-left quarter is one
    matrix product. The two remaining triangles are blocks of half the size, down to blocks of `base` tokens. A block of
    `base` tokens is one product with exponents of both signs, so that `base` is from `block_of`. G and its differences
    are float64, so that −50 followed by −0.01 keeps its digits.
    """

    def __init__(self, x: Tensor, y: Tensor, log_decay: Tensor, delta: bool, base: int):
        self._take(x, y, delta)
        G = log_decay.double().clamp(min=LEAST).cumsum(1)
        self.seen, self.left = G.to(y.dtype).exp(), (G[:, -1:] - G).to(y.dtype).exp()
        self.through = self.seen[:, -1, :, None]
        self.reads, self.writes = (x.unflatten(1, (-1, y.shape[1])) * self.seen[:, None]).flatten(1, 2), y * self.left
        size = max(base, 1 << (y.shape[1] - 1).bit_length())
        self.base, self.padding = base, size - y.shape[1]
        # Padding repeats the last G, so that no exponent becomes positive.
        G = torch.cat([G, G[:, -1:].expand(-1, self.padding, -1)], 1) if self.padding else G
        halves = (size >> i for i in range(1, size.bit_length()) if size >> i >= base)
        self.levels = [self._level(G, m, y.dtype) for m in halves]
        blocks = G.unflatten(1, (-1, base))
        middle = blocks[:, :, base // 2, None]
        self.ahead, self.behind = (blocks - middle).to(y.dtype).exp(), (middle - blocks).to(y.dtype).exp()
        self.scores = torch.cat([self._scores(part) for part in x.split(y.shape[1], 1)], 1)
        self.scores.masked_fill_(self.hidden, 0)

    @staticmethod
    def _level(G: Tensor, m: int, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        first, second = G.unflatten(1, (-1, 2, m)).unbind(2)
        middle = first[:, :, -1:]
        return m, (second - middle).to(dtype).exp(), (middle - first).to(dtype).exp()

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.padding)) if self.padding else x

    @staticmethod
    def _quarters(A: Tensor, m: int) -> Tensor:
        """Returns a view [M, blocks, m, m] of the lower-left quarters of A's diagonal blocks of size 2m."""
        blocks = A.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))[:, :, 1, :, :, 0]
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _blocks(self, A: Tensor) -> Tensor:
        """Returns a view [M, blocks, base, base] of A's diagonal blocks of size base."""
        blocks = A.unflatten(2, (-1, self.base)).unflatten(1, (-1, self.base))
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _based(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.unflatten(1, (-1, self.base)) * self.ahead, y.unflatten(1, (-1, self.base)) * self.behind

    def _scores(self, x: Tensor) -> Tensor:
        """Returns the scores [M, C, C] of one kind of readers."""
        C, x, y = x.shape[1], self._padded(x), self._padded(self.y)
        A = x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
        ahead, behind = self._based(x, y)
        self._blocks(A).copy_(ahead @ behind.mT)
        for m, after, before in self.levels:
            x_after = x.unflatten(1, (-1, 2, m))[:, :, 1] * after
            y_before = y.unflatten(1, (-1, 2, m))[:, :, 0] * before
            self._quarters(A, m).copy_(x_after @ y_before.mT)
        return A[:, :C, :C]

    def backward(self, dA: Tensor, read: Tensor, written: Tensor, passed: Tensor | None) -> Gradients:
        C, dg, dxs = self.y.shape[1], None, []
        read.unflatten(1, (-1, C)).mul_(self.seen[:, None])
        written *= self.left
        if passed is not None:
            kinds = dA.shape[1] // C
            flow = torch.cat([read * self.x, passed, written * self.y], 1)
            dg = summed(crossing(kinds, C, dA.dtype, dA.device), flow)
        dA.masked_fill_(self.hidden, 0)
        for x, part in zip(self.x.split(C, 1), dA.split(C, 1), strict=True):
            dx, dy, more = self._scores_backward(part, x, passed is not None)
            dxs.append(dx)
            written += dy
            dg = more if dg is None or more is None else more.add_(dg)
        return read.add_(torch.cat(dxs, 1)), written, dg

    def _scores_backward(self, dA: Tensor, x: Tensor, decay_gradient: bool) -> Gradients:
        """Returns the gradients to x, y and log_decay through the scores of one kind of readers."""
        C, x, y = x.shape[1], self._padded(x), self._padded(self.y)
        dA = F.pad(dA, (0, self.padding, 0, self.padding)) if self.padding else dA
        ahead, behind = self._based(x, y)
        block = self._blocks(dA)
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
                matrix = crossing(1, m, dg.dtype, dg.device)
                second += matrix[:, :m] @ (x_after * dx_after)
                first += matrix[:, m + 1 :] @ (y_before * dy_before)
        return dx[:, :C], dy[:, :C], None if dg is None else dg[:, :C]

    def _crossing_in_blocks(self, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
        """Returns the gradient to log_decay from pairs within a block, as a difference of sums. Its terms are up to e^g
        times as large as the result for decays of −g a token, and `block_of` has blocks of several tokens for g ≤ 4
        alone."""
        if self.base == 1:
            return torch.zeros_like(x)
        difference = (x * dx).addcmul_(y, dy, value=-1).unflatten(1, (-1, self.base))
        matrix = crossing(1, self.base, x.dtype, x.device)[:, : self.base]
        return (matrix @ difference).flatten(1, 2)


def block_of(log_decay: Tensor) -> int:
    """Returns the base of HalvedDecay: LONGEST if no decay over so many tokens can exceed e^MOST, else 1, also if a
    decay is NaN, so that the NaN affects no earlier token.

    There is nothing between: in a block of 4 tokens, decays of −16 a token do not overflow, but the gradient to them
    is a difference of sums (`_crossing_in_blocks`), whose terms are up to e^16 times as large."""
    low, high = log_decay.aminmax() if log_decay.numel() else (log_decay.new_zeros(()),) * 2
    return LONGEST if float(torch.maximum(-low, high)) * LONGEST <= MOST else 1
