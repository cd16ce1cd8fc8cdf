"""What a recipe needs of a machine that is not there: memory per device, layout, steps and days.

The memory is a sum of formulas, `memory`; the days follow from the peak of the data sheet and the efficiency that
`benchmarks/gpu.py` measured with the mixer, in which the network has no part of its own.
"""

import csv
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files.devices import present_device
from ..ops.loss import PIECE, PIECE_ON_GPU
from ..utils.errors import InputError, did_you_mean, require
from .model import FORWARD, counted, estimate
from .recipes import Recipe

# Of a CPU's rate in matrix products, that a training step reaches: 0.83 (transformer) and 0.86 (softmax-gla) were
# measured with laptop-5m on one core; evaluations, checkpoints and narrower models take more.
REACHED = 0.7
OF_TEACHER = 8 * 4  # bytes per logit of the model with a teacher: the divergence, the cross-entropy and their gradients
DAY = 24 * 60 * 60  # seconds
MEASURED, SHEETS = (Path(__file__).with_name(f"{name}.csv") for name in ("efficiency", "devices"))


def read_rows(path: Path, key: str) -> dict[str, dict[str, str]]:
    """Returns the rows of a CSV file by their value of the column `key`."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row[key]: row for row in csv.DictReader(file)}


class Device(NamedTuple):
    """A device by its data sheet."""

    memory: float  # bytes, with a data sheet's GB as 10^9: what CUDA itself takes is less than the difference to 2^30
    flops: float  # bfloat16 multiplications and additions per second, dense: half of a number "with sparsity"


DEVICES = {name: Device(float(row["bytes"]), float(row["flops"])) for name, row in read_rows(SHEETS, "device").items()}


HOPPER = "H100", "H200", "H20"  # how their names begin: those whose kernel of the loss takes larger pieces


def peak(name: str) -> float | None:
    """Returns the peak of a device by its driver's name for it, such as NVIDIA A100-SXM4-40GB; None if not known."""
    words = set(re.split(r"[\s-]+", name.lower()))
    fitting = [known for known in DEVICES if set(known.lower().split("-")) <= words]
    return DEVICES[max(fitting, key=len)].flops if fitting and not words & {"laptop", "d", "mig"} else None


class Efficiency(NamedTuple):
    """Model FLOPs utilization, and where it is from."""

    fraction: float
    source: str


def efficiency(mixer: str) -> Efficiency:
    """Returns the efficiency of a mixer, an expression; of one that was not measured, the median of the others."""
    measured, name = read_rows(MEASURED, "mixer"), mixer.partition("(")[0].strip()
    if own := measured.get(name):
        return Efficiency(float(own["efficiency"]), f"measured with {name} on one {own['machine']}")
    median = statistics.median(float(row["efficiency"]) for row in measured.values())
    return Efficiency(median, f"an assumption, the median of {len(measured)} measured mixers")


class Machine(NamedTuple):
    """Devices of one kind."""

    devices: int
    name: str


def parse(text: str) -> Machine:
    """Returns the machine 8xH100, or 4x8xH100 for four nodes of eight. Raises InputError for other texts."""
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(?:(\d+)\s*[x×]\s*)?([\w-]+)", text.strip(), re.IGNORECASE)
    count = int(match[1]) * int(match[2] or 1) if match else 0
    if match is None or count == 0:
        raise InputError(f"--machine {text!r}; expected a number of devices and their name, such as 8xH100 or 4x8xH100")
    name = next((known for known in DEVICES if known.lower() == match[3].lower()), None)
    if name is None:
        known = ", ".join(DEVICES) + did_you_mean(match[3].upper(), DEVICES)
        raise InputError(f"--machine {text!r} has an unknown device; expected one of {known}")
    return Machine(count, name)


def plan(recipe: Recipe, machine: Machine, assumed: float | None = None) -> dict[str, Any]:
    """Returns layout, bytes per device and days of a training run.

    assumed: the fraction of the peak that the operations of a run reach, those of a second forward pass by
        `recompute` included; without `recompute` this is the model FLOPs utilization. None: as measured.

    Raises:
        InputError: for rows or weights that the devices cannot share evenly, and an efficiency outside 0 to 1.
    """
    reached = efficiency(recipe.mixer) if assumed is None else Efficiency(assumed, "an assumption")
    require(0 < reached.fraction <= 1, f"--efficiency={reached.fraction:g}; expected more than 0 and at most 1")
    if machine.devices % recipe.shard:
        raise InputError(f"shard={recipe.shard}; expected a divisor of the machine's {machine.devices} devices")
    rows, passes = recipe.share(machine.devices)
    device = DEVICES[machine.name]
    needed = memory(replace(recipe, micro_batch=rows), machine.devices, machine.name.startswith(HOPPER))
    seconds = operations(recipe) / (machine.devices * device.flops * reached.fraction)
    return {
        "devices": machine.devices,
        "device": machine.name,
        "data_parallel": machine.devices // recipe.context_parallel,
        "context_parallel": recipe.context_parallel,
        "shard": recipe.shard,
        "rows_per_pass": rows,
        "passes_per_step": passes,
        "bytes": needed,
        "bytes_of_device": int(device.memory),
        "fits": sum(needed.values()) <= device.memory,
        "efficiency": reached.fraction,
        "efficiency_source": reached.source,
        "tokens_per_second": recipe.trained_tokens / seconds,
        "days": seconds / DAY,
    }


