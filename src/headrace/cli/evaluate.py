"""Evaluate and understand: eval, bench, inspect."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import zoo
from ..benchmarking import measurements
from ..evaluation import check_suites
from ..files.hub import ask_hub, check_config
from ..files.processes import MOST, locked, locked_beside
from ..utils.errors import require
from ..utils.integrity import atomic
from .console import interruptible, numbers, read_prompt, telling, terminal, track
from .options import Checkpoint, Device, PromptFile, Threads, argument, setting, takes


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `headrace eval`."""

    checkpoints: list[str] = setting(
        "Causal language models, ours or others: folders, GGUF files or names on the Hub.", ..., kind=argument
    )
    suite: str = setting(
        "Suites, separated by commas: language, recall, needle, blimp, or tasks of lm-evaluation-harness.", ...
    )
    data: Path | None = setting("Folder of local benchmark files.", shown="download from the Hub")
    lengths: str = setting("Tokens of the prompts of `needle`, separated by commas.", "1024,2048,4096,8192")
    limit: int | None = setting("Number of rows per task.", shown="all", least=1)
    max_length: int | None = setting("Maximum context in tokens, except needles.", shown="the model config's", least=1)
    batch_size: int = setting("Rows per batch.", 8, least=1)
    device: Device = None
    threads: Threads = None
    seed: int = setting("Random seed of the needles.", 1234, least=0, most=2**32 - 1)
    output: Path | None = setting("Folder of the report.", shown="runs/eval-<suite>")

    def __post_init__(self) -> None:
        require(bool(self.checkpoints), "eval has no checkpoint; expected at least one")


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Any:
    """Evaluate checkpoints on tasks of lm-evaluation-harness.

    Reports standard errors, and paired differences of the checkpoints from the first. After an interruption, the same
    command resumes; further checkpoints are added to the folder."""
    console = terminal()
    for path in options.checkpoints:
        if Path(path).exists():
            check_config(Path(path))
    lengths = tuple(numbers("lengths", options.lengths))
    check_suites(options.suite)
    if options.data is None:
        ask_hub()
    from ..evaluation import report, run
    from ..files.devices import on_device
    from ..files.results import short_names
    from ..report.page import print_sections

    one, folder = options, options.output or Path("runs", f"eval-{run.slug(options.suite)}")
    local = None if one.data is None else str(one.data)
    plan = run.EvaluationPlan(one.suite, lengths, local, one.limit, one.max_length, one.seed)
    machine = run.Machine(on_device(one.device), one.batch_size, one.threads)
    with interruptible(f"what is finished is in {folder}; the same command continues"), locked(folder):
        with telling(console) as tell:
            evaluation = run.evaluate(one.checkpoints, plan, machine, folder, tell)
        page = report.report(evaluation, short_names(one.checkpoints, "checkpoint"), folder)
        written, table = page.write(folder / "report.html"), folder / "scores.csv"
        report.write_scores(evaluation, table)
    print_sections(page, console)
    console.print(f"The report is {written}, the numbers {table}", soft_wrap=True, highlight=False)
    return evaluation


@dataclass(frozen=True)
class BenchOptions:
    """The options of `headrace bench`."""

    mixers: str = setting(
        "Mixers, separated by commas: names or expressions (see `headrace zoo`), transformers-llama, "
        "transformers-mamba2, transformers-qwen3-next; or checkpoints, which keep their own sizes.",
        "retnet,gla,gated-deltanet,mamba2,transformer,transformers-llama,transformers-mamba2,transformers-qwen3-next",
    )
    what: str = setting("Measurements, separated by commas.", "memory,training,prefill,decoding")
    layers: int | None = setting("Number of layers.", shown="24; 2 on a CPU")
    hidden_size: int = setting("Hidden size of the models.", 1024)
    heads: int = setting("Number of heads per layer.", 4)
    lengths: str = setting("Tokens of a training row and of a prompt, separated by commas.", "512,2048")
    batch_sizes: str = setting("Rows of a training step, separated by commas.", "1,2")
    contexts: str = setting(
        "Tokens of context before the decoded token, separated by commas.", "1024,16384,131072,1048576"
    )
    rounds: int = setting("Number of timed rounds. One more round warms up.", 5)
    threads: int = setting("Number of CPU threads.", 1, least=1, most=MOST)
    device: Device = None
    dtype: str | None = setting("Data type: bfloat16, float32 or float64.", shown="bfloat16; float32 on a CPU")
    output: Path = setting("Folder for bench.csv and report.html.", Path("runs/bench"))

    def __post_init__(self) -> None:
        for name in zoo.several(self.mixers):
            if not (name.startswith("transformers-") or Path(name).exists() or name.count("/")):
                zoo.get(name)  # raises for a misspelt one before PyTorch is imported, which takes seconds
        self.measured()

    def measured(self) -> tuple[Any, ...]:
        """What is measured, at which lengths, batch sizes and contexts. InputError for text that names none."""
        sizes = {"lengths": self.lengths, "batch-sizes": self.batch_sizes, "contexts": self.contexts}
        return measurements(self.what), *(numbers(name, text) for name, text in sizes.items())


@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure memory, throughput and latency of mixers with and without competition.

    Models of transformers are measured beside them. After an interruption, the same command resumes; further lengths
    and contexts are added to the folder."""
    from ..benchmarking.measure import complete
    from ..benchmarking.models import Shape, named
    from ..benchmarking.plan import BenchPlan, points
    from ..benchmarking.report import overheads, rows, write_csv, write_report
    from ..files.devices import on_device
    from ..report.page import print_section

    one, console, output = options, terminal(), options.output
    device = on_device(one.device)
    dtype, layers = ("float32", 2) if device == "cpu" else ("bfloat16", 24)
    shape = Shape(layers if one.layers is None else one.layers, one.hidden_size, one.heads)
    plan = BenchPlan(named(one.mixers), shape, device, one.dtype or dtype, one.threads, one.rounds)
    if one.layers is None and device == "cpu":
        console.print("Note: 2 layers on a CPU instead of the paper's 24; set --layers 24 for all", style="yellow")
    with interruptible(f"what is finished is in {output}; the same command continues"), locked(output):
        with telling(console) as tell:
            held = complete(plan, points(*one.measured()), output, tell)
        lines = rows(held, plan)
        write_csv(output / "bench.csv", lines)
        report = write_report(held, lines, plan, output)
    print_section(overheads(held, plan), console)
    console.print(f"The report is {report}, the numbers {output / 'bench.csv'}", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class InspectOptions:
    """The options of `headrace inspect`."""

    checkpoint: Checkpoint
    prompt: str | None = setting(
        "Text for the model to read.", None, "--prompt", "--text", shown="--file or standard input"
    )
    file: PromptFile = None
    tokens: int | None = setting("Number of tokens to keep of a longer text.", shown="all; more than 2000 are refused")
    device: Device = None
    output: Path = setting("HTML file to write.", Path("inspect.html"))


@takes(InspectOptions)
def inspect(options: InspectOptions) -> Path:
    """Write an interactive page of what a model computes on a text.

    The page shows, for each token, the gates, decay horizons and effective attention of every head."""
    from .. import inspection

    text, output = read_prompt(options.prompt, options.file), options.output
    with telling(Console(stderr=True)) as tell, locked_beside(output):
        tell(f"reading {options.checkpoint}")
        layers = partial(track, name="layer", tell=tell)
        page = inspection.inspect(options.checkpoint, text, options.tokens, layers, options.device)
        with atomic(output) as file:
            file.write(page)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
    return output
