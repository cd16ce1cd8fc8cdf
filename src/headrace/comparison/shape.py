"""What all arms of a comparison share: the shape of the model around the mixer, and the training."""

from dataclasses import dataclass

from ..spec.record import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Record
from ..training.optimization import Optimization

MATCHED = 1.05  # largest ratio of two sizes that are called matched


@dataclass(frozen=True)
class Shape(Record):
    """The model around the mixer.

    mlp: MLP width of the model with the most parameters; the widths of the other models are chosen so that all models
    have equally many parameters. None: no MLP if the parameters match without one, else `hidden_size`. 0: no MLP."""

    hidden_size: PositiveInt = 64
    layers: PositiveInt = 1
    heads: PositiveInt = 8
    mlp: NonNegativeInt | None = None


@dataclass(frozen=True)
class ArmRecipe(Optimization):
    """Training of one arm with AdamW."""

    lr: PositiveFloat = 1e-2
    min_lr: NonNegativeFloat = 0.05
    steps: PositiveInt = 300
    batch_size: PositiveInt = 64
    warmup: NonNegativeFloat = 1 / 15
    evaluations: PositiveInt = 10
    held_out: PositiveInt = 512  # number of held-out rows
    # torch.compile of each block; None: on a CUDA GPU, unless a mixer needs the lengths of sequences on the host
    compile: bool | None = None
