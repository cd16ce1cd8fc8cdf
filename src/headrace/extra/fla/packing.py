"""Packed sequences for FLA's kernels, which need the bounds on the device and on the host."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.checks import sequence_ends


class Packing(NamedTuple):
    """The bounds of packed sequences, checked. FLA caches by the identity of the tensors, so they never change."""

    on_device: Tensor
    on_host: Tensor


_recent: deque[tuple[Tensor, int, Packing]] = deque(maxlen=4)


def packing(cu_seqlens: Tensor, T: int) -> Packing:
    """Returns the bounds of the sequences of T tokens in all.

    Synchronizes the GPU once for a tensor, not once per layer. A tensor that was changed in place is read again; one
    made in inference mode, which does not count its changes, is read for every call.

    Raises:
        InputError: unless 0 = c_0 ≤ … ≤ c_N = T.
    """
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    for known, at, packing in _recent.copy():  # another thread may append
        if known is cu_seqlens and at == version >= 0 and int(packing.on_host[-1]) == T:
            return packing
    on_host = torch.tensor(sequence_ends(cu_seqlens, T), device="cpu")
    packing = Packing(on_host.to(cu_seqlens.device, copy=True), on_host)
    _recent.append((cu_seqlens, version, packing))
    return packing
