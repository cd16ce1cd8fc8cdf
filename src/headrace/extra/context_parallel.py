"""Context parallelism: the tokens of a row split over processes, for `linear_attention`, convolutions and positions.

The state after a process's tokens is affine in the state before them, S_out = M S_in + E. Each process computes E, M
and its outputs for S_in = 0 in one call of the backend, all processes exchange (E, M) in one all-gather, and each adds
what its outputs read from its S_in (LASP-2, arXiv 2502.07563; here for the delta rule too).

Shapes: B batch, T tokens of this process, H heads, K key, V value dimension per head, N sequences, D channels; n of the
N sequences cross a border between two processes: all B rows, or one of the packed sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..ops.call import Call, accumulator, gated
from ..ops.checks import check_bounds, require
from ..ops.derivatives import first_order
from ..ops.parallel.context import PARALLEL, within
from ..utils.device import without_autocast

NAME = "linear_attention under context_parallel"


@contextmanager
def context_parallel(group: Any = None) -> Iterator["SequenceShard"]:
    """Splits the tokens of rows over the processes of a group, in equal parts in the order of the ranks. Within this
    context each process calls `linear_attention`, a mixer or a model with its part [B, T, ·] of the rows.

    Outputs and gradients are those of the whole rows. cu_seqlens are the bounds in the whole row. A given state is the
    state before the whole row; a returned state is the state after this process's tokens (in a pack, of the sequences
    with tokens here). All processes of the group must make the same calls, and the same backward. Gradients of
    parameters are those of this process's tokens: sum them over the group.

    Args:
        group: a torch.distributed process group; None: all processes.

    Raises:
        InputError: for a mixer whose tokens cannot be split (softmax attention, scans), padding, and unequal parts.

    Example::

        with context_parallel(group) as part:
            y, _ = layer(part.split(x))
    """
    require(dist.is_initialized(), "context_parallel needs torch.distributed; expected init_process_group before it")
    part = SequenceShard(group)
    with within(part):
        yield part
    part.check()


class SequenceShard:
    """This process's part of rows that are split over the processes of a group."""

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._T = 0  # tokens of this process in the present call; 0 before the first
        self._lengths: Tensor | None = None  # those of all processes, in the first call where they differ, or the last

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this process's part of a whole row's tensor. Raises InputError for tokens without equal parts."""
        T = x.shape[dim]
        require(T % self.size == 0, f"{T} tokens cannot be split evenly over {self.size} processes")
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def offset(self, x: Tensor) -> int:
        """Returns the number of tokens of a row before this process's x [B, T, ...]."""
        first, self._T = not self._T, x.shape[1]
        if first:  # before another error, which one process alone may raise
            self.gather(x.new_empty(0))
            self.check()
        return self.rank * self._T

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns x of every process. T travels with it, so that unequal parts are an error in all processes: at once
        on a CPU, at the end of the context on a GPU, which is not synchronized here."""
        T = torch.full((1,), self._T, device=x.device)
        mine = torch.cat([x.flatten().view(torch.uint8), T.view(torch.uint8)])
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, self.group)
        lengths, known = torch.cat([part[-8:] for part in parts]).view(T.dtype), self._lengths
        self._lengths = lengths if known is None else torch.where((known == known[0]).all(), lengths, known)
        if x.device.type == "cpu":
            self.check()
        return [part[:-8].view(x.dtype).view(x.shape) for part in parts]

    def check(self) -> None:
        """Raises InputError if the parts of a call were unequal."""
        lengths, self._lengths = [] if self._lengths is None else self._lengths.tolist(), None
        require(len({*lengths}) < 2, f"the processes have {lengths} tokens of the row; expected equal parts")

    def borders(self, cu_seqlens: Tensor | None, x: Tensor) -> "ShardBoundaries":
        """Returns where the sequences of x [B, T, ...] cross borders. cu_seqlens: bounds [N + 1] in the whole row."""
        return ShardBoundaries(self, cu_seqlens, x)

    def before(self, x: Tensor) -> Tensor:
        """Returns x of the process before this one, or zeros; differentiable."""
        return _FromBefore.apply(x, self, _tie())


class ShardBoundaries:
    """Where the sequences of this process's tokens cross the borders to other processes.

    Args:
        cu_seqlens: bounds [N + 1] in the whole row, or None.
        x: this process's tokens [B, T, ...].
    """

    def __init__(self, part: SequenceShard, cu_seqlens: Tensor | None, x: Tensor):
        T, self.packed = x.shape[1], cu_seqlens is not None
        self.part, self.offset, self.cu_seqlens = part, part.offset(x), cu_seqlens
        starts = torch.zeros(1, dtype=torch.long, device=x.device)
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, T * part.size)
            starts = cu_seqlens[:-1].long()
            self.cu_seqlens = (cu_seqlens - self.offset).clamp(0, T)  # sequences of other processes are empty
        offsets = torch.arange(part.size, device=x.device) * T
        lasts = torch.searchsorted(starts, offsets + (T - 1), right=True) - 1
        self.first = torch.searchsorted(starts, offsets[part.rank, None], right=True) - 1
        self.last, self.start = lasts[part.rank, None], starts[self.first]
        self.continues = self.start < self.offset  # [1], whether the first token's sequence begins in another process
        self.begins = (starts >= self.offset) & (starts < self.offset + T)  # [N or 1], whether in this process
        self.passes = starts[lasts] < offsets  # [size], whether a sequence begins before and ends after each process

    def select(self, x: Tensor, places: Tensor) -> Tensor:
        """Selects n sequences of x [N, ...]: `first` come from the process before, `last` reach the one after."""
        return x.index_select(0, places) if self.packed else x

    def place(self, x: Tensor, entering: Tensor) -> Tensor:
        """Adds [n, ...] to those of x [N, ...] that come from the process before."""
        return x.index_add(0, self.first, entering) if self.packed else x + entering

    def tokens(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns which of this process's tokens [1, T, 1] are in a sequence of the process before.

        cu_seqlens: this process's bounds, which can be longer than `self.cu_seqlens` by a token per sequence."""
        T = x.shape[1]
        if cu_seqlens is None:
            return self.continues.expand(1, T, 1)
        there = torch.arange(T, device=x.device) < cu_seqlens[self.first + 1]
        return there[None, :, None] & self.continues

    def history(self, x: Tensor, given: Tensor) -> Tensor:
        """Returns the h tokens before each sequence: those of the process before, else `given` [N, h, D]."""
        h, T = given.shape[1], x.shape[1]
        require(h <= T, f"each process has {T} tokens of a row; expected at least {h}, the tokens before each token")
        before = self.part.before(x[:, T - h :])
        if not self.packed:
            return before if self.part.rank else given + 0 * before
        places = torch.arange(self.offset - h, self.offset, device=x.device)
        return self.place(given, torch.where((places >= self.start)[None, :, None] & self.continues, before, 0))

    def over_processes(self, call: Call, run: Callable[[Call], Any]) -> tuple[Tensor, Tensor]:
        """Computes a call whose tokens are this process's part of a row. run: a backend's function; cu_seqlens of the
        call: this process's bounds. Returns (out, final state) as `run`."""
        V, initial = call.v.shape[-1], call.initial_state
        initial = None if initial is None else torch.where(self.begins.view(-1, 1, 1, 1), initial, 0)
        if call.delta:
            out, final = run(_with_transition(call, self, initial))
            out, read, final, transition = out[..., :V], out[..., V:], final[..., :V], final[..., V:]
            entering, leaving = (self.select(transition, at) for at in (self.first, self.last))
        else:
            out, final = run(call._replace(initial_state=initial))
            read, entering = _decayed(call, self)
            leaving = entering
        acc, inside = final.dtype, self.tokens(call.v, call.cu_seqlens)[..., None]
        with without_autocast(final):  # states are in the accumulator's precision
            sent = self.select(final, self.last), leaving.to(acc)
            incoming = torch.where(self.continues, _Incoming.apply(*sent, self.passes, self.part, _tie()), 0)
            grouped = torch.where(inside, read.to(acc), 0).unflatten(2, (incoming.shape[1], -1))  # by states
            more = torch.einsum("bthqk,bhkv->bthqv", grouped, incoming).flatten(2, 3)
            out = out + torch.where(inside, more, 0).to(out.dtype)
            return out, self.place(final, _after(entering.to(acc), incoming, self.continues))


