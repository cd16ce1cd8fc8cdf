"""The plan of a benchmark: models of one shape, measured at points of length and batch size. Its folder holds

plan.json           the plan; the folder is for this plan only
points/<point>.json the measurements of all models at one point
bench.csv           all measurements, a line for each model and point
report.html, *.png  the report
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..files.engine import Claim
from ..files.environment import environment
from ..files.provenance import defaults
from ..utils.errors import require
from ..verification.errors import dtype_of
from . import MEASURED
from .models import Shape, check


@dataclass(frozen=True)
class BenchPlan:
    """Models, machine settings and number of rounds of a benchmark."""

    models: tuple[str, ...]
    shape: Shape = field(default_factory=Shape)
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    rounds: int = 5

    def __post_init__(self):
        dtype_of(self.dtype)  # raises for an unknown one
        for name, value in (vars(self.shape) | {"threads": self.threads, "rounds": self.rounds}).items():
            require(value >= 1, f"--{name.replace('_', '-')}={value}; expected at least 1")
        for name in self.models:
            check(name, self.shape)

    def claim(self) -> Claim:
        """The claim of the folder of its measurements."""
        content = asdict(self) | {"models": list(self.models), "machine": environment()["processor"]}
        return Claim(content, set(defaults(self)))

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def clock(self) -> str:
        """The clock of the measurements. CPU time does not depend on other processes, but measures one CPU thread only;
        with several threads or a device it is the wall clock."""
        return "cpu time" if self.device == "cpu" and self.threads == 1 else "wall clock"


@dataclass(frozen=True, order=True)
class Point:
    """One measurement of all models at one length and batch size."""

    what: str  # memory, training, prefill or decoding
    length: int  # tokens of a row, of the prompt, or of the context
    batch: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * (1 if self.what == "decoding" else self.length)

    @property
    def path(self) -> Path:
        return Path("points", f"{self.what}-{self.length}x{self.batch}.json")


def points(what: Sequence[str], lengths: list[int], batches: list[int], contexts: list[int]) -> list[Point]:
    """The points of the measurements `what`, in the order of measuring."""
    rows = [(length, batch) for length in lengths for batch in batches]
    alone = {"prefill": lengths, "decoding": contexts}  # of one sequence
    axes = {"memory": rows, "training": rows} | {name: [(n, 1) for n in each] for name, each in alone.items()}
    return [Point(name, *place) for name in MEASURED if name in what for place in axes[name]]
