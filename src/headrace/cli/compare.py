"""Compare: compare, zoo."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import zoo
from ..files.hub import ask_hub, tokenizer_is_elsewhere
from ..report import catalog
from ..report.numbers import count
from ..spec.serialize import to_json
from ..utils.errors import InputError, require
from .console import interruptible, refuse_idle, terminal
from .options import Device, argument, option, setting, takes


@dataclass(frozen=True)
class CompareOptions:
    """The options of `headrace compare`."""

    files: list[str] | None = setting("Files of text to model, as with --text.", kind=argument, show_default=False)
    mixers: str | None = setting(
        "Mixers, separated by commas: names or expressions (see `headrace zoo`), or all.", shown="the task's"
    )
    task: str | None = setting("Task, with its fields: key-value(length=128).", shown="pair; text with --text")
    text: list[str] | None = setting(
        "File of text to model: text, JSON Lines or Parquet, as for `headrace prepare`. Repeatable."
    )
    tokenizer: str | None = setting("Tokenizer: bytes, a file, a folder or a name on the Hub.", shown="bytes")
    seeds: str | None = setting("Number of random seeds, or the seeds themselves: 10-14 or 7,10-14.", shown="3")
    steps: int | None = setting("Number of training steps.", shown="300")
    batch_size: int | None = setting("Rows per training step.", shown="64")
    lr: float | None = setting("Peak learning rate.", shown="0.01")
    length: int | None = setting("Tokens per row.", shown="48")
    sweep: str | None = setting(
        "Field of the task, model or training and its values: FIELD=VALUE,VALUE,... Each value is one comparison."
    )
    initializer_range: float | None = setting("Standard deviation of the initial weights.", shown="0.64 / √hidden_size")
    tune: str | None = setting(
        "Field of the training and its values: lr=VALUE,VALUE,... Each mixer takes the value that is best on "
        "seeds and rows that are not reported."
    )
    tune_seeds: str | None = setting("Seeds of the search, as with --seeds.", shown="three that are not reported")
    hidden_size: int | None = setting("Hidden size of the models.", shown="64")
    layers: int | None = setting("Number of layers.", shown="1")
    heads: int | None = setting("Number of heads per layer.", shown="8")
    match: str | None = setting(
        "What is equal in all models: parameters, or state, which is parameters and the size of the state.",
        shown="parameters",
    )
    plan: Path | None = setting("YAML file of a study with its question and test, in place of options.")
    suite: str | None = setting(
        "Suite of tasks with fixed settings: small, that of the leaderboard. Each mixer gets a row and a folder."
    )
    board: Path | None = setting(
        "CSV file with the rows of other mixers, which a suite shows beside the new rows.",
        shown="benchmarks/results/leaderboard.csv of the checkout",
    )
    output: Path | None = setting("Folder of the report.", shown="runs/<task>")
    device: Device = None
    workers: int | None = setting("Number of worker processes.", shown="one per GPU, or one per CPU core")

    def __post_init__(self) -> None:
        for mixer in () if self.mixers is None else zoo.several(self.mixers):
            zoo.get(mixer)  # raises for a misspelt one before PyTorch is imported, which takes seconds
        if self.suite is None:
            refuse_idle("without --suite", board=self.board)
        else:
            refuse_idle("with --suite", **self.changes | self.others | {"mixers": None}, plan=self.plan)
        if self.plan is not None:
            refuse_idle(f"with --plan {str(self.plan)!r}, which has all settings", **self.changes | self.others)

    @property
    def sources(self) -> list[str]:
        """The text files."""
        return [*(self.text or []), *(self.files or [])]

    @property
    def changes(self) -> dict[str, Any]:
        """Changes to the task's settings by name; None: its own."""
        names = "mixers seeds steps batch_size lr length hidden_size layers heads initializer_range"
        return {name: getattr(self, name) for name in names.split()}

    @property
    def others(self) -> dict[str, Any]:
        """The options that choose the task and the study."""
        names = "task tokenizer sweep tune tune_seeds match"
        return {name: getattr(self, name) for name in names.split()} | {"text": self.sources or None}


