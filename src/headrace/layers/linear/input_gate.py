"""xLSTM's exponential input gate (write.beta="exp") and the running maximum that keeps its memory finite.

The update of head h, with a forget gate f ≤ 1 and an input gate i, is (arXiv 2405.04517, equations 19 to 27)

    S_t = f_t S_{t−1} + e^{i_t} k_tᵀ v_t        n_t = f_t n_{t−1} + e^{i_t} k_t
    o_t = q_t S_t / max(|q_t · n_t|, 1)

S and n are held times e^−m, where m_t = max(log f_t + m_{t−1}, i_t, 0). Their decay is then log f_t + m_{t−1} − m_t ≤ 0
and their write strength e^{i_t − m_t} ≤ 1, and 1 becomes e^−m in the denominator. No output depends on m, so that
autograd treats it as a constant. n is one more column of S, for a value of 1. i has no bias: a norm of the head after
the division cancels it, as it cancels the denominator, up to its epsilon.

Dimensions: B batch, T tokens, H heads, V value dimension per head, N sequences.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.call import accumulator
from ...ops.derivatives import refuse_transforms
from ...ops.sequences import Sequences
from ..scans.scan import NAME, Pack, running_maximum


class Stabilised(NamedTuple):
    """The arguments of the recurrence for a memory that is held times e^−m."""

    log_decay: Tensor  # [B, T, H]
    beta: Tensor  # [B, T, H]
    peaks: Tensor  # m [B, T, H]
    last: Tensor  # m after the last token of each sequence [N, H]

    def divided(self, out: Tensor) -> Tensor:
        """Returns what is read [B, T, H, V] over max(|q · n|, e^−m), given it with q · n as its last column."""
        least = torch.exp(-self.peaks).clamp(min=torch.finfo(self.peaks.dtype).tiny ** 0.5)  # no gradient is infinite
        return out[..., :-1] / torch.maximum(out[..., -1:].abs(), least[..., None])


def stabilised(gate: Tensor, log_decay: Tensor | None, peak: Tensor | None, sequences: Sequences) -> Stabilised:
    """Computes log_decay, β and m.

    Args:
        gate: i [B, T, H].
        log_decay: log f, [H] or [B, T, H]; None: 0.
        peak: m before the first token [N, H]; None: 0.
        sequences: the sequences of the tokens.
    """
    gate = gate.to(accumulator(gate))
    fade = (gate.new_zeros(()) if log_decay is None else log_decay).expand_as(gate)
    peak = gate.new_zeros(sequences.count, gate.shape[2]) if peak is None else peak.to(gate)
    before, peaks, last = _peaks(gate.detach(), fade.detach(), peak, sequences)
    return Stabilised(fade + (before - peaks), torch.exp(gate - peaks), peaks, last)


@torch.no_grad()
def _peaks(gate: Tensor, fade: Tensor, peak: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Returns m before and at each token [B, T, H], and after the last token of each sequence."""
    least = F.relu(gate)
    if sequences.T == 1 and not sequences.packed:
        peaks = torch.maximum(fade + peak[:, None], least)
        return peak[:, None], peaks, peaks[:, 0]
    refuse_transforms(NAME)
    whole = Pack(sequences.counts(), gate.device).tile(0, sequences.B * sequences.T)
    before, peaks = running_maximum(least.flatten(0, 1), -fade.flatten(0, 1), peak, whole)
    last = peak.index_copy(0, whole.ended, peaks[whole.last])
    return before.view_as(gate), peaks.view_as(gate), last
