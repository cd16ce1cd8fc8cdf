"""Measures the points of a plan in a folder, each once, so that a run that was killed at any moment continues.

plan.json       the plan; the folder is for this plan only
made-by.json    the versions that worked in the folder

The result of a point is a JSON file of its own, written atomically when it is finished, with its environment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import provenance
from .checks import Form
from .environment import environment
from .results import NOT_FINITE, finite, read_result, write_result
from .workers import Worker, distribute

Row = dict[str, Any]
Measure = Callable[[Any, Worker], Row]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Claim:
    """What a folder is for.

    plan: everything that the results depend on, as JSON.
    optional: places of the plan that an older version's may lack: see `provenance.defaults`.
    made: properties beside the plan that the results depend on, as {name: value}.
    """

    plan: Any
    optional: Iterable[provenance.Place] = ()
    made: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One measurement.

    name: in lines of progress.
    path: the file of its result, in the folder.
    value: what is measured.
    form: of its result, as `checks.misfit` describes it.
    fingerprint: of what the result depends on beside the plan; a result with another one is measured again.
    """

    name: str
    path: Path
    value: Any
    form: Form = field(default_factory=dict)
    fingerprint: str | None = None

    def kept(self, folder: Path) -> Row | None:
        """Its row, if the folder has one that holds."""
        if not (folder / self.path).exists():
            return None
        row = read(folder / self.path, self.form)
        return row if row.get("fingerprint") == self.fingerprint else None


# (point, None when its measurement begins; its row if it was finished before; or what `measure` reports)
Listen = Callable[[Point, Any], None]


def run(
    folder: Path, claim: Claim | None, points: Sequence[Point], measure: Measure,
    listen: Listen = lambda point, news: None, workers: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Measures the points that the folder does not have yet, and returns the rows of all points, in their order.

    Args:
        claim: the folder's; None if it is claimed already.
        measure: measure(point.value, worker) -> its result, which is kept with the environment. A number in it may be
            NaN or infinite: then the row has the key NOT_FINITE, with the places of such numbers.
        listen: called in this process on progress.
        workers: the device of each worker process; () to measure in this process, in order.

    Raises:
        InputError: the folder has another plan; a result is damaged; a worker process died.
    """
    pending = []
    with claimed(folder, claim) if claim else nullcontext():
        for point in points:
            row = point.kept(folder)
            if row is not None:
                listen(point, row)
            elif workers:
                pending.append(point)
            else:
                listen(point, None)
                keep(folder, point, measure, Worker(None, partial(listen, point)))
        jobs = [(folder, point, measure) for point in pending]
        distribute(keep, jobs, workers, lambda i, news: listen(pending[i], news))
        return [read(folder / point.path, point.form) for point in points]


@contextmanager
def claimed(folder: Path, claim: Claim) -> Iterator[None]:
    """Claims a folder. If the block ends with an exception before there is a result, the folder is free again, so that
    a corrected command can take it."""
    provenance.claim(folder, claim.plan, optional=claim.optional, **claim.made)
    try:
        yield
    except BaseException:
        provenance.release(folder)
        raise


def keep(folder: Path, point: Point, measure: Measure, worker: Worker) -> None:
    """Measures a point and writes its result."""
    mark = {"fingerprint": point.fingerprint} if point.fingerprint else {}
    about = environment("cpu" if worker.device == "cpu" else None)  # before the measurement sets other threads
    write_result(folder / point.path, {"environment": about, **mark, **measure(point.value, worker)})


def read(path: Path, form: Form = None) -> Row:
    """The row of a file. Numbers that are not finite are listed under NOT_FINITE, as {JSON pointer: number}."""
    row = read_result(path, form)
    marks = finite(row).get(NOT_FINITE)
    return row | ({NOT_FINITE: marks} if marks else {})


def lines(tell: Tell, points: Sequence[Point]) -> Listen:
    """Tells a line for each point: when it begins, and if it was finished before."""
    places = {point.path: i for i, point in enumerate(points, 1)}

    def listen(point: Point, news: Any) -> None:
        line = f"{places[point.path]} of {len(points)}: {point.name}"
        tell(line if news is None else f"{line}: {news}" if isinstance(news, str) else f"{line}: already finished")

    return listen
