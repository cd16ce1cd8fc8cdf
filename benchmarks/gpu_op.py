"""The op on a GPU: the rates that limit it, errors, times, memory and launches of every backend.

    python benchmarks/gpu_op.py NAME ...         of STAGES; started by gpu.py, rows are lines of JSON
    SMALL=1 python benchmarks/gpu_op.py op       the same on small shapes, also without a GPU

FlashQLA and Helion's examples (a checkout of pytorch/helion on PYTHONPATH) are compared with if they can be imported. A
call that fails is a row with the error; after another error the process ends with code 3.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before PyTorch: its profiler would write a line per measurement

import torch
from torch import Tensor

from gpu_measure import Call, Machine
from headrace import InputError, backends, linear_attention
from headrace.ops.dispatch import BACKENDS
from headrace.ops.reference import literal
from headrace.verification.verify import relative, worst
from peers import FAMILIES, Family

Found = tuple[str, str, str, float, str, str]  # subject, shape, measure, value, unit, note


class Sizes(NamedTuple):
    """The sizes of all stages. A shape of the op is (B, T, H, K, V)."""

    copied: int  # numbers
    square: int  # rows of a square matrix
    correct: tuple[tuple[int, int, int, int, int], ...]
    timed: tuple[tuple[int, int, int, int, int], ...]
    long: tuple[tuple[int, int, int, int, int], ...]  # few long rows
    families: tuple[str, ...]
    rounds: int
    budget: float  # seconds for the rounds of one call


ALL = "scalar", "gated-delta", "vector", "linear", "kda", "delta", "fixed", "bonus"
FULL = Sizes(
    copied=2**30,
    square=8192,
    correct=((2, 512, 8, 128, 128), (2, 512, 4, 256, 256), (2, 512, 4, 192, 384), (1, 2048, 2, 64, 64)),
    timed=((8, 4096, 8, 128, 128), (8, 4096, 4, 256, 256), (8, 4096, 4, 192, 384)),
    long=((1, 32768, 4, 128, 128),),
    families=ALL,
    rounds=20,
    budget=1.0,
)
DRY = Sizes(
    copied=2**12,
    square=32,
    correct=((1, 70, 2, 16, 16),),
    timed=((1, 70, 2, 16, 16), (1, 40, 1, 16, 16)),
    long=((1, 140, 1, 16, 16),),
    families=ALL,
    rounds=1,
    budget=1.0,
)


def failure(subject: str, shape: str, error: Exception) -> Found:
    return (
        subject,
        shape,
        "failed",
        1.0,
        "",
        f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
    )


# --- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """The rates that nothing can exceed: of copying, of a product of matrices, of launches."""
    x = torch.zeros(sizes.copied, dtype=torch.bfloat16, device=machine.device)
    a = torch.randn(sizes.square, sizes.square, dtype=torch.bfloat16, device=machine.device)
    small, y = torch.zeros(1, device=machine.device), torch.empty_like(x)
    calls: dict[str, Call] = {"copy": lambda: y.copy_(x), "product": lambda: a @ a, "launch": lambda: small.add_(1)}
    times = machine.interleave(calls, sizes.rounds, sizes.budget)
    shape = "bfloat16"
    yield "machine", shape, "copy", 2 * x.nbytes / times["copy"].device / 1e6, "GB/s", ""
    yield "machine", shape, "product", 2 * sizes.square**3 / times["product"].device / 1e9, "TFLOP/s", ""
    yield "machine", shape, "launch", 1000 * times["launch"].host, "µs", ""


# --- the op ----------------------------------------------------------------------------------------------------------


def tensors_of(family: Family, shape: tuple[int, ...], machine: Machine) -> dict[str, Tensor]:
    B, T, H, K, V = shape
    return family.inputs(B=B, T=T, H=H, K=K, V=V, dtype=torch.bfloat16, device=machine.device)


def engines(family: Family, tensors: dict[str, Tensor]) -> Iterator[tuple[str, partial, str]]:
    """(name, call, why it is refused) of every backend that is here."""
    for name, backend in BACKENDS.items():
        if backend.missing() is None:
            call = partial(linear_attention, **tensors, **family.options(), backend=name)
            try:
                backends(**tensors, **family.options(), backend=name)
                yield name, call, ""
            except InputError as error:
                yield name, call, str(error)


def both_ways(call: Callable[[], Any], inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The gradients of a weighted sum of what the call returns."""
    return list(torch.autograd.grad(list(call()), inputs, weights, allow_unused=True, materialize_grads=True))