def _with_transition(call: Call, borders: ShardBoundaries, initial: Tensor | None) -> Call:
    """Adds K columns to v, which are zero, and to the state, which are the identity for the sequences of the process
    before: their state afterwards is M, and their outputs are what a token reads of S_in."""
    K, acc = call.k.shape[-1], accumulator(call.v)
    state = call.v.new_zeros(call.state_shape, dtype=acc) if initial is None else initial.to(acc)
    N, H = state.shape[:2]
    eye = torch.eye(K, dtype=acc, device=state.device) * borders.continues.view(-1, 1, 1, 1)
    eye = borders.place(state.new_zeros(N, H, K, K), eye.expand(len(borders.select(state, borders.first)), H, K, K))
    return call._replace(v=F.pad(call.v, (0, K)), initial_state=torch.cat([state, eye], -1))


def _decayed(call: Call, borders: ShardBoundaries) -> tuple[Tensor, Tensor]:
    """Returns, for the additive rule, what each token reads of S_in [B, T, H, K], and the diagonal of M [n, H, K, 1].

    Both are decays from the start of this process's tokens."""
    (B, T, H, _), K, acc = call.v.shape, call.k.shape[-1], accumulator(call.v)
    inside = borders.tokens(call.v, call.cu_seqlens)[..., None]
    each = call.v.new_zeros((), dtype=acc) if call.log_decay is None else call.log_decay.to(acc)
    each = each if each.dim() == 4 else each.expand(B, T, H)[..., None]
    log = torch.where(inside, each, 0).cumsum(1)
    q = call.q.to(acc).repeat_interleave(-(-H // call.q.shape[2]), 2)
    decay = torch.where(inside, log, 0).repeat_interleave(call.queries, 2).exp()
    return gated(q * decay * call.scale, call.read_gate), log[:, -1, :, :, None].exp().expand(-1, H, K, 1)


class _Incoming(torch.autograd.Function):
    """The state before this process's tokens, [n, H, K, V], from E [n, H, K, V] and M [n, H, K, K or 1 for a diagonal]
    of all processes, and which of them a sequence passes through [size]. One all-gather forward, one backward."""

    @staticmethod
    def forward(ctx, E: Tensor, M: Tensor, passes: Tensor, part: SequenceShard, tie: Tensor) -> Tensor:
        V = E.shape[-1]
        parts = part.gather(torch.cat([E, M], -1))
        state = torch.zeros_like(E)
        for each, through in zip(parts[: part.rank], passes, strict=False):
            state = _after(each[..., V:], state, through) + each[..., :V]
        ctx.part = part
        ctx.save_for_backward(state, M, passes, *(each[..., V:].clone() for each in parts[part.rank + 1 :]))
        return state

    @staticmethod
    @first_order(NAME)
    def backward(ctx, d_state: Tensor):
        state, M, passes, *later = ctx.saved_tensors
        gradients, after = ctx.part.gather(d_state)[ctx.part.rank + 1 :], passes[ctx.part.rank + 1 :]
        total = torch.zeros_like(d_state)  # the gradient to the state after this process's tokens
        for each, transition, through in zip(reversed(gradients), reversed(later), after.flip(0), strict=True):
            total = each + _after(transition.mT if transition.shape[-1] > 1 else transition, total, through)
        dM = total @ state.mT if M.shape[-1] > 1 else (total * state).sum(-1, keepdim=True)
        return total, torch.where(passes[ctx.part.rank], dM, 0), None, None, None


class _FromBefore(torch.autograd.Function):
    """x of the process before this one, or zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, part: SequenceShard, tie: Tensor) -> Tensor:
        ctx.part = part
        return part.gather(x)[part.rank - 1] if part.rank else part.gather(x)[0].zero_()

    @staticmethod
    @first_order(NAME)
    def backward(ctx, d_x: Tensor):
        parts = ctx.part.gather(d_x)
        last = ctx.part.rank == ctx.part.size - 1
        return (torch.zeros_like(d_x) if last else parts[ctx.part.rank + 1]), None, None


def _after(M: Tensor, state: Tensor, through: Tensor) -> Tensor:
    """Returns M state, of M [n, H, K, K] or its diagonal [n, H, K, 1]; zeros, also of NaN, unless `through`."""
    return torch.where(through, M * state if M.shape[-1] == 1 else M @ state, 0)


def _tie() -> Tensor:
    """An input that needs a gradient wherever gradients are computed, so that all processes have the same collectives
    in their backward: one without would leave the others waiting."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


PARALLEL.update({"context_parallel": context_parallel, "SequenceShard": SequenceShard})
