"""The studies of benchmarks/studies: their tables from the rows that are kept in benchmarks/results/studies.

headrace compare --plan benchmarks/studies/NAME.yaml --output runs/NAME     the runs; the same command continues
python benchmarks/study.py keep NAME                                        runs/NAME/runs.csv into the results
python benchmarks/study.py show NAME [NAME ...]                             the plans' statistics, as Markdown
"""

import shutil
from pathlib import Path

import typer

from headrace.studies.compare import rows, statistics
from headrace.studies.compare.choose import planned
from headrace.studies.compare.plan import Study
from headrace.studies.compare.question import Question

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, help=__doc__)


def kept(name: str) -> Path:
    return HERE / "results" / "studies" / f"{name}.csv"


@app.command()
def keep(name: str, run: Path | None = None) -> None:
    shutil.copy((run or Path("runs", name)) / "runs.csv", kept(name))


@app.command()
def show(names: list[str]) -> None:
    """Prints the statistics of studies, corrected by Holm's rule over the comparisons of all of them."""
    print(*lines(names), sep="\n")


def lines(names: list[str]) -> list[str]:
    return shown([read(name) for name in names])


def shown(asked: list[tuple[Question, list[rows.Row]]]) -> list[str]:
    """The answers and tables of studies, each its question and its runs, as Markdown."""
    found = []
    for (question, runs), tested in zip(asked, statistics.differences(asked), strict=True):
        for table in statistics.tables(question, runs, tested):
            found += [table.answer, "", table.about, ""] if table.answer else []
            found += [f"| {' | '.join(row)} |" for row in (table.header, ["---"] * len(table.header), *table.rows)]
            found.append("")
        last = [row for row in runs if not row["trial"]]
        found += [f"{sum(row['converged'] for row in last)} of {len(last)} reported runs {rows.RULE}.", ""]
    return found


def plan(name: str) -> Study:
    return planned(HERE / "studies" / f"{name}.yaml")


def question(name: str) -> Question:
    found = plan(name).question
    assert found is not None
    return found


def read(name: str) -> tuple[Question, list[rows.Row]]:
    return question(name), rows.read(kept(name))


if __name__ == "__main__":
    app()
