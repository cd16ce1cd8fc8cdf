"""The layers of a model that no kernel of headrace computes on a GPU, by their own calls of `linear_attention`."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.backends.torch.op import BACKEND
from ..ops.backends.triton.op import unsupported_on_gpus
from ..ops.call import Call
from ..ops.dispatch import BACKENDS, set_backend
from ..spec.attention import SoftmaxSpec

LENGTH = 64  # tokens of the calls, on which no reason depends
ASKING = "asking"  # a backend that computes as PyTorch's, and notes what the kernels say of each call


@torch.no_grad()
def without_kernel(model: Any) -> dict[str, list[int]]:
    """Returns the layers of a language model without a kernel, by the reason. Layers of softmax attention, which
    PyTorch's kernels compute, are left out.

    model: on any device, which computes a few tokens with it; on the meta device without memory. Its backend is set to
        "torch"."""
    x = model.model.embed_tokens.weight.new_zeros(1, LENGTH, model.config.hidden_size)
    found: dict[str, list[int]] = {}
    for i, layer in enumerate(model.model.backbone.layers):
        for mixer in (layer.mixer, layer.parallel):
            if mixer is not None and (reason := _reason(mixer, x)) is not None:
                found.setdefault(reason, []).append(i)
    return found


def _reason(mixer: nn.Module, x: Tensor) -> str | None:
    if isinstance(getattr(mixer, "spec", None), SoftmaxSpec):
        return None
    asked: list[str | None] = []

    def note(call: Call) -> None:
        asked.append(unsupported_on_gpus(call))

    kernel = BACKEND.linear_attention._replace(unsupported_reason=note)
    BACKENDS[ASKING] = BACKEND._replace(linear_attention=kernel)
    try:
        set_backend(mixer, ASKING)
        mixer(x)
    finally:
        del BACKENDS[ASKING]
    set_backend(mixer, "torch")
    if not asked:
        return f"the recurrence of {type(mixer).__name__} has none"
    return next((reason for reason in asked if reason is not None), None)
