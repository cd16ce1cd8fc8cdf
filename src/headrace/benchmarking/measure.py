"""The four measurements of a plan's points. In each, all models take turns in every round, so that other load affects
them alike."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import engine
from ..files.devices import note_speed
from ..files.engine import Tell
from ..files.environment import environment
from ..files.memory import Shortage, fitting
from ..files.workers import Worker, begin, context, ended_by_errors
from ..hf import HeadraceForCausalLM
from ..utils import plugins
from ..utils.errors import InputError
from ..verification.errors import dtype_of
from . import MEASURED
from .decoding import Decoder
from .models import build, cache_bytes, obstacle
from .plan import BenchPlan, Point

WARM = 64  # tokens of the warm-up step, which is not measured
TOKENS = 8  # tokens decoded in a turn
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
SHARE = 4  # one cache may take at most 1 / SHARE of the free memory

# The form of a measured point.
RESULT = {"point": {"what": str}, "environment": {}, "clock": str, "models": {...: {}}}

Measured = dict[str, Any]  # seconds: one for each round; bytes; how; or left_out: the reason


def complete(plan: BenchPlan, wanted: list[Point], folder: Path, tell: Tell) -> list[engine.Row]:
    """Measures the points that the folder does not hold yet, and returns all points of the folder."""
    note_speed(plan.device, plan.dtype)
    points = [
        engine.Point(f"{point.what}, {point.length:,} × {point.batch}", point.path, point, RESULT) for point in wanted
    ]
    engine.run(folder, plan.claim(), points, partial(record, plan=plan), engine.lines(tell, points))
    results = [engine.read(path, RESULT) for path in (folder / "points").glob("*.json")]
    return sorted(results, key=lambda one: (MEASURED.index(one["point"]["what"]), *list(one["point"].values())[1:]))


def record(point: Point, worker: Worker, plan: BenchPlan) -> engine.Row:
    about = {"threads": plan.threads, "date": datetime.now().isoformat(timespec="seconds")}
    result = {"point": vars(point), "environment": environment(plan.device) | about, "clock": plan.clock}
    return result | {"models": measure(point, plan)}


def measure(point: Point, plan: BenchPlan) -> dict[str, Measured]:
    """Model -> its measurement at a point: {"seconds": [...], ...}, or {"left_out": reason}."""
    torch.set_num_threads(plan.threads)
    tokens = point.length + (TOKENS * (plan.rounds + 1) if point.what == "decoding" else 0)
    measured = {n: {"left_out": why} for n in plan.models if (why := obstacle(n, plan.shape, plan.device, tokens))}
    able = tuple(name for name in plan.models if name not in measured)
    measured |= MEASUREMENTS[point.what](point, replace(plan, models=able))
    return {name: measured[name] for name in plan.models}


def training(point: Point, plan: BenchPlan) -> dict[str, Measured]:
    """Time of a training step: forward, backward and AdamW. A model is built for its turn only, to save memory."""

    def turn(name: str) -> float:
        step = Step(built(name, plan))
        step.run(ids(min(WARM, point.length), 1, step.model))
        tokens = ids(point.length, point.batch, step.model)
        return timed(lambda: step.run(tokens), plan)

    return taking_turns(plan.models, turn, plan)


@torch.inference_mode()
def prefill(point: Point, plan: BenchPlan) -> dict[str, Measured]:
    """Time to the first token after a prompt."""

    def turn(name: str) -> float:
        model = built(name, plan)
        prompt = ids(point.length, 1, model)
        Decoder(model).forward(prompt[:, :WARM])
        return timed(lambda: Decoder(model).forward(prompt), plan)

    return taking_turns(plan.models, turn, plan)


@torch.inference_mode()
def decoding(point: Point, plan: BenchPlan) -> dict[str, Measured]:
    """Time of one decoded token of each sequence after a context, with the bytes of the states."""
    decoders, about = dict[str, Decoder](), dict[str, Measured]()

    def turn(name: str) -> float:
        if name not in decoders:  # a model that runs out of memory here is left out too
            needed = point.batch * cache_bytes(name, plan.shape, point.length, plan.itemsize)
            if why := too_large(needed, known_memory("decoding", plan)):  # of what the models before it have left
                about[name] = {"left_out": why}
                raise MemoryError
            decoder = Decoder(built(name, plan), point.batch)
            decoder.reach(point.length)
            decoders[name], about[name] = decoder, {"how": decoder.how, "bytes": decoder.state_bytes()}
        return timed(decoders[name].token, plan, TOKENS)

    measured = taking_turns(plan.models, turn, plan)
    return {name: measured[name] | about.get(name, {}) for name in plan.models}


def too_large(needed: int, memory: int) -> str | None:
    """Why a cache of so many bytes is not made, or None."""
    if needed * SHARE <= memory:
        return None
    return f"its cache needs {needed / 2**30:.1f} GiB, more than 1/{SHARE} of {memory / 2**30:.1f} GiB of free memory"


def memory(point: Point, plan: BenchPlan) -> dict[str, Measured]:
    """Peak memory of a training step. Each model has its own process, as the peak of a process never falls."""
    peaks: dict[str, Measured] = {}
    known_memory("memory", plan)
    for name in plan.models:
        given = begin, (list(plugins.LOADED),)
        with ProcessPoolExecutor(1, context([plan.device]), *given) as pool, ended_by_errors(pool):
            try:
                with fitting(name):
                    peaks[name] = {"bytes": pool.submit(peak, name, point, plan).result()}
            except BrokenProcessPool:
                peaks[name] = {"left_out": "its process was killed, perhaps because memory ran out"}
            except Shortage:
                peaks[name] = {"left_out": "out of memory"}
    return peaks


MEASUREMENTS = {"memory": memory, "training": training, "prefill": prefill, "decoding": decoding}


def peak(name: str, point: Point, plan: BenchPlan) -> int:
    """Peak bytes of weights, gradients, AdamW moments and activations; on a CPU, minus those of the process before."""
    torch.set_num_threads(plan.threads)
    return_freed_blocks()
    steps(name, point, replace(plan, shape=replace(plan.shape, layers=1, vocab_size=64)))  # loads the libraries
    before = 0 if on_cuda(plan) else resident("VmRSS")
    steps(name, point, plan)
    return torch.cuda.max_memory_allocated(plan.device) if on_cuda(plan) else resident("VmHWM") - before


def steps(name: str, point: Point, plan: BenchPlan) -> None:
    step = Step(built(name, plan))
    for _ in range(2):  # AdamW's moments exist from the second step on
        step.run(ids(point.length, point.batch, step.model))


def return_freed_blocks() -> None:
    """Has every block of 128 KiB or more returned to the system once it is freed. By default glibc keeps blocks of up
    to 32 MiB, and the peak of a process depends on the order in which they are freed. Other C libraries lack the
    option, and return such blocks anyway."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def resident(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at the peak. (ru_maxrss of a child can start at the value of its
    parent.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


