"""What the op costs, beside what the same recurrence costs in other libraries and softmax attention in PyTorch.

    python benchmarks/op.py --quick                            a minute, to see that everything runs
    python benchmarks/op.py                                    the real thing, on an otherwise idle machine
    python benchmarks/op.py --family scalar --peers mamba2     one family, only the peers whose name has this in it
    python benchmarks/op.py --dtype bfloat16                   every input in bfloat16
    GGML=…/libggml.so VLLM=… python benchmarks/op.py           with compiled peers: see compiled.py

All implementations run in one process, in turn. A ratio is a time over the time of our first backend here, the one that
"auto" takes: the median over rounds. Times are CPU time of the process (wall time on a GPU, and with several threads).
Every peer is first compared with the literal equation, and not timed if it disagrees. Rows are appended to a CSV file,
each with what it takes to repeat it.
"""

import itertools
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from headrace import InputError, backends, linear_attention
from headrace.ops.reference import literal
from peers import ATTENTION, FAMILIES, PEERS, Family, Peer
from program import Log, Output, Quick, console, show
from record import RESULTS, Row
from turns import CPU, WALL, Runner, flops, peak, peak_flops, take_turns

Families = Annotated[list[str], typer.Option("--family", help=f"Any of {', '.join(FAMILIES)}; may be repeated.")]
MODES = ("forward", "forward+backward")
FULL = {"lengths": (2048, 8192), "sizes": ((128, 256), (128, 128), (64, 64))}
QUICK = {"lengths": (128, 512), "sizes": ((16, 32), (16, 16))}
SEED, HEADS = 0, 4
WRONG = {torch.float32: 1e-4, torch.bfloat16: 2**-5}  # relative error above which a call is not the one that was meant


def ours(family: Family, backend: str, tensors: dict[str, Tensor]) -> Tensor:
    return linear_attention(**tensors, **family.options(), backend=backend)[0]


def competing(family: Family, backend: str, tensors: dict[str, Tensor]) -> Tensor:
    """Ours with head competition: read and write gates by a softmax over the heads, its gradients included."""
    tensors = dict(tensors)
    gates = {f"{way}_gate": HEADS * tensors.pop(f"{way}_logits").softmax(-1) for way in ("read", "write")}
    return ours(family, backend, tensors | gates)


def attention(q, k, v) -> Tensor:
    """Softmax attention, written out: the truth for PyTorch's."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def relative_error(peer: Peer, family: Family, shape: dict) -> float:
    """The error of the peer's output against the literal equation in float64, on a sequence short enough for it."""
    tensors = {name: x.detach() for name, x in family.inputs(**shape | {"T": min(shape["T"], 256)}).items()}
    exact = {name: x.double() for name, x in tensors.items()}
    truth = attention(*(exact[n] for n in "qkv")) if peer is ATTENTION else literal(**exact, **family.options())[0]
    with torch.no_grad():
        out, _ = peer(peer.arguments(tensors))
    return ((out - truth).norm() / truth.norm()).item()


def objection(peer: Peer, T: int, K: int, V: int, backward: bool, dtype: torch.dtype) -> str | None:
    """Why this peer is not timed on these shapes, or None."""
    if (reason := peer.missing()) is not None:
        return reason
    if peer.square and K != V:
        return f"needs K = V; here {K}×{V}"
    if K % peer.multiple:
        return f"needs K in multiples of {peer.multiple}; here {K}"
    if backward and not peer.backward:
        return "its backward raises or does not exist"
    if dtype not in peer.dtypes:
        return f"computes in {str(peer.dtypes[0]).removeprefix('torch.')}"
    if peer.upto[backward] < T:
        return f"{MODES[backward]} at T={T} takes too long or too much memory"
    return None


def can(family: Family, backend: str, tensors: dict[str, Tensor]) -> bool:
    try:
        ours(family, backend, {name: x.detach()[:, :1] if x.dim() > 2 else x.detach() for name, x in tensors.items()})
    except InputError:
        return False
    return True


def contestants(name: str, shape: dict, backward: bool, part: str) -> tuple[list[Runner], list[str]]:
    """Ours, ours with competition, and every peer that can be timed on these shapes; and why the others cannot."""
    family, refused = FAMILIES[name], []
    tensors = family.inputs(**shape)
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(2, *tensors["v"].shape[:3], generator=draw).to(tensors["v"])
    scored = tensors | {f"{way}_logits": x.requires_grad_() for way, x in zip(("read", "write"), logits, strict=True)}
    runners = []
    available = (name for name, missing in backends().items() if missing["linear_attention"] is None)
    for backend in (name for name in available if can(family, name, tensors)):
        runners.append(Runner(f"headrace {backend}", partial(ours, family, backend), tensors))
        runners.append(Runner(f"headrace {backend}, heads competing", partial(competing, family, backend), scored))
    for peer in (p for p in [*PEERS, ATTENTION] if p.family in (name, "attention") and part in p.name):
        reason = objection(peer, shape["T"], shape["K"], shape["V"], backward, shape["dtype"])
        error = relative_error(peer, family, shape) if reason is None else 0.0
        if error > WRONG[shape["dtype"]]:
            reason = f"its output is {error:.1e} away from the literal equation"
        if reason is None:
            runners.append(Runner(peer.name, lambda x, peer=peer: peer(x)[0], peer.arguments(tensors), error=error))
        else:
            refused.append(f"{name}: {peer.name}: {reason}")
    runners.append(peak(torch.get_num_threads(), shape["device"]))
    for runner in runners:
        runner.threads = torch.get_num_threads()
    return runners, refused


