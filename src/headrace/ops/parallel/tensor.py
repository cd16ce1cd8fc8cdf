"""The collectives of tensor parallelism, with their gradients.

A layer whose heads are split over processes is a region between `enter` and `leave`: within it each process holds its
own part of the output, a sum over processes, and therefore its own part of every gradient, a sum as well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checks import require
from ..derivatives import first_order

NAME = "a layer under tensor_parallel"


class Ranks:
    """The processes of a one-dimensional mesh. All of them must make the same calls, and the same backward."""

    def __init__(self, mesh: DeviceMesh):
        require(mesh.ndim == 1, f"mesh has {mesh.ndim} dimensions; expected 1, such as mesh['tp']")
        self.group = mesh.get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def reduced(self, x: Tensor) -> Tensor:
        """Returns the sum of x over all processes; not differentiable."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all(self, x: Tensor) -> list[Tensor]:
        """Returns x of every process; not differentiable."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), self.group)
        return parts

    def enter(self, x: Tensor) -> Tensor:
        """Returns x, which all processes have, for a region; its gradient is summed over processes."""
        return _Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Returns the sum of x over the processes of a region, which all processes have then."""
        return _Leave.apply(x, self)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of x over processes, within a region."""
        return self.enter(self.leave(x))

    def join(self, x: Tensor) -> Tensor:
        """Returns the concatenation [..., n · size] of x [..., n] of all processes, within a region."""
        return self.enter(_Join.apply(x, self))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @first_order(NAME)
    def backward(ctx, grad: Tensor) -> Any:
        return ctx.ranks.reduced(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.reduced(x)

    @staticmethod
    @first_order(NAME)
    def backward(ctx, grad: Tensor) -> Any:
        return grad, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return torch.cat(ranks.all(x), -1)

    @staticmethod
    @first_order(NAME)
    def backward(ctx, grad: Tensor) -> Any:
        return grad.chunk(ctx.ranks.size, -1)[ctx.ranks.rank], None
