"""The backend "torch": the chunkwise form as a PyTorch operator for all devices, `torch.ops.headrace.chunkwise`."""

import torch

from ...autograd import register
from ...call import Call
from ..base import Backend, Kernel
from . import chunkwise, step, tiles


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
    (B, _, H, V), K, (chunks, length, keeps) = call.v.shape, call.k.shape[-1], tiles.grid(call)
    return (chunks, B * H, K, V) if keeps else (0,), (chunks * B * H, length, V) if call.delta else (0,)


_run = register("chunkwise", "CompositeExplicitAutograd", _forward, _backward, ["states", "errors"], _kept_shapes)


BACKEND = Backend(
    missing=lambda: None,
    about=lambda: f"PyTorch {torch.__version__}",
    linear_attention=Kernel(_run, extras=("queries",)),
    step=Kernel(step.step),
)
