"""What is between a linear mixer's recurrence and its output: skip, read gate, norm, output gate and projection.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.triton import elementwise
from ...ops.call import accumulator
from ...spec.read import HEAD_NORMS, WIDE_NORMS
from ..base import SelfInitialized
from .competition import gates_query
from .stage import Stage, Tokens, refuse_changes

GROUP_NORM_EPS = 64e-5  # RWKV-6: 1e-5 · 8², where 8 is its head size divisor
GATES = "silu", "sigmoid", "sigmoid-low-rank"  # of each channel, which the kernel of the norm applies
# The lower bounds of the norms, which are the epsilons of PyTorch's F.normalize and nn.LayerNorm.
NORM_FLOORS = {"l2": 1e-12, "layer": 1e-5**0.5}


def normalized(x: Tensor, kind: str, floor: Tensor | float) -> Tensor:
    """Divides x [..., d] by its L2 norm ("l2") or root mean square ("rms"), or centres x and divides it by its standard
    deviation ("layer"). floor [..., 1] bounds the divisor: max(norm, floor) for "l2", else √(norm² + floor²)."""
    if kind == "l2":
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=floor)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + floor**2)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns x · weight + bias, without what is None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


class GateLogits(SelfInitialized):
    """The logits of a gate of the output or of v, [B, T, H, V], or [B, T, H, 1] for "sigmoid-head", from its part
    [B, T, in_features] of the input projection. Low-rank gates have rank V."""

    quantizable = False  # by `quantize`

    def __init__(self, kind: str, num_heads: int, value_dim: int, bias: bool = True):
        super().__init__()
        self.num_heads, low_rank, head = num_heads, kind.endswith("low-rank"), kind.endswith("head")
        self.activation = kind.partition("-")[0]
        self.in_features = value_dim if low_rank else num_heads if head else num_heads * value_dim
        self.up = nn.Linear(value_dim, num_heads * value_dim, bias) if low_rank else nn.Identity()
        self.bias = nn.Parameter(torch.empty(num_heads)) if head and bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.up(x)
        logits = logits if self.bias is None else logits + self.bias
        return logits.unflatten(-1, (self.num_heads, -1))


class Skip(Stage):
    """Adds the token's values times a weight per head, Mamba-2's D."""

    field = "read.skip"
    kinds = ()

    def build(self, mixer: Any) -> None:
        mixer.skip = nn.Parameter(torch.empty(mixer.H))

    def reset(self, mixer: Any) -> None:
        mixer.skip.fill_(1)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.out + mixer.skip[:, None] * t.parts["v"]


class ReadGate(Stage):
    """The read gate of head competition, after the norm of a head, which would cancel it."""

    kinds = ()
    after_norm: ClassVar[bool] = True

    @classmethod
    def applies(cls, spec: Any) -> bool:
        gate = spec.competition
        reads = gate is not None and gate.read != "none" and not gates_query(spec)
        single = spec.read.norm == "rms-groups" and spec.heads.qk_groups in (None, spec.heads.count)  # a head per group
        return reads and (single or spec.read.norm in HEAD_NORMS) == cls.after_norm

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.out * t.read[..., None].to(t.out.dtype)


class ReadGateFirst(ReadGate):
    """The read gate of head competition, before a norm over several heads, or none."""

    after_norm = False


class Gate(Stage):
    """The output gate, after the norm."""

    order = "norm-gate"

    @classmethod
    def applies(cls, spec: Any) -> bool:
        return spec.read.gate != "none" and spec.read.order == cls.order

    def build(self, mixer: Any) -> None:
        mixer.gate = GateLogits(mixer.spec.read.gate, mixer.H, mixer.V, mixer.spec.read.gate_bias)
        mixer.parts["gate"] = mixer.gate.in_features

    def native(self, mixer: Any) -> dict[str, Any]:
        refuse_changes(mixer.spec, "read.gate_bias")
        return {"gate": mixer.spec.read.gate, "order": self.order}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        if "gate" in t.parts:  # not yet applied by the kernel of the norm
            logits = t.sequences.tokenwise(mixer.gate, t.parts["gate"])
            is_silu = mixer.gate.activation == "silu"
            t.out = elementwise.silu_product(t.out, logits, mixer.backend) if is_silu else t.out * torch.sigmoid(logits)


class GateFirst(Gate):
    """The output gate, before the norm."""

    order = "gate-norm"


class Norm(Stage):
    """The norm of what the heads read, in the accumulator's precision."""

    field, values = "read.norm", (*HEAD_NORMS, *WIDE_NORMS)

    def build(self, mixer: Any) -> None:
        read = mixer.spec.read
        if read.weighted:
            size = mixer.H * mixer.V if read.norm in ("group", *WIDE_NORMS) else mixer.V
            mixer.norm_weight = nn.Parameter(torch.empty(size))
            if read.norm in ("group", "layer"):
                mixer.norm_bias = nn.Parameter(torch.empty(size))

    def reset(self, mixer: Any) -> None:
        if mixer.norm_weight is not None:
            rwkv = mixer.spec.read.norm == "group" and mixer.spec.read.bonus
            mixer.norm_weight.fill_(mixer.share**0.7 if rwkv else 1)
        if mixer.norm_bias is not None:
            mixer.norm_bias.zero_()

    def native(self, mixer: Any) -> dict[str, Any]:
        read = mixer.spec.read
        if read.weighted != replace(read, affine=None).weighted:
            refuse_changes(mixer.spec, "read.affine")
        return {"norm": read.norm}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        read = mixer.spec.read
        kinds = [type(stage) for stage in mixer.readout if type(stage) is not ReadGate]  # which may come after the gate
        gated = read.norm == "rms" and read.gate in GATES and kinds[-3:] == [Norm, Gate, Out]
        if gated and t.out.dtype == t.parts["gate"].dtype and elementwise.computes(mixer.backend, t.out):
            gate, silu = t.sequences.tokenwise(mixer.gate, t.parts.pop("gate")), read.gate == "silu"
            t.out = elementwise.GatedNorm.apply(t.out, gate, mixer.norm_weight, mixer.norm_eps, silu)
        else:
            t.out = NORMS[read.norm](mixer, t.out)


