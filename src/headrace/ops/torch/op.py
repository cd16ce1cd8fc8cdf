"""The backend "torch": the chunkwise form as a PyTorch operator for all devices, `torch.ops.headrace.chunkwise`."""

import torch

from ..backend import Backend, Kernel
from ..call import Call
from ..operator import register
from . import chunkwise, convolution, int8, step, tiles


def _forward(call: Call, keep: bool):
    with torch.autocast(call.q.device.type, enabled=False):  # the recurrence is in the accumulator's precision
        return chunkwise.forward(call, keep)


def _backward(d_out, d_final, call: Call, kept, wanted):
    states, errors = kept
    with torch.autocast(call.q.device.type, enabled=False):
        # Only the gradient to the decay costs enough to be skipped if it is not wanted.
        return chunkwise.backward(d_out, d_final, call, states, errors, wanted[3])


def _kept_shapes(call: Call):
    """Returns the shapes of the kept states and of E."""
    (B, T, H, V), K, chunk = call.v.shape, call.k.shape[-1], tiles.chunk_size(call)
    sequences = 1 if call.cu_seqlens is None else call.sequences
    states = tiles.kept_states(T, sequences, chunk * tiles.kept_stride(K, V, chunk))
    return (states, B * H, K, V), (call.v.shape if call.delta else (0,))


_run = register("chunkwise", "CompositeExplicitAutograd", _forward, _backward, ["states", "errors"], _kept_shapes)


def _refuses(*arguments) -> None:
    return None


BACKEND = Backend(
    missing=lambda: None,
    about=lambda: f"PyTorch {torch.__version__}",
    linear_attention=Kernel(_run, _refuses),
    step=Kernel(step.step, _refuses),
    convolution=Kernel(convolution.run, _refuses),
    int8_product=Kernel(int8.run, _refuses),
)
