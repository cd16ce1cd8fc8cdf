"""The write strength β of a linear mixer.

Dimensions: B batch, T tokens, H heads.
"""

from typing import Any

from ...ops.call import accumulator
from .stage import Stage, Tokens


class Strength(Stage):
    """β from its logit, a sigmoid or twice that, to which the write gate of competition.write="beta" adds its
    logarithm; it stays a logit if it also depends on the memory (write.residual_chunk)."""

    field = "write.beta"
    values = ("sigmoid", "sigmoid-2")
    kinds = ("beta",)

    def build(self, mixer: Any) -> None:
        write, rows = mixer.spec.write, mixer.spec.memory_rows(mixer.K)
        mixer.parts["beta"] = mixer.H * (rows if write.erase == "channel" else write.steps)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        spec, t.beta = mixer.spec, t.beta.to(accumulator(t.beta))
        if spec.competition is not None and spec.competition.write == "beta":
            t.beta = t.beta + (t.write[..., None] if t.beta.dim() > 3 else t.write)
            t.write = None
        if spec.write.residual_chunk is None:
            t.beta = t.beta.sigmoid() * (2 if spec.write.beta == "sigmoid-2" else 1)


class StepSize(Stage):
    """β = dt, the step size of the decay."""

    field = "write.beta"
    values = ("dt",)
    kinds = ("beta",)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.beta = t.dt
