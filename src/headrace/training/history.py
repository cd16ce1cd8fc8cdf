"""The numbers that a run logs: its history, its progress bar and its trackers."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from platform import node
from typing import Any

from tqdm import tqdm

from .. import zoo
from ..files.results import finite
from ..utils.errors import InputError
from ..utils.extras import require_packages

TIMED = 5  # steps that are timed to tell the time of a run, after one that warms up
UNITS = (("days", 86400.0), ("hours", 3600.0), ("min", 60.0), ("s", 1.0))
GATE = re.compile(r"_(read|write)_(entropy|specialization|load)_")  # logged names of gate statistics


@dataclass
class Measures:
    """Constants of a run by which losses and speeds are converted, and what a speed is measured from."""

    tokens_per_step: int
    bytes_per_token: float  # of the held-out text
    seconds_per_token: float | None  # at the peak of all devices together; None: not known
    last: tuple[float, int] | None = None  # time and step of the last speed
    paused: float = 0.0  # seconds of evaluations since then

    def speed(self, step: int) -> dict[str, float]:
        """Training speed since the last call, without the time of evaluations."""
        now, before, paused = time.perf_counter(), self.last, self.paused
        self.last, self.paused = (now, step), 0.0
        if before is None or step == before[1]:
            return {}
        rate = (step - before[1]) * self.tokens_per_step / (now - before[0] - paused)
        speed = {"tokens_per_second": round(rate, 1)}
        if self.seconds_per_token is not None:
            speed["mfu"] = round(rate * self.seconds_per_token, 4)
        return speed


class History:
    """The numbers of a run by step, in the form of `finite`. With `shown`, which is set in process 0, they are printed,
    except those of gates."""

    def __init__(self, shown: bool):
        self.shown = shown
        self.trackers: list[TensorBoard | Service] = []
        self.points: list[dict[str, Any]] = []
        self.progress: tqdm | None = None
        self.seconds: list[float] = []  # the times of the ends of the first steps

    def add(self, step: int, numbers: dict[str, Any]) -> None:
        self.points.append(finite(numbers | {"step": step}))
        for tracker in self.trackers:
            tracker.log({chart(name): value for name, value in numbers.items()}, step)
        if self.shown and self.progress is not None:
            texts = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in numbers.items()}
            self.progress.write(str({name: text for name, text in texts.items() if not GATE.search(name)}))

    def last(self, name: str) -> int:
        """A number that counts, as it was last logged; 0 if it never was."""
        return next((int(point[name]) for point in reversed(self.points) if name in point), 0)

    @contextmanager
    def bar(self, steps: int, first: int) -> Iterator[None]:
        """Shows the progress from step `first` to the last one of `steps`."""
        with tqdm(total=steps, initial=first, dynamic_ncols=True, disable=not self.shown) as self.progress:
            try:
                yield
            finally:
                self.progress, self.seconds = None, []

    def tick(self, left: int) -> None:
        """Notes the end of a step and, after the first ones, prints how long the `left` steps that follow will take."""
        assert self.progress is not None
        self.progress.update()
        if not self.shown or len(self.seconds) > TIMED:
            return
        self.seconds.append(time.perf_counter())
        if len(self.seconds) > TIMED:
            each = (self.seconds[-1] - self.seconds[0]) / TIMED
            said = f"{each:.3g} s per step: about {duration(each * left)} for {left:,} more steps, without evaluations"
            self.progress.write(said)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def chart(name: str) -> str:
    """The name of a number in trackers, which group names by what stands before the slash."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def duration(seconds: float) -> str:
    """A time in the unit in which it is a number of 1 to 3 digits."""
    unit, size = next((each for each in UNITS if seconds >= 2 * each[1]), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


class TensorBoard:
    """Writes to the folder `runs` of a run, each part of a run that is resumed to a folder of its own."""

    def __init__(self, folder: Path, recipe: str):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "runs" / f"{datetime.now():%b%d_%H-%M-%S}_{node()}"))
        self.writer.add_text("recipe", f"```yaml\n{recipe}```")

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Service:
    """Weights & Biases, or Trackio, which has the same functions."""

    def __init__(self, name: str, folder: Path, recipe: str):
        self.module: Any = import_module(name)
        project = os.environ.get(f"{name.upper()}_PROJECT", "headrace")
        self.module.init(project=project, name=folder.name, config={"recipe": recipe})

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.module.log(numbers, step=step)

    def close(self) -> None:
        self.module.finish()


TRACKERS = ("tensorboard", "wandb", "trackio", "none")


def check_trackers(trackers: str) -> None:
    for name in zoo.split(trackers):
        if name not in TRACKERS:
            raise InputError(f"--trackers={trackers!r}; expected {', '.join(TRACKERS)}, or several separated by commas")
        if name != "none":
            require_packages(f"--trackers={trackers}", name)


def open_trackers(trackers: str, folder: Path, recipe: str) -> list[TensorBoard | Service]:
    """The trackers of a run in a folder, from names in TRACKERS; they show its recipe."""
    names = [name for name in zoo.split(trackers) if name != "none"]
    return [TensorBoard(folder, recipe) if name == "tensorboard" else Service(name, folder, recipe) for name in names]
