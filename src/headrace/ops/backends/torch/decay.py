"""The operators of one chunk of C tokens, for the three shapes of log_decay: what its readers x see of its writers y.

Readers are queries, r of them per token, and, under the delta rule, keys: x [M, R·C, K] has the r·C queries first, then
the C keys. A query sees the writers up to its own token, a key those before it. With G_i the sum of log_decay over the
chunk's tokens up to and including i (per head, or per head and key channel):

    scores  [M, R·C, C]   Σ_k x_ik y_jk e^{G_i − G_j} for the writers j that reader i sees, else 0
    reads   [M, R·C, K]   x_i e^{G_i}            decay from the incoming state to token i
    writes  [M, C, K]     y_j e^{G_C − G_j}      decay from token j to the end of the chunk
    through [M, K or 1, 1]  e^{G_C}              decay of the incoming state; None if it does not decay

G is never computed: each G_i − G_j is a sum of its own over the tokens in between. Differences of sums would lose the
digits of −0.01 after −50, and would be NaN for −∞. No decay overflows, since no exponent is above 0. (A positive
log_decay makes the memory grow, and overflows only if the memory does.) What a reader does not see is set to zero, not
multiplied by zero, so that a NaN affects only the tokens after it.

The gradient to a token's log_decay is the sum of the contributions of all pairs of an earlier writer and a reader at or
after the token. These pairs are summed directly: the difference of larger sums (q·dq − k·dk, accumulated) would leave
rounding errors when a strong decay makes the contributions small.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....utils.device import kept_on_cpu

Gradients = tuple[Tensor, Tensor, Tensor | None]  # to x, y and log_decay


class NoDecay:
    """No decay, and the interface of the three classes."""

    through: Tensor | None = None

    def __init__(self, x: Tensor, y: Tensor, log_decay: Tensor | None = None, delta: bool = False):
        self._take(x, y, delta)
        self.reads, self.writes = x, y
        self.scores = torch.bmm(x, y.mT).masked_fill_(self.hidden, 0)

    def _take(self, x: Tensor, y: Tensor, delta: bool) -> None:
        C = y.shape[1]
        self.x, self.y, self.queries = x, y, x.shape[1] - C * delta  # queries: how many rows of x they have
        self.hidden = hidden(self.queries // C, delta, C, x.device)

    def backward(self, dA: Tensor, read: Tensor, written: Tensor, passed: Tensor | None) -> Gradients:
        """Returns the gradients to x, y and log_decay. May overwrite its arguments.

        dA, read, written: the gradients to scores, reads and writes. passed [M, 1, K]: the product of the gradient to
        `through` and `through`; None if the gradient to log_decay is not wanted."""
        dA.masked_fill_(self.hidden, 0)
        return read.baddbmm_(dA, self.y), written.baddbmm_(dA.mT, self.x), None


class ScalarDecay(NoDecay):
    """A decay per head and token: log_decay [M, C, 1]."""

    def __init__(self, x: Tensor, y: Tensor, log_decay: Tensor, delta: bool = False):
        super().__init__(x, y, None, delta)
        decays = between(log_decay).squeeze(-1)
        self.pairs, self.seen, self.left = decays[:, None, :, 1:], decays[:, None, :, :1], decays[:, -1, 1:, None]
        self.through = decays[:, -1:, :1]
        self._by_kind(self.scores).mul_(self.pairs)
        self.reads, self.writes = (self._by_kind(x) * self.seen).view_as(x), y * self.left

    def _by_kind(self, x: Tensor) -> Tensor:
        """Returns a view [M, R, C, ·] of a tensor of the readers."""
        return x.unflatten(1, (-1, self.y.shape[1]))

    def backward(self, dA: Tensor, read: Tensor, written: Tensor, passed: Tensor | None) -> Gradients:
        dg, (M, C, _), kinds = None, self.y.shape, dA.shape[1] // self.y.shape[1]
        self._by_kind(read).mul_(self.seen)
        written *= self.left
        if passed is not None:
            matrix = crossing(kinds, C, dA.dtype, dA.device)
            dg = summed(matrix[:, : kinds * C], dA * self.scores).tril_(-1).sum(-1, keepdim=True)
            flow = torch.cat([read * self.x, passed, written * self.y], 1).sum(-1, keepdim=True)
            dg.baddbmm_(matrix.expand(M, -1, -1), flow)
        self._by_kind(dA).mul_(self.pairs)
        dx, dy, _ = super().backward(dA, read, written, None)
        return dx, dy, dg


class VectorDecay(NoDecay):
    """A decay per head, token and key channel: log_decay [M, C, K].

    A chunk is n blocks of c tokens, with c near the root of C. For a writer in an earlier block J than the reader's
    block I, e^{G_i − G_j} is the product of the decays from j to the end of J, from there to the start of I, and from
    there to i. With the first two multiplied to y for each I, these scores are one matrix product per block. Within a
    block, the decay is multiplied to y for each reader.
    """

    def __init__(self, x: Tensor, y: Tensor, log_decay: Tensor, delta: bool = False):
        (M, C, _), c = y.shape, block_length(y.shape[1])
        self._take(x, y, delta)
        self.sizes = M, x.shape[1] // C, C // c, c
        logs = log_between(log_decay.unflatten(1, (-1, c)))
        outside = between(F.pad(logs[:, :, -1, 0], (0, 0, 1, 0)))[:, :, 1:]
        inside = logs.exp_()
        # Within a block: from writer to reader, from the start to the reader, and from the writer to the end.
        self.near, self.since, self.until = inside[:, :, :, 1:], inside[:, :, :, 0], inside[:, :, -1, 1:]
        # From the end of block J to the start of block I, from the start of the chunk, and to its end.
        self.blocks, self.before, self.after = outside[:, :-1, 1:], outside[:, :-1, :1], outside[:, -1, 1:, None]
        self.through = outside[:, -1, 0, :, None]
        self.late = times(self._by_block(x).transpose(1, 2), self.since[:, :, None])
        self.ended = y.view_as(self.until) * self.until
        self.reads = times(self.late.transpose(1, 2), self.before[:, None]).view_as(x)
        self.writes = (self.ended * self.after).reshape(y.shape)
        self._score()

    def _by_block(self, x: Tensor) -> Tensor:
        """Returns a view [M, R, n, c, ·] of a tensor of the readers."""
        return x.unflatten(1, self.sizes[1:])

    def _diagonal(self, A: Tensor) -> Tensor:
        """Returns a view [M, n, c, R, c] of the diagonal blocks of scores."""
        M, R, n, c = self.sizes
        return A.view(M, R, n, c, n, c).diagonal(dim1=2, dim2=4).permute(0, 4, 2, 1, 3)

    def _score(self) -> None:
        M, R, n, c = self.sizes
        K = self.y.shape[-1]
        self.early = (self.ended[:, None] * self.blocks[:, :, :, None]).reshape(M * n, n * c, K)
        self.own = self.x.unflatten(1, (R, n * c)).transpose(1, 2).reshape(M * n * c, R, K)
        self.beside = (self.y.view(M, n, 1, c, K) * self.near).reshape(M * n * c, c, K)
        far = torch.bmm(self.late.flatten(0, 1).flatten(1, 2), self.early.mT).view(M, n, R, c, n * c)
        near = torch.bmm(self.own, self.beside.mT).view(M, n, c, R, c)
        self.scores = far.new_empty(M, R * n * c, n * c)
        zeroed(far, not_earlier(R, n, c, far.device), self._by_block(self.scores).transpose(1, 2))
        zeroed(near, self._hidden_beside(), self._diagonal(self.scores))

    def _hidden_beside(self) -> Tensor:
        """Returns which writers of their block [c] the readers [c, R] do not see."""
        _, R, n, c = self.sizes
        queries = self.queries // (n * c)
        return hidden(queries, queries < R, c, self.x.device).view(R, c, c).transpose(0, 1)

    def backward(self, dA: Tensor, read: Tensor, written: Tensor, passed: Tensor | None) -> Gradients:
        M, R, n, c = self.sizes
        K, dg = self.y.shape[-1], None
        far = zeroed(self._by_block(dA).transpose(1, 2), not_earlier(R, n, c, dA.device)).view(M * n, R * c, n * c)
        near = zeroed(self._diagonal(dA), self._hidden_beside()).view(M * n * c, R, c)
        d_late = torch.bmm(far, self.early).view(M, n, R, c, K)
        d_early = torch.bmm(far.mT, self.late.view(M * n, R * c, K))
        d_ended = (d_early.view(M, n, n, c, K) * self.blocks[:, :, :, None]).sum(1)
        d_own, d_beside = torch.bmm(near, self.beside), torch.bmm(near.mT, self.own)
        if passed is not None:
            dg = self._flows(read, written, passed, d_late, d_early, d_ended, d_beside)
        x, y = self._by_block(read), written.unflatten(1, (n, c))
        torch.addcmul(d_late.transpose(1, 2), x, self.before[:, None], out=x)
        torch.addcmul(d_own.view(M, n, c, R, K).permute(0, 3, 1, 2, 4), x, self.since[:, None], out=x)
        torch.addcmul(d_ended, y, self.after, out=y)
        torch.addcmul((d_beside.view(M, n, c, c, K) * self.near).sum(2), y, self.until, out=y)
        return read, written, dg

    def _flows(self, read, written, passed, d_late, d_early, d_ended, d_beside) -> Tensor:
        """Returns the gradient to log_decay: the sum of what passes a token from the incoming state or to the outgoing
        one, between blocks, and within its block. within [M, n, c, c + 1, K]: what passes from a boundary of the block
        to the end of a token of it, as in `between`."""
        M, R, n, c = self.sizes
        kind, K = (read.dtype, read.device), self.y.shape[-1]
        outer = torch.cat([read * self.reads, passed, written * self.writes], 1)
        within = read.new_empty(M, n, c, c + 1, K)
        torch.mul(d_beside.view(M, n, c, c, K), self.beside.view(M, n, c, c, K), out=within[:, :, :, 1:])
        within[:, :, -1, 1:].addcmul_(d_ended, self.ended)
        if R == 1:
            torch.mul(d_late[:, :, 0], self.late[:, :, 0], out=within[:, :, :, 0])
        else:
            torch.sum(d_late * self.late, 2, out=within[:, :, :, 0])
        over = (d_early * self.early).view(M, n * n, c, K).sum(2)
        within[:, :, -1, 0].baddbmm_(straddling(n, *kind).expand(M, -1, -1), over)
        dg = summed(crossing(R, n * c, *kind), outer)
        pairs = within.view(M * n, c * (c + 1), K)
        dg.view(M * n, c, K).baddbmm_(spanning(c, *kind).expand(M * n, -1, -1), pairs)
        return dg


def block_length(C: int) -> int:
    """Returns the tokens per block of VectorDecay: the power of two near the root of C, which may be symbolic."""
    n = 1
    while 2 * n * n < C:
        n *= 2
    return n


def between(g: Tensor) -> Tensor:
    """Returns the decay [..., n, n + 1, K] from boundary j to the end of token i, given log_decay [..., n, K]: the
    exponential of the sum over the tokens j, …, i, and 1 for j > i. Boundary j is before token j."""
    return log_between(g).exp_()


def log_between(g: Tensor) -> Tensor:
    """Returns the logarithm of `between(g)`."""
    mask, zero = covered(g.shape[-2], g.dtype, g.device)
    return torch.where(mask, g[..., None, :], zero).cumsum(-3)


@kept_on_cpu
def covered(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns which boundaries j are before token i, [n, n + 1, 1], and a zero."""
    mask = torch.ones(n, n + 1, dtype=torch.bool, device=device).tril()
    return mask[..., None], torch.zeros((), dtype=dtype, device=device)