class Step:
    def __init__(self, model: nn.Module):
        self.model = model.train()
        self.memory = {"skip_logits": True} if isinstance(model, HeadraceForCausalLM) else {}
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def run(self, tokens: Tensor) -> None:
        self.model(input_ids=tokens, labels=tokens, use_cache=False, **self.memory).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def taking_turns(names: Iterable[str], turn: Callable[[str], float], plan: BenchPlan) -> dict[str, Measured]:
    """One warm-up round and `plan.rounds` measured rounds, in which `turn(name)` returns the seconds of each model. A
    model that runs out of memory is left out from then on."""
    measured: dict[str, Measured] = {name: {"seconds": []} for name in names}
    gc.freeze()  # the collector need not visit the objects that exist already
    try:
        for i in range(plan.rounds + 1):
            for name in [name for name, own in measured.items() if "left_out" not in own]:
                try:
                    with fitting(name):
                        measured[name]["seconds"] += [turn(name)] * (i > 0)
                except Shortage:
                    measured[name] = {"left_out": "out of memory"}
                gc.collect()
    finally:
        gc.unfreeze()
    return measured


def timed(call: Callable[[], Any], plan: BenchPlan, times: int = 1) -> float:
    """Seconds of a call, the mean over so many."""
    now = clock(plan)
    synchronize(plan)
    start = now()
    for _ in range(times):
        call()
    synchronize(plan)
    return (now() - start) / times


def clock(plan: BenchPlan) -> Callable[[], float]:
    return time.process_time if plan.clock == "cpu time" else time.perf_counter


def synchronize(plan: BenchPlan) -> None:
    if plan.device != "cpu":
        torch.accelerator.synchronize(plan.device)  # which need not be the current one


def on_cuda(plan: BenchPlan) -> bool:
    return plan.device.startswith("cuda")


def free(plan: BenchPlan) -> int | None:
    """Bytes of free memory on the device; None where the system does not tell, and on other devices."""
    if on_cuda(plan):
        torch.cuda.empty_cache()  # else what PyTorch keeps of earlier points would count as taken
        return torch.cuda.mem_get_info(plan.device)[0]
    if plan.device == "cpu":
        with suppress(OSError):
            lines = Path("/proc/meminfo").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return None


def known_memory(what: str, plan: BenchPlan) -> int:
    """Bytes of free memory. InputError where neither they nor a peak are known."""
    if (memory := free(plan)) is None:
        raise InputError(f"--what={what} needs a CPU with /proc or CUDA, not {plan.device!r}; leave it out of --what")
    return memory


def built(name: str, plan: BenchPlan) -> nn.Module:
    model = build(name, plan.shape).to(plan.device)
    # In float32, the default, a peer keeps weights of another dtype.
    return model if plan.dtype == "float32" else model.to(dtype_of(plan.dtype))


def ids(length: int, batch: int, model: Any) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device)
