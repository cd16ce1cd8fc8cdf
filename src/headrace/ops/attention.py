"""`linear_attention` and `step`, the recurrence of all linear mixers.

reference.py defines the recurrence. This module checks the arguments and runs the backend that dispatch.py chooses;
rewrite.py expresses the normalizer, the bonus and grouped queries through the arguments that every backend supports.

Shapes: B batch, T tokens, H heads of v (Hq of q, Hk of k), K key, V value dimension per head, N packed sequences.
"""

from functools import partial
from inspect import signature as signature_of
from typing import Any, Literal

from torch import Tensor

from ..spec.record import require_bools
from ..utils.errors import InputError, did_you_mean
from .backends.base import OPERATIONS
from .backends.torch.step import recurrent
from .call import Call, accumulator
from .checks import as_bounds, check_form, check_rule, check_scale, check_shapes, check_values, require
from .dispatch import BACKENDS, choose, refuse_recurrent, unavailable
from .parallel.context import current
from .prepared import TABLE, remember, signature
from .rewrite import normalized, per_query, with_bonus
from .written import check_written

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
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "chunkwise",
    chunk_size: int | None = None,
    backend: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes linear attention with decay, delta rule and gates. The chunkwise form takes O(T) time and memory.

    The state is a matrix S [K, V] per head, the memory. Each token updates it with k and v and reads it with q:

        S' = e^{g_t} S_{t-1}
        add:    S_t = S' + β_t k_tᵀ (w_t v_t)                  o_t = scale · r_t · q_t S_t
        delta:  S_t = S' + β_t k_tᵀ (w_t v_t − k_t S')

    Args:
        q, k: [B, T, Hq, K] and [B, T, Hk, K], in one of three ways. Hq = Hk = H. Grouped queries (GQA, arXiv
            2305.13245): Hk = H, and Hq is a multiple of H; Hq / H consecutive heads of q read each state. Shared keys
            (Mamba-2, Qwen3-Next): Hq = Hk divides H; H / Hk consecutive heads of v, each with a state of its own, share
            a head of q and k.
        v: [B, T, H, V]. q, k and v have the same floating-point dtype; the other tensors may have another. T is at
            least 1.
        log_decay: natural logarithm g ≤ 0 of the decay. None: no decay; [H]: fixed (RetNet); [B, T, H]: per token
            (Mamba-2, Gated DeltaNet); [B, T, H, K]: per token and key channel (GLA, RWKV-6, KDA). Values above 0 can
            give NaN; only check=True refuses them.
        beta: write strength β [B, T, H]; None: 1.
        rule: "add", or "delta" (arXiv 2406.06484), which replaces the value stored under k. The delta rule diverges
            unless β‖k‖² ≤ 2.
        read_gate: r [B, T, H], or [B, T, Hq] with grouped queries, which multiplies what a head reads; None: 1. In head
            competition (arXiv 2602.01744) the head's share of the read, the paper's gate on q.
        write_gate: w [B, T, H], which multiplies the value that a head writes; None: 1. In head competition the head's
            share of the write: for "add" it equals the paper's gate on k (equations 5, 10, 12), for "delta" it is the
            gate of equation 14.
        bonus: u [H, K], for "add" only (RWKV-6, arXiv 2404.05892): q_t reads S_{t-1} + diag(u) β_t k_tᵀ w_t v_t.
        normalize: for "add" only (arXiv 2006.16236): o_t = r_t (scale · q_t S_t) / (scale · q_t z_t + 1e-6), where z is
            the S of v = 1. q and k must be non-negative. The state has z as its last column.
        scale: multiplies q; None: K^-1/2.
        initial_state: [B, H, K, V] (V + 1 with normalize); [N, H, K, V] when packed; None: zeros.
        cu_seqlens: [N + 1] integers 0 = c_0 ≤ … ≤ c_N = T, for N packed sequences in one row (B = 1): sequence n has
            the tokens c_n … c_{n+1} − 1.
        form: "chunkwise"; "recurrent", a loop over tokens; or "parallel", with T×T scores, for study. Only "recurrent"
            has derivatives of all orders and modes; the others have first gradients and raise for any further ones.
        chunk_size: tokens per chunk of the chunkwise form; None: the backend's choice.
        backend: "auto", or a name from `backends()`.
        check: whether to check the values too (NaN, infinities, log_decay > 0, β out of range). Synchronizes a GPU.

    Returns:
        (out [B, T, H, V], or [B, T, Hq, V] with grouped queries, in v's dtype, the final state [B or N, H, K, V] in
        float64 for float64 inputs, else float32).

    Raises:
        InputError: for arguments that do not fit together, a backend that cannot compute the call, and a parallel form
            that would exceed 4 GiB.

    Note:
        Grouped queries: the backend torch writes each state once. The chunks of native, triton and fla compute Hq
        states, of which each group's are equal, so that writing and working memory are those of Hq heads. `step` has
        one state per group in all backends.
    """
    part, borders = current(), None
    call = Call(
        q, k, v, log_decay, beta, write_gate, read_gate, initial_state, bonus, as_bounds(cu_seqlens),
        chunk_size=chunk_size, normalize=normalize,
    )  # fmt: skip
    check_form(form, chunk_size, check)
    call = _checked(call, rule, scale, ("B", "T"))
    if part is not None:
        require(form == "chunkwise", f"form={form!r} under context_parallel; expected form='chunkwise'")
        borders = part.borders(call.cu_seqlens, v)
        call = call._replace(cu_seqlens=borders.cu_seqlens)
    if check:
        check_values(call)
    if form == "parallel":
        call = call._replace(chunk_size=_one_chunk(call))
    if form == "recurrent":
        refuse_recurrent(backend)
        out, state = recurrent(call.wide())  # wide: gradients of tensors that all tokens share are sums over tokens
        return out.to(v.dtype), state
    kernel = choose("linear_attention", backend, call)
    run = kernel.run if "queries" in kernel.extras else partial(per_query, run=kernel.run)
    if borders is not None:
        run = partial(borders.over_processes, run=run)
    extras = kernel.extras if borders is None else ()
    if normalize:
        return normalized(call, run, "normalize" in extras)
    return with_bonus(call, run) if bonus is not None and "bonus" not in extras else run(call)


def _checked(call: Call, rule: str, scale: float | None, axes: tuple[str, ...]) -> Call:
    """Checks a call of `linear_attention` or `step`, and returns it with its rule and scale."""
    check_rule(rule, call.bonus, call.normalize)
    check_scale(scale)
    check_shapes(call, axes)
    return call._replace(delta=rule == "delta", scale=call.k.shape[-1] ** -0.5 if scale is None else float(scale))


def _one_chunk(call: Call) -> int:
    """Returns the chunk size of the parallel form: the length of the longest sequence."""
    chunks, length, heads, _ = call.out_shape
    T = length if call.cu_seqlens is None else max(int(call.cu_seqlens.diff().max()), 1)
    if call.cu_seqlens is not None and call.v.device.type != "cpu":  # which has the chunks of one sequence at a time
        chunks = length // T + call.sequences
    needed = chunks * heads * T * T * accumulator(call.v).itemsize
    if needed > PARALLEL_LIMIT:
        raise InputError(
            f"form='parallel' would hold {needed / 2**30:.1f} GiB of T×T scores for T={T}; "
            f"expected at most {PARALLEL_LIMIT / 2**30:.0f} GiB, or form='chunkwise'"
        )
    return T


def backends(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs: Any
) -> dict[str, dict[str, str | None]] | str:
    """Lists what each backend computes, or names the backend of a call.

    Args:
        q, k, v: as in `linear_attention`, all three or none.
        kwargs: the other arguments of `linear_attention`. They are checked as there, except for values (check=True)
            and context parallelism.

    Returns:
        Without arguments, a dict by backend of dicts by operation, with None, or the reason why the backend does not
        compute the operation here. With the arguments of a call, the name of the backend that would compute it.

    Raises:
        InputError: for arguments that `linear_attention` refuses, and for a backend given by name that cannot compute
            the call.
    """
    if q is None and k is None and v is None and not kwargs:
        return {name: {operation: unavailable(name, operation) for operation in OPERATIONS} for name in BACKENDS}
    if q is None or k is None or v is None:
        raise InputError("backends needs q, k and v to name the backend of a call; expected all three, or no arguments")
    given = {x.name: x.default for x in signature_of(linear_attention).parameters.values() if x.kind is x.KEYWORD_ONLY}
    for name in kwargs:
        if name not in given:
            raise InputError(f"linear_attention has no argument {name!r}{did_you_mean(name, given)}")
    return _backend_of(q, k, v, given | kwargs)


def _backend_of(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> str:
    """Returns the name of the backend that computes a call of `linear_attention`."""
    check_form(given["form"], given["chunk_size"], given["check"])
    fields = {name: x for name, x in given.items() if name in Call._fields}
    call = Call(q, k, v, **fields | {"scale": 1.0, "cu_seqlens": as_bounds(given["cu_seqlens"])})
    call = _checked(call, given["rule"], given["scale"], ("B", "T"))
    if given["form"] == "recurrent":
        refuse_recurrent(given["backend"])
        return "torch"
    if given["form"] == "parallel":
        call = call._replace(chunk_size=_one_chunk(call))
    kernel = choose("linear_attention", given["backend"], call)
    return next(name for name, backend in BACKENDS.items() if backend.linear_attention is kernel)


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
    normalize: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    in_place: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes one token of `linear_attention`. Arguments have no token dimension, and `state` is its initial_state.

    There is no cu_seqlens, form, chunk_size or check.

    Args:
        q, k: [B, Hq, K] and [B, Hk, K], grouped as in `linear_attention`.
        v: [B, H, V].
        state: [B, H, K, V] (V + 1 with normalize); None: zeros.
        log_decay: [H] (fixed), [B, H] or [B, H, K]; None: no decay.
        beta: write strength [B, H]; None: 1.
        read_gate: [B, H], or [B, Hq] with grouped queries, which multiplies what is read; None: 1.
        write_gate: [B, H], which multiplies the value that is written; None: 1.
        rule, bonus, normalize, scale, backend: as in `linear_attention`.
        in_place: whether the next state is written into `state`, which is then the one returned (None: a new one). It
            must be contiguous and in the next state's dtype.
        out: a tensor of the output's shape, contiguous and in v's dtype, into which it is written; None: a new one.

    Returns:
        (out [B, H, V], or [B, Hq, V] with grouped queries, in v's dtype, the next state in float64 for float64 inputs,
        else float32).

    Raises:
        InputError: for arguments that do not fit together, for a backend that cannot compute the call, and for a
            tensor that cannot be written: one that shares memory with another argument, and any while an argument
            requires a gradient (without torch.no_grad()).
    """
    tensors = q, k, v, log_decay, beta, write_gate, read_gate
    settings = rule, normalize, type(scale), backend, in_place
    key = signature((*tensors, bonus, state, out), settings)
    if key and (prepared := TABLE.get(key)) is not None:  # a graph that reads the table is compiled anew as it grows
        return prepared(tensors, state if in_place else None, state, out, scale)
    require_bools(in_place=in_place)
    call = _checked(Call(*tensors, state, bonus, normalize=normalize), rule, scale, ("B",))
    written = state if in_place else None
    if written is not None or out is not None:
        check_written(written, out, call)
    kernel = choose("step", backend, call)
    prepared = kernel.prepare(call) if key and kernel.prepare is not None else None
    if prepared is not None:
        return remember(key, prepared)(tensors, written, state, out, scale)
    result, after = kernel.run(call, in_place)
    return _written(result, out), _written(after, written)


def _written(x: Tensor, into: Tensor | None) -> Tensor:
    return x if into is None or x is into else into.copy_(x)
