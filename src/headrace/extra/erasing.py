"""Delta rules that erase by another vector than they write (write.erase), by the recurrence of `dplr`:

    feedback:   S ← e^g S + β kᵀ (w v − b k S)                    o = (q − d k) S        (Comba, arXiv 2506.02475)
    channel:    S ← e^g S + kᵀ (w v − (β ⊙ k) e^g S)              o = q S                (GDN-2, arXiv 2605.22791)

Comba's b = σ(·) and d are learned per head; it reads the memory before the decay. β is one number per key channel in
GDN-2, whose w is one per value channel, and one number per head in Comba. Comba's k and q have length 1 here. In
flash-linear-attention's layer, b k and q − d b k are divided by their lengths instead, which cancels the b of b k.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.linear.stage import STAGES, Stage, Tokens
from ..ops.sequences import Sequences
from ..spec.linear import RULES, MixerSpec, Read, Write
from ..zoo.mixers import GATED_DELTANET, KDA
from .chunks import recur
from .dplr import Operands, form, step
from .recurrence import ModuleRecur, RecurrenceModule
from .registration import register_mixer


class GeneralDelta(RecurrenceModule):
    """Computes the recurrence of a spec with write.erase.

    Args:
        erase: "feedback" or "channel".
        num_heads: H.
        scale: factor of q.
    """

    feedback: Any  # the logit of Comba's b
    correction: Any  # Comba's d

    def __init__(self, erase: str, num_heads: int, scale: float):
        super().__init__()
        self.scale = scale
        self.feedback, self.correction = (
            nn.Parameter(torch.empty(num_heads)) if erase == "feedback" else None for _ in range(2)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.feedback is not None:
            self.feedback.fill_(1)
            self.correction.fill_(0.02)  # the author's for small models

    def compute(self, op: Any, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """beta is [B, T, H], or [B, T, H, K] of GDN-2. op, `linear_attention`, has no such update."""
        v, beta, H = x["v"], x["beta"], x["v"].shape[2]
        q, k = (x[name].repeat_interleave(H // x[name].shape[2], 2) for name in "qk")
        g = x.get("log_decay", torch.zeros_like(k))
        g = (g if g.dim() == 4 else g[..., None]).expand_as(k)
        if self.feedback is None:
            operands = Operands(self.scale * q, k, v, g, beta * k * g.exp(), k)
        else:
            b, d = (y.to(v).repeat_interleave(H // len(y))[:, None] for y in (self.feedback, self.correction))
            written = beta[..., None] * k
            operands = Operands(self.scale * (q - d * k), written, v, g, torch.sigmoid(b) * k, written)
        return recur(step, form, operands, sequences, None if state is None else state.memory)


class WriteGate(Stage):
    """A sigmoid gate of v, one number per channel, where β is one per key channel (arXiv 2605.22791)."""

    def build(self, mixer: Any) -> None:
        mixer.parts["write"] = mixer.H * mixer.V

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = t.v * torch.sigmoid(t.parts["write"].view_as(t.v))


class Erase(ModuleRecur):
    """The recurrence of a rule that erases by another vector."""

    name = "general"

    @property
    def static_shapes(self) -> bool:
        return torch.compiler.is_compiling()  # the lengths of the sequences lay out its chunks, but for an operator

    def build(self, mixer: Any) -> None:
        super().build(mixer)
        mixer.general = GeneralDelta(mixer.spec.write.erase, mixer.H, mixer.scale)


def rules(spec: MixerSpec) -> Iterator[tuple[bool, str]]:
    """Objections to erasing by another vector."""
    write, gate = spec.write, spec.competition
    yield (
        not (write.rule == "delta" and write.sigmoid) or write.steps > 1 or bool(write.residual_chunk),
        f"write.erase={write.erase!r} changes what the delta rule removes; expected write.rule='delta', "
        "write.beta='sigmoid' or 'sigmoid-2', write.steps=1 and write.residual_chunk=None",
    )
    yield (
        gate is not None and gate.write == "beta" and write.erase == "channel",
        "competition.write='beta' with write.erase='channel' gates what is removed and not what is written; "
        "expected competition.write='value'",
    )


RULES["write.erase"] = rules


STAGES.update({"gate-of-channels": WriteGate, "erase": Erase})
register_mixer(
    "comba",
    replace(GATED_DELTANET, write=Write("delta", "sigmoid", erase="feedback"), read=Read("rms", "sigmoid")),
    about="Gated DeltaNet that removes a learned share of the stored value, read before the decay, and corrects q by "
    "k.",
    paper="https://arxiv.org/abs/2506.02475",
)
register_mixer(
    "gated-deltanet-2",
    replace(KDA, write=Write("delta", "sigmoid", erase="channel")),  # gdn2_1.3B: 18 heads at 2304
    about="KDA that removes with a strength per key channel and writes with another per value channel.",
    paper="https://arxiv.org/abs/2605.22791",
)
