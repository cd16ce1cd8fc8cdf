"""The fields that every recipe for training has: AdamW, its learning-rate schedule, the initial weights, and the
competition's gates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ..spec.record import NonNegativeFloat, PositiveFloat, Range, Record

Seed = Annotated[int, Range(f"0 to {2**32 - 1}", lambda seed: 0 <= seed < 2**32)]


@dataclass(frozen=True)
class Optimization(Record):
    """Settings of the optimizer.

    Raises:
        InputError: a value is out of range, or two fields contradict each other.
    """

    lr: PositiveFloat = 1e-3  # peak learning rate
    min_lr: NonNegativeFloat = 0.1  # final learning rate as a fraction of lr
    schedule: Literal["cosine", "linear"] = "cosine"  # shape of the learning rate, after the warm-up
    warmup: NonNegativeFloat = 0.0  # fraction of the training in which the learning rate rises linearly from 0
    # not applied to norms, biases, the dynamics of state-space models, and gates without competition.weight_decay
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: PositiveFloat = 1e-8  # of AdamW
    clip: PositiveFloat | None = 1.0  # largest norm of the gradient; None: no clipping
    initializer_range: PositiveFloat | None = None  # standard deviation of initial weights; None: 0.64 / √hidden_size
    gate_lr: NonNegativeFloat = 1.0  # learning rate of the competition's weights as a multiple of lr
    gate_std: NonNegativeFloat = 0.0  # standard deviation of the competition's initial weights
    gate_init: Literal["normal", "orthogonal"] = "normal"  # their distribution; "orthogonal" needs gate_std > 0

    def _objections(self) -> Iterator[tuple[bool, str]]:
        fractions = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        yield not fractions, f"betas={self.betas}; expected 2 numbers from 0 to less than 1"
        yield self.warmup >= 1, f"warmup={self.warmup:g}; expected less than 1, as a fraction of the training"
        idle = self.gate_init != "normal" and self.gate_std == 0
        yield idle, f"gate_init={self.gate_init!r} with gate_std=0, which leaves the weights at 0; expected gate_std>0"
        above = self.schedule == "linear" and self.min_lr > 0
        yield above, f"min_lr={self.min_lr} with schedule='linear', which ends at 0; expected min_lr=0"

    @property
    def steps(self) -> int:
        """Number of updates of the weights."""
        raise TypeError(f"{type(self).__name__} does not define steps")

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.steps)

    @property
    def clips(self) -> float | None:
        """The largest norm of the gradient; None: no clipping."""
        return self.clip
