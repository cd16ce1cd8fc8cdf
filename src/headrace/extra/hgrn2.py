"""The key of HGRN2 (arXiv 2404.07904), which follows from the decay."""

from typing import Any

import torch

from ..layers.linear.stage import STAGES, Stage, Tokens


class ComplementKey(Stage):
    """HGRN2's key, 1 − the decay (arXiv 2404.07904, section 3.2)."""

    def build(self, mixer: Any) -> None:
        del mixer.parts["k"]

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.k = -torch.expm1(t.log_decay).to(t.q.dtype)


STAGES["complement-key"] = ComplementKey
