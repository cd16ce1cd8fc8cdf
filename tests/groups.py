"""A function in several processes of a group on this machine, and a command in a process."""

import datetime
import gc
import os
import resource
import signal
import socket
import sys
import time
from multiprocessing.forkserver import _forkserver

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace import InputError

# Imported once, by the process from which all others are forked. A part whose extra is not installed is left out.
SHARED = [
    "headrace.hf", "headrace.serving.tokenizing", "headrace.cli.app", "headrace.training.run",
    "headrace.comparison.arm",
]  # fmt: skip


def forked():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    return context


def run(world, folder, function, *arguments):
    """Returns function(*arguments) of each of `world` processes."""
    forked()
    given = (world, str(folder), free_port(), function, arguments)
    mp.start_processes(_process, given, world, start_method="forkserver")
    return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world)]


def begin(threads=1):
    """Begins a process that was forked. It does not look through what all processes share for garbage, and its own
    processes are forked from the same one."""
    torch.set_num_threads(threads)
    gc.freeze()
    if not hasattr(_forkserver, "_forkserver_authkey"):  # before Python 3.14
        # Python means to do this, but begins another process, which imports all again.
        _forkserver.ensure_running = lambda: None


def begun_by(process):
    """The processes that one which was forked has had forked: the younger ones, if nothing else begins any."""
    own = psutil.Process(process.pid)
    return [other for other in own.parent().children() if other != own and other.create_time() >= own.create_time()]


def _process(rank, world, folder, port, function, arguments):
    begin()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600))
    torch.save(function(*arguments), os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def command(folder, *words, largest=None):
    """Starts `headrace WORDS` in a session of its own, with what it says in the files `out` and `err` of a folder.
    largest: bytes beyond which it cannot write a file, those two among them."""
    process = forked().Process(target=_command, args=(folder, largest, *words))
    process.start()
    return process


def _command(folder, largest, *words):
    os.setsid()
    begin()
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    # In a job in the background, whose shell has it ignore the signal, this hears SIGINT all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
    from headrace.cli import main

    sys.argv = ["headrace", *map(str, words)]
    main()


def wait_for(condition, process=None):
    """Until it holds. process: one that must not end before."""
    for _ in range(30000):  # ten minutes, on a busy machine
        if condition():
            return
        assert process is None or process.is_alive(), "the process has ended"
        time.sleep(0.02)
    raise AssertionError("it never came")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def refused(call):
    """Returns the sentence with which a call is refused."""
    try:
        call()
    except InputError as error:
        return str(error)
    raise AssertionError("not refused")
