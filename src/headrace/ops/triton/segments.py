"""Long rows in segments that are computed at the same time, where rows and heads are too few to fill the GPU.

The state after a segment is affine in the state before it, S_out = M S_in + E; M is diagonal for an additive update.

    E      the states after all segments at once, each from zeros
    M      the same without values, from the identity or, for a diagonal, from a column of ones
    S      the states between segments, one after another; then the outputs of all segments at once

In reverse, dS_in = Mᵀ dS_out + dE, with dE the gradient from zeros after the segment. To the kernels a segment is a
packed sequence.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import TOKENWISE, Call

FEWEST = 4  # fewer segments gain less than the further passes cost
CHUNKS = 4  # the fewest in a segment


def number(call: Call, chunk: int, programs: int, processors: int) -> int:
    """Returns the number of segments of a row: as many as there are processors for each program of whole rows."""
    if programs == 0 or call.cu_seqlens is not None:
        return 1
    found = min(processors // programs, call.v.shape[1] // (CHUNKS * chunk))
    return found if found >= FEWEST else 1


def split(call: Call, segments: int, chunk: int) -> Call:
    """Returns the call with each row as packed sequences of whole chunks; the last has the rest, or nothing."""
    B, T = call.v.shape[:2]
    length = -(-T // (segments * chunk)) * chunk
    rows, places = (torch.arange(n, device=call.v.device) for n in (B, segments))
    bounds = F.pad((rows[:, None] * T + (places * length).clamp(max=T)).flatten(), (0, 1), value=B * T)
    joined: dict[str, Any] = {name: _joined(getattr(call, name)) for name in TOKENWISE}
    return call._replace(cu_seqlens=bounds, initial_state=None, **joined)


def _joined(x: Tensor | None) -> Tensor | None:
    """Returns all rows as one; a decay [H] as it is."""
    return x if x is None or x.dim() == 1 else x.flatten(0, 1)[None]


def relay(first: Tensor | None, across: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states before all segments [rows · segments, H, K, V] and the state after each row, [rows, H, K, V].

    first: the state before each row; None: zeros. across: M [rows, segments, H, K, K], or a diagonal, [rows, segments,
    H, K, 1]. added: E [rows, segments, H, K, V]."""
    state = torch.zeros_like(added[:, 0]) if first is None else first.float()
    through = torch.mul if across.shape[-1] == 1 else torch.matmul
    before = []
    for M, E in zip(across.unbind(1), added.unbind(1), strict=True):
        before.append(state)
        state = through(M, state) + E
    return torch.stack(before, 1).flatten(0, 1), state


def relay_back(last: Tensor | None, across: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients to the states after all segments and to the state before each row, as `relay` does."""
    transposed = across if across.shape[-1] == 1 else across.mT
    after, first = relay(last, transposed.flip(1), added.flip(1))
    return after.unflatten(0, across.shape[:2]).flip(1).flatten(0, 1), first
