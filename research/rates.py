"""The learning rates that were tried for recipes, one row for each run of `headrace train`.

    headrace train laptop-1m lr=1e-2 seed=100 --mixer gla --data data --output runs/laptop-1m-gla-1e-2
    python -m research.rates keep laptop-1m runs/laptop-1m-* --commit COMMIT

adds runs to results/rates.csv, and `python -m research.rates show` prints its table of docs/appendix.md.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from benchmarks import record
from headrace.training.card import read_history

from . import RESULTS

TRIED = RESULTS / "rates.csv"
app = typer.Typer()


def row(recipe: str, run: Path) -> record.Row:
    """The settings of a run, its loss on the held-out text, and the seconds of its training by the clock."""
    settings = json.loads((run / "run.json").read_text("utf-8"))["recipe"]
    numbers = {name: value for point in read_history(run) for name, value in point.items()}
    kept = {name: settings[name] for name in ("mixer", "lr", "tokens", "batch_tokens", "seed")}
    return {"recipe": recipe, **kept, "loss": numbers["final_loss"], "seconds": numbers["train_runtime"]}


@app.command()
def keep(
    recipe: str,
    runs: list[Path],
    commit: Annotated[str, typer.Option(help="The commit that made the runs.")],
) -> None:
    """Add runs to the results."""
    record.append(TRIED, record.environment() | {"commit": commit}, [row(recipe, run) for run in runs])


@app.command()
def show() -> None:
    """Print the table."""
    print("\n".join(lines()))


def losses() -> dict[tuple[str, str, int, int], dict[float, float]]:
    """{(recipe, mixer, tokens, tokens a step): {learning rate: held-out loss, the mean over seeds}}"""
    by_seed: dict[tuple[str, str, int, int], dict[float, list[float]]] = {}
    for row in record.read(TRIED):
        setting = row["recipe"], row["mixer"], int(float(row["tokens"])), int(row["batch_tokens"])
        by_seed.setdefault(setting, {}).setdefault(float(row["lr"]), []).append(float(row["loss"]))
    return {setting: {lr: fmean(own) for lr, own in tried.items()} for setting, tried in by_seed.items()}


def lines() -> list[str]:
    by_setting = losses()
    rates = sorted({rate for tried in by_setting.values() for rate in tried})
    head = ["recipe", "mixer", "tokens", "tokens a step", *(f"lr {rate:g}" for rate in rates)]
    rows = [
        [f"`{recipe}`", f"`{mixer}`", f"{tokens:,}", f"{step:,}",
         *(f"{tried[rate]:.3f}" if rate in tried else "" for rate in rates)]
        for (recipe, mixer, tokens, step), tried in by_setting.items()
    ]  # fmt: skip
    return record.markdown(head, rows, ["---"] * 2 + ["--:"] * (2 + len(rates)))


if __name__ == "__main__":
    app()
