"""Worker processes. A worker does job after job on one device; on a CPU, with one thread."""

import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import cycle, islice
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any, NamedTuple

from ..utils import plugins
from ..utils.errors import GateWarning, InputError, reading
from .devices import see_only
from .processes import MOST, interrupts_later

Listen = Callable[[int, Any], None]  # (index of a job, what it reports)
SHARED = ["headrace.hf"]  # to import this takes seconds, longer than a small job


class Worker(NamedTuple):
    """device: "cpu"; None in the process that the user started; any other value means the one accelerator that is
    visible to the process. report: tells that process of progress."""

    device: str | None
    report: Callable[[Any], None]


def place_workers(devices: Sequence[str], wanted: int | None) -> list[str]:
    """The device of each worker, for `wanted` workers placed round-robin on the devices. The default is one worker per
    accelerator or, on a CPU, one per core that this process may use.

    Raises:
        InputError: `wanted` is below 1 or above MOST.
    """
    if wanted is not None and not 1 <= wanted <= MOST:
        raise InputError(f"--workers={wanted}; expected at least 1, and at most {MOST}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return list(islice(cycle(devices), wanted or (cores if list(devices) == ["cpu"] else len(devices))))


def context(devices: Sequence[str]) -> BaseContext:
    """How processes for the devices begin. On Linux and a CPU they are forked from a process that has imported SHARED
    once, for all of them, and has neither the threads of this process nor its data. A process with a GPU begins anew:
    the driver does not survive a fork. So does one on macOS, whose libraries do not."""
    if sys.platform != "linux" or any(device != "cpu" for device in devices):
        return get_context("spawn")
    forking = get_context("forkserver")
    forking.set_forkserver_preload(SHARED)
    return forking


def distribute(call: Callable, jobs: Sequence[tuple], devices: Sequence[str], listen: Listen) -> None:
    """Calls call(*job, worker) for every job in worker processes on the devices; `listen` is called in this process.

    An exception (such as KeyboardInterrupt) ends the workers, and loses only what is in work.

    Raises:
        InputError: a worker process died, or a job has an object of a class that the user's script defines.
    """
    if not jobs:
        return
    with without_main(), reading("worker processes need a plug-in for what a script or notebook defines"):
        pickle.dumps((call, jobs))
    how = context(devices)
    events, free_devices = how.SimpleQueue(), how.SimpleQueue()
    for device in devices:
        free_devices.put(device)
    size, given = min(len(devices), len(jobs)), (events, free_devices, dict(os.environ), list(plugins.LOADED))
    with ProcessPoolExecutor(size, how, initialize_worker, given) as executor, ended_by_errors(executor):
        with interrupts_later(), without_main():  # both are inherited by the workers
            futures = {executor.submit(call_in_worker, call, i, job) for i, job in enumerate(jobs)}
        wait_for(futures, events, listen)


@contextmanager
def ended_by_errors(executor: ProcessPoolExecutor) -> Iterator[None]:
    """At an exception such as KeyboardInterrupt in the block, ends the workers that the executor began in it."""
    others = set(active_children())
    try:
        yield
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in set(active_children()) - others:
            worker.terminate()
        raise


@contextmanager
def without_main() -> Iterator[None]:
    """Starts workers that do not run the user's script again, which they would do to find what it defines: a job needs
    nothing of it, and a script that calls `headrace.compare` may be text on standard input. A module that was run by
    its name, `python -m NAME`, is imported by it: a job may be one of its functions."""
    if getattr(sys.modules["__main__"], "__spec__", None) is not None:
        yield
        return
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def wait_for(futures: set[Future], events, listen: Listen) -> None:
    while futures:
        done, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
        while not events.empty():
            listen(*events.get())
        try:
            for future in done:
                future.result()
        except BrokenProcessPool:
            died = "a worker process died, perhaps because memory ran out; what is finished is kept, so run the same"
            raise InputError(f"{died} command again with fewer --workers") from None


# --- in the worker ---------------------------------------------------------------------------------------------------
send_to_parent: Callable[[tuple[int, Any]], None]
worker_device: str


def initialize_worker(events, devices, environment, plugin_names) -> None:
    global send_to_parent, worker_device
    send_to_parent, worker_device = events.put, devices.get()
    os.environ.clear()  # the process from which this one was forked may have an older one
    os.environ.update(environment)
    see_only(worker_device)
    import torch
    import transformers

    gc.freeze()  # what is imported stays: no collection looks through it
    begin(plugin_names)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GateWarning)  # the parent warns once for the whole plan
    transformers.utils.logging.set_verbosity_error()


def begin(plugin_names: list[str]) -> None:
    """Makes this worker one that ends with its parent alone, and loads plug-ins before a job is unpickled, which may
    have a task of one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plugins.load(plugin_names)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Ends this worker when its parent has ended, even if the parent was killed."""
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def call_in_worker(call: Callable, i: int, job: tuple) -> None:
    call(*job, Worker(worker_device, lambda news: send_to_parent((i, news))))
