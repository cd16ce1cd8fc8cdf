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
    asked, shown = [read(name) for name in names], []
    for (question, found), tested in zip(asked, statistics.differences(asked), strict=True):
        for table in statistics.tables(question, found, tested):
            shown += [table.answer, "", table.about, ""] if table.answer else []
            shown += [f"| {' | '.join(row)} |" for row in (table.header, ["---"] * len(table.header), *table.rows)]
            shown.append("")
        last = [row for row in found if not row["trial"]]
        shown += [f"{sum(row['converged'] for row in last)} of {len(last)} reported runs {rows.RULE}.", ""]
    return shown


def read(name: str) -> tuple[Question, list[rows.Row]]:
    question = planned(HERE / "studies" / f"{name}.yaml").question
    assert question is not None
    return question, rows.read(kept(name))


if __name__ == "__main__":
    app()
