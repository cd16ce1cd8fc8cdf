"""The recurrence in PyTorch one token at a time, with derivatives of all orders and modes."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....utils.device import without_autocast
from ...call import NORMALIZER_EPS, TOKENWISE, Call, accumulator, gated
from ...checks import sequence_ends


def step(call: Call, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Computes one token. The tensors of the call have no token dimension."""
    with without_autocast(call.v):  # the state is float32 or float64 by definition
        return _update(call)


def _update(call: Call) -> tuple[Tensor, Tensor]:
    acc, H = accumulator(call.v), call.v.shape[1]
    tensors: Any = (x if x is None else x.to(acc) for x in call.tensors)
    q, k, target, log_decay, beta, write_gate, read_gate, before, bonus = tensors
    q, k = (x.repeat_interleave(H // x.shape[1], 1) if x.shape[1] < H else x for x in (q, k))
    q = (q * call.scale).unflatten(1, (H, -1))  # [B, H, queries of each state, K]
    if call.normalize:
        target = torch.cat([target, torch.ones_like(target[..., :1])], -1)
    target = gated(target, write_gate)
    before = S = k.new_zeros(*k.shape, target.shape[-1]) if before is None else before
    if log_decay is not None:
        decay = log_decay.exp()
        S = S * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
    if call.delta:
        target = target - torch.matmul(k[:, :, None], S).squeeze(2)
    target = gated(target, beta)
    S = torch.addcmul(S, k[..., None], target[:, :, None])
    if bonus is None:
        out = torch.matmul(q, S)
    else:
        out = torch.matmul(q, before) + torch.matmul(q, (bonus * k)[..., None]) * target[:, :, None]
    out = out.flatten(1, 2)
    if call.normalize:
        out = out[..., :-1] / (out[..., -1:] + NORMALIZER_EPS)
    return gated(out, read_gate).to(call.v.dtype), S


def recurrent(call: Call) -> tuple[Tensor, Tensor]:
    """Runs `step` in a loop over the tokens."""
    if call.cu_seqlens is not None:
        return _each_sequence(call)
    T = call.v.shape[1]

    def columns(x: Tensor | None):
        # unbind instead of indexing, because the gradient of x[:, t] is as large as x.
        return [x] * T if x is None or x.dim() == 1 else x.unbind(1)

    state, acc, out = call.initial_state, accumulator(call.v), []
    state = call.v.new_zeros(call.state_shape, dtype=acc) if state is None else state.to(acc)
    for tensors in zip(*(columns(getattr(call, name)) for name in TOKENWISE), strict=True):
        o, state = step(call._replace(**dict(zip(TOKENWISE, tensors, strict=True)), initial_state=state))
        out.append(o)
    return torch.stack(out, 1) if out else call.v.new_empty(call.out_shape), state


def _each_sequence(call: Call) -> tuple[Tensor, Tensor]:
    assert call.cu_seqlens is not None
    lengths = [end - start for start, end in pairwise(sequence_ends(call.cu_seqlens, call.v.shape[1]))]
    per_token = {n: x.split(lengths, 1) for n in TOKENWISE if (x := getattr(call, n)) is not None and x.dim() > 1}
    results = []
    for n in range(len(lengths)):
        tensors: dict[str, Any] = {name: pieces[n] for name, pieces in per_token.items()}
        state = None if call.initial_state is None else call.initial_state[n : n + 1]
        results.append(recurrent(call._replace(**tensors, initial_state=state, cu_seqlens=None)))
    return torch.cat([out for out, _ in results], 1), torch.cat([state for _, state in results])