def gate_and_norm(mixer: Any, t: Tokens) -> int:
    """Computes all stages up to the norm of several heads by one kernel, where an output gate precedes the norm.
    Returns the number of these stages, or 0 where the kernel does not compute them, as those of a plug-in."""
    groups = {"rms-joint": 1, "rms-groups": mixer.Hq}.get(mixer.spec.read.norm)
    if groups is None or mixer.spec.read.gate != "silu" or not elementwise.gate_norm_takes(mixer.H // groups, mixer.V):
        return 0
    kinds, v, skip, weight = [type(stage) for stage in mixer.readout], t.parts["v"], mixer.skip, mixer.norm_weight
    joined = [kind for kind in (Skip, ReadGateFirst, GateFirst, Norm) if kind in kinds]
    if kinds[: len(joined)] != joined or joined[-2:] != [GateFirst, Norm]:
        return 0
    activations, parameters = (t.out, t.parts["gate"], v), [p for p in (skip, weight) if p is not None]
    alike = len({x.dtype for x in activations}) == 1
    if not (alike and elementwise.computes(mixer.backend, *activations, *parameters, in_graphs=True)):
        return 0
    gate = t.sequences.tokenwise(mixer.gate, t.parts["gate"])
    reads = t.read.to(t.out.dtype) if ReadGateFirst in kinds else None
    given = t.out, gate, None if skip is None else v, skip, reads, weight
    t.out = elementwise.gate_norm(*given, groups, mixer.norm_eps)
    return len(joined)


def floored_norm(mixer: Any, x: Tensor) -> Tensor:
    """l2 and layer: norms per head with a lower bound of the divisor."""
    kind = mixer.spec.read.norm
    wide = normalized(x.to(accumulator(x)), kind, NORM_FLOORS[kind])
    return affine(wide, mixer.norm_weight, mixer.norm_bias).to(x.dtype)


def group_norm(mixer: Any, x: Tensor) -> Tensor:
    centred = F.layer_norm(x.to(accumulator(x)), x.shape[-1:], eps=mixer.group_eps)
    weight, bias = (y.view(x.shape[-2:]) for y in (mixer.norm_weight, mixer.norm_bias))
    return (centred * weight + bias).to(x.dtype)


def rms_norm(mixer: Any, x: Tensor) -> Tensor:
    """rms, per head, and rms-joint, over all heads."""
    weight = mixer.norm_weight
    narrow = weight is None or weight.dtype == x.dtype  # PyTorch's RMSNorm has the accumulator's precision inside
    wide = x if narrow else x.to(accumulator(x))
    weight = None if weight is None else weight.to(wide.dtype)
    wide = wide.flatten(-2) if mixer.spec.read.norm == "rms-joint" else wide
    return F.rms_norm(wide, wide.shape[-1:], weight, mixer.norm_eps).view_as(x).to(x.dtype)


def rms_norm_of_groups(mixer: Any, x: Tensor) -> Tensor:
    wide = x.to(accumulator(x))
    groups = wide.unflatten(-2, (mixer.Hq, -1)).flatten(-2)
    normal = F.rms_norm(groups, groups.shape[-1:], None, mixer.norm_eps).view_as(x)
    return (normal * mixer.norm_weight.to(wide.dtype).view(x.shape[-2:])).to(x.dtype)


NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "l2": floored_norm, "layer": floored_norm, "group": group_norm, "rms": rms_norm, "rms-joint": rms_norm,
    "rms-groups": rms_norm_of_groups,
}  # fmt: skip


class Out(Stage):
    """The output projection: [B, T, H, V] -> [B, T, D]."""

    kinds = ()

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.sequences.tokenwise(mixer.o_proj, t.out.flatten(-2))
