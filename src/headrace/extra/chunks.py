"""Splits sequences into chunks of equal size, which are computed in parallel except for the recurrence of the states.

Chunks are ordered by rounds: round i has the i-th chunk of every sequence that has one, with the longest sequences
first, so that the sequences of a round are the first ones of the previous round. Incomplete chunks are padded by zeros.

Dimensions: B batch, T tokens, N sequences, M chunks, C tokens per chunk.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..layers.base import Mixer
from ..layers.linear.token import MixerState
from ..ops.autograd import define, library
from ..ops.derivatives import first_order, transformed
from ..ops.sequences import Sequences
from ..utils.device import without_autocast
from .recurrence import Recurrence
from .specs.matrix import MatrixSpec

CHUNK = 32  # tokens per chunk of the matrix memories; a power of two
SPAN = 1024  # number of tokens that are computed in parallel
OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? c, Tensor initial"
SETTINGS = "Tensor? cu_seqlens, str form"


class Chunks:
    """The chunks of x [B, T, ·].

    Args:
        size: C.
        offsets: [N], position of each sequence's first token in its first chunk; None: 0.
    """

    def __init__(self, sequences: Sequences, x: Tensor, size: int, offsets: Tensor | None = None):
        lengths = sequences.lengths(x)
        offsets = torch.zeros_like(lengths) if offsets is None else offsets
        chunks = torch.where(lengths > 0, -(-(lengths + offsets) // size), 0)
        self.order = chunks.argsort(descending=True, stable=True)
        self.rank = self.order.argsort()
        even = [-(-x.shape[1] // size)] * len(chunks)  # of rows without offsets, which a tensor without values may have
        held = even if chunks.is_meta else chunks.tolist()
        self.counts = [sum(n > i for n in held) for i in range(max(held, default=0))]
        self.size, self.shape = size, x.shape[:2]
        begins = torch.tensor([0, *self.counts], device=x.device).cumsum(0)
        tokens = x.shape[0] * x.shape[1]
        owner = torch.arange(len(held), device=x.device).repeat_interleave(lengths, output_size=tokens)
        within = sequences.positions(None, x).expand(self.shape).flatten() + offsets[owner]
        self.places = (begins[within // size] + self.rank[owner]) * size + within % size

    def lay_out(self, x: Tensor) -> Tensor:
        """Converts tokens [B, T, ·] to chunks [M, C, ·]."""
        x = x.flatten(0, 1)
        full = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:])
        return full.index_copy(0, self.places, x).unflatten(0, (-1, self.size))

    def take_back(self, y: Tensor) -> Tensor:
        """Converts chunks [M, C, ·] to tokens [B, T, ·]."""
        return y.flatten(0, 1)[self.places].unflatten(0, self.shape)

    def spans(self) -> list[list[int]]:
        """Groups consecutive rounds into spans of about SPAN tokens. Returns the numbers of chunks of their rounds."""
        spans: list[list[int]] = []
        filled = SPAN
        for count in self.counts:
            if filled >= SPAN:
                spans.append([])
                filled = 0
            spans[-1].append(count)
            filled += count * self.size
        return spans


def carry(advance: Callable[..., Tensor], S: Tensor, counts: list[int], *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the recurrence S ← advance(S, *operands of a chunk) over all rounds.

    Args:
        S: initial states [N, ·], in the order `Chunks.order`.
        counts: number of chunks of each round.
        operands: [M, ·].

    Returns:
        (the state before each chunk [M, ·], the last state of each sequence [N, ·]).
    """
    before, ended = [], []
    for pieces in zip(*(x.split(counts) for x in operands), strict=True):
        S, rest = S.split([len(pieces[0]), len(S) - len(pieces[0])])
        before.append(S)
        ended.append(rest)
        S = advance(S, *pieces)
    return torch.cat([S[:0], *before]), torch.cat([S, *reversed(ended)])


def recomputed(form: Callable[..., Any], *operands: Any) -> Any:
    """Computes form(*operands), and again in the backward, except under torch.func, which has no checkpoints."""
    if transformed():
        return form(*operands)
    return checkpoint(form, *operands, use_reentrant=False, preserve_rng_state=False)


