"""The normalizer, the bonus and grouped queries, expressed through the arguments that every backend supports.

`run` is a backend's function from a Call to (out, final state).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import NORMALIZER_EPS, Call, gated
from .checks import check_bounds
from .derivatives import has_address

Run = Callable[[Call], tuple[Tensor, Tensor]]


def normalized(call: Call, run: Run, inside: bool = False) -> tuple[Tensor, Tensor]:
    """Computes the normalizer as one more column of v, which is 1: the same decay, β and write gate apply to it.

    inside: whether `run` computes the normalizer itself, in calls without a read gate."""
    dtype = call.v.dtype
    if inside and call.read_gate is None:
        return run(call)
    call = call.wide()
    if inside:
        out, state = run(call._replace(read_gate=None))
        return gated(out, call.read_gate).to(dtype), state
    v = torch.cat([call.v, torch.ones_like(call.v[..., :1])], -1)
    out, state = run(call._replace(v=v, read_gate=None, normalize=False))
    out = out[..., :-1] / (out[..., -1:] + NORMALIZER_EPS)
    return gated(out, call.read_gate).to(dtype), state


def per_query(call: Call, run: Run) -> tuple[Tensor, Tensor]:
    """Computes grouped queries by a kernel with one query per state: each of the r queries of a group gets a state of
    its own, which takes r times the writing and the working memory. A group's states are equal; one is returned."""
    if call.queries == 1:
        return run(call)
    out, states = run(call.ungrouped())
    return out, states[:, :: call.queries].clone(memory_format=torch.contiguous_format)


def with_bonus(call: Call, run: Run) -> tuple[Tensor, Tensor]:
    """Delays k and v by one token, so that q_t reads S_{t-1}, and adds the bonus term of the current token.

    Each sequence grows by one token: its first query reads the initial state, its last write reaches the final state.
    The sum is in the accumulator's precision, so that outputs and gradients are rounded once."""
    bounds, T = call.cu_seqlens, call.v.shape[1]
    if bounds is not None and not torch.compiler.is_compiling() and has_address(bounds):
        check_bounds(bounds, T)  # checked here, because the backend gets the shifted bounds
    dtype, call = call.v.dtype, call.wide()
    place = tokens = torch.arange(T, device=call.k.device)
    if bounds is not None:
        place = tokens + (torch.searchsorted(bounds[:-1].to(tokens), tokens, right=True) - 1)

    def moved(x: Tensor | None, by: int) -> Any:
        if x is None or bounds is None:
            return x if x is None else F.pad(x, (0, 0) * (x.dim() - 2) + (by, 1 - by))
        return x.new_zeros(1, T + call.sequences, *x.shape[2:]).index_copy(1, place + by, x)

    decay = call.log_decay
    if decay is not None and decay.dim() == 1:
        decay = decay.expand(call.v.shape[:3])
    shifted = call._replace(
        q=moved(call.q, 0), read_gate=moved(call.read_gate, 0), k=moved(call.k, 1), v=moved(call.v, 1),
        log_decay=moved(decay, 1), beta=moved(call.beta, 1), write_gate=moved(call.write_gate, 1),
        bonus=None,
    )  # fmt: skip
    if bounds is not None:
        added = torch.arange(bounds.shape[0], dtype=bounds.dtype, device=bounds.device)
        shifted = shifted._replace(cu_seqlens=bounds + added)
    out, state = run(shifted)
    own = call.ungrouped()
    assert own.bonus is not None
    qk = own.q * own.k  # [B, T, Hq, K], each head for several of v
    weight = (qk[..., None, :] * own.bonus.unflatten(0, (qk.shape[2], -1))).sum(-1).flatten(-2) * own.scale
    for factor in (own.beta, own.write_gate, own.read_gate):
        weight = weight if factor is None else weight * factor
    return ((out[:, :T] if bounds is None else out[:, place]) + weight[..., None] * own.v).to(dtype), state
