"""What a call costs on a GPU, or on the CPU where a benchmark is only rehearsed."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from headrace.layers.graph import captured

Call = Callable[[], object]
BUSY = 2_000_000  # cycles, about a millisecond, before a call: its first kernels are launched while they last


class Times(NamedTuple):
    """Medians over rounds, in milliseconds."""

    device: float  # from the first to the last kernel; gaps included where the host takes more than BUSY cycles
    host: float  # until the call has returned
    rounds: int


class Machine:
    """A device and its clock."""

    def __init__(self, device: str):
        self.device, self.is_gpu = device, device == "cuda"
        self.captures = self.is_gpu  # until a capture fails, after which PyTorch may take all memory for a graph's

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def once(self, call: Call) -> tuple[float, float]:
        """(milliseconds on the device, milliseconds on the host)"""
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            taken = 1000 * (time.perf_counter() - start)
            return taken, taken
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        start = time.perf_counter()
        first.record()
        call()
        last.record()
        host = 1000 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        return first.elapsed_time(last), host

    def interleave(self, calls: dict[str, Call], rounds: int, budget: float) -> dict[str, Times]:
        """Times the calls in turn, round after round; a call that has used `budget` seconds sits out the rest."""
        for call in calls.values():
            call()  # compiles and tunes
            call()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                if sum(device for device, _ in found[name]) < 1000 * budget:
                    found[name].append(self.once(call))
        return {
            name: Times(median(x for x, _ in times), median(x for _, x in times), len(times))
            for name, times in found.items()
        }

    def graph(self, call: Call) -> Call | None:
        """The replay of a CUDA graph of the call; None on a CPU, and after a failed capture. Raises what it raises."""
        if not self.captures:
            return None
        self.captures = False
        replay = captured(call, call, torch.device(self.device))[1]
        self.captures = True
        return replay

    def peak(self, call: Call) -> float | None:
        """Bytes that the call needs at its worst moment beyond what was there; None on a CPU."""
        if not self.is_gpu:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    def launches(self, call: Call) -> int:
        """Number of kernels on a GPU; of operators of PyTorch on a CPU."""
        kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if self.is_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
        with profile(activities=[kind[0]]) as seen:
            call()
            self.synchronize()
        events = [event for event in seen.events() if event.device_type == kind[1]]
        return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
