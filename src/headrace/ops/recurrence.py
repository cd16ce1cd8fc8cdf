"""`linear_attention` and `step`, the recurrence of all linear mixers.

reference.py defines the recurrence. This module checks the arguments, expresses the normaliser and the bonus through
the arguments that every backend supports, and runs the backend that dispatch.py chooses.

Shapes: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N packed sequences.
"""

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..utils.errors import InputError
from .backend import Backend
from .call import Call, accumulator
from .checks import check_form, check_rule, check_shapes, check_values
from .derivatives import has_address, transformed
from .dispatch import choose
from .torch.tiles import sequence_ends

NORMALISER_EPS = 1e-6
PARALLEL_LIMIT = 4 * 2**30  # bytes of T×T scores that form="parallel" may hold

Form = Literal["chunkwise", "recurrent", "parallel"]
Rule = Literal["add", "delta"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    rule: Rule = "add",
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    bonus: Tensor | None = None,
    normalise: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "chunkwise",
    chunk_size: int | None = None,
    backend: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes linear attention with decay, delta rule and gates, in time and memory linear in T.

    The state is a matrix S [K, V] per head, the memory. Each token updates it with k and v and reads it with q:

        S' = e^{g_t} S_{t-1}
        add:    S_t = S' + β_t k_tᵀ (w_t v_t)                  o_t = scale · r_t · q_t S_t
        delta:  S_t = S' + β_t k_tᵀ (w_t v_t − k_t S')

    Args:
        q, k: [B, T, Hq, K], where Hq divides H. Each q/k head is shared by H / Hq consecutive value heads.
        v: [B, T, H, V].
        log_decay: natural logarithm g ≤ 0 of the decay. None: no decay; [H]: fixed (RetNet); [B, T, H]: per token
            (Mamba-2, Gated DeltaNet); [B, T, H, K]: per token and key channel (GLA, RWKV-6, KDA). Values above 0 can
            give NaN; only check=True refuses them.
        beta: write strength β [B, T, H]; None: 1.
        rule: "add", or "delta" (arXiv 2406.06484), which replaces the value stored under k. The delta rule diverges
            unless β‖k‖² ≤ 2.
        read_gate, write_gate: r, w [B, T, H]; None: 1. The gates of head competition (arXiv 2602.01744): for "add" the
            write gate equals the paper's gate on k (equations 5, 10, 12), for "delta" it is the gate of equation 14.
        bonus: u [H, K], for "add" only (RWKV-6, arXiv 2404.05892): q_t reads S_{t-1} + diag(u) β_t k_tᵀ w_t v_t.
        normalise: for "add" only (arXiv 2006.16236): divides the output by q_t z_t + 1e-6, where z is the S of v = 1.
            q and k must be non-negative. The state has z as its last column; r multiplies after the division.
        scale: multiplies q; None: K^-1/2.
        initial_state: [B, H, K, V] (V + 1 with normalise); [N, H, K, V] when packed; None: zeros.
        cu_seqlens: [N + 1] integers 0 = c_0 ≤ … ≤ c_N = T, for N packed sequences in one row (B = 1): sequence n has
            the tokens c_n … c_{n+1} − 1.
        form: "chunkwise"; "recurrent", a loop over tokens; or "parallel", with T×T scores, for study. Only "recurrent"
            has derivatives of all orders and modes; the others have first gradients and raise for any further ones.
        chunk_size: tokens per chunk of the chunkwise form; None: the backend's choice.
        backend: "auto", or a name from `backends()`.
        check: whether to check the values too (NaN, infinities, log_decay > 0, β out of range). Synchronises a GPU.

    Returns:
        (out [B, T, H, V] in v's dtype, final state [B or N, H, K, V] in float64 for float64 inputs, else float32).

    Raises:
        InputError: for arguments that do not fit together, a backend that cannot compute the call, and a parallel form
            that would exceed 4 GiB.
    """
    optional = {
        "log_decay": log_decay, "beta": beta, "read_gate": read_gate, "write_gate": write_gate, "bonus": bonus,
        "initial_state": initial_state, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    check_rule(rule, bonus, normalise)
    check_form(form, chunk_size)
    check_shapes(q, k, v, optional, normalise, ("B", "T"))
    if check:
        check_values(q, k, v, optional, rule, normalise)
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    call = Call(
        q, k, v, log_decay, beta, write_gate, read_gate, initial_state, cu_seqlens,
        delta=rule == "delta", scale=scale, chunk_size=_chunk(form, chunk_size, v, cu_seqlens),
    )  # fmt: skip
    if form == "recurrent":
        if backend not in ("auto", "torch"):
            raise InputError(
                f"backend={backend!r} cannot run here: it has no form='recurrent'; expected backend='torch' or 'auto'"
            )
        # In the accumulator's precision, because gradients of tensors shared by all tokens are summed over tokens.
        out, state = _recurrent(_wide(call), None if bonus is None else bonus.to(accumulator(v)), normalise)
        return out.to(v.dtype), state
    chosen = choose(call, backend)
    if normalise:
        return _normalised(call, chosen)
    if bonus is not None:
        return _with_bonus(call, bonus, chosen)
    return chosen.run(call)


def _chunk(form: str, chunk_size: int | None, v: Tensor, cu_seqlens: Tensor | None) -> int | None:
    """Returns the chunk size. The parallel form is one chunk as long as the longest sequence."""
    if form != "parallel":
        return chunk_size
    T = v.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    needed = v.shape[0] * v.shape[2] * T * T * accumulator(v).itemsize
    if needed > PARALLEL_LIMIT:
        raise InputError(
            f"form='parallel' would hold {needed / 2**30:.1f} GiB of T×T scores for T={T}; "
            f"expected at most {PARALLEL_LIMIT / 2**30:.0f} GiB, or form='chunkwise'"
        )
    return max(T, 1)


# --- normaliser and bonus --------------------------------------------------------------------------------------------


def _normalised(call: Call, backend: Backend) -> tuple[Tensor, Tensor]:
    """Computes the normaliser as one more column of v, which is 1: the same decay, β and write gate apply to it."""
    acc = accumulator(call.v)
    v = torch.cat([call.v.to(acc), torch.ones_like(call.v[..., :1], dtype=acc)], -1)
    out, state = backend.run(call._replace(q=call.q.to(acc), k=call.k.to(acc), v=v, read_gate=None))
    out = out[..., :-1] / (out[..., -1:] + NORMALISER_EPS)
    return _gated(out, call.read_gate).to(call.v.dtype), state


def _with_bonus(call: Call, bonus: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    """Delays k and v by one token, so that q_t reads S_{t-1}, and adds the bonus term of the current token.

    Each sequence grows by one token: its first query reads the initial state, its last write reaches the final state.
    The sum is in the accumulator's precision, so that outputs and gradients are rounded once."""
    if call.cu_seqlens is not None and not torch.compiler.is_compiling() and has_address(call.cu_seqlens):
        sequence_ends(call.cu_seqlens, call.v.shape[1])  # checked here, because the backend gets the shifted bounds
    dtype, call, bonus = call.v.dtype, _wide(call), bonus.to(accumulator(call.v))
    starts = call.k.new_zeros(1, dtype=torch.long) if call.cu_seqlens is None else call.cu_seqlens[:-1]
    T, N = call.k.shape[1], starts.shape[0]
    tokens = torch.arange(T, device=call.k.device)
    place = tokens + (torch.searchsorted(starts.to(tokens), tokens, right=True) - 1)

    def moved(x: Tensor | None, by: int) -> Any:
        return None if x is None else x.new_zeros(x.shape[0], T + N, *x.shape[2:]).index_copy(1, place + by, x)

    decay = call.log_decay
    if decay is not None and decay.dim() == 1:
        decay = decay.expand(call.v.shape[:3])
    shifted = call._replace(
        q=moved(call.q, 0), read_gate=moved(call.read_gate, 0), k=moved(call.k, 1), v=moved(call.v, 1),
        log_decay=moved(decay, 1), beta=moved(call.beta, 1), write_gate=moved(call.write_gate, 1),
    )  # fmt: skip
    if call.cu_seqlens is not None:
        shifted = shifted._replace(cu_seqlens=call.cu_seqlens + torch.arange(N + 1).to(call.cu_seqlens))
    out, state = backend.run(shifted)
    weight = (_per_head(call.q, bonus) * bonus * _per_head(call.k, bonus)).sum(-1) * call.scale
    for factor in (call.beta, call.write_gate, call.read_gate):
        weight = weight if factor is None else weight * factor
    return (out[:, place] + weight[..., None] * call.v).to(dtype), state


def _wide(call: Call) -> Call:
    """Converts the tensors with a token dimension to the accumulator's precision."""
    acc = accumulator(call.v)
    return call._replace(**{name: x.to(acc) for name in TOKENWISE if (x := getattr(call, name)) is not None})


def _per_head(x: Tensor, bonus: Tensor) -> Tensor:
    return x.repeat_interleave(bonus.shape[0] // x.shape[-2], -2)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate[..., None]


# --- token by token --------------------------------------------------------------------------------------------------


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    rule: Rule = "add",
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    bonus: Tensor | None = None,
    normalise: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes one token of `linear_attention`, with the same arguments except for their token dimension.

    Args:
        q, k: [B, Hq, K].
        v: [B, H, V].
        state: [B, H, K, V] (V + 1 with normalise); None: zeros.
        log_decay: [H] (fixed), [B, H] or [B, H, K]; None: no decay.
        beta, read_gate, write_gate: [B, H]; None: 1.
        rule, bonus, normalise, scale: as in `linear_attention`.

    Returns:
        (out [B, H, V] in v's dtype, the next state in float64 for float64 inputs, else float32).

    Raises:
        InputError: for arguments that do not fit together.
    """
    optional = {
        "log_decay": log_decay, "beta": beta, "read_gate": read_gate, "write_gate": write_gate, "bonus": bonus,
        "state": state,
    }  # fmt: skip
    check_rule(rule, bonus, normalise)
    check_shapes(q, k, v, optional, normalise, ("B",))
    factor = k.shape[-1] ** -0.5 if scale is None else float(scale)
    call = Call(
        q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), _one_row(log_decay), _one_row(beta), _one_row(write_gate),
        _one_row(read_gate), state, None, delta=rule == "delta", scale=factor, chunk_size=None,
    )  # fmt: skip
    backend = choose(call, "auto")
    if backend.steps and bonus is None and not transformed():
        out, state = _normalised(call, backend) if normalise else backend.run(call)
        return out.squeeze(1), state
    return _step(q, k, v, state, log_decay, beta, write_gate, read_gate, bonus, rule, normalise, factor)


def _one_row(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dim() == 1 else x.unsqueeze(1)


def _step(q, k, v, state, *rest):
    with torch.autocast(v.device.type, enabled=False):  # the state is float32 or float64 by definition
        return _update(q, k, v, state, *rest)


def _update(q, k, v, state, log_decay, beta, write_gate, read_gate, bonus, rule, normalise, scale):
    acc, H = accumulator(v), v.shape[1]
    q, k, target = (x.to(acc) for x in (q, k, v))
    rest = (state, log_decay, beta, write_gate, read_gate, bonus)
    state, log_decay, beta, write_gate, read_gate, bonus = (x if x is None else x.to(acc) for x in rest)
    q, k = (x.repeat_interleave(H // x.shape[1], 1) if x.shape[1] != H else x for x in (q, k))
    q = q * scale
    if normalise:
        target = torch.cat([target, torch.ones_like(target[..., :1])], -1)
    target = _gated(target, write_gate)
    S = k.new_zeros(*k.shape, target.shape[-1]) if state is None else state.to(acc)
    before = S
    if log_decay is not None:
        decay = log_decay.exp()
        S = S * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
    if rule == "delta":
        target = target - torch.matmul(k[:, :, None], S).squeeze(2)
    target = _gated(target, beta)
    S = torch.addcmul(S, k[..., None], target[:, :, None])
    if bonus is None:
        out = torch.matmul(q[:, :, None], S).squeeze(2)
    else:
        out = torch.matmul(q[:, :, None], before).squeeze(2) + (q * bonus * k).sum(-1, keepdim=True) * target
    if normalise:
        out = out[..., :-1] / (out[..., -1:] + NORMALISER_EPS)
    return _gated(out, read_gate).to(v.dtype), S


def _recurrent(call: Call, bonus: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor]:
    """Runs `step` in a loop over the tokens."""
    if call.cu_seqlens is not None:
        return _each_sequence(call, bonus, normalise)
    T, settings = call.v.shape[1], (bonus, "delta" if call.delta else "add", normalise, call.scale)

    def columns(x: Tensor | None):
        # unbind instead of indexing, because the gradient of x[:, t] is as large as x.
        return [x] * T if x is None or x.dim() == 1 else x.unbind(1)

    state, out = call.initial_state, []
    if state is None:
        (B, _, H, V), K = call.v.shape, call.k.shape[-1]
        state = call.v.new_zeros(B, H, K, V + normalise, dtype=accumulator(call.v))
    for q, k, v, *rest in zip(*(columns(x) for x in call[:7]), strict=True):
        o, state = _step(q, k, v, state, *rest, *settings)
        out.append(o)
    return torch.stack(out, 1) if out else call.v, state


def _each_sequence(call: Call, bonus: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor]:
    assert call.cu_seqlens is not None
    lengths = [end - start for start, end in pairwise(sequence_ends(call.cu_seqlens, call.v.shape[1]))]
    per_token = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor) and name in TOKENWISE}
    per_token = {name: x.split(lengths, 1) for name, x in per_token.items() if x.dim() > 1}
    results = []
    for n in range(len(lengths)):
        own: dict[str, Any] = {name: pieces[n] for name, pieces in per_token.items()}
        state = None if call.initial_state is None else call.initial_state[n : n + 1]
        results.append(_recurrent(call._replace(**own, initial_state=state, cu_seqlens=None), bonus, normalise))
    return torch.cat([out for out, _ in results], 1), torch.cat([state for _, state in results])


TOKENWISE = ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate")
