"""The numbers of every run of `headrace reproduce` as rows, before means and differences are taken.

    python -m research.reproduction figure-2 --root runs/reproduce/laptop

adds them to results/reproduce/figure-2.csv, each with the command that trained the model and the seconds it took.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import record
from headrace.studies.reproduce import execute, experiment, numbers

from . import RESULTS


def rows(name: str, scale: str, root: Path) -> list[record.Row]:
    """The numbers of the models that are there; a metric that a run has no number of has no row.

    seconds: of training, by the clock; None if it went on after an interruption."""
    chosen, kept = experiment.load(name), []
    at_scale = chosen.at(scale)
    trained = {step[-1]: step for step in experiment.commands(at_scale, root) if "train" in step}
    for at in experiment.combinations(at_scale.axes):
        folder = experiment.run_folder(at_scale, root, at)
        step = trained[str(folder)]
        seconds = (execute.done(root, step) or {}).get("seconds")
        for metric, place in chosen.columns.items():
            (number,) = numbers.each(at_scale, place, at, root)
            if number is not None:
                value = {"run": folder.name, "metric": metric, "value": number.value}
                kept.append(value | {"seconds": seconds, "command": shlex.join(step)})
    return kept


def main(
    name: str,
    root: Annotated[Path, typer.Option(help="The --output of headrace reproduce.")],
    commit: Annotated[str, typer.Option(help="The commit that made the runs.")],
    scale: Annotated[str, typer.Option()] = "laptop",
) -> None:
    about = record.environment() | {"commit": commit}
    record.append(RESULTS / "reproduce" / f"{name}.csv", about, rows(name, scale, root))


if __name__ == "__main__":
    typer.run(main)
