"""The environment of a result: versions, machine and threads."""

import os
import platform
import shlex
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import headrace

from ..utils.plugins import digests
from .devices import present_device
from .provenance import source


def environment(device: str | None = None) -> dict[str, Any]:
    """Returns versions, machine, threads and plug-ins for a result's record. device: None for `present_device`."""
    device = str(present_device()) if device is None else device
    return {
        "headrace": headrace.__version__,
        "commit": commit(),
        "source": source(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "backend": os.environ.get("HEADRACE_BACKEND") or "auto",
        "device": device_name(device) if device.startswith("cuda") else device,
        "threads_per_arm": torch.get_num_threads(),
        **digests(),
    }


def environments(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the environments in which results were made, each once, without date and threads."""
    apart = {"date", "threads_per_arm"}
    every = [{key: x for key, x in result["environment"].items() if key not in apart} for result in results]
    return [one for i, one in enumerate(every) if one not in every[:i]]


def command() -> str:
    """Returns the command line of this process."""
    return shlex.join(["headrace", *sys.argv[1:]])


@lru_cache
def commit() -> str | None:
    """Returns the commit of the checkout that this package runs from, with "-dirty" for changes; None without one."""
    here = Path(__file__).parents[1]
    # `-- here` gives no commit if the repository only contains the environment that headrace is installed in.
    revision = git("log", "-1", "--format=%h", "--", str(here))
    return revision + ("-dirty" if git("status", "--porcelain", "--", str(here)) else "") if revision else None


def git(*args: str) -> str | None:
    """Returns the output of a git command in the package's folder, or None if it fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def device_name(device: str) -> str:
    """Returns the name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else processor()


def processor() -> str:
    """Returns the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