def operations(recipe: Recipe) -> float:
    """Returns the operations of a run; by `recompute` the model, but not its teacher, has a second forward pass."""
    again = counted(recipe).flops_per_token / FORWARD if recipe.recompute else 0
    return estimate(recipe)["flops"] + again * recipe.trained_tokens


def time_here(recipe: Recipe) -> dict[str, Any]:
    """Returns the device that a run would use on this machine; its operations per second, by the data sheet of a GPU or
    else measured in matrix products; and the seconds of the run if it reaches a fraction of these operations: REACHED
    on a CPU, elsewhere the efficiency of the mixer."""
    device, sheet = present_device(), None
    if device.type == "cuda" and recipe.precision == "bfloat16":
        sheet = peak(torch.cuda.get_device_name())
    rate = sheet or matrix_rate(device, getattr(torch, recipe.precision))
    reached = REACHED if device.type == "cpu" else efficiency(recipe.mixer).fraction
    return {
        "device": device.type, "flops_per_second": rate, "measured": sheet is None, "efficiency": reached,
        "seconds": operations(recipe) / (rate * reached),
    }  # fmt: skip


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the operations per second of the fastest of at most ten products of two matrices. The first may load a
    library; the others take about half a second: a CPU without instructions for bfloat16 computes 10^9 per second."""
    times: list[float] = []
    size = 512 if device.type == "cpu" else 8192  # of a smaller one a GPU's time is that of its launch
    x = torch.ones(size, size, device=device, dtype=dtype)
    while len(times) < 10 and sum(times[1:]) < 0.5:
        started = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def memory(recipe: Recipe, devices: int, hopper: bool = False) -> dict[str, int]:
    """Returns the bytes per device of a training run, by what they hold. P parameters are trained by N devices:

    - weights and AdamW's two moments in float32, 12 P / shard, and gradients until the end of a step, 4 P;
    - with shard, whole weights of the embeddings and of two blocks, the one in work and the next: 4 bytes each;
    - without shard, for N > 1, the buckets in which DistributedDataParallel sums gradients: 4 P;
    - autocast's copies of the weights in bfloat16, which stay until the backward or the end of the forward: 2 P;
    - what a forward pass over the rows of a device saves for the backward, counted on a model without memory;
    - while the backward begins, a piece of the logits, or copies of the head's gradient; with `recompute`, later the
      tensors of one block, if larger;
    - from the second pass of a step on, that gradient in float32, before it is added to the sum;
    - the weights of a teacher, and instead of a piece of the logits all of them, eight times in float32.
    """
    costs, blocks = estimate(recipe), counted(recipe).blocks
    P, sharded = costs["parameters"]["tied" if recipe.tie else "untied"], recipe.shard > 1
    held = dict(costs["bytes"])
    kept = held.pop("kept for the backward")
    if sharded:
        held["whole weights of two blocks"] = 4 * min(P, P - sum(blocks) + 2 * max(blocks))
    elif devices > 1:
        held["buckets of gradients"] = 4 * P
    if recipe.precision == "bfloat16":
        held["weights in bfloat16"] = 2 * P
    if recipe.teacher is None and recipe.share(devices)[1] > 1:
        held["gradient of the head"] = 4 * recipe.vocab_size * recipe.hidden_size
    return held | {"kept for the backward": kept, "at work": _at_work(recipe, hopper)}


def _at_work(recipe: Recipe, hopper: bool) -> int:
    """Returns the bytes of the largest of these: a piece of the logits, once in a kernel, else twice in float32 and
    twice more in bfloat16 if that is the precision; a product for the head's gradient with its rounding; what one block
    keeps when it is computed again. With a teacher, all logits take the place of a piece."""
    half = recipe.precision == "bfloat16"
    whole = recipe.micro_batch * recipe.length // recipe.context_parallel * recipe.vocab_size
    if recipe.teacher is not None:
        found = whole * OF_TEACHER
    else:
        logits = min(whole, PIECE_ON_GPU) * (2 if half else 4) if hopper else min(whole, PIECE) * (12 if half else 8)
        found = max(logits, recipe.vocab_size * recipe.hidden_size * (6 if half else 4))
    if not recipe.recompute:
        return found
    kept = estimate(replace(recipe, recompute=False))["bytes"]["kept for the backward"]
    return max(found, kept // recipe.layers)
