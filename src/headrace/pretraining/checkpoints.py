"""Which checkpoints of a run are whole: a marker is written beside a checkpoint after everything else, with what the
files must weigh. What has none, or does not weigh that, was cut off.
"""

import os
import shutil
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import InputError
from ..train.folder import read_json, write_json

MARKER = "complete.json"


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; what was cut off after it is deleted. InputError where a whole one is damaged."""
    found = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    while found and not (found[-1] / MARKER).is_file():
        shutil.rmtree(found.pop())
    if not found:
        return None
    for name, size in read_json(found[-1] / MARKER).items():
        file = found[-1] / name
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            raise InputError(
                f"checkpoint {str(found[-1])!r} is damaged: {name} has {there} bytes, not {size}; delete that folder "
                "to go on from the one before"
            )
    return found[-1]


class MarkComplete(TrainerCallback):
    """Flushes a checkpoint to the disk and marks it."""

    def on_save(self, args, state, control, **kwargs):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # every process has written its part
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        write_json(folder / MARKER, {str(path.relative_to(folder)): path.stat().st_size for path in files})
