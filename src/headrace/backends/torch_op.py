"""torch_chunkwise as a PyTorch operator, `torch.ops.headrace.chunkwise`, on any device."""

import torch
from torch import Tensor

from . import tiles, torch_chunkwise
from .operator import register


def _forward(*args):
    with torch.autocast(args[0].device.type, enabled=False):  # the accumulator's precision is part of the definition
        return torch_chunkwise.forward(*args)


def _backward(*args):
    arguments = (*args[:-1], args[-1][3])  # of what is wanted, the gradient to the decay alone is worth leaving out
    with torch.autocast(args[0].device.type, enabled=False):
        return torch_chunkwise.backward(*arguments)


def _kept_shapes(q, k, v, log_decay, beta, write_gate, read_gate, state, cu_seqlens, delta, scale, chunk_size):
    """Of the states and of E."""
    (B, T, H, V), K = v.shape, k.shape[-1]
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = tiles.kept_states(T, sequences, chunk_size * tiles.kept_stride(K, V, chunk_size))
    return (states, B * H, K, V), (v.shape if delta else (0,))


_run = register("chunkwise", "CompositeExplicitAutograd", _forward, _backward, ["states", "errors"], _kept_shapes)


def run(*args) -> tuple[Tensor, Tensor]:
    """(out, final state); the arguments are those of INPUTS in order; chunk_size None: what suits K and V."""
    *given, chunk_size = args
    chunk_size = chunk_size or tiles.default_chunk(given[1].shape[-1], given[2].shape[-1])
    return _run(*given, chunk_size)
