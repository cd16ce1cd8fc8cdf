"""Times of the Triton kernels at the shapes of training with 340M parameters, by block sizes.

    python benchmarks/gpu_kernels.py gla gradients "num_warps=4 BK=16" "num_warps=8 BK=32"

Prints rows of results/gpu_kernels.csv: for the sizes in use, then for each of the others, with how far its results are
from those of the sizes in use. A process measures one kernel at one shape: an illegal memory access ends it.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn.functional import normalize

from headrace.ops.backends.triton import launch
from headrace.ops.backends.triton.scan import reverse_scan
from headrace.ops.call import Call
from headrace.verification.verify import relative

COLUMNS = "commit", "machine", "torch", "triton", "shape", "kernel", "sizes", "launch", "ms", "difference"
B, T = 4, 4096


class Shape(NamedTuple):
    """Heads of v, heads of q and k, K, V, dimensions of log_decay, rule."""

    H: int
    HQ: int
    K: int
    V: int
    decay: int
    delta: bool


SHAPES = {
    "gla": Shape(4, 4, 128, 256, 4, False), "kda": Shape(8, 8, 128, 128, 4, True),
    "gated-deltanet": Shape(4, 4, 192, 384, 3, True), "mamba2": Shape(32, 1, 128, 64, 3, False),
    "retnet": Shape(4, 4, 256, 512, 1, False),
}  # fmt: skip
LAUNCHES = {"prepare": ("prepare",), "scan": ("scan", "states", "reverse_scan"), "gradients": ("gradients",)}
Launches = dict[str, Callable[[], Any]]


def problem(shape: Shape, device: str) -> tuple[Call, Tensor, Tensor]:
    """A call, and the gradients to its output and to its final state."""
    H, HQ, K, V, dims, delta = shape
    torch.manual_seed(0)
    draw = lambda *sizes: torch.randn(*sizes, device=device)  # noqa: E731
    q, k, v = normalize(draw(B, T, HQ, K), dim=-1), normalize(draw(B, T, HQ, K), dim=-1), draw(B, T, H, V)
    sizes = {1: (H,), 3: (B, T, H), 4: (B, T, H, K)}[dims]
    decay, beta = -0.2 * torch.rand(sizes, device=device), torch.rand(B, T, H, device=device)
    narrow = (x.bfloat16() for x in (q, k, v))
    return Call(*narrow, decay, beta, delta=delta, tf32=True), draw(B, T, H, V).bfloat16(), draw(B, H, K, V)


def launches(call: Call, d_out: Tensor, d_final: Tensor) -> tuple[Launches, dict[str, Tensor]]:
    """The launches of a forward and a backward, each after those that it needs have run, and what they write."""
    run = launch.Launcher(call)
    forward, backward = run.prepare(backward=False), run.prepare(backward=True)
    out, final, d_initial = torch.empty_like(call.v), run.states(), run.states()
    states, d_states = (run.new(run.chunks, run.H, run.K, run.V) for _ in range(2))
    d_target = run.new(run.tokens, run.H, run.V)
    errors = torch.empty_like(d_target) if call.delta else None
    written = launch._gradients(run, d_target, call.log_decay is not None and call.log_decay.dim() > 1)
    passed: dict[str, Any] = {"states": states, "d_states": d_states, "d_out": d_out, "d_target": d_target}
    found: Launches = {
        "prepare": lambda: run.prepare(backward=True),
        "scan": lambda: run.scan(forward, out=out, final=final),
        "states": lambda: run.scan(backward, states=states, errors=errors),
        "reverse_scan": lambda: run.carry(
            reverse_scan, backward, d_out=d_out, d_final=d_final, d_target=d_target, d_states=d_states,
            d_initial=d_initial,
        ),
        "gradients": lambda: run.gradients(backward, e=run.v if errors is None else errors, **passed, **written),
    }  # fmt: skip
    for one in found.values():
        one()
    results = {"out": out, "final": final, "d_initial": d_initial, "d_target": d_target, **written}
    return found, {name: x.clone() for name, x in results.items() if x is not None}


def parsed(sizes: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (word.partition("=") for word in sizes.split())}


def measure(name: str, kernel: str, others: list[str], device: str = "cuda") -> Iterator[dict[str, Any]]:
    given, sizes_of, expected = problem(SHAPES[name], device), launch.block_sizes, None
    about = {
        "commit": os.environ.get("COMMIT", ""),
        "machine": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    about |= {"torch": torch.__version__, "triton": triton.__version__, "shape": name, "kernel": kernel}
    for sizes in ("", *others):
        own = parsed(sizes)

        def chosen(which: str, *rest: Any, own: dict[str, int] = own) -> dict[str, int]:
            mine = which == kernel or (which, kernel) == ("states", "scan")
            return sizes_of(which, *rest) | (own if mine else {})

        with patch.object(launch, "block_sizes", chosen):
            found, results = launches(*given)
            expected = expected or results
            difference = max(relative(results[x].double(), expected[x].double()) for x in results)
            for one in LAUNCHES[kernel]:
                ms = triton.testing.do_bench(found[one], warmup=5, rep=20, return_mode="median")
                yield about | {"sizes": sizes, "launch": one, "ms": round(ms, 4), "difference": f"{difference:.1e}"}


if __name__ == "__main__":
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in measure(sys.argv[1], sys.argv[2], sys.argv[3:]):
        writer.writerow(row)
        sys.stdout.flush()
