"""Which checkpoints of a run are whole: one is written beside, marked with what its files hold, and named last.

What has no marker we did not finish, or did not write: nothing of it is read or deleted.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..utils.errors import InputError
from ..utils.integrity import damage, read_json, record, write_json

MARKER = "complete.json"
UNFINISHED = ".unfinished"  # the folder where checkpoints are written
KEPT = 2


def whole(folder: Path) -> list[Path]:
    """A run's marked checkpoints, by their steps."""
    found = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{MARKER}")]
    return sorted((path for path in found if _step(path).isdecimal()), key=lambda path: int(_step(path)))


def _step(checkpoint: Path) -> str:
    return checkpoint.name.rpartition("-")[2]


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint. InputError where it is damaged."""
    found = whole(folder)
    if not found:
        return None
    if wrong := damage(found[-1], read_json(found[-1] / MARKER)):
        raise InputError(
            f"checkpoint {str(found[-1])!r} is damaged: {wrong}; delete that folder to go on from the one before"
        )
    return found[-1]


def discard_unfinished(folder: Path) -> None:
    if (folder / UNFINISHED).exists():
        shutil.rmtree(folder / UNFINISHED)


class MarkComplete(TrainerCallback):
    """Flushes a checkpoint to the disk, marks it, names it, and deletes the third newest."""

    def on_save(self, args, state, control, **kwargs):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # every process has written its part
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        written = folder / UNFINISHED / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        for path in filter(Path.is_file, written.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        write_json(written / MARKER, record(written))
        make_room(folder / written.name)
        written.rename(folder / written.name)
        for old in whole(folder)[:-KEPT]:
            delete(old)


def make_room(place: Path) -> None:
    """Move aside what stands there: it has no marker, so it may be a user's."""
    if not place.exists():
        return
    aside = next(path for i in range(1, 1000) if not (path := place.with_name(f"{place.name}.kept{i}")).exists())
    place.rename(aside)
    print(f"{place} was no whole checkpoint; it is {aside.name} now", file=sys.stderr)


def delete(checkpoint: Path) -> None:
    """A whole checkpoint, but nothing that was put beside its files."""
    ours = read_json(checkpoint / MARKER)
    for name in (MARKER, *ours):
        (checkpoint / name).unlink(missing_ok=True)
    for folder in sorted({(checkpoint / name).parent for name in ours}, reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