def rows(runners: list[Runner], backward: bool, cell: Row, clock: int) -> list[Row]:
    """A line for each runner; the first is ours, the last the matrix product that says what the machine can do.

    ratio: the time over ours. of_floor: the time that the flops take at the machine's best rate, over this one's
    (turns.py). error: against the literal equation, relative."""
    *runners, machine = runners
    flop = flops(FAMILIES[cell["family"]], cell["T"] * HEADS, cell["K"], cell["V"], backward)
    return [
        cell | {
            "mode": MODES[backward], "runner": runner.name, "rounds": len(runner.seconds),
            "cpu_ms": runner.milliseconds(CPU), "wall_ms": runner.milliseconds(WALL), "spread": runner.spread(clock),
            "ratio": round(runner.over(runners[0], clock), 3),
            "of_floor": round(flop / peak_flops() / runner.over(machine, clock), 3),
            "saved_over_inputs": round(runner.saved(), 2) if backward else 0.0, "error": float(f"{runner.error:.1e}"),
        }
        for runner in runners
    ]  # fmt: skip


def show_family(rows: list[Row], clock: str) -> None:
    """A table for each family and size: the ratio to ours, then the time, for every length and mode."""
    for (family, K, V), group in itertools.groupby(rows, lambda r: (r["family"], r["K"], r["V"])):
        cells = {(r["runner"], r["mode"], r["T"]): r for r in group}
        lengths = sorted({T for _, _, T in cells})
        header = [
            "", *(f"{mode}\nT={T}" for mode in MODES for T in lengths), f"growth\n×{lengths[-1] // lengths[0]} tokens",
            "of the floor", "saved /\ninputs", "error",
        ]  # fmt: skip
        lines = [line(runner, cells, lengths, clock) for runner in dict.fromkeys(name for name, _, _ in cells)]
        show(f"{family}, {K}×{V}: this / headrace, ms", header, lines)


def line(runner: str, cells: dict[tuple, Row], lengths: list[int], clock: str) -> list[str]:
    own = {(mode, T): cells.get((runner, mode, T)) for mode in MODES for T in lengths}
    grown = [growth(own[mode, lengths[0]], own[mode, lengths[-1]], clock) for mode in MODES]
    some = [row for row in own.values() if row]
    saved, shortest = max(row["saved_over_inputs"] for row in some), min(row["T"] for row in some)
    return [
        runner, *(text(row, clock) for row in own.values()), " ".join(grown),
        " ".join(f"{row['of_floor']:.0%}" for row in some if row["T"] == shortest), f"{saved:.1f}" if saved else "",
        f"{max(row['error'] for row in some):.0e}" if "headrace" not in runner else "",
    ]  # fmt: skip


def text(row: Row | None, clock: str) -> str:
    return f"[bold]{row['ratio']:.2f}[/]  {row[clock]:.1f} ±{row['spread']:.0%}" if row else ""


def growth(short: Row | None, long: Row | None, clock: str) -> str:
    return f"{long[clock] / short[clock]:.1f}" if short and long else "–"


def main(
    quick: Quick = False,
    family: Families = list(FAMILIES),  # noqa: B006
    peers: Annotated[str, typer.Option(help="Only peers whose name contains this; 'none' for ours alone.")] = "",
    rounds: int = 9,
    budget: Annotated[float, typer.Option(help="Seconds per peer and cell after which it sits out.")] = 30.0,
    threads: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    output: Output = RESULTS / "op.csv",
) -> None:
    """Time the op beside its peers."""
    for name in family:
        if name not in FAMILIES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(FAMILIES)}", param_hint="--family")
    torch.set_num_threads(threads)
    clock = WALL if device == "cuda" or threads > 1 else CPU  # process time says nothing about a GPU, and adds threads
    plan, log, skipped = QUICK if quick else FULL, Log(output, device), {}
    for name, (K, V), T, backward in itertools.product(family, plan["sizes"], plan["lengths"], (False, True)):
        shape = {
            "B": 1, "T": T, "H": HEADS, "K": K, "V": V, "device": device, "seed": SEED, "dtype": getattr(torch, dtype)
        }  # fmt: skip
        with console.status(f"{name} T={T} {K}×{V} {MODES[backward]}"):
            active, refused = contestants(name, shape, backward, peers)
            skipped |= dict.fromkeys(refused)
            take_turns(active, backward, 2 if quick else rounds, budget)
            log.add(rows(active, backward, {"family": name, "dtype": dtype, "T": T, "K": K, "V": V}, clock))
    show_family(log.rows, ("cpu_ms", "wall_ms")[clock])
    for reason in skipped:
        console.print(f"[dim]not timed: {reason}[/]")
    log.end()


if __name__ == "__main__":
    typer.run(main)
