"""The commands that look at what models and memories do."""

import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .console import AcceptOld


def lab(
    name: Annotated[str | None, typer.Argument(help="An experiment, or all; a list of them without it.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for NAME.png and NAME.json.")] = Path("runs/lab"),
    seed: Annotated[int, typer.Option(help="Of the random keys and values.", min=0, max=2**32)] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="With `past`: a trained model to look into.")] = None,
) -> None:
    """Theory as laws and pictures: what is seen against what the law says. Exit code 1 where a law does not hold."""
    from ..studies import theory as laboratory
    from ..utils.errors import InputError
    from ..utils.processes import locked
    from .console import telling

    console, broken = Console(), 0
    if name is None and checkpoint is not None:
        raise InputError(f"--checkpoint {str(checkpoint)!r} without an experiment; expected it with lab past")
    if name is None:
        table = Table("experiment", "what it shows")
        for known in laboratory.EXPERIMENTS:
            table.add_row(known, laboratory.about(known))
        console.print(table)
        return
    for known in laboratory.chosen(name, checkpoint):
        with telling(console) as tell:
            tell(f"experiment {known}")
            finding = laboratory.experiment(known, seed, checkpoint)
        with locked(output):
            picture = laboratory.save(known, seed, finding, output)
        broken += sum(not row.holds for row in finding.rows)
        table = Table("law", "seen", "", "the law says", "", title=known, title_justify="left")
        for row in finding.rows:
            mark = "holds" if row.holds else "[red]BROKEN"
            table.add_row(row.law, f"{row.seen:.3g}", row.relation, f"{row.bound:.3g}", mark)
        console.print(table)
        console.print(f"{finding.sentence}\nThe picture is {picture}\n", soft_wrap=True, highlight=False)
    raise typer.Exit(1 if broken else 0)


def bench(
    mixers: Annotated[
        str, typer.Option(help="With commas between: names of the zoo, and transformers-llama, -mamba2, -qwen3-next.")
    ] = "retnet,gla,gated-deltanet,mamba2,transformer,transformers-llama,transformers-mamba2,transformers-qwen3-next",
    what: Annotated[str, typer.Option(help="With commas between.")] = "memory,training,prefill,decoding",
    layers: Annotated[int | None, typer.Option(help="24 without it; 2 on a CPU.")] = None,
    hidden_size: Annotated[int, typer.Option()] = 1024,
    heads: Annotated[int, typer.Option()] = 4,
    lengths: Annotated[str, typer.Option(help="Tokens of a row in training, and of a prompt.")] = "512,2048",
    batch_sizes: Annotated[str, typer.Option(help="Rows of a training step.")] = "1,2",
    contexts: Annotated[str, typer.Option(help="Tokens before the one decoded.")] = "1024,16384,131072,1048576",
    rounds: Annotated[int, typer.Option(help="That count; one more warms up.")] = 5,
    threads: Annotated[int, typer.Option()] = 1,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 without it; float32 on a CPU.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for bench.csv and report.html.")] = Path("runs/bench"),
    accept_old: AcceptOld = False,
) -> None:
    """Memory, throughput and latency of mixers with and without competition, beside transformers' own models.

    The same command continues what was interrupted; further lengths and contexts add to the folder."""
    from ..studies.bench.models import Shape, named
    from ..studies.bench.plan import Plan, points
    from ..studies.bench.report import print_overheads, write_report
    from ..studies.bench.results import complete, rows, write_csv
    from ..utils.device import on_device
    from ..utils.environment import environment
    from ..utils.processes import locked
    from ..utils.provenance import own
    from .console import interruptible, telling, terminal

    device, console = on_device(device), terminal()
    if layers is None and device == "cpu":
        console.print("2 layers of the paper's 24, for this is a CPU: --layers 24 for all", style="yellow")
    depth = layers if layers is not None else 2 if device == "cpu" else 24
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    plan = Plan(named(mixers), Shape(depth, hidden_size, heads), device, dtype, threads, rounds)
    wanted = points(
        what.split(","),
        numbers("lengths", lengths),
        numbers("batch-sizes", batch_sizes),
        numbers("contexts", contexts),
    )
    with interruptible(f"what is finished is in {output}; the same command continues"), locked(output):
        own(output, asdict(plan) | {"models": list(plan.models)}, accept_old, machine=environment()["processor"])
        with telling(console) as tell:
            held = complete(plan, wanted, output, tell)
        lines = rows(held, plan)
        write_csv(output / "bench.csv", lines)
        report = write_report(held, lines, plan, output, shlex.join(["headrace", *sys.argv[1:]]))
    print_overheads(held, plan, console)
    console.print(f"The report is {report}, the numbers {output / 'bench.csv'}", soft_wrap=True, highlight=False)