@kept_on_cpu
def identity(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(C, dtype=dtype, device=device)


@kept_on_cpu
def hidden(queries: int, keys: bool, C: int, device: torch.device) -> Tensor:
    """Returns which writers [C] the readers [R·C] do not see. queries: number of kinds; keys: whether keys read too."""
    ones = torch.ones(C, C, dtype=torch.bool, device=device)
    return torch.cat([*[ones.triu(1)] * queries, *[ones.triu()] * keys])


@kept_on_cpu
def not_earlier(kinds: int, n: int, c: int, device: torch.device) -> Tensor:
    """Returns which writers [n·c] are in no earlier block than the readers [n, R, c], with n blocks of c tokens."""
    ones = torch.ones(n, n, dtype=torch.bool, device=device).triu().repeat_interleave(c, 1)
    return ones[:, None, None].repeat(1, kinds, c, 1)


@kept_on_cpu
def crossing(kinds: int, C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the matrix [C, R·C + 1 + C] that sums, for each token, over the readers at or after it, what passes the
    whole chunk, and the writers before it."""
    ones = torch.ones(C, C, dtype=dtype, device=device)
    return torch.cat([*[ones.triu()] * kinds, ones[:, :1], ones.tril(-1)], 1)


@kept_on_cpu
def straddling(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the matrix [n, n·n] that sums, for each t, over the pairs (i, j) with j < t < i."""
    t = torch.arange(n, device=device)
    return ((t[None, :, None] > t[:, None, None]) & (t[None, None, :] < t[:, None, None])).flatten(1).to(dtype)


@kept_on_cpu
def spanning(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the matrix [n, n·(n + 1)] that sums, for each t, over the pairs (i, j) with j ≤ t ≤ i."""
    i, j = torch.arange(n, device=device), torch.arange(n + 1, device=device)
    return ((j <= i[:, None, None]) & (i[None, :, None] >= i[:, None, None])).flatten(1).to(dtype)


def summed(matrix: Tensor, x: Tensor) -> Tensor:
    """Returns the product of a matrix [a, b] and each of x [M, b, ·]."""
    return torch.bmm(matrix.expand(len(x), -1, -1), x)


def times(x: Tensor, y: Tensor) -> Tensor:
    """Returns x y, contiguous also where x is a view of another layout."""
    return torch.mul(x, y, out=x.new_empty(x.shape))


def zeroed(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies x, with zeros where `mask` is true, to `out` or to new contiguous memory."""
    zero = covered(1, x.dtype, x.device)[1]
    return torch.where(mask, zero, x, out=x.new_empty(x.shape) if out is None else out)
