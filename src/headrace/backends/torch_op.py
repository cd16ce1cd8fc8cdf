"""torch_chunkwise as a PyTorch operator, `torch.ops.headrace.chunkwise`, with a backward and shapes for tracing, so
that `torch.compile(fullgraph=True)` and `torch.library.opcheck` see through it."""

from typing import Any

import torch
from torch import Tensor

from . import torch_chunkwise

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? write_gate, Tensor? read_gate, "
    "Tensor? initial_state, Tensor? cu_seqlens, bool delta, float scale, int chunk_size"
)
library = torch.library.Library("headrace", "DEF")
library.define(f"chunkwise({INPUTS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"chunkwise_backward(Tensor d_out, Tensor d_final, {INPUTS}, Tensor states, Tensor errors, bool decay_gradient) "
    f"-> ({', '.join(['Tensor'] * 8)})"
)


def _forward(*args):
    with torch.autocast(args[0].device.type, enabled=False):  # the accumulator's precision is part of the definition
        return torch_chunkwise.forward(*args)


library.impl("chunkwise", _forward, "CompositeExplicitAutograd")


def run(*args) -> tuple[Tensor, Tensor]:
    """(out, final state); the arguments are those of INPUTS in order; chunk_size None: what suits K and V."""
    *given, chunk_size = args
    chunk_size = chunk_size or torch_chunkwise.default_chunk(given[1].shape[-1], given[2].shape[-1])
    keep = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
    out, final, _, _ = torch.ops.headrace.chunkwise(*given, chunk_size, keep)
    return out, final


def _backward(*args):
    with torch.autocast(args[0].device.type, enabled=False):
        grads = torch_chunkwise.backward(*args)
    return tuple(args[0].new_empty(0) if grad is None else grad for grad in grads)


library.impl("chunkwise_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("headrace::chunkwise")
def _fake(
    q, k, v, log_decay, beta, write_gate, read_gate, initial_state, cu_seqlens, delta, scale, chunk_size, keep
):  # fmt: skip
    (B, T, H, V), K = v.shape, k.shape[-1]
    dtype = torch_chunkwise.accumulator_dtype(q)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    stride = torch_chunkwise.kept_stride(K, V, chunk_size)
    if not keep:
        kept: int | torch.SymInt = 0
    elif cu_seqlens is None:
        kept = -(-T // (chunk_size * stride))
    else:
        kept = torch.library.get_ctx().new_dynamic_size()
    final = q.new_empty(sequences, H, K, V, dtype=dtype)
    states = final.new_empty((kept, B * H, K, V) if keep else 0)
    errors = final.new_empty(v.shape if keep and delta else 0)
    return torch.empty_like(v, memory_format=torch.contiguous_format), final, states, errors


@torch.library.register_fake("headrace::chunkwise_backward")
def _fake_backward(d_out, d_final, *args):
    inputs = [*args[:7], d_final]
    return tuple(
        d_out.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.delta, ctx.scale, ctx.chunk_size, _ = inputs
    _, final, states, errors = output
    ctx.final_shape = final.shape
    ctx.state_dtype = None if inputs[7] is None else inputs[7].dtype
    ctx.present = [x is not None for x in tensors]
    ctx.save_for_backward(*(x for x in tensors if x is not None), states, errors)
    ctx.set_materialize_grads(False)  # zeros for the states kept would be as large as the inputs


def _gradients(ctx, d_out, d_final, *_):
    *saved, states, errors = ctx.saved_tensors
    tensors: list[Any] = [saved.pop(0) if present else None for present in ctx.present]
    settings = (ctx.delta, ctx.scale, ctx.chunk_size)
    decay_gradient = ctx.needs_input_grad[3]
    d_out = torch.zeros_like(tensors[2]) if d_out is None else d_out
    d_final = d_out.new_zeros(ctx.final_shape, dtype=states.dtype) if d_final is None else d_final
    grads = torch.ops.headrace.chunkwise_backward(
        d_out.contiguous(), d_final.contiguous(), *tensors, *settings, states, errors, decay_gradient
    )
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:8], strict=True)]
    if wanted[7] is not None:
        wanted[7] = wanted[7].to(ctx.state_dtype)
    return *wanted, None, None, None, None, None


torch.library.register_autograd("headrace::chunkwise", _gradients, setup_context=_setup_context, lib=library)
