"""Feature maps, norms and rotary positions of q and k.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.backends.triton import elementwise
from ...ops.call import accumulator
from ...utils.tables import Table
from ..rotary import angles, frequencies, rotate
from .stage import Stage, Tokens

EPS = 1e-6  # of both norms


def l2_norm(x: Tensor) -> Tensor:
    """Returns x / sqrt(|x|² + 1e-6) over the last dimension."""
    wide = x.to(accumulator(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


FEATURE_MAPS: Table[Callable[[Tensor], Tensor]] = Table(
    "feature_maps", {"identity": lambda x: x, "elu+1": lambda x: F.elu(x) + 1, "relu": F.relu, "silu": F.silu}
)
QK_NORMS: Table[Callable[[Tensor], Tensor]] = Table("qk_norms", {"l2": l2_norm})  # without weights


class FeatureMap(Stage):
    """The map of q and k; of q alone if k is 1 − the decay."""

    field = "inputs.feature_map"
    kinds = ("feature_map",)

    def build(self, mixer: Any) -> None:
        _ = FEATURE_MAPS[mixer.spec.inputs.feature_map]  # imports a plug-in's, which a forward that is compiled cannot

    def __call__(self, mixer: Any, t: Tokens) -> None:
        phi = FEATURE_MAPS[mixer.spec.inputs.feature_map]
        t.q, t.k = phi(t.q), phi(t.k) if "k" in mixer.parts else t.k


class QKNorm(Stage):
    """The norm of q and k."""

    field, values = "inputs.qk_norm", ("l2", "sum")
    kinds = ("qk_norm",)

    def build(self, mixer: Any) -> None:
        _ = QK_NORMS[mixer.spec.inputs.qk_norm]  # as FeatureMap

    def __call__(self, mixer: Any, t: Tokens) -> None:
        norm = QK_NORMS[mixer.spec.inputs.qk_norm]
        if norm is l2_norm and elementwise.computes(mixer.backend, t.q):
            t.q, t.k = elementwise.L2Norm.apply(t.q, EPS), elementwise.L2Norm.apply(t.k, EPS)
        else:
            t.q, t.k = norm(t.q), norm(t.k)


class Rotate(Stage):
    """Rotary positions of q and k, after the feature map and the norm."""

    first: ClassVar[bool] = False  # whether the rotation comes before the feature map

    @classmethod
    def applies(cls, spec: Any) -> bool:
        return spec.inputs.rotary and spec.inputs.rotary_first == cls.first

    def native(self, mixer: Any) -> dict[str, Any]:
        order, turned = "first" if self.first else "last", mixer.rope.dims or mixer.K
        turns = frequencies(mixer.rope, mixer.rope_theta, turned, torch.zeros(1, 1, device="cpu"))
        return {"rotary": order, "turned": turned, "amplitude": mixer.rope.scale, "frequencies": turns}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        cos, sin = angles(t.positions, mixer.rope, mixer.rope_theta, mixer.K)
        turn = cos.to(accumulator(t.q)), sin.to(accumulator(t.q))
        t.q, t.k = rotate(t.q, turn, mixer.backend), rotate(t.k, turn, mixer.backend)


class RotateFirst(Rotate):
    """Rotary positions of q and k, before the feature map."""

    field, first = "inputs.rotary_first", True