def numbers(option: str, text: str) -> list[int]:
    from ..utils.errors import InputError

    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"--{option}={text}; expected positive integers with commas between, as 512,2048")
    return [int(part) for part in parts]


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A folder written by `train` or save_pretrained.")],
    text: Annotated[str | None, typer.Option(help="What the model reads; standard input without it.")] = None,
    file: Annotated[Path | None, typer.Option(help="The same, from a file of UTF-8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Cut the text after so many; without it, 2,000 at most.")] = None,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
) -> None:
    """What a model does with a text, token by token, as one interactive page: gates, horizons, effective attention."""
    from ..studies import inspect as inspection
    from ..utils.processes import locked_beside
    from .console import telling, track

    with telling(Console(stderr=True)) as tell, locked_beside(output):
        tell(f"reading {checkpoint}")
        page = inspection.inspect(
            checkpoint, inspection.read_text(text, file), tokens, partial(track, name="layer", tell=tell), device
        )
        inspection.write(page, output)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")


def evaluate(
    checkpoints: Annotated[list[str], typer.Argument(help="Folders or names on the Hub, ours or any causal LM.")],
    suite: Annotated[str, typer.Option(help="language, recall, needle, blimp or tasks of the harness, with commas.")],
    data: Annotated[Path | None, typer.Option(help="A folder of local files in place of the Hub.")] = None,
    lengths: Annotated[str, typer.Option(help="Of needles' prompts, in tokens.")] = "1024,2048,4096,8192",
    limit: Annotated[int | None, typer.Option(help="Rows of each task; all without it.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of context; the config's without it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at once.", min=1)] = 8,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Of needles and their places.", min=0, max=2**32 - 1)] = 1234,
    output: Annotated[Path | None, typer.Option(help="The report's folder; runs/eval-<suite> without one.")] = None,
    accept_old: AcceptOld = False,
) -> None:
    """Evaluate by lm-evaluation-harness, side by side, with standard errors and paired differences.

    The same command continues what was interrupted, and another checkpoint joins those that are done."""
    from ..studies.evaluate import checkpoint, report, run
    from ..utils.device import on_device
    from ..utils.processes import locked
    from .console import interruptible, telling, terminal

    folder, console = output or Path("runs", f"eval-{run.slug(suite)}"), terminal()
    plan = run.Plan(
        suite, tuple(numbers("lengths", lengths)), None if data is None else str(data), limit, max_length, seed
    )
    with interruptible(f"what is finished is in {folder}; the same command continues"), locked(folder):
        with telling(console) as tell:
            found = run.evaluate(
                checkpoints, plan, run.Machine(on_device(device), batch_size), folder, accept_old, tell
            )
        page = report.write_report(found, checkpoint.named(checkpoints), folder)
    report.print_evaluation(found, console)
    console.print(f"The report is {page}", soft_wrap=True, highlight=False)


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or figure; a list of them without it.")] = None,
    scale: Annotated[str, typer.Option(help="paper (eight GPUs) or laptop.")] = "laptop",
    run: Annotated[bool, typer.Option("--run", help="Execute the steps; without it they are only printed.")] = False,
    text: Annotated[list[str] | None, typer.Option(help="Files to train on in place of the Hub's.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder of rows to evaluate on in place of the Hub's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="AXIS=VALUE,VALUE: a part of the work, as seed=0.")] = None,
    add: Annotated[list[str] | None, typer.Option(help='More for a command: "train tokens=1e6".')] = None,
    output: Annotated[
        Path | None, typer.Option(help="Shared by experiments; runs/reproduce/<scale> by itself.")
    ] = None,
    accept_old: AcceptOld = False,
) -> None:
    """The steps that make a table or a figure of a paper, and our numbers beside the published ones.

    With --run the steps are executed; the same command continues what was interrupted."""
    from ..studies.reproduce import experiment, numbers, show
    from ..studies.reproduce.execute import downloads, execute
    from ..utils.processes import locked
    from .console import interruptible, terminal

    console = terminal()
    if name is None:
        show.print_list(console)
        return
    chosen, folder = experiment.load(name), output or Path("runs", "reproduce", scale)
    additions = [*(add or []), *([] if data is None else [shlex.join(["eval", "--data", str(data)])])]
    wanted = experiment.tailored(chosen.at(scale), text or [], only or [], additions)
    steps = experiment.commands(wanted, folder)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    if run:
        tell(downloads(steps))
        with interruptible("the steps that have ended are kept; the same command continues"), locked(folder):
            execute(steps, folder, tell, accept_old)
    else:
        for step in steps:
            tell(shlex.join(step))
    found = numbers.cells(chosen, wanted, folder)
    show.print_cells(chosen, scale, found, console)
    if run:
        command = shlex.join(["headrace", *sys.argv[1:]])
        tell(f"The report is {show.write_page(chosen, scale, found, folder / f'{name}.html', command)}")
