"""A function in several processes of a group on this machine."""

import datetime
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace import InputError

# Imported once, by the process from which all others are forked. A part whose extra is not installed is left out.
SHARED = ["headrace.hf", "headrace.cli.app", "headrace.training.run"]


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


def _process(rank, world, folder, port, function, arguments):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600))
    torch.save(function(*arguments), os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


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