@takes(CompareOptions)
def compare(options: CompareOptions) -> dict[str, Any] | None:
    """Train mixers on one task with equal parameter counts, and write a report of their differences.

    Without arguments, runs a demonstration. After an interruption, the same command resumes. Each task has its own
    defaults; the options below show those of `pair`. `--device cuda` uses all GPUs.

    With --suite, each mixer trains by itself on several tasks with fixed settings, tuned learning rates and five seeds,
    and gets a row of the leaderboard. The command first says how long this will take.
    """
    if tokenizer_is_elsewhere(options.tokenizer):
        ask_hub()
    from ..comparison.choose import choose, planned
    from ..comparison.page import report
    from ..files.devices import all_devices
    from ..files.workers import place_workers
    from ..report.page import print_sections

    places, one = place_workers(all_devices(options.device), options.workers), options
    if one.suite is not None:
        run_suite(one.suite, one.mixers, one.output or Path("runs", one.suite), one.board, places)
        return None
    study = choose(**one.others, **one.changes) if one.plan is None else planned(one.plan)
    folder = one.output or Path("runs", study.name)
    results = run(study, folder, places)
    print_sections(report(results, None), terminal())
    terminal().print(f"The report is {folder / 'report.html'}", soft_wrap=True, highlight=False)
    return results


def run_suite(suite: str, mixers: str | None, folder: Path, board: Path | None, places: list[str]) -> None:
    """Runs each mixer's study of a suite in a folder of its own, and shows their rows beside those of the file `board`.
    Says before how long it will take."""
    from ..comparison import leaderboard
    from ..comparison.run import check, duration
    from ..report.page import print_sections

    if mixers is None:
        raise InputError("--suite needs --mixers; expected the mixers that get a row")
    console, by_name, others = terminal(), leaderboard.studies(suite, zoo.several(mixers)), leaderboard.others(board)
    for name, study in by_name.items():
        check(folder / name, study)
    for name, study in by_name.items():
        arms, seconds = duration(study, folder / name, places)
        about = f"{seconds / 60:.0f} min with {count(len(places), 'worker')}, by a few steps of each task"
        console.print(f"{name}: {count(arms, 'model')} to train, about {about}", highlight=False)
    for name, study in by_name.items():
        run(study, folder / name, places)
    print_sections(leaderboard.report(folder, suite, others), console)
    console.print(f"The tables are in {folder / 'leaderboard.html'}", soft_wrap=True, highlight=False)


def run(study: Any, folder: Path, places: list[str]) -> dict[str, Any]:
    """Runs a study in its folder, writes the report and returns the results."""
    from ..comparison.page import write_report
    from ..comparison.run import board, check, complete
    from ..files.engine import claimed
    from ..files.processes import locked

    console = terminal()
    for sentence in dict.fromkeys(note for plan in study.plans for note in plan.notes()):
        console.print(f"Note: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    check(folder, study)
    with interruptible(f"finished models are kept in {folder}; the same command continues"), locked(folder):
        with claimed(folder, study.claim()), board(study, console) as progress:
            results = complete(study, folder, progress.listen, places)
        write_report(results, folder)
    return results


def list_zoo(
    show: Annotated[str | None, option("View of the table: update, axes, cost or paper.", default="update")] = None,
    as_json: Annotated[bool, option("JSON output with every view and every spec.", "--json")] = False,
) -> None:
    """List the named mixers and models.

    A view shows the memory update of each mixer, its four design axes, its cost, or a sentence and its paper."""
    require(show is None or not as_json, "--show and --json are both given; expected one of them")
    require(show in (None, *catalog.VIEWS), f"--show={show!r}; expected one of {', '.join(catalog.VIEWS)}")
    rows = {name: catalog.describe(name) for name in zoo.names()}
    if as_json:
        models = {name: catalog.cited(name) | {"spec": to_json(spec)} for name, spec in zoo.MODELS.items()}
        print(json.dumps(rows | models, indent=1, ensure_ascii=False))
        return
    columns = catalog.VIEWS[show or "update"]
    caption = f"Views: --show {', '.join(catalog.VIEWS)}. {catalog.COUNTED}"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("mixer", no_wrap=True)
    for column in columns:
        number = column in ("numbers", "training", "decoding")
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for name, row in rows.items():
        table.add_row(name, *(catalog.cell(row[column]) for column in columns))
    terminal().print(table)
    terminal().print(f"Whole models: {', '.join(zoo.MODELS)}")
