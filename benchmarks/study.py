"""The studies of benchmarks/studies: their tables from the rows that are kept in benchmarks/results/studies.

headrace compare --plan benchmarks/studies/NAME.yaml --output runs/NAME     the runs; the same command continues
python benchmarks/study.py keep NAME                                        runs/NAME/runs.csv into the results
python benchmarks/study.py show NAME                                        the plan's statistic, as Markdown
"""

import shutil
from pathlib import Path

import typer

from headrace.studies.compare import rows, statistics
from headrace.studies.compare.choose import planned

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, help=__doc__)


def kept(name: str) -> Path:
    return HERE / "results" / "studies" / f"{name}.csv"


@app.command()
def keep(name: str, run: Path | None = None) -> None:
    shutil.copy((run or Path("runs", name)) / "runs.csv", kept(name))


@app.command()
def show(name: str) -> None:
    study, found = planned(HERE / "studies" / f"{name}.yaml"), rows.read(kept(name))
    assert study.question is not None
    for table in statistics.tables(study.question, found, study.swept):
        print(table.answer, table.about, sep="\n\n", end="\n\n")
        for row in (table.header, ["---"] * len(table.header), *table.rows):
            print(f"| {' | '.join(row)} |")
        print()
    last = [row for row in found if not row["trial"]]
    print(f"{sum(row['converged'] for row in last)} of {len(last)} reported runs {rows.RULE}.")


if __name__ == "__main__":
    app()
