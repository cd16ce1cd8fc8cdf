"""Positions other than rotary ones (../rotary.py): sinusoidal embeddings, forgetting."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinusoidal(positions: Tensor, width: int, theta: float = 10000.0) -> Tensor:
    """Returns sinusoidal embeddings (arXiv 1706.03762, section 3.5): positions [...] -> [..., width], float32.

    Channels 2i and 2i + 1 are sine and cosine of position / theta^(2i/width). Angles are float64."""
    frequency = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    angle = positions[..., None].double() * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width].float()


def forgotten(gate: Tensor, valid: Tensor | None) -> Tensor:
    """Returns Σ log σ(gate) over all tokens up to each one, [B, H, L], of which the logit of a query and a key has the
    difference (arXiv 2503.02130). In float64: float32 sums of thousands of tokens leave few digits of the difference
    of neighbours.

    gate [B, L, H]; valid [B, L]: False marks padding, which forgets nothing; None: no padding."""
    log_f = F.logsigmoid(gate.double())
    return (log_f if valid is None else log_f.masked_fill(~valid[..., None], 0)).cumsum(1).mT
