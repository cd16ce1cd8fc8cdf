"""Complete checkpoints of a run. A checkpoint is written to another folder, marked with checksums of its files, and
renamed last. A folder without a marker is incomplete or not ours, and is neither read nor deleted.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from ..files.checks import damage, read_record
from ..utils.errors import InputError
from ..utils.integrity import record, write_json
from .processes import Processes

MARKER = "complete.json"
UNFINISHED = ".unfinished"  # the folder in which checkpoints are written
OPTIMIZER = "optimizer"  # the folder in a checkpoint of the optimizer's state
HISTORY = "history.json"  # what the run has logged
RANDOM = "random-{}.pt"  # the states of a process's random generators
KEPT = 2


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, by step."""
    marked = (path.parent for path in folder.glob(f"{name('*')}/{MARKER}"))
    return sorted((path for path in marked if path.name.removeprefix(name("")).isdecimal()), key=step)


def name(step: int | str) -> str:
    return f"checkpoint-{step}"


def step(checkpoint: Path) -> int:
    """The step after which a complete checkpoint was written."""
    return int(checkpoint.name.removeprefix(name("")))


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None. InputError if its files do not match their checksums."""
    last = next(reversed(complete_checkpoints(folder)), None)
    if last is not None and (wrong := damage(last, read_record(last / MARKER))):
        raise InputError(
            f"checkpoint {str(last)!r} is damaged: {wrong}; delete the folder to resume from an earlier checkpoint"
        )
    return last


def stopped_run(what: str, folder: Path) -> InputError:
    return InputError(f"{what}; the last complete checkpoint is {['none', *complete_checkpoints(folder)][-1]}")


def discard_unfinished(folder: Path) -> None:
    if (folder / UNFINISHED).exists():
        shutil.rmtree(folder / UNFINISHED)


def save_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    """Writes the state of the optimizer and of its schedule, by names of parameters. Each process writes its part."""
    with _plainly():
        dcp.save(_state(model, optimizer, scheduler), checkpoint_id=checkpoint / OPTIMIZER)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    """Reads what `save_optimizer` wrote with any number of processes. Each process reads its part. A parameter that had
    no gradient until then has no state."""
    state, reader = _state(model, optimizer, scheduler), dcp.FileSystemReader(checkpoint / OPTIMIZER)
    with _plainly():
        dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    stored = {key.rpartition(".")[0] for key in reader.read_metadata().state_dict_metadata}
    for parameter in (p for name, p in model.named_parameters() if f"optimizer.state.{name}" not in stored):
        optimizer.state.pop(parameter, None)


def _state(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    return {"optimizer": get_optimizer_state_dict(model, optimizer), "scheduler": scheduler.state_dict()}


@contextmanager
def _plainly() -> Iterator[None]:
    """Without torch's warning that one process writes alone, and with the error or the interruption itself in place of
    torch's CheckpointException, which is not an Exception."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def save_random_state(checkpoint: Path, processes: Processes) -> None:
    states, kind = {"cpu": torch.get_rng_state()}, processes.device.type
    if kind != "cpu":
        states[kind] = torch.get_device_module(kind).get_rng_state()
    torch.save(states, checkpoint / RANDOM.format(processes.rank))


def load_random_state(checkpoint: Path, processes: Processes) -> None:
    """Of a process that has one there: a run may go on with more processes."""
    file, kind = checkpoint / RANDOM.format(processes.rank), processes.device.type
    if not file.exists():
        return
    states = torch.load(file, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if kind in states and kind != "cpu":
        torch.get_device_module(kind).set_rng_state(states[kind])


def complete(folder: Path, name: str) -> None:
    """Marks the written checkpoint `name` as complete, and moves it into the folder of the run."""
    written = folder / UNFINISHED / name
    for path in filter(Path.is_file, written.rglob("*")):
        with path.open("rb+") as file:  # Windows flushes only files that are open for writing
            os.fsync(file.fileno())
    write_json(written / MARKER, record(written))
    make_room(folder / name)
    written.rename(folder / name)
    for old in complete_checkpoints(folder)[:-KEPT]:
        delete(old)


def make_room(place: Path) -> None:
    """Renames a folder that stands in the place of a new checkpoint: without a marker it may be a user's."""
    if not place.exists():
        return
    aside = next(path for i in range(1, 1000) if not (path := place.with_name(f"{place.name}.kept{i}")).exists())
    place.rename(aside)
    print(f"{place} was not a complete checkpoint; it has been renamed to {aside.name}", file=sys.stderr)


def delete(checkpoint: Path) -> None:
    """Deletes the files of a complete checkpoint, but no other files in its folder."""
    ours = read_record(checkpoint / MARKER)
    for name in (*ours, MARKER):  # last, so that the next call goes on after an interruption
        (checkpoint / name).unlink(missing_ok=True)
    for folder in sorted({(checkpoint / name).parent for name in ours}, reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
