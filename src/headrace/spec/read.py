"""The record of a linear mixer's readout."""

from dataclasses import dataclass
from typing import Literal

from .record import PositiveFloat, Record

SUMS = ("sum", "detached")  # norms that divide by the sum of weights, which is one more column of the state
HEAD_NORMS = ("rms", "group", "l2", "layer")  # norms over the channels of a head, which cancel a factor per head
WIDE_NORMS = ("rms-joint", "rms-groups")  # norms over the channels of several heads


@dataclass(frozen=True)
class Read(Record):
    """How the layer's output is read from the memory. Bonus and scale are arguments of `linear_attention`; its output
    passes through the skip, the norm and the output gate."""

    # sum: linear attention's normalizer; detached: max(sum of weights, 1) without a gradient; rms, group, l2 and layer:
    # norm per head; rms-joint: RMSNorm over all heads; rms-groups: over the heads that share a head of q and k
    norm: Literal["none", "sum", "detached", "rms", "group", "l2", "layer", "rms-joint", "rms-groups"] = "rms"
    # activation of the output gate; sigmoid-head: one number per head, with a bias, instead of one per channel
    gate: Literal["none", "silu", "sigmoid", "sigmoid-low-rank", "sigmoid-head"] = "none"
    order: Literal["norm-gate", "gate-norm"] = "norm-gate"  # which of norm and gate comes first
    scale: Literal["key", "one"] = "key"  # factor of q: K^-1/2 or 1
    bonus: bool = False  # RWKV-6's u: a learned weight for the current token
    skip: bool = False  # Mamba-2's D: v times a learned weight per head is added to the output
    by_length: bool = False  # whether what is read is divided by the number of tokens so far
    # whether the norm has a weight (group, layer: and a bias); None: l2 and layer have none, the others do
    affine: bool | None = None
    eps: PositiveFloat | None = None  # of rms, group, rms-joint and rms-groups; None: the model's; for group, RWKV's
    gate_bias: bool = True  # whether the logits of sigmoid-low-rank and sigmoid-head have a bias
    bias: bool = False  # whether the output projection has a bias

    def _objections(self):
        yield (
            self.affine is not None and self.norm in ("none", *SUMS),
            f"read.affine={self.affine} is of a norm with channels; expected read.norm to be one of "
            f"{', '.join((*HEAD_NORMS, *WIDE_NORMS))}, got {self.norm!r}",
        )
        yield (
            self.affine is False and self.norm in ("group", *WIDE_NORMS),
            f"read.affine=False with read.norm={self.norm!r}; expected one of rms, l2, layer, whose weight is optional",
        )
        yield (
            self.eps is not None and self.norm not in ("rms", "group", *WIDE_NORMS),
            f"read.eps={self.eps} is of read.norm='rms', 'group', 'rms-joint' and 'rms-groups'; got {self.norm!r}",
        )
        yield (
            not self.gate_bias and self.gate not in ("sigmoid-low-rank", "sigmoid-head"),
            f"read.gate_bias=False is of read.gate='sigmoid-low-rank' and 'sigmoid-head'; got {self.gate!r}",
        )
        yield (
            self.by_length and self.norm == "sum",
            "read.by_length=True has no effect with read.norm='sum', since it divides numerator and denominator alike; "
            "expected read.by_length=False, or another norm",
        )

    @property
    def weighted(self) -> bool:
        """Whether the norm has a learned weight."""
        return self.norm in ("rms", "group", *WIDE_NORMS) if self.affine is None else self.affine
