"""Memories that keep their content where a gate of 0 keeps a token out."""

import math
from typing import Any

import torch

from ..layers.linear.stage import STAGES, Stage, Tokens


class Freeze(Stage):
    """Keeps a memory whose write gate is 0 from decaying."""

    field = "competition.freeze"

    def __call__(self, mixer: Any, t: Tokens) -> None:
        if t.log_decay is None:
            return
        written = t.write > (-math.inf if mixer.spec.competition.write == "beta" else 0)
        t.log_decay = torch.where(written if t.log_decay.dim() < 4 else written[..., None], t.log_decay, 0)


STAGES["freeze"] = Freeze
