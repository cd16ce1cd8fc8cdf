"""`linear_attention` and `step`: one recurrence for the whole family.

The equation is in reference.py. Here arguments are checked, and what no kernel needs to know (the normaliser, the
bonus) is expressed through what every kernel does know; dispatch.py chooses one.

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
    """A matrix memory S read by q and written at k with v, in time and memory linear in T.

        S' = e^{g_t} S_{t-1}
        add:    S_t = S' + β_t k_tᵀ (w_t v_t)                  o_t = scale · r_t · q_t S_t
        delta:  S_t = S' + β_t k_tᵀ (w_t v_t − k_t S')

    Args:
        q, k: [B, T, Hq, K], Hq dividing H (each shared by H / Hq consecutive value heads).
        v: [B, T, H, V].
        log_decay: g ≤ 0, natural logarithm. None: no decay; [H]: fixed (RetNet); [B, T, H]: per token (Mamba-2, Gated
            DeltaNet); [B, T, H, K]: per token and key channel (GLA, RWKV-6, KDA). Above 0, which no layer here makes,
            the result may be NaN; only check=True refuses it.
        beta: write strength β [B, T, H]; None: 1.
        rule: "add", or "delta" (arXiv 2406.06484): what memory holds under k is replaced. The recurrence itself
            diverges unless β‖k‖² ≤ 2.
        read_gate, write_gate: r, w [B, T, H]; None costs nothing. Head competition (arXiv 2602.01744): for "add" w on v
            is the paper's gate on k (equations 5, 10, 12), for "delta" it is that of equation 14.
        bonus: u [H, K], "add" only (RWKV-6, arXiv 2404.05892): q_t reads S_{t-1} + diag(u) β_t k_tᵀ w_t v_t.
        normalise: "add" only (arXiv 2006.16236): divide by q_t z_t + 1e-6, z being S with v = 1; q and k must not be
            negative. The state carries z as its last column, and r multiplies after the division.
        scale: multiplies q; None: K^-1/2.
        initial_state: [B, H, K, V] (V + 1 with normalise); [N, H, K, V] when packed; None: zeros.
        cu_seqlens: [N + 1] integers 0 = c_0 ≤ … ≤ c_N = T: B is 1 and tokens c_n … c_{n+1} − 1 are sequence n.
        form: "chunkwise"; "parallel", T×T, for study: above a memory limit it raises; "recurrent", token by token. The
            last has derivatives of every order and mode; of the others all but first gradients are refused.
        chunk_size: tokens per chunk of the chunkwise form; None: the backend's choice.
        backend: "auto", or a name from `backends()`, which raises if it cannot be honoured.
        check: also look at the values (NaN, infinities, log_decay > 0, β out of range). Stalls a GPU.

    Returns:
        (out [B, T, H, V] in v's dtype, final state [B or N, H, K, V] in float64 for float64 inputs, else float32).

    Raises:
        InputError: with the argument, its value and what was expected.
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
            raise InputError(f"backend={backend!r} cannot run here: form='recurrent' is PyTorch's")
        # In the accumulator's precision, for gradients to what all tokens share are summed token by token.
        out, state = _recurrent(_wide(call), None if bonus is None else bonus.to(accumulator(v)), normalise)
        return out.to(v.dtype), state
    chosen = choose(call, backend)
    if normalise:
        return _normalised(call, chosen)
    if bonus is not None:
        return _with_bonus(call, bonus, chosen)
    return chosen.run(call)


def _chunk(form: str, chunk_size: int | None, v: Tensor, cu_seqlens: Tensor | None) -> int | None:
    """The parallel form is one chunk as long as the longest sequence."""
    if form != "parallel":
        return chunk_size
    T = v.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    needed = v.shape[0] * v.shape[2] * T * T * accumulator(v).itemsize
    if needed > PARALLEL_LIMIT:
        raise InputError(
            f"form='parallel' would hold {needed / 2**30:.1f} GiB of T×T scores for T={T}; "
            f"expected at most {PARALLEL_LIMIT / 2**30:.0f} GiB: use form='chunkwise'"
        )
    return max(T, 1)


# --- what kernels need not know ------------------------------------------------------------------------------------


def _normalised(call: Call, backend: Backend) -> tuple[Tensor, Tensor]:
    """The normaliser is a column of ones beside v: the same decay, β and write gate act on it."""
    acc = accumulator(call.v)
    v = torch.cat([call.v.to(acc), torch.ones_like(call.v[..., :1], dtype=acc)], -1)
    out, state = backend.run(call._replace(q=call.q.to(acc), k=call.k.to(acc), v=v, read_gate=None))
    out = out[..., :-1] / (out[..., -1:] + NORMALISER_EPS)
    return _gated(out, call.read_gate).to(call.v.dtype), state


def _with_bonus(call: Call, bonus: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    """Reading S_{t-1} is reading S_t with the writes one token late: each sequence grows by one token, in which the
    first query reads the initial state and the last write reaches the final one. The present token's term is added:
    both in the accumulator's precision, so that outputs and gradients are rounded once."""
    if call.cu_seqlens is not None and not torch.compiler.is_compiling() and has_address(call.cu_seqlens):
        sequence_ends(call.cu_seqlens, call.v.shape[1])  # here, for the kernel sees them moved
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
    """What is given by token, in the accumulator's precision."""
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
    """One token of `linear_attention`: the same arguments without T, state in, state out.

    q, k [B, Hq, K]; v [B, H, V]; log_decay None, [H] (fixed), [B, H] or [B, H, K]; beta and gates [B, H]; bonus [H, K];
    state [B, H, K, V] (V + 1 with normalise; None: zeros). Returns (out [B, H, V], state) in the precisions that
    `linear_attention` returns. Raises InputError as it does.
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
    with torch.autocast(v.device.type, enabled=False):  # the precision of the state is part of the definition
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
    """`step` in a loop, sequence by sequence."""
    if call.cu_seqlens is not None:
        return _each_sequence(call, bonus, normalise)
    T, settings = call.v.shape[1], (bonus, "delta" if call.delta else "add", normalise, call.scale)

    def columns(x: Tensor | None):
        # unbind, not indexing: the gradient of x[:, t] is as large as x.
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
