"""Linearize: a trained model whose attention layers become linear."""

import csv
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import zoo
from ..files.checks import read_json
from ..files.processes import locked, resumed_folder
from ..files.results import finite, restored
from ..spec.linear import MixerSpec
from ..utils.errors import InputError, reading, require
from ..utils.integrity import digest, write_json
from .console import interruptible, refuse_idle, telling, terminal
from .options import Checkpoint, Device, NewFolder, Threads, setting, takes

CHECKPOINTS = "transfer/checkpoint-*/complete.json"  # from which a command goes on
REPORT = "linearize.json"
MEASURED = {"held_out": int, "precision": str, "data": str}  # what its losses depend on beside the models
FORM = {"nats": {}, "removed": {}, "curve": [float], "measured": MEASURED, "commands": [str], "environments": [{}]}
LONGER = 4  # times the imitation's length: rows of the last stage
UPDATES = 50  # of each stage that trains the model as a whole
FEW = 4  # held-out rows on which layers are removed, as the page says


@dataclass(frozen=True)
class LinearizeOptions:
    """The options of `headrace linearize`."""

    checkpoint: Checkpoint
    output: NewFolder
    data: Path = setting("Folder of `headrace prepare`, whose --tokenizer is the checkpoint, to imitate on.", ...)
    mixer: str = setting(
        "Linear mixer in place of attention: hedgehog, lolcats(window=64), gla, ...",
        "hedgehog(decay.kind=sigmoid-head)",
    )
    keep: str = setting(
        "Attention layers that stay: 4,12,20, or every=4 (each fourth, from the first), worst=6 (those whose "
        "imitation is worst), or none.",
        "every=2",
    )
    steps: int = setting("Number of training steps.", 200, least=1)
    rows: int = setting("Rows of the data per step.", 2)
    lr: float = setting("Peak learning rate.", 1e-2)
    trains: str = setting(
        "Weights to train: new (those that the old layers do not have), or all of the new layers.", "new"
    )
    window_dropout: float = setting(
        "Share of the steps in which layers with a window lose it, so that they learn to use their memory.", 0.0
    )
    precision: str = setting("Activations in float32, or in bfloat16 by autocast. Weights are not rounded.", "float32")
    held_out: int = setting("Held-out rows on which the errors and losses are measured.", 16)
    seed: int = setting("Random seed of new weights and of the order of the rows.", 0)
    beside: list[str] | None = setting(
        "Model whose held-out loss is added to the report of an existing OUTPUT, such as OUTPUT after training as a "
        "whole, or CHECKPOINT after training on the same rows. Repeatable.",
        show_default=False,
    )
    scores: Path | None = setting(
        "Folder of `headrace eval` whose scores are added to the report of an existing OUTPUT."
    )
    device: Device = None
    threads: Threads = None
    machine: str | None = setting(
        "Machine, such as 1xH100: print its memory and time for the imitation, and train nothing."
    )

    def __post_init__(self) -> None:
        if not isinstance(zoo.mixer(self.mixer), MixerSpec):
            raise InputError(f"--mixer={self.mixer!r} is no linear mixer; expected one, such as gated-deltanet")

    @property
    def settings(self) -> Any:
        """The settings of the training."""
        from ..training.transfer import Transfer

        own = {"steps", "lr", "trains", "rows", "window_dropout", "precision", "held_out", "seed"}
        return Transfer(**{name: getattr(self, name) for name in own})


@takes(LinearizeOptions)
def linearize(options: LinearizeOptions) -> dict[str, Any]:
    """Make attention layers of a trained model linear, and train them to imitate attention.

    The new layers take over q, k, v and o. Each is trained to give what the old one gave for the same input, all at
    once; nothing else trains. After an interruption, the same command goes on. OUTPUT/report.html shows how well each
    layer imitates, what the model loses without it, the state and speed of both models, and the commands that train the
    model as a whole; OUTPUT/linearize.json has the numbers. With --beside or --scores nothing trains: the held-out
    losses of these models, and the scores of tasks, are added to the report."""
    from ..convert.checkpoint import fetched, read_config, read_tokenizer
    from ..data import open_data
    from ..training.linear import Keep, checked, costs
    from ..training.processes import answering

    one, keep, settings, processes = options, Keep.parsed(options.keep), options.settings, connected(options.device)
    adds = bool(one.beside or one.scores)
    done = "changed" if adds else "created"
    with interruptible(f"{one.output} was not {done}; the same command goes on"):
        data, config = open_data(one.data), read_config(one.checkpoint)
        for model in (one.checkpoint, *(one.beside or ())):
            tokenizer = read_tokenizer(fetched(model))
            if data.tokenizer is None or tokenizer.get_vocab() != data.tokenizer.get_vocab():
                raise InputError(
                    f"--data {str(one.data)!r} has another tokenizer than {str(model)!r}; prepare it with --tokenizer "
                    f"{model}"
                )
        if adds:
            refuse_idle("with --beside or --scores", machine=one.machine)
            with locked(one.output):
                return _add(one, data, processes.device)
        changed = checked(config, one.mixer, keep, data, settings)  # before the weights are read
        if one.machine is not None:
            needed = costs(config, one.mixer, changed, settings, data.manifest["length"])
            return show_costs(one.machine, one.mixer, needed)
        each = processes.count
        require(
            settings.rows % each == 0, f"--rows={settings.rows} with {each} processes; expected a multiple of {each}"
        )
        with answering(processes), seen_by_all(one.output) as (work, ready):
            report = _write(one, keep, data, processes, work / "transfer", ready)
            if processes.rank == 0:
                tokenizer.save_pretrained(ready)
    if processes.rank == 0:
        show(report)
        print(f"{one.output} is a model of headrace; next: {report['next']['the model as a whole']}")
    return report