def chunkwise(form: Callable[..., tuple[Tensor, Tensor]], x: Any, sequences: Sequences, S: Tensor):
    """Computes a mixer span by span: x [B, T, ·] and the initial memory S [N, ·] -> (out [B, T, ·], the final memory).

    form(counts, S, *operands [M, C, ·]) -> (out [M, C, ·], S) computes a span. The intermediate tensors of a span are
    recomputed in the backward, because for all tokens they would be several times as large as the saved tensors.
    """
    chunks = Chunks(sequences, x[0], CHUNK)
    S, spans, out = S[chunks.order], chunks.spans(), [x[2].new_zeros(0, CHUNK, *x[2].shape[2:])]
    sizes = [sum(counts) for counts in spans]
    for counts, *pieces in zip(spans, *(chunks.lay_out(y).split(sizes) for y in x), strict=True):
        if len(spans) == 1:
            y, S = form(counts, S, *pieces)
        else:
            y, S = recomputed(form, counts, S, *pieces)
        out.append(y)
    return chunks.take_back(torch.cat(out)), S[chunks.rank]


def recur(step: Callable, form: Callable, x: Any, sequences: Sequences, S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes the recurrence of a mixer with a matrix memory per head.

    Args:
        step: step(x, S) computes one token of each sequence.
        form: computes many tokens, as in `chunkwise`.
        x: q, k [B, T, H, K], v [B, T, H, V] and further operands, in the precision of the memory.
        S: initial memory [N, H, K, V]; None: zeros.

    Returns:
        (out [B, T, H, V], the final memory [N, H, K, V]).
    """
    q, _, v = x[:3]
    with without_autocast(q):  # the memory is float32 or float64 by definition
        S = q.new_zeros(sequences.count, *q.shape[2:], v.shape[-1]) if S is None else S
        if q.shape[1] == 1 and sequences.cu_seqlens is None:
            return step(x, S)
        if torch.compiler.is_compiling():  # the operations of `chunkwise` depend on the lengths of the sequences
            last = x[5] if len(x) > 5 else None
            return _in_a_graph(*x[:5], last, S, sequences.cu_seqlens, f"{form.__module__}:{form.__name__}")
        return chunkwise(form, x, sequences, S)


class MatrixMixer(Mixer):
    """Base of the layers of a MatrixSpec, whose memory `recur` computes."""

    state_kind = MixerState

    def __init__(self, spec: MatrixSpec, hidden_size: int, num_heads: int):
        super().__init__()
        self.H, (self.K, self.V) = spec.num_heads(hidden_size, num_heads), spec.head_dims(hidden_size, num_heads)
        self.state_shapes = spec.state_shapes(hidden_size, num_heads)
        self.recurrence = Recurrence()

    @property
    def static_shapes(self) -> bool:
        return torch.compiler.is_compiling()


# --- in compiled graphs -----------------------------------------------------------------------------------------------


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *x, S, cu_seqlens, form = args
    given = [y for y in x if y is not None]
    out, S = chunkwise(resolve_name(form), given, Sequences(given[0], cu_seqlens), S)
    return out.contiguous(), S.contiguous()


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return args[2].new_empty(args[2].shape), args[6].new_empty(args[6].shape)


def _backward(d_out: Tensor, d_S: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Computes the forward again, with its graph."""
    with torch.enable_grad():
        x = [y if y is None else y.detach().requires_grad_() for y in args[:7]]
        results = _forward(*x, *args[7:])
    gradients = iter(torch.autograd.grad(results, [y for y in x if y is not None], (d_out, d_S)))
    return tuple(d_out.new_empty(0) if y is None else next(gradients).contiguous() for y in x)


def _fake_backward(d_out: Tensor, d_S: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(d_out.new_empty(0 if y is None else y.shape) for y in args[:7])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


@first_order("a recurrence in a compiled graph")
def _differentiate(ctx: Any, d_out: Tensor, d_S: Tensor) -> tuple[Tensor | None, ...]:
    *x, cu_seqlens = ctx.saved_tensors
    found = _gradient(d_out.contiguous(), d_S.contiguous(), *x, cu_seqlens, ctx.form)
    return *(None if y is None else g for y, g in zip(x, found, strict=True)), None, None


_gradient = define(
    "chunks_backward", f"(Tensor d_out, Tensor d_state, {OPERANDS}, {SETTINGS})", 7, _backward, _fake_backward,
    "CompositeExplicitAutograd",
)  # fmt: skip
library.impl(_gradient.name(), torch.library.fallthrough_kernel, "Autograd")  # or what it records would be left out
_in_a_graph = define(
    "chunks", f"({OPERANDS}, {SETTINGS})", 2, _forward, _fake, "CompositeExplicitAutograd", _differentiate, _save
)
