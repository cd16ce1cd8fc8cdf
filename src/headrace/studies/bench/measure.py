"""The four measurements. In each all models take turns, round after round, so that a busy moment hits them alike."""

import gc
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.errors import InputError
from .decoding import Decoder
from .models import build, cache_bytes
from .plan import DTYPES, Plan, Point

WARM = 64  # tokens of a short step that is not measured
TOKENS = 8  # decoded in a turn
SHARE = 4  # one cache may take this part of the memory that is free

Measured = dict[str, Any]  # seconds: one for each round; bytes; how; or left_out: why


def measure(point: Point, plan: Plan) -> dict[str, Measured]:
    """Of every model at a point: {"seconds": [...], ...}, or {"left_out": why}."""
    torch.set_num_threads(plan.threads)
    return MEASUREMENTS[point.what](point, plan)


def training(point: Point, plan: Plan) -> dict[str, Measured]:
    """Forward, backward and AdamW. Models are built anew for each turn: only one of them needs room."""

    def turn(name: str) -> float:
        step = Step(built(name, plan))
        step.run(ids(min(WARM, point.length), 1, plan))
        given = ids(point.length, point.batch, plan)
        return timed(lambda: step.run(given), plan)

    return taking_turns(plan.models, turn, plan)


@torch.inference_mode()
def prefill(point: Point, plan: Plan) -> dict[str, Measured]:
    """From a prompt to the first token after it."""

    def turn(name: str) -> float:
        model, given = built(name, plan), ids(point.length, 1, plan)
        Decoder(model).forward(given[:, :WARM])
        return timed(lambda: Decoder(model).forward(given), plan)

    return taking_turns(plan.models, turn, plan)


@torch.inference_mode()
def decoding(point: Point, plan: Plan) -> dict[str, Measured]:
    """One token after a context."""
    limit, decoders = free(plan) // SHARE, {}
    found: dict[str, Measured] = {}
    for name in plan.models:
        if (needed := cache_bytes(name, plan.shape, point.length, plan.itemsize)) > limit:
            found[name] = {"left_out": f"its cache would take {needed / 2**30:.1f} GiB of {SHARE * limit / 2**30:.1f}"}
        else:
            decoders[name] = Decoder(built(name, plan))
            decoders[name].reach(point.length)
    about = {name: {"how": each.how, "bytes": each.state_bytes()} for name, each in decoders.items()}
    found |= taking_turns(decoders, lambda name: several(decoders[name], plan), plan)
    return {name: about.get(name, {}) | found[name] for name in plan.models}


def several(decoder: Decoder, plan: Plan) -> float:
    """Seconds of a token, over several."""

    def tokens() -> None:
        for _ in range(TOKENS):
            decoder.token()

    return timed(tokens, plan) / TOKENS


def memory(point: Point, plan: Plan) -> dict[str, Measured]:
    """The peak of a training step, each in a process of its own: a peak is never forgotten."""
    found: dict[str, Measured] = {}
    for name in plan.models:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found[name] = {"bytes": pool.submit(peak, name, point, plan).result()}
            except BrokenProcessPool:
                found[name] = {"left_out": "its process was killed, as for want of memory"}
            except torch.OutOfMemoryError:
                found[name] = {"left_out": "out of memory"}
    return found


MEASUREMENTS = {"memory": memory, "training": training, "prefill": prefill, "decoding": decoding}


def peak(name: str, point: Point, plan: Plan) -> int:
    """Bytes of weights, gradients, AdamW and activations at their most; on a CPU, over those of the empty process."""
    torch.set_num_threads(plan.threads)
    before = 0 if on_cuda(plan) else resident("VmRSS")
    step = Step(built(name, plan))
    for _ in range(2):  # the moments are there from the second on
        step.run(ids(point.length, point.batch, plan))
    return torch.cuda.max_memory_allocated(plan.device) if on_cuda(plan) else resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most. (A child's ru_maxrss can begin at its parent's.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        raise InputError("peak memory is read from /proc, which this system has not; leave memory out of --what")
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))


class Step:
    def __init__(self, model: nn.Module):
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def run(self, given: Tensor) -> None:
        self.model(input_ids=given, labels=given, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def taking_turns(names: Iterable[str], turn: Callable[[str], float], plan: Plan) -> dict[str, Measured]:
    """A round that warms up, then those that count; turn(name) is seconds. Whoever runs out of memory is left out."""
    found: dict[str, Measured] = {name: {"seconds": []} for name in names}
    gc.freeze()  # what is there by now need not be looked through again
    for i in range(plan.rounds + 1):
        for name in found:
            if "left_out" in found[name]:
                continue
            try:
                seconds = turn(name)
                if i:
                    found[name]["seconds"].append(seconds)
            except torch.OutOfMemoryError:
                found[name] = {"left_out": "out of memory"}
            gc.collect()
    gc.unfreeze()
    return found


def timed(call: Callable[[], Any], plan: Plan) -> float:
    clock = time.process_time if plan.clock == "cpu time" else time.perf_counter
    synchronise(plan)
    start = clock()
    call()
    synchronise(plan)
    return clock() - start


def synchronise(plan: Plan) -> None:
    if plan.device != "cpu":
        torch.accelerator.synchronize()


def on_cuda(plan: Plan) -> bool:
    return plan.device.startswith("cuda")


def free(plan: Plan) -> int:
    """Bytes."""
    if on_cuda(plan):
        return torch.cuda.mem_get_info(plan.device)[0]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    raise InputError("free memory is read from /proc, which this system has not; leave decoding out of --what")


def built(name: str, plan: Plan) -> nn.Module:
    return build(name, plan.shape).to(plan.device, DTYPES[plan.dtype])


def ids(length: int, batch: int, plan: Plan) -> Tensor:
    return torch.randint(plan.shape.vocab_size, (batch, length), device=plan.device)
