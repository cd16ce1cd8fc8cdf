"""One token of the recurrence in one launch: a program holds a block of V of the state of one sequence and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import Call
from .block_sizes import block
from .launch import DECAYS

PROGRAM = 8192  # entries of the state that a program holds


@triton.jit
def factor(x, at):
    if x is None:
        result = 1.0
    else:
        result = tl.load(x + at).to(tl.float32)
    return result


@triton.jit
def advanced(S, decay, xk, target, beta, DELTA: tl.constexpr):
    """Returns (the next state [BK, BV], what it was given [BV]) from the state S and its decay, which is broadcast to
    it."""
    S *= decay
    if DELTA:
        target -= tl.sum(xk[:, None] * S, 0)
    target *= beta
    return S + xk[:, None] * target[None, :], target


@triton.jit
def seen(xq, S, before, xk, target, u):
    """Returns what a query reads, [BV]: of the next state, or with a bonus u [BK] of the state before and the write."""
    if u is None:
        o = tl.sum(xq[:, None] * S, 0)
    else:
        o = tl.sum(xq[:, None] * before, 0) + tl.sum(xq * u * xk, 0) * target
    return o


@triton.jit
def step_kernel(
    q, k, v, g, beta, write, read, bonus, state, out, after, scale, H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Grid: (B × H, blocks of V). q [B, HQ, K], k [B, HQ or H, K], v [B, H, V], g [H], [B, H] or [B, H, K], beta and
    write [B, H], read and out [B, HQ or H, ·]: with HQ above H each state has HQ / H queries."""
    QUERIES: tl.constexpr = HQ // H if HQ > H else 1
    SHARED: tl.constexpr = H // HQ if HQ < H else 1
    row = tl.program_id(0).to(tl.int64)
    h = row % H
    shared = (row // H) * (H // SHARED) + h // SHARED
    keys, values = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    has_key, has_value = keys < K, values < V
    at = row * K * V + keys[:, None] * V + values[None, :]
    mask = has_key[:, None] & has_value[None, :]
    xk = tl.load(k + shared * K + keys, mask=has_key, other=0.0).to(tl.float32)
    target = tl.load(v + row * V + values, mask=has_value, other=0.0).to(tl.float32) * factor(write, row)
    S = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        S = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
    if DECAY == "vector":
        decay = tl.exp(tl.load(g + row * K + keys, mask=has_key, other=0.0).to(tl.float32))[:, None]
    elif DECAY == "scalar":
        decay = tl.exp(tl.load(g + row).to(tl.float32))
    elif DECAY == "fixed":
        decay = tl.exp(tl.load(g + h).to(tl.float32))
    else:
        decay = 1.0
    u = bonus
    if bonus is not None:
        u = tl.load(bonus + h * K + keys, mask=has_key, other=0.0).to(tl.float32)
    before = S
    S, target = advanced(S, decay, xk, target, factor(beta, row), DELTA)
    for i in tl.static_range(QUERIES):
        xq = tl.load(q + (shared * QUERIES + i) * K + keys, mask=has_key, other=0.0).to(tl.float32) * scale
        o = seen(xq, S, before, xk, target, u) * factor(read, row * QUERIES + i)
        tl.store(out + (row * QUERIES + i) * V + values, o.to(out.dtype.element_ty), mask=has_value)
    tl.debug_barrier()  # `after` may be `state`: another thread may hold a copy of its entries, and load them last
    tl.store(after + at, S, mask=mask)


def step(call: Call, after: Tensor) -> Tensor:
    """Returns the output of one token, and writes the state to `after`, which may be the state before. The tensors of
    the call have no token dimension."""
    (B, H, V), (HQ, K) = call.v.shape, call.q.shape[1:]
    given = [None if x is None else x.contiguous() for x in (*call[:7], call.bonus, call.initial_state)]
    dims = 0 if call.log_decay is None else call.log_decay.dim() + (call.log_decay.dim() > 1)
    out = call.v.new_empty(call.out_shape)
    BK = block(K, 1 << 16)
    BV = block(V, max(16, PROGRAM // BK))
    with torch.cuda.device_of(call.v):
        step_kernel[(B * H, -(-V // BV))](
            *given, out, after, call.scale, H=H, HQ=HQ, K=K, V=V, BK=BK, BV=BV, DECAY=DECAYS[dims], DELTA=call.delta,
            num_warps=4,
        )  # fmt: skip
    return out
