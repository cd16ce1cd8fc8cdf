"""Worker processes: one per core, each importing once and training arm after arm on a single thread."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from ..device import on_device
from ..errors import GateWarning, InputError
from .folder import result_path
from .plan import Arm

Listen = Callable[[Arm, int, dict[str, float] | None], None]  # arm, step, scores where there are new ones


def worker_count(wanted: int | None) -> int:
    """As many as are wanted; without a wish one for an accelerator, which they would share, or else one per core that
    this process may use. InputError for none."""
    if wanted is not None:
        if wanted < 1:
            raise InputError(f"--workers={wanted}; expected at least 1")
        return wanted
    if on_device(None) != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_all(arms: Sequence[Arm], folder: Path, workers: int, listen: Listen) -> None:
    """Train every arm; `listen` hears of each one's progress, in this process.

    An arm's result is on the disk as soon as the arm is done: an exception here (KeyboardInterrupt, say) ends the
    workers and loses only what is not finished. InputError where a worker dies.
    """
    context, others = get_context("spawn"), set(active_children())
    news = context.SimpleQueue()
    with ProcessPoolExecutor(min(workers, len(arms)), context, prepare, (news,)) as executor:
        with interrupts_ignored():  # by the workers too, which inherit it: Ctrl-C is for this process alone
            futures = {executor.submit(work, arm, result_path(folder, arm)) for arm in arms}
        try:
            follow(futures, news, listen)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def follow(futures: set[Future], news, listen: Listen) -> None:
    while futures:
        done, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
        while not news.empty():
            listen(*news.get())
        try:
            for future in done:
                future.result()
        except BrokenProcessPool:
            raise InputError(
                "a worker process died, perhaps for want of memory; what is finished is kept: run the same command "
                "again, with fewer --workers"
            ) from None


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the worker ---------------------------------------------------------------------------------------------------
tell_parent: Callable[[tuple[Arm, int, dict[str, float] | None]], None]


def prepare(news) -> None:
    import torch
    import transformers

    global tell_parent
    tell_parent = news.put
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GateWarning)  # the plan's own warnings say it once
    transformers.utils.logging.set_verbosity_error()


def end_with_parent() -> None:
    """A parent that is killed cannot say goodbye."""
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def work(arm: Arm, path: Path) -> None:
    from .arm import train

    train(arm, path, lambda step, scores: tell_parent((arm, step, scores)))