def correctness(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Errors in bfloat16 against the literal loop in float64 on the same numbers; not those of FLA, which tunes its
    kernels for each shape."""
    for shape in sizes.correct:
        for name in sizes.families:
            family, where = FAMILIES[name], f"{name} {list(shape)}"
            tensors = tensors_of(family, shape, machine)
            inputs = [x for x in tensors.values() if x.requires_grad]
            exact = {key: x.detach().double().requires_grad_(x.requires_grad) for key, x in tensors.items()}
            truth = literal(**exact, **family.options())
            weights = [torch.randn_like(x) for x in truth]
            expected = both_ways(lambda truth=truth: truth, [x for x in exact.values() if x.requires_grad], weights)
            truth = [x.cpu() for x in truth]
            for engine, call, refused in engines(family, tensors):
                if engine == "fla":
                    continue
                if refused:
                    yield engine, where, "refused", 0.0, "", refused
                    continue
                try:
                    found = call()
                    rounded = [w.to(x.dtype) for w, x in zip(weights, found, strict=True)]
                    gradients = both_ways(lambda found=found: found, inputs, rounded)
                    yield engine, where, "output", relative(found[0], truth[0]), "relative", ""
                    yield engine, where, "state", relative(found[1], truth[1]), "relative", ""
                    yield engine, where, "gradients", worst(gradients, [x.cpu() for x in expected]), "relative", ""
                except Exception as error:  # one kernel's failure must not end the run
                    yield failure(engine, where, error)


def flash_qla(*, log_decay: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    function = import_module("flash_qla").chunk_gated_delta_rule
    return function(**tensors, g=log_decay, output_final_state=True, auto_cp=True)


def helion(*, log_decay: Tensor | None = None, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    return import_module(HELION).chunked_linear_attn(**tensors, g=log_decay, return_final_state=True)


def heads_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors [B, T, H, ·] as [B, H, T, ·]; a decay [H] is expanded."""
    B, T, H, _ = tensors["q"].shape
    wide = {name: x.detach().expand(B, T, H) if x.dim() == 1 else x.detach() for name, x in tensors.items()}
    return {
        name: x.transpose(1, 2).contiguous().requires_grad_(tensors[name].requires_grad) for name, x in wide.items()
    }


class Peer(NamedTuple):
    """Another library's implementation of some families."""

    module: str
    families: tuple[str, ...]
    run: Callable[..., Any]  # (**tensors) -> (out, final state)
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # our tensors -> its own; not timed


LONG = "scalar", "vector", "gated-delta"
HELION = "examples.linear.linear_attention_engine"  # of a checkout of pytorch/helion on PYTHONPATH, beside its package
PEERS = {
    "flash_qla": Peer("flash_qla", ("gated-delta",), flash_qla),
    "helion": Peer(
        HELION, ("linear", "fixed", "scalar", "vector", "delta", "gated-delta", "kda"), helion, heads_first
    ),
}  # fmt: skip


def gated(call: partial) -> partial:
    """Returns a call of the op with both gates."""
    like = call.keywords["v"][..., 0]
    return partial(
        call, read_gate=torch.rand_like(like).requires_grad_(), write_gate=torch.rand_like(like).requires_grad_()
    )


def runners(name: str, tensors: dict[str, Tensor]) -> dict[str, partial]:
    """Ours by backend, without and with gates, and peers that can be imported."""
    family, found = FAMILIES[name], dict[str, partial]()
    for engine, call, refused in engines(family, tensors):
        if not refused:
            found |= {engine: call, f"{engine}, gates": gated(call)}
    for label, peer in PEERS.items():
        if name not in peer.families:
            continue
        try:
            import_module(peer.module)
        except ImportError:  # peers are optional; the table shows which ones ran
            continue
        found[label] = partial(peer.run, **peer.prepare(tensors))
    return found


def op(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Times, memory and launches of every backend and peer at the first shape, in turn in one process."""
    return at_shapes(machine, sizes, sizes.timed[:1], sizes.families)


def shapes(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """The stage `op` at the other shapes."""
    return at_shapes(machine, sizes, sizes.timed[1:], sizes.families)


def long(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """The stage `op` for few long rows."""
    return at_shapes(machine, sizes, sizes.long, LONG)


def at_shapes(
    machine: Machine, sizes: Sizes, shapes: Sequence[tuple[int, ...]], families: Sequence[str]
) -> Iterator[Found]:
    for shape in shapes:
        for name in families:
            tensors, where = tensors_of(FAMILIES[name], shape, machine), f"{name} {list(shape)}"
            calls: dict[str, Call] = {}
            for runner, call in runners(name, tensors).items():
                inputs = [x for x in call.keywords.values() if isinstance(x, Tensor) and x.requires_grad]
                try:
                    weights = [torch.ones_like(x) for x in call()]
                    calls[runner] = torch.no_grad()(call)
                    calls[f"{runner} | both"] = partial(both_ways, call, inputs, weights)
                    calls[f"{runner} | both"]()
                except Exception as error:
                    calls = {key: x for key, x in calls.items() if not key.startswith(runner)}
                    yield failure(runner, where, error)
            yield from costs(machine, sizes, calls, where)


def costs(machine: Machine, sizes: Sizes, calls: dict[str, Call], where: str) -> Iterator[Found]:
    for key, times in machine.interleave(calls, sizes.rounds, sizes.budget).items():
        runner, _, way = key.partition(" | ")
        way = "f+b" if way else "fwd"
        yield runner, where, way, times.device, "ms", ""
        yield runner, where, f"{way} host", times.host, "ms", ""
        yield runner, where, f"{way} launches", machine.launches(calls[key]), "", ""
        if (peak := machine.peak(calls[key])) is not None:
            yield runner, where, f"{way} memory", peak / 2**20, "MiB", ""
        try:
            replay = machine.graph(calls[key])
        except Exception as error:  # not every call can be captured
            yield runner, where, f"{way} graph", 0.0, "ms", f"no: {type(error).__name__}"
            continue
        if replay is not None:
            graphed = machine.interleave({key: replay}, sizes.rounds, sizes.budget)[key]
            yield runner, where, f"{way} graph", graphed.device, "ms", ""


STAGES: dict[str, Callable[[Machine, Sizes], Iterator[Found]]] = {
    "ceilings": ceilings, "correctness": correctness, "op": op, "shapes": shapes, "long": long,
}  # fmt: skip


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main(*names: str) -> int:
    """Returns the exit code."""
    machine, sizes = Machine("cuda" if torch.cuda.is_available() else "cpu"), DRY if os.environ.get("SMALL") else FULL
    for name in names:
        say(name=name, begun=True)
        try:
            for subject, shape, measure, value, unit, note in STAGES[name](machine, sizes):
                row = {"failed": note} if measure == "failed" else {"value": value, "unit": unit, "note": note}
                say(name=name, subject=subject, shape=shape, measure=measure, **row)
        except Exception as error:  # after some of them a process cannot use the GPU any more
            traceback.print_exc()
            say(name=name, failed=failure("", "", error)[-1])
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
