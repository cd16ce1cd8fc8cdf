"""Calls of `step` that are checked once for all tensors of a signature, because checks and the choice of a backend take
longer than the kernel of one token."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .backends.base import Prepared
from .derivatives import transformed

MANY = 1024  # size limit of the table
TABLE: OrderedDict[tuple, Prepared] = OrderedDict()  # by signature, the oldest first
SETTINGS = frozenset((str, bool, int, type))  # no numbers that may be others at each call


def signature(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple:
    """Returns all that the checks of a call depend on, except for the scale and the addresses of its tensors.

    () for a call that must not run without PyTorch's dispatcher: inside transforms and graphs, with gradients, not on
    the CPU."""
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack():
        return ()
    if not SETTINGS.issuperset(map(type, settings)):
        return ()
    key, grad = [torch.get_num_threads(), *settings], torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) not in (Tensor, nn.Parameter) or not x.is_cpu or (grad and x.requires_grad):
            return ()
        else:
            key += x.shape, x.stride(), x.dtype
    return tuple(key)


def remember(key: tuple, prepared: Prepared) -> Prepared:
    """Stores a prepared call in the table, in place of the oldest if the table is full, and returns it."""
    TABLE[key] = prepared
    if len(TABLE) > MANY:
        TABLE.popitem(last=False)
    return prepared
