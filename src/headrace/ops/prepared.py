"""Calls of `step` that are checked once for all tensors of a signature, because checks and the choice of a backend take
longer than the kernel of one token, and that the native library computes without PyTorch's dispatcher.

The library gets bare addresses. Shapes, strides and dtypes are those of the signature, which was checked; whether what
is written shares memory with another tensor is checked for every set of addresses."""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .backends.base import Prepared
from .backends.native import library as native
from .call import Call
from .checks import check_scale
from .derivatives import dispatched
from .written import check_written

MANY = 1024  # size limit of the table, and of a set of addresses
TABLE: OrderedDict[tuple, Prepared] = OrderedDict()  # by signature, the oldest first
SETTINGS = frozenset((str, bool, int, type))  # no numbers that may be others at each call
_ADDRESSES = struct.Struct("@9P")  # TOKENWISE, out, state


def signature(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple:
    """Returns all that the checks of a call depend on, except for the scale and the addresses of its tensors.

    () for a call that must not run without PyTorch's dispatcher: inside transforms and graphs, with gradients, not on
    the CPU."""
    if dispatched():
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


def prepare(call: Call) -> "Step | None":
    """Returns the prepared call, or None if the library cannot read the tensors where they lie."""
    if call.bonus is not None or call.normalize or not all(x is None or _is_plain(x) for x in call.tensors):
        return None
    call = call.with_tokens()._replace(initial_state=None)
    problem = native.Problem(call)
    return Step(call, problem) if all(a is b for a, b in zip(problem.tensors, call, strict=False)) else None


def _is_plain(x: Tensor) -> bool:
    """Whether all tensors with the layout of x hold their values: a part of complex numbers may be negated lazily."""
    return any(n > 1 and stride == 1 for n, stride in zip(x.shape, x.stride(), strict=True))


class Step:
    """`step` for tensors with the signature of a call."""

    def __init__(self, call: Call, problem: native.Problem):
        B, _, *heads = call.out_shape
        self.packed, self.state, self.out = problem.packed, call.state_shape, (B, *heads)
        self.scale = call.scale
        self.apart: set[tuple[int, ...]] = set()  # addresses that were checked for overlaps

    def __call__(
        self, tensors: Sequence[Tensor | None], into: Tensor | None, state: Tensor | None, out: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert native.library is not None
        packed = self.packed if scale is None or scale == self.scale else self._scaled(scale)
        result = tensors[2].new_empty(self.out) if out is None else out  # type: ignore[union-attr]
        after = native.copied(state, self.state) if into is None else into
        places = *[0 if x is None else x.data_ptr() for x in tensors], result.data_ptr(), after.data_ptr()
        written = [x for x in (into, out) if x is not None]
        versioned = [x for x in written if not x.is_inference()]
        if written and (into is None or places not in self.apart or len(versioned) < len(written)):
            self._check(places, Call(*tensors, state), into, out)  # type: ignore[call-arg, arg-type]
        native.check(native.library.hr_step_at(packed, _ADDRESSES.pack(*places)))
        # Tells autograd, which may have saved one of these tensors for a backward, that the tensors have changed.
        increment_version(versioned)
        return result, after

    def _scaled(self, scale: float) -> bytes:
        check_scale(scale)
        packed = bytearray(self.packed)
        native.SCALE.pack_into(packed, native.SCALE_AT, scale)
        return bytes(packed)

    def _check(self, places: tuple[int, ...], call: Call, into: Tensor | None, out: Tensor | None) -> None:
        check_written(into, out, call)
        if len(self.apart) >= MANY:
            self.apart.clear()
        self.apart.add(places)
