"""Compare: compare, zoo, verify, backends."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from .. import zoo
from ..report import catalog
from ..report.numbers import count
from ..spec.serialize import to_json
from ..utils.errors import InputError
from .console import Device, interruptible, refuse_with, refuse_without, telling, terminal, track
from .options import takes


@dataclass(frozen=True)
class CompareOptions:
    """The options of `headrace compare`."""

    files: Annotated[
        list[str] | None,
        typer.Argument(help=r"Text files for language modelling, as with --text. \[default: none]", show_default=False),
    ] = None
    mixers: Annotated[
        str | None,
        typer.Option(
            help=r"Mixers, separated by commas: names or expressions (see `headrace zoo`), or all. "
            r"\[default: the task's]"
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help=r"Task, with fields in parentheses: key-value(length=128). \[default: pair; text with --text]"
        ),
    ] = None
    text: Annotated[
        list[str] | None, typer.Option(help=r"Text file for language modelling. Repeatable. \[default: none]")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help=r"Tokenizer: bytes, or a JSON file of `tokenizers`. \[default: bytes]")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option(help=r"Number of random seeds, or the seeds themselves: 10-14 or 7,10-14. \[default: 3]"),
    ] = None
    steps: Annotated[int | None, typer.Option(help=r"Number of training steps. \[default: 300]")] = None
    batch_size: Annotated[int | None, typer.Option(help=r"Rows per training step. \[default: 64]")] = None
    lr: Annotated[float | None, typer.Option(help=r"Peak learning rate. \[default: 0.01]")] = None
    length: Annotated[int | None, typer.Option(help=r"Tokens per row. \[default: 48]")] = None
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Field of the task, model or training and its values: FIELD=VALUE,VALUE,... "
            r"Each value is one comparison. \[default: none]"
        ),
    ] = None
    initializer_range: Annotated[
        float | None,
        typer.Option(help=r"Standard deviation of the initial weights. \[default: 0.64 / √hidden_size]"),
    ] = None
    tune: Annotated[
        str | None,
        typer.Option(
            help="Field of the training and its values: lr=VALUE,VALUE,... Each mixer takes its best value, on "
            r"seeds and rows that are not reported. \[default: none]"
        ),
    ] = None
    tune_seeds: Annotated[
        str | None,
        typer.Option(help=r"Seeds of the search, as with --seeds. \[default: three that are not reported]"),
    ] = None
    hidden_size: Annotated[int | None, typer.Option(help=r"Hidden size of the models. \[default: 64]")] = None
    layers: Annotated[int | None, typer.Option(help=r"Number of layers. \[default: 1]")] = None
    heads: Annotated[int | None, typer.Option(help=r"Number of heads per layer. \[default: 8]")] = None
    match: Annotated[
        str | None,
        typer.Option(
            help="What all models have equally many of: parameters, or state: parameters and numbers of the state. "
            r"\[default: parameters]"
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(help=r"YAML file of a study with its question and test, in place of options. \[default: none]"),
    ] = None
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite of tasks with fixed settings: small, of the leaderboard. Each mixer gets a row, in a folder of "
            r"its own. \[default: none]"
        ),
    ] = None
    board: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with the rows of others, which a suite's are shown beside. "
            r"\[default: benchmarks/results/leaderboard.csv of the checkout]"
        ),
    ] = None
    output: Annotated[Path | None, typer.Option(help=r"Folder of the report. \[default: runs/<task>]")] = None
    device: Device = None
    workers: Annotated[
        int | None,
        typer.Option(help=r"Number of worker processes. \[default: one per GPU, or one per CPU core]"),
    ] = None

    def __post_init__(self) -> None:
        for mixer in () if self.mixers is None else zoo.several(self.mixers):
            zoo.get(mixer)  # raises for a misspelt one before PyTorch is imported, which takes seconds
        if self.suite is None:
            refuse_without("--suite", board=self.board)
        else:
            refuse_with("--suite", **self.changes | self.others | {"mixers": None}, plan=self.plan)
        if self.plan is not None:
            refuse_beside_plan(self.plan, self.changes | self.others)

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
    """Train mixers on one task with equal parameter counts, and with --match state equal states, and write a report.

    Without arguments, runs a demonstration. After an interruption, the same command resumes. Each task has its own
    defaults; the options below show those of `pair`. `cuda` stands for all GPUs.

    With --suite, each mixer trains by itself on several tasks with fixed settings, tuned learning rates and five seeds,
    and gets a row of the leaderboard. The time that this will take is said before.
    """
    from ..comparison.choose import choose, planned
    from ..comparison.terminal import print_results
    from ..files.workers import place_workers
    from ..utils.device import all_devices

    places, one = place_workers(all_devices(options.device), options.workers), options
    if one.suite is not None:
        run_suite(one.suite, one.mixers, one.output or Path("runs", one.suite), one.board, places)
        return None
    if one.plan is None:
        study = choose(
            one.task, one.sources, one.tokenizer, one.changes, one.sweep, one.tune, one.tune_seeds, one.match
        )
    else:
        study = planned(one.plan)
    folder = one.output or Path("runs", study.name)
    results = run(study, folder, places)
    print_results(results, terminal())
    terminal().print(f"The report is {folder / 'report.html'}", soft_wrap=True, highlight=False)
    return results


def run_suite(suite: str, mixers: str | None, folder: Path, board: Path | None, places: list[str]) -> None:
    """Runs each mixer's study of a suite in a folder of its own, and shows their rows beside those of the file `board`.
    Says before how long it will take."""
    from ..comparison import estimate, leaderboard
    from ..comparison.run import check
    from ..comparison.suite import studies
    from ..comparison.terminal import print_sections

    if mixers is None:
        raise InputError("--suite needs --mixers; expected the mixers that get a row")
    console, by_name, others = terminal(), studies(suite, zoo.several(mixers)), leaderboard.others(board)
    for name, study in by_name.items():
        check(folder / name, study)
    for name, study in by_name.items():
        arms, seconds = estimate.duration(study, folder / name, places)
        about = f"{seconds / 60:.0f} min with {count(len(places), 'worker')}, by a few steps of each task"
        console.print(f"{name}: {count(arms, 'model')} to train, about {about}", highlight=False)
    for name, study in by_name.items():
        run(study, folder / name, places)
    print_sections(leaderboard.report(folder, suite, others), console)
    console.print(f"The tables are in {folder / 'leaderboard.html'}", soft_wrap=True, highlight=False)


def run(study: Any, folder: Path, places: list[str]) -> dict[str, Any]:
    """Runs a study in its folder, writes the report and returns the results."""
    from ..comparison.page import write_report
    from ..comparison.run import check, complete
    from ..comparison.terminal import board
    from ..files.engine import claimed
    from ..files.processes import locked

    console = terminal()
    for sentence in dict.fromkeys(idle for arm_plan in study.plans for idle in arm_plan.idle_gates()):
        console.print(f"Note: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    check(folder, study)
    with interruptible(f"finished models are kept in {folder}; the same command continues"), locked(folder):
        with claimed(folder, study.claim()), board(study, console) as progress:
            results = complete(study, folder, progress.listen, places)
        write_report(results, folder)
    return results


def refuse_beside_plan(plan: Path, options: dict[str, Any]) -> None:
    """InputError for an option beside --plan, whose file has all settings."""
    if beside := next((name for name, value in options.items() if value is not None), None):
        raise InputError(
            f"--{beside.replace('_', '-')} is given beside --plan {str(plan)!r}, which has all settings; expected one"
        )


def list_zoo(
    show: Annotated[
        str | None, typer.Option(help=r"View of the table: update, axes, cost or paper. \[default: update]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON output with every view and every spec.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown output, of all views.")] = False,
) -> None:
    """List the named mixers and models.

    The views show each mixer as a memory update, by four design axes, with its cost, or with its paper."""
    outputs = [name for name, on in (("--show", show), ("--json", as_json), ("--markdown", as_markdown)) if on]
    if len(outputs) > 1:
        raise InputError(f"{' and '.join(outputs)} are both given; expected one of them")
    if show not in (None, *catalog.VIEWS):
        raise InputError(f"--show={show!r}; expected one of {', '.join(catalog.VIEWS)}")
    if as_markdown:
        print(catalog.markdown())
        return
    rows = {name: catalog.describe(name) for name in zoo.names()}
    if as_json:
        models = {name: {"spec": to_json(spec)} for name, spec in zoo.MODELS.items()}
        print(json.dumps(rows | models, indent=1, ensure_ascii=False))
        return
    columns = catalog.VIEWS[show or "update"]
    table = Table(
        caption=f"Views: --show {', '.join(catalog.VIEWS)}. {catalog.COUNTED}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("mixer", no_wrap=True)
    for column in columns:
        number = column in ("numbers", "training", "decoding")
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for name, row in rows.items():
        table.add_row(name, *(catalog.cell(row[column]) for column in columns))
    terminal().print(table)
    terminal().print(f"Whole models: {', '.join(zoo.MODELS)}")


def verify(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Layers or models of others: transformers:mamba2, transformers:Qwen3_5GatedDeltaNet, "
            r"fla:GatedLinearAttention, or a file and a function that returns an adapter, layer.py:adapter. "
            r"\[default: our own mixers]",
            show_default=False,
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(
            help="Mixers, separated by commas: names or expressions (see `headrace zoo`), or linear_attention for the "
            r"op by itself at the sizes of large models. \[default: all mixers, on a GPU also the op]"
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=r"Data type: float64, float32 or bfloat16. \[default: float64; of a target, float32]"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help=r"Backends to check, separated by commas. \[default: all that run here]")
    ] = None,
    laws: Annotated[
        str | None, typer.Option(help=r"Laws to check of a target, separated by commas. \[default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a target's parameters and inputs.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdicts on a target, versions and machine as JSON.")
    ] = False,
) -> None:
    """Check every form and backend of a mixer on this machine against the recurrence, or a layer or model of others.

    Prints the relative error and the tolerance of each check. Exit code 1 if a check fails. On a GPU, FLA first
    compiles and tunes its kernels for every shape, which takes long: --backend triton,torch leaves them out.

    A target is checked against itself: packed or padded rows, pieces, decoding, copied states, gradients, and more.
    Each law that it breaks is followed by a program of the smallest failing input, which runs without headrace."""
    if targets:
        refuse_with("a target", mixers=mixers, backend=backend)
        failed = _verify_targets(targets, device, dtype or "float32", laws, seed, as_json)
    else:
        refuse_without("a target", laws=laws, seed=seed or None, json=as_json)
        failed = _verify_mixers(mixers, device, dtype or "float64", backend)
    raise typer.Exit(int(failed))


def _verify_mixers(mixers: str | None, device: str | None, dtype: str, backend: str | None) -> bool:
    """Prints the checks of our own mixers, and returns whether one failed."""
    from ..files.environment import device_name
    from ..utils.device import on_device
    from ..verification.verify import OP, available, device_failed, subjects, verify

    precision, device = _precision(dtype), on_device(device, float64=dtype == "float64")
    names = subjects(device) if mixers is None else zoo.several(mixers)
    for name in names:
        if name != OP:
            zoo.mixer(name)  # raises for an unknown name before the first check
    chosen = available(None if backend is None else backend.split(","))
    console, rows = terminal(), []
    with interruptible("the checks so far are printed above"), telling(console) as tell:
        for name in track(names, "mixer", tell):
            checked = verify([name], device, precision, backends=chosen)
            console.print(_table(name, checked))
            rows += checked
            if device_failed(device, checked):
                console.print(f"{device} computes nothing any more after this error; the other checks are left out")
                break
    broken = [row for row in rows if not row.holds]
    console.print(f"{len(rows) - len(broken)} of {len(rows)} laws hold on {device} in {dtype}")
    for row in broken:
        if row.note:
            console.print(f"{row.mixer}, {row.law}: {row.note}", soft_wrap=True, highlight=False, markup=False)
    if broken:
        print(f"{device}: {device_name(device)}")
        backends()
    return bool(broken)


def _precision(name: str) -> Any:
    from ..verification.errors import TOLERANCE

    dtypes = {str(known).removeprefix("torch."): known for known in TOLERANCE}
    if name not in dtypes:
        raise InputError(f"--dtype={name!r}; expected one of {', '.join(dtypes)}")
    return dtypes[name]


def _verify_targets(
    names: list[str], device: str | None, dtype: str, laws: str | None, seed: int, as_json: bool
) -> bool:
    """Prints the verdicts on layers and models of others, and returns whether one broke a law or raised."""
    from ..utils.device import on_device
    from ..verification import foreign

    precision, on = _precision(dtype), on_device(device, float64=dtype == "float64")
    chosen = None if laws is None else [law.strip() for law in laws.split(",")]
    console, records, failed = terminal(), [], 0
    with foreign.quiet():
        for target in [foreign.target(name) for name in names]:
            verdicts = list(foreign.verify(target.adapter, chosen, on, precision, seed))
            broken = [v for v in verdicts if v.verdict == "breaks"]
            failed += sum(v.verdict in ("breaks", "raises") for v in verdicts)
            if as_json:
                command = " ".join(["headrace", "verify", *map(shlex.quote, sys.argv[2:])])
                records.append(foreign.as_json(target, verdicts, command, seed, on, precision))
                continue
            shown = Table(
                *(["law", "verdict", "error", "tolerance", "smallest", "note"]), title=target.name, title_justify="left"
            )
            for row in foreign.table(verdicts):
                shown.add_row(*map(escape, row))
            console.print(shown)
            for verdict in broken:
                program = foreign.snippet(target, verdict, seed, on, precision)
                console.print(program, soft_wrap=True, highlight=False, markup=False)
            holding = sum(v.verdict == "holds" for v in verdicts)
            console.print(f"{target.name}: {holding} of {len(verdicts)} laws hold on {on} in {dtype}")
    if as_json:
        print(json.dumps(records, indent=2, allow_nan=False))
    return failed > 0


def _table(mixer: str, rows: list[Any]) -> Table:
    table = Table("law", "relative error", "tolerance", "", title=mixer, title_justify="left")
    for row in rows:
        mark = "holds" if row.holds else "[red]BROKEN"
        table.add_row(row.law, f"{row.error:.1e}", f"{row.tolerance:.0e}", mark)
    return table


def backends() -> None:
    """List the backends and what each computes, and why the others are unavailable on this machine."""
    from ..ops.backends.base import OPERATIONS
    from ..ops.dispatch import BACKENDS, default_backend, has

    for name, backend in BACKENDS.items():
        reason, computes = backend.missing(), ", ".join(o for o in OPERATIONS if has(name, o))
        print(f"{name}: {f'not here: {reason}' if reason else f'available ({backend.about()}): {computes}'}")
    if (chosen := default_backend()) != "auto":
        print(f"HEADRACE_BACKEND={chosen}: layers use this backend")
