"""Bytes that a training step moves and keeps per layer, counted on fake tensors of a GPU that is not there.

    python benchmarks/traffic.py gla gated-deltanet                    one layer of width 1,024, eager and compiled

The unit of traffic is the residual stream [B, T, D] in bfloat16. Matrix products and the recurrence are counted apart,
because they are limited by arithmetic. Kept bytes are those of the tensors that the forward holds for the backward,
without parameters, per token.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch._inductor import compile_fx, graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dry
import headrace
from headrace.layers.blocks.block import Block

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "linear_backward"}
# What only makes a tensor, or another shape of one.
FREE = {
    "view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "split",
    "split_with_sizes", "unbind", "alias", "as_strided", "_unsafe_view", "reshape", "unflatten", "narrow", "diagonal",
    "_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "is_same_size",
    "lift_fresh", "sym_size", "sym_numel",
}  # fmt: skip


class Traffic(NamedTuple):
    """What one layer moves and keeps in a training step."""

    moved: Counter  # by operator, in units of the residual stream
    launches: int  # outside products and the recurrence
    kept: float  # bytes per token

    @property
    def outside(self) -> float:
        return sum(n for name, n in self.moved.items() if name not in ("products", "recurrence"))


def kind(namespace: str, name: str) -> str:
    if namespace == "headrace" and not name.startswith("conv"):
        return "recurrence"
    return "products" if name in PRODUCTS else name


class Meter(TorchDispatchMode):
    """Counts the bytes that each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter = Counter()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in FREE or func.namespace == "prim":
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.is_cuda]
        if tensors:
            self.bytes[kind(func.namespace, name)] += sum(map(nbytes, tensors))
            self.calls[kind(func.namespace, name)] += 1
        return out


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
