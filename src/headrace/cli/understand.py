"""Understand: inspect, reproduce."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .console import (
    Checkpoint,
    Device,
    PromptFile,
    interruptible,
    read_prompt,
    refuse_without,
    telling,
    terminal,
    track,
)
from .options import takes


@dataclass(frozen=True)
class InspectOptions:
    """The options of `headrace inspect`."""

    checkpoint: Checkpoint
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "--text", help=r"Text for the model to read. \[default: --file or standard input]"),
    ] = None
    file: PromptFile = None
    tokens: Annotated[
        int | None,
        typer.Option(help=r"Number of tokens to keep of a longer text. \[default: all; more than 2000 are refused]"),
    ] = None
    device: Device = None
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("inspect.html")


@takes(InspectOptions)
def inspect(options: InspectOptions) -> Path:
    """Write an interactive page of what a model computes on a text.

    The page shows, for each token, the gates, decay horizons and effective attention of every head."""
    from ..studies import inspect as inspection
    from ..utils.processes import locked_beside

    text, output = read_prompt(options.prompt, options.file), options.output
    with telling(Console(stderr=True)) as tell, locked_beside(output):
        tell(f"reading {options.checkpoint}")
        layers = partial(track, name="layer", tell=tell)
        page = inspection.inspect(options.checkpoint, text, options.tokens, layers, options.device)
        inspection.write(page, output)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
    return output


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help=r"Table or figure of a paper. \[default: none, which lists the experiments]", show_default=False
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="Scale of the experiment: paper (GPUs) or laptop.")] = "laptop",
    run: Annotated[bool, typer.Option("--run", help="Execution of the commands, which are otherwise printed.")] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(help=r"Text file to train on. Repeatable. \[default: the data sets of the experiment]"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help=r"Folder of benchmark files to evaluate on. \[default: the Hub]")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=r"Axis and its values: AXIS=VALUE,VALUE,... Repeatable. \[default: every value]"),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            help=r'Command with more arguments for its steps: "train tokens=1e6". Repeatable. \[default: none]'
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Machine of the training runs at paper scale, such as 8xH100 or 1xH20: sets processes, rows per "
            r"pass and recomputation so that each fits; without the name of an experiment, prints the costs of all. "
            r"\[default: the experiment's]"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help=r"Folder shared by the experiments. \[default: runs/reproduce/<scale>]")
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper, and show our numbers beside the published ones.

    Without --run, prints the commands. With --run, executes them; after an interruption, the same command resumes."""
    from ..studies.reproduce import experiment, numbers, show, training
    from ..studies.reproduce.execute import downloads, execute
    from ..utils.processes import locked

    console = terminal()
    if name is None:
        options = {"run": run, "text": text, "data": data, "only": only, "add": add, "output": output}
        refuse_without("the name of a table or figure", **options)
        if machine is None:
            show.print_list(console)
        else:
            show.print_costs(machine, console)
        return
    chosen, folder = experiment.load(name), output or Path("runs", "reproduce", scale)
    additions = [*(add or []), *([] if data is None else [shlex.join(["eval", "--data", str(data)])])]
    plan = experiment.tailored(chosen.at(scale), text or [], only or [], additions)
    steps, fits = training.on_machine(experiment.commands(plan, folder), plan.machine, machine)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    if run:
        training.refuse_unfitting(fits)
        tell(downloads(steps))
        with interruptible("the steps that have ended are kept; the same command continues"), locked(folder):
            execute(steps, folder, tell)
    else:
        for step in steps:
            tell(shlex.join(step))
    if fits:
        show.print_fits(fits, console)
    cells, about = numbers.cells(chosen, plan, folder), show.notes(chosen, scale, plan, steps)
    show.print_cells(chosen, cells, about, console)
    if run:
        command = shlex.join(["headrace", *sys.argv[1:]])
        tell(f"The report is {show.write_page(chosen, scale, cells, about, folder / f'{name}.html', command)}")
