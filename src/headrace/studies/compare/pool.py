"""Worker processes for the arms of a study. A worker trains arm after arm on one device; on a CPU, with one thread."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import cycle, islice
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from ...utils.device import see_only
from ...utils.errors import GateWarning, InputError
from .plan import Arm

Listen = Callable[[Arm, int, dict[str, float] | None], None]  # (arm, step, scores after an evaluation, else None)


def place_workers(devices: Sequence[str], wanted: int | None) -> list[str]:
    """The device of each worker, for `wanted` workers placed round-robin on the devices. The default is one worker per
    accelerator or, on a CPU, one per core that this process may use.

    Raises:
        InputError: `wanted` is below 1.
    """
    if wanted is not None and wanted < 1:
        raise InputError(f"--workers={wanted}; expected at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return list(islice(cycle(devices), wanted or (cores if list(devices) == ["cpu"] else len(devices))))


def train_all(arms: Sequence[Arm], folder: Path, workers: Sequence[str], listen: Listen) -> None:
    """Trains every arm with worker processes on the devices `workers`; `listen` is called in this process on progress.

    The result of an arm is written when the arm is finished, so an exception (such as KeyboardInterrupt) ends the
    workers and loses unfinished arms only.

    Raises:
        InputError: a worker process died.
    """
    context, others = get_context("spawn"), set(active_children())
    events, devices = context.SimpleQueue(), context.SimpleQueue()
    for device in workers:
        devices.put(device)
    with ProcessPoolExecutor(min(len(workers), len(arms)), context, initialise_worker, (events, devices)) as executor:
        with interrupts_ignored():  # workers inherit this, so that only this process handles Ctrl-C
            futures = {executor.submit(train_in_worker, arm, arm.result(folder)) for arm in arms}
        try:
            wait_for(futures, events, listen)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def wait_for(futures: set[Future], events, listen: Listen) -> None:
    while futures:
        done, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
        while not events.empty():
            listen(*events.get())
        try:
            for future in done:
                future.result()
        except BrokenProcessPool:
            raise InputError(
                "a worker process died, perhaps because memory ran out; finished arms are kept, so run the same "
                "command again with fewer --workers"
            ) from None


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the worker ---------------------------------------------------------------------------------------------------
send_to_parent: Callable[[tuple[Arm, int, dict[str, float] | None]], None]
worker_device: str


def initialise_worker(events, devices) -> None:
    global send_to_parent, worker_device
    send_to_parent, worker_device = events.put, devices.get()
    see_only(worker_device)
    import torch
    import transformers

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GateWarning)  # the parent warns once for the whole plan
    transformers.utils.logging.set_verbosity_error()


def end_with_parent() -> None:
    """Ends this worker when its parent has ended, even if the parent was killed."""
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def train_in_worker(arm: Arm, path: Path) -> None:
    from .arm import train

    train(arm, path, lambda step, scores: send_to_parent((arm, step, scores)), worker_device)
