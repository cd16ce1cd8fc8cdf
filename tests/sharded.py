"""Runs that a group of processes trains one after the other by `headrace train`, as torchrun would start them."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from groups import begin, forked, free_port

GRACE = 5  # seconds in which the other processes may end after one has failed


@dataclass
class Run:
    folder: Path
    changes: dict = field(default_factory=dict)  # fields of the recipe
    signals: dict = field(default_factory=dict)  # {process: (step, signal that it sends to itself before the step)}
    options: tuple = ()  # of the command
    log_every: int = 1  # steps


def train_all(runs, data, processes=1):
    """Trains the runs in `processes` processes, which are new, and returns their exit codes."""
    return ended(start(runs, data, processes))


def start(runs, data, processes):
    return start_each([runs] * processes, data)


def start_each(runs, data, context=None):
    """Starts a process for each element of `runs`, the runs of this process."""
    context, given = context or forked(), (len(runs), free_port(), data)
    group = [context.Process(target=_process, args=(rank, *given, own), daemon=True) for rank, own in enumerate(runs)]
    for process in group:
        process.start()
    return group


def ended(group):
    """Returns the exit codes of the processes, when they have ended or, after one has failed, were killed."""
    for process in group:
        process.join(GRACE if any(other.exitcode for other in group) else 900)
        process.kill()
        process.join()
    return [process.exitcode for process in group]


def _process(rank, processes, port, data, runs):
    from headrace.training import card, loop
    from trained import signalled

    begin(int(os.environ.get("HEADRACE_TEST_THREADS", "1")))
    if processes > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}
    card.draw_curves = lambda *given: None  # takes as long as half of the steps
    for one in runs:
        loop.LOG_EVERY = one.log_every
        with (one.folder.parent / f"{one.folder.name}-{rank}.txt").open("w") as message:
            os.dup2(message.fileno(), 1)
            os.dup2(message.fileno(), 2)
        with signalled(*one.signals.get(rank, (None, None))):
            command(data, one)


def command(data, one):
    """Ends this process unless the command ends with code 0."""
    from headrace.cli import main
    from trained import arguments

    sys.argv = ["headrace", *arguments(data, one.folder, **one.changes), *one.options]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