def connected(device: str | None) -> Any:
    """Returns the processes of torchrun, or this one with the device."""
    import torch

    from ..files.devices import on_device
    from ..training.processes import connect

    processes = connect()
    if processes.count == 1:
        return replace(processes, device=torch.device(on_device(device)))
    refuse_idle("with torchrun, which gives each process a device", device=device)
    return processes


@contextmanager
def seen_by_all(output: Path) -> Iterator[tuple[Path, Path]]:
    """Yields what `resumed_folder` does in process 0, in all processes."""
    from ..training.processes import errors_in_all, gathered, rank

    with ExitStack() as held:
        places = None
        with errors_in_all():
            if rank() == 0:
                places = held.enter_context(resumed_folder(output, CHECKPOINTS))
        yield gathered(places)[0]


def next_commands(one: LinearizeOptions, length: int, config: Any) -> dict[str, str]:
    """Returns the commands that follow, by what they do. Longer rows end where learned positions do."""
    old, new, data = map(str, (one.checkpoint, one.output, one.data))
    longer, whole, control = LONGER * length, f"{new}-whole", f"{new}-control"
    if config.sizes.style.positions == "learned":
        longer = min(longer, config.max_position_embeddings)

    def command(*words: str) -> str:
        return shlex.join(["headrace", *words])

    def train(weights: str, rows: int, length: int, data: str, output: str) -> str:
        sizes = f"tokens={UPDATES * rows * length}", f"batch_tokens={rows * length}", f"micro_batch={rows}"
        teacher = () if weights == old else (f"teacher={old}",)
        settings = "mixer=checkpoint", f"weights={weights}", *teacher, "lr=1e-4", "weight_decay=0", *sizes
        return command("train", "laptop-5m", *settings, "--data", data, "--output", output)

    models, more, tasks = (f"{whole}/model", f"{control}/model"), f"{data}-{longer}", f"{new}-tasks"
    folders = "--data", data, "--output", new
    beside = (word for model in models for word in ("--beside", model))
    prepare = "prepare", "TEXT", "--tokenizer", old, "--length", str(longer), "--output", more
    return {
        "the model as a whole": train(new, one.rows, length, data, whole),
        "the original on the same rows": train(old, one.rows, length, data, control),
        "tasks of all": command("eval", old, new, *models, "--suite", "language,recall,needle", "--output", tasks),
        "losses and scores on this page": command("linearize", old, *folders, *beside, "--scores", tasks),
        "longer rows": command(*prepare),
        "the model as a whole on them": train(models[0], 1, longer, more, f"{new}-{longer}"),
    }


def _add(one: LinearizeOptions, data: Any, device: Any) -> dict[str, Any]:
    """Measures the losses of --beside as those of the report, and writes it with them and the scores."""
    from ..convert.checkpoint import load
    from ..convert.importing import cast
    from ..training.linear import held_out_loss
    from ..training.processes import timed_steps

    added = {"tasks": _scores(one.scores)} if one.scores else {}
    path = one.output / REPORT
    report = restored(read_json(path, FORM))
    settings = replace(one.settings, **{name: report["measured"][name] for name in ("held_out", "precision")})
    require(report["measured"] == measured(settings, data), f"--data {str(one.data)!r} is not that of {str(path)!r}")
    report |= {"beside": report.get("beside", {})} | added
    with telling(terminal()) as say, timed_steps(device, one.threads or 1):
        for other in one.beside or ():
            say(f"loss of {other}")
            model: Any = load(other)
            cast(model.to(device), settings.weights(model.dtype))
            report["beside"][other] = held_out_loss(model, data, settings)
        _keep(report, one.output, device)
    show_losses(report)
    return report


