"""xLSTM's exponential input gate (write.beta="exp") and the running maximum that keeps its memory finite.

The update of head h, with a forget gate f ≤ 1 and an input gate i, is (arXiv 2405.04517, equations 19 to 27)

    S_t = f_t S_{t−1} + e^{i_t} k_tᵀ v_t        n_t = f_t n_{t−1} + e^{i_t} k_t
    o_t = q_t S_t / max(|q_t · n_t|, 1)

S and n are held times e^−m, where m_t = max(log f_t + m_{t−1}, i_t, 0). Their decay is then log f_t + m_{t−1} − m_t ≤ 0
and their write strength e^{i_t − m_t} ≤ 1, and 1 becomes e^−m in the denominator. No output depends on m, so that
autograd treats it as a constant. n is one more column of S, for a value of 1. i has no bias: a norm of the head after
the division cancels it, as it cancels the denominator, up to its epsilon. The layer is that of xLSTM 7B (arXiv
2503.13427), which has no convolution, without its bound of both gates' logits, 15 tanh(x / 15), and with a bias in the
norm.

Dimensions: B batch, T tokens, H heads, V value dimension per head, N sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.linear.stage import STAGES, Stage, Tokens
from ..ops.call import accumulator
from ..ops.derivatives import refuse_transforms
from ..ops.sequences import Sequences
from ..spec.decay import Decay
from ..spec.linear import Heads, MixerSpec, Read, Write
from .registration import register_mixer
from .scan import NAME, scan_packed_, tropical_


class ExponentialGate(Stage):
    """log_decay and β of the stabilized memory."""

    splits = False

    def build(self, mixer: Any) -> None:
        mixer.parts["beta"] = mixer.H

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.log_decay, t.beta, t.peaks, t.next["peak"] = stabilized(t.beta, t.log_decay, t.before("peak"), t.sequences)


class DivideByWeights(Stage):
    """Divides what is read by max(|q · n|, e^−m), given q · n as its last column."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        least = torch.exp(-t.peaks).clamp(min=torch.finfo(t.peaks.dtype).tiny ** 0.5)  # no gradient is infinite
        t.out = t.out[..., :-1] / torch.maximum(t.out[..., -1:].abs(), least[..., None])


def stabilized(
    gate: Tensor, log_decay: Tensor | None, peak: Tensor | None, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the arguments of the recurrence for a memory that is held times e^−m.

    Args:
        gate: i [B, T, H].
        log_decay: log f, [H] or [B, T, H]; None: 0.
        peak: m before the first token [N, H]; None: 0.
        sequences: the sequences of the tokens.

    Returns:
        (log_decay, β and m [B, T, H], m after the last token of each sequence [N, H]).
    """
    gate = gate.to(accumulator(gate))
    fade = (gate.new_zeros(()) if log_decay is None else log_decay).expand_as(gate)
    peak = gate.new_zeros(sequences.count, gate.shape[2]) if peak is None else peak.to(gate)
    peaks = _peaks(gate.detach(), fade.detach(), peak, sequences)
    before, last = sequences.shift(peaks, peak[:, None])
    return fade + (before - peaks), torch.exp(gate - peaks), peaks, last[:, 0]


@torch.no_grad()
def _peaks(gate: Tensor, fade: Tensor, peak: Tensor, sequences: Sequences) -> Tensor:
    """Returns m at each token [B, T, H]. Time is the first dimension of the scan."""
    before, _ = sequences.shift(gate, peak[:, None])
    least, first = F.relu(gate), sequences.positions(None, gate)[..., None] == 0
    peaks = torch.where(first, torch.maximum(before + fade, least), least)
    if sequences.T > 1:
        refuse_transforms(NAME)
        peaks = peaks.transpose(0, 1).contiguous()
        scan_packed_(torch.where(first, -torch.inf, fade).transpose(0, 1).contiguous(), peaks, tropical_)
        peaks = peaks.transpose(0, 1)
    return peaks


STAGES.update({"exponential-gate": ExponentialGate, "divide-by-weights": DivideByWeights})
register_mixer(
    "mlstm",
    MixerSpec(
        Heads(expand_k=0.5, width=512),  # xLSTM-7b: 8 heads at a hidden size of 4096
        decay=Decay("sigmoid-head", temperature=1.0),
        write=Write(beta="exp"),
        read=Read("group", "sigmoid", eps=1e-6),
    ),
    about="xLSTM's matrix memory: an exponential input gate; the output is divided by max(|sum of weights|, 1).",
    paper="https://arxiv.org/abs/2405.04517",
)
