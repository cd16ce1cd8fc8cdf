"""A driver of Triton for a GPU that is not there, and torch.cuda's answers about it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from .code import Code, read


class GPU(NamedTuple):
    name: str
    capability: tuple[int, int]
    target: GPUTarget
    shared: int  # bytes of shared memory of a block
    processors: int
    registers: int  # per processor


GPUS = {
    "sm_80": GPU("NVIDIA A100", (8, 0), GPUTarget("cuda", 80, 32), 166_912, 108, 65_536),
    "sm_90": GPU("NVIDIA H100", (9, 0), GPUTarget("cuda", 90, 32), 232_448, 132, 65_536),
    "sm_100": GPU("NVIDIA B200", (10, 0), GPUTarget("cuda", 100, 32), 232_448, 148, 65_536),
    "sm_120": GPU("NVIDIA GeForce RTX 5090", (12, 0), GPUTarget("cuda", 120, 32), 101_376, 170, 65_536),
    "gfx942": GPU("AMD Instinct MI300X", (9, 4), GPUTarget("hip", "gfx942", 64), 65_536, 304, 131_072),
}


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, int, int]
    warps: int
    stages: int
    code: Code


class Driver:
    """The part of Triton's driver that compilation and launches use."""

    def __init__(self, gpu: GPU, index: int):
        self.gpu, self.index, self.grid = gpu, index, (0, 0, 0)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": gpu.shared, "multiprocessor_count": gpu.processors, "max_num_regs": gpu.registers,
                "warpSize": gpu.target.warp_size, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
            },
            load_binary=lambda name, kernel, shared, device: (name, None, 0, 0, 1024),
            unload_module=lambda module: None,
        )  # fmt: skip

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, *_):
            self.grid = (x, y, z)

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.gpu.target

    def get_current_device(self) -> int:
        return self.index  # Triton caches compiled kernels by this number

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def gpu(name: str, configurations: int = 1) -> Iterator[list[Launch]]:
    """Replaces Triton's driver by one for a GPU of this name, and yields the list to which every launch is added.

    Tensors on the CPU say that they are on the GPU (`is_cuda`). Code that asks PyTorch about the GPU at its import must
    be imported inside, in a process of its own.

    Args:
        name: a key of `GPUS`.
        configurations: number of configurations of an autotuned kernel to compile. Of these the one with the least
            stack, then the fewest instructions, is launched.

    Raises:
        OutOfResources: for a kernel that needs more shared memory than the GPU has.
    """
    launches: list[Launch] = []
    active = _driver(name)
    with ExitStack() as replaced:
        enter = replaced.enter_context
        enter(patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1")}))
        for attribute in ("_active", "_default"):
            enter(patch.object(driver, attribute, active))
        for attribute, answer in _torch_cuda(active.gpu).items():
            enter(patch.object(torch.cuda, attribute, answer))
        enter(patch.object(torch.Tensor, "is_cuda", True))
        enter(patch.object(torch.version, "hip", "6.4" if active.gpu.target.backend == "hip" else None))
        enter(patch.object(JITFunction, "run", _recording(active, launches)))
        enter(patch.object(autotuner.Autotuner, "run", _tuning(configurations, launches)))
        yield launches


@cache  # Triton keeps compiled kernels, and these the driver that launches them
def _driver(name: str) -> Driver:
    return Driver(GPUS[name], list(GPUS).index(name))


def _torch_cuda(gpu: GPU) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.processors,
        shared_memory_per_block=49_152, total_memory=80 << 30, warp_size=gpu.target.warp_size,
        gcnArchName=str(gpu.target.arch),
    )  # fmt: skip
    if gpu.target.backend == "cuda":  # PyTorch for AMD's GPUs does not have it
        properties.shared_memory_per_block_optin = gpu.shared
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
    }


def _recording(active: Driver, launches: list[Launch]):
    original, known = JITFunction.run, {}

    def run(self, *args, **kwargs):
        kernel = original(self, *args, **kwargs)
        if kernel is not None and not kwargs.get("warmup"):
            about = kernel.metadata
            if about.hash not in known:
                known[about.hash] = read(kernel)
            stages = getattr(about, "num_stages", 0)
            launches.append(Launch(about.name, active.grid, about.num_warps, stages, known[about.hash]))
        return kernel

    return run


def _tuning(limit: int, launches: list[Launch]):
    """In place of `Autotuner.run`, which asks a GPU for times."""

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        best, reason = None, None
        for config in list(self.prune_configs(kwargs))[:limit]:
            start = len(launches)
            try:
                kernel = self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
            except (OutOfResources, PTXASError) as error:
                reason = error
                continue
            launch = launches.pop()
            del launches[start:]
            cost = launch.code.stack, launch.code.instructions
            if best is None or cost < best[0]:
                best = cost, launch, config, kernel
        if best is None:
            raise reason or ValueError(f"{self.fn} has no configuration")
        launches.append(best[1])
        self.best_config = best[2]
        return best[3]

    return run