def _scores(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of the scores.csv of `headrace eval`."""
    file = folder / "scores.csv"
    require(file.is_file(), f"--scores {str(folder)!r} has no {file.name}; expected a folder of `headrace eval`")
    with reading(f"--scores {str(folder)!r} cannot be read"), file.open(encoding="utf-8", newline="") as opened:
        return [
            {name: x[name] for name in ("task", "metric", "model", "rows")}
            | {name: float(x[name]) if x[name] else None for name in ("score", "standard_error")}
            | {"accuracy": x["higher_is_better"] == "1"}
            for x in csv.DictReader(opened)
        ]


def _write(one: LinearizeOptions, keep: Any, data: Any, processes: Any, work: Path, ready: Path) -> dict[str, Any]:
    """Writes the model and its report, which is returned, into the folder `ready`, in process 0."""
    from transformers import set_seed

    from ..benchmarking.generation import speeds
    from ..convert.checkpoint import load
    from ..convert.importing import cast
    from ..training.linear import imitate, removed
    from ..training.processes import timed_steps

    set_seed(one.seed)
    model: Any = load(one.checkpoint)
    console, dtype = terminal(), model.dtype
    shown = 1 if console.is_terminal else max(one.steps // 10, 1)
    with telling(console) as say:

        def tell(step: int, error: float) -> None:
            if step % shown == 0:
                say(f"step {step} of {one.steps}: error {error:.3f}")

        linear, report = imitate(model, one.mixer, keep, data, one.settings, work, processes, tell, one.threads)
        if processes.rank:
            return report
        changed = [int(i) for i in report["layers"] if int(i) not in report["kept"]]
        few = replace(one.settings, held_out=FEW)
        report["removed"] = removed(model, linear, changed, data, few, lambda i: say(f"loss without layer {i}"))
    cast(linear, dtype).save_pretrained(ready)
    with timed_steps(processes.device, one.threads or 1):
        both = {"original": cast(model, dtype), "linear": linear}
        report["decoding"] = speeds(both, report["state_bytes"])
        report |= {"mixer": one.mixer, "keep": one.keep, "from": str(one.checkpoint), "seed": one.seed}
        report |= {"measured": measured(one.settings, data), "commands": [], "environments": []}
        report["next"] = next_commands(one, data.manifest["length"], linear.config)
        _keep(report, ready, processes.device)
    return report


def measured(settings: Any, data: Any) -> dict[str, Any]:
    return {"held_out": settings.held_out, "precision": settings.precision, "data": digest(data.identity)}


def _keep(report: dict[str, Any], folder: Path, device: Any) -> None:
    """Writes the report as JSON and as a page, with this command and where it ran."""
    from ..files.environment import command, environment
    from ..training.card import can_draw
    from ..utils.extras import named

    made = {"commands": command(), "environments": environment(str(device)) | {"seed": report["seed"]}}
    for name, one in made.items():
        report[name] = [other for other in report[name] if other != one] + [one]
    write_json(folder / REPORT, finite(report))
    if can_draw():
        from ..report.linearized import write_page

        write_page(report, folder)
    else:
        print(f"report.html needs {named('studies')}")


def show(report: dict[str, Any]) -> None:
    """Prints the errors of the layers, and the losses."""
    console, table = terminal(), Table("layer", "error before", "after", "")
    for i, errors in report["layers"].items():
        kept = "keeps its attention" if int(i) in report["kept"] else ""
        table.add_row(i, f"{errors['before']:.3f}", f"{errors['after']:.3f}", kept)
    console.print(table)
    show_losses(report)


def show_losses(report: dict[str, Any]) -> None:
    losses = ", ".join(f"{what} {nats:.3f}" for what, nats in (report["nats"] | report.get("beside", {})).items())
    terminal().print(f"held-out loss in nats per token: {losses}", highlight=False, soft_wrap=True)


def show_costs(machine: str, mixer: str, needed: dict[str, Any]) -> dict[str, Any]:
    """Prints what the imitation needs of a machine."""
    from ..training.history import duration
    from ..training.linear import plan

    console, table, found = terminal(), Table("", ""), plan(machine, mixer, needed)
    for name, size in found["bytes"].items():
        table.add_row(f"memory, {name}", f"{size / 2**30:,.2f} GiB")
    total, most = sum(found["bytes"].values()) / 2**30, found["bytes_of_device"] / 2**30
    no = "does not fit; expected fewer --rows, shorter rows or --precision bfloat16"
    table.add_row("memory", f"{total:,.1f} of {most:,.1f} GiB: {'fits' if found['fits'] else no}")
    reached = f"{found['efficiency']:.0%} of the peak, {found['efficiency_source']}"
    table.add_row("time", f"{duration(found['seconds'])} on one {found['device']}, at {reached}")
    console.print(table)
    return found
