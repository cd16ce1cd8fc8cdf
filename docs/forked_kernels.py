"""Kernels for the pages of code, and commands of theirs, that need not import PyTorch and transformers again.

Each page has a process of its own, forked from one that has imported them, and so has each command `headrace` of a
page. That one has not imported headrace, so that a page must itself import all that it uses of it.
"""

import gc
import multiprocessing
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Listener
from multiprocessing.forkserver import _forkserver
from threading import Thread
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

CONTEXT = multiprocessing.get_context("forkserver")
# Not matplotlib, which takes the backend that IPython sets when it is imported.
SHARED = [
    "torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "transformers.generation.utils",
    "transformers.loss.loss_utils", "ipykernel.kernelapp",
]  # fmt: skip


def begin(folder: str, environment: dict[str, str]) -> None:
    """Begins a process that was forked."""
    gc.freeze()  # what all share is not looked through for garbage
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if not hasattr(_forkserver, "_forkserver_authkey"):  # before Python 3.14
        # Workers of a command are forked from the same process. Python means to do this, but begins another one.
        _forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    from ipykernel.kernelapp import launch_new_instance

    begin(folder, environment | {"JPY_PARENT_PID": str(os.getppid())})
    launch_new_instance(arguments)


class Kernel(CONTEXT.Process):
    """A forked process with the methods of subprocess.Popen that a provisioner calls."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)


class Forked(LocalProvisioner):
    async def launch_kernel(self, cmd: list[str], **settings: Any) -> KernelConnectionInfo:
        """cmd: python -m ipykernel_launcher ARGUMENTS"""
        self.process = Kernel(target=run, args=(cmd[3:], str(settings.get("cwd") or os.getcwd()), settings["env"]))
        self.process.start()
        self.pid = self.process.pid
        return self.connection_info


def command(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    """Becomes the installed command that words[0] names, which writes to the files out and err."""
    begin(folder, environment)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    sys.argv = words
    (installed,) = entry_points(group="console_scripts", name=words[0])
    sys.exit(installed.load()())


def serve(listener: Listener) -> None:
    """Runs the commands that pages ask for, one after the other, and answers with their exit codes."""
    while True:
        with listener.accept() as page:
            process = CONTEXT.Process(target=command, args=page.recv())
            process.start()
            process.join()
            page.send(process.exitcode)


def fork_kernels() -> None:
    """Has Jupyter start kernels so, in this process, and the pages their commands."""
    CONTEXT.set_forkserver_preload(SHARED)
    listener = Listener(family="AF_UNIX", authkey=multiprocessing.current_process().authkey)
    os.environ["HEADRACE_DOCS_COMMANDS"] = str(listener.address)
    Thread(target=serve, args=(listener,), daemon=True).start()
    factory = KernelProvisionerFactory.instance()
    factory.provisioners["forked"] = EntryPoint("forked", "forked_kernels:Forked", factory.GROUP_NAME)
    factory.default_provisioner_name = "forked"
