"""One token of a linear layer by the kernels of layer_step.py: from the output of its input projection to the input of
its output projection, with the state updated in place."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...checks import require
from ...layer_shapes import token_shapes, weight_shapes
from .limits import LARGEST_HEADS, LARGEST_KEY, LARGEST_NORM, missing, unsupported_tokens

KINDS = {
    "feature_map": ("identity", "elu+1", "relu", "silu"), "qk_norm": ("none", "l2"),
    "decay": ("none", "retnet", "softplus", "sigmoid", "exp", "softplus-vector"), "rule": ("add", "delta"),
    "beta": ("one", "sigmoid", "dt"), "norm": ("none", "rms", "group", "rms-joint"),
    "gate": ("none", "silu", "sigmoid", "sigmoid-low-rank"), "order": ("norm-gate", "gate-norm"),
    "read": ("none", "query", "after_norm"), "write": ("none", "value", "beta"), "source": ("head",),
    "activation": ("softmax", "sigmoid", "null"), "gate_scale": ("identity", "one"),
}  # fmt: skip
STATE = ("memory", "conv", "tokens")
STATE_DTYPES = {"memory": torch.float32, "tokens": torch.int64}  # the convolution's history has the dtype of x


class Layer:
    """The kernels' arguments of one layer. See `LayerStep` in ops/backends/base.py, and `Layer` of native."""

    def __init__(self, kinds: dict[str, str], sizes: Sequence[int], numbers: Sequence[float], weights: Sequence[str]):
        self.kind, self.sizes, self.names = kinds, sizes, weights
        self.numbers, self.rotary = numbers, bool(numbers[-1])
        self.kernels: Any = None  # imported at the first token, because they need Triton
        unknown = (f"{name}={kinds[name]!r}" for name, known in KINDS.items() if kinds[name] not in known)
        self.unknown = next((f"it does not support {kind}" for kind in unknown), None)
        _, H, Hq, K, V, _, decay_size, gate_size = sizes
        beta_size = H * (kinds["beta"] == "sigmoid")
        self.parts = [2 * Hq * K + H * V, decay_size, beta_size, gate_size]

    def unsupported_reason(self, x: Tensor, weights: Sequence[Tensor]) -> str | None:
        """Returns why the kernels cannot compute x [B, 1, D] with these weights, or None.

        Raises InputError for a weight whose shape is not the layer's."""
        if (reason := missing() or self.unknown or unsupported_tokens(x)) is not None:
            return reason
        _, H, _, K, V, *_ = self.sizes
        if K > LARGEST_KEY or H * K > LARGEST_HEADS or H * V > LARGEST_NORM:
            return f"it takes K up to {LARGEST_KEY}, and H · K and H · V up to {LARGEST_HEADS}"
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return "it runs neither in a compiled graph nor under autocast"
        shapes = weight_shapes(self.kind, self.sizes)
        for name, weight in zip(self.names, weights, strict=True):
            shape = list(shapes[name])
            require(list(weight.shape) == shape, f"{name} has shape {list(weight.shape)}; expected {shape}")
            if weight.dtype != x.dtype or weight.device != x.device or not weight.is_contiguous():
                return f"{name} is {weight.dtype} on {weight.device}; expected contiguous {x.dtype} on {x.device}"
        return None

    def state(self, rows: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...] | None, torch.dtype, str]]:
        """Returns (shape, or None for a part that the layer does not have, dtype, name) of each tensor of the state."""
        shapes = token_shapes(self.kind, self.sizes, self.rotary, rows)
        return [(shapes.get(name), STATE_DTYPES.get(name, dtype), name) for name in STATE]

    def fits(self, state: Sequence[Tensor | None], x: Tensor) -> bool:
        """Whether the kernels can update the state of the sequences of x in place."""

        def fit(part: Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype) -> bool:
            if part is None:
                return shape is None
            return part.shape == shape and part.dtype == dtype and part.is_contiguous() and part.device == x.device

        expected = self.state(x.shape[0], x.dtype)
        return all(fit(part, shape, dtype) for part, (shape, dtype, _) in zip(state, expected, strict=True))

    def run(self, weights: Sequence[Tensor], token: Sequence[Any], state: Sequence[Any]) -> Tensor:
        """Computes [B, H V] from the projected input [B, parts], and updates the state."""
        if self.kernels is None:
            self.kernels = import_module(".layer_step", __package__).LayerKernels(self)
        out = self.kernels.run(dict(zip(self.names, weights, strict=True)), token[0], *state)
        # Tells autograd, which may have saved one of these tensors for a backward, that the tensors have changed.
        increment_version([x for x in state if x is not None and not x.is_inference()])
        return out
