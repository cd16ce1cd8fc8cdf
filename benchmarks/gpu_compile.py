"""The stage of gpu.py that compiles before anything is timed: several processes fill Triton's cache on disk.

FLA tunes each kernel at its first call, some among 96 configurations. To compile them one after another takes minutes
for each shape. The processes compile for this kind of GPU by dry/, and do not use it.

    python benchmarks/gpu_compile.py sm_90 3 16 FILE [--dry]        process 3 of 16, started by gpu.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_measure import Machine
from gpu_models import Model, token_by_token
from gpu_op import LONG, both_ways, gated, tensors_of
from gpu_sizes import DRY, FULL, Found, Sizes, told
from headrace import InputError, linear_attention
from peers import FAMILIES

FLA_PARTS = 8  # processes that compile the configurations of one call to FLA
SHORT = 128  # tokens of a row
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Job(NamedTuple):
    """The kernels of one call; of autotuned kernels one part of the configurations."""

    backend: str
    part: int
    subject: str  # a family of the op, or a mixer
    shape: tuple[int, ...]  # of the op (B, T, H, K, V), of a model (B, T)


def jobs(sizes: Sizes) -> list[Job]:
    """Returns the jobs, the most valuable first. Kernels do not depend on the number of tokens."""
    first, *others = ((B, min(T, SHORT), *rest) for B, T, *rest in sizes.timed)
    (B, T), backbones = sizes.batch, [name for name in sizes.mixers if "softmax" not in name]
    return [
        *_ours(sizes.families, first), *_of_fla(sizes.families, first),
        *_ours(sizes.mixers, (B, min(T, SHORT))), *_of_fla(backbones, (B, min(T, SHORT))),
        *_ours(sizes.families, *others, *sizes.correct), *_ours(LONG, *sizes.long),
        *_of_fla(sizes.families, *others), *_of_fla(LONG, *sizes.long),
    ][: sizes.jobs]  # fmt: skip


def _ours(subjects: Sequence[str], *shapes: tuple[int, ...]) -> list[Job]:
    return [Job("triton", 0, name, shape) for shape in shapes for name in subjects]


def _of_fla(subjects: Sequence[str], *shapes: tuple[int, ...]) -> list[Job]:
    return [Job("fla", part, name, shape) for shape in shapes for name in subjects for part in range(FLA_PARTS)]


def compiling(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Compiles for at most `sizes.compiling` seconds; what is left over is compiled at its first call."""
    wanted, gpu = jobs(sizes), kind_of_gpu(machine)
    if gpu is None:
        yield "machine", "", "refused", 0.0, "", "dry/ does not know this GPU, or Triton is not installed"
        return
    n = min(len(os.sched_getaffinity(0)), len(wanted))
    print(f"compiling {len(wanted)} jobs in {n} processes, at most {sizes.compiling:g} s", file=sys.stderr)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, str(i)) for i in range(n)]
        dry = [] if sizes is FULL else ["--dry"]
        commands = ([sys.executable, __file__, gpu, str(i), str(n), str(results[i]), *dry] for i in range(n))
        processes = [subprocess.Popen(command, env=os.environ | NO_GPU) for command in commands]
        for process in processes:
            wait(process, start + sizes.compiling)
        found = [json.loads(line) for path in results if path.exists() for line in path.read_text("utf-8").splitlines()]
    where = f"{len(wanted)} jobs in {n} processes"
    yield "machine", where, "compiled", float(len(found)), "", ""
    yield "machine", where, "compiling", time.perf_counter() - start, "s", ""
    yield from (("compiler", about, "failed", 1.0, "", error) for about, error in found if error)


def wait(process: subprocess.Popen, deadline: float) -> None:
    """Waits for a process until the deadline, and ends it then."""
    try:
        process.wait(max(0.0, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kind_of_gpu(machine: Machine) -> str | None:
    """Returns the name that dry/ has for this GPU, or for a rehearsal that of an H100; None if it has none."""
    if find_spec("triton") is None:
        return None
    from dry import GPUS

    if not machine.is_gpu:
        return "sm_90"
    about: Any = torch.cuda.get_device_properties(0)
    name = f"sm_{about.major}{about.minor}" if torch.version.hip is None else about.gcnArchName.partition(":")[0]
    return name if name in GPUS else None


# --- in a process ----------------------------------------------------------------------------------------------------


def main(gpu: str, number: str, count: str, results: str, *rehearsal: str) -> None:
    """Compiles the jobs of a process, and writes a line [job, error or ""] for each: to a file, because compilers print
    what they like."""
    import dry

    sizes = DRY if rehearsal else FULL
    with dry.gpu(gpu), Path(results).open("w", encoding="utf-8", buffering=1) as file:
        for job in jobs(sizes)[int(number) :: int(count)]:
            error = ""
            try:
                with patch("triton.runtime.autotuner.Autotuner.run", compile_part(job.part)):
                    (op if job.subject in FAMILIES else model)(job, sizes)
            except InputError:
                pass  # the backend does not take the call: the stages that time it say why
            except Exception as failed:
                error = told(failed)
            print(json.dumps([" ".join(map(str, job)), error]), file=file)


def op(job: Job, sizes: Sizes) -> None:
    """Compiles the kernels of a family of the op, in headrace's backend also those with gates."""
    family = FAMILIES[job.subject]
    tensors = tensors_of(family, job.shape, Machine("cpu"))
    call = partial(linear_attention, **tensors, **family.options(), backend=job.backend)
    for run in (call, gated(call)) if job.backend == "triton" else (call,):
        inputs = [x for x in run.keywords.values() if isinstance(x, Tensor) and x.requires_grad]
        both_ways(run, inputs, [torch.ones_like(x) for x in run()])


def model(job: Job, sizes: Sizes) -> None:
    """Compiles the kernels of a model of one layer: of a training step and, in headrace's backend, of a token."""
    made = Model(job.subject, sizes._replace(layers=1, vocabulary=64), job.backend).to(torch.bfloat16)
    made.loss(torch.zeros(job.shape, dtype=torch.long)).backward()
    if job.backend == "triton":
        with torch.no_grad():
            for B in sizes.streams:
                token_by_token(made, torch.zeros(B, 64, sizes.hidden, dtype=torch.bfloat16), False)()


def compile_part(part: int) -> Callable[..., None]:
    """Returns what replaces `Autotuner.run`: it compiles a part of the configurations and launches none."""
    from triton.runtime.errors import OutOfResources, PTXASError

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in list(self.prune_configs(kwargs))[part::FLA_PARTS]:
            try:
                self.fn.run(*args, **kwargs | config.all_kwargs() | {"warmup": True})
            except (OutOfResources, PTXASError):
                continue  # tuning leaves these configurations out, too

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
