"""Runs that a group of processes trains one after the other, as torchrun would start them."""

import multiprocessing as mp
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import TrainerCallback


@dataclass
class Run:
    folder: Path
    changes: dict = field(default_factory=dict)  # fields of the recipe
    killed_at: int | None = None  # the step before which every process is killed by SIGKILL


def train_all(runs, data, processes=1):
    """Trains the runs, each in `processes` new processes, which are the same for all runs up to one that is killed."""
    context, given = mp.get_context("forkserver"), (processes, _free_port(), data, runs)
    context.set_forkserver_preload(["headrace.training.run"])  # imported once for all groups
    group = [context.Process(target=_process, args=(rank, *given), daemon=True) for rank in range(processes)]
    for process in group:
        process.start()
    for process in group:
        process.join(300)
    ended = [process.exitcode for process in group]
    wanted = -signal.SIGKILL if runs[-1].killed_at is not None else 0
    assert ended == [wanted] * processes, ended


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _process(rank, processes, port, data, runs):
    from headrace.data import open_data
    from headrace.training import run
    from training import train

    torch.set_num_threads(1)
    if processes > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}
    run.LOG_EVERY, make = 1, run.make_trainer
    for one in runs:

        def with_kill(*given, step=one.killed_at):
            trainer = make(*given)
            trainer.add_callback(KillAt(step))
            return trainer

        run.make_trainer = with_kill
        train(open_data(data), one.folder, **one.changes)


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
