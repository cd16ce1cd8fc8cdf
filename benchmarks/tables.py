"""The measurements of research/docs/benchmarks.md, from the newest rows of results/*.csv: python benchmarks/tables.py

`make -C research generated` writes them to the page, `make generated` those of docs/serving.md and docs/choose.md."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import record
from record import RESULTS, newest

MODES = ("forward", "forward+backward")
DEPTH = 24


def read(name: str) -> list[dict]:
    return record.read(RESULTS / name)


def about(rows: list[dict]) -> str:
    """What the rows were measured on, once for each machine, version and day."""
    line = "{machine}, {threads} thread(s), torch {torch}, commit {commit}, {date:.10}"
    return "; ".join(dict.fromkeys(line.format(**row) for row in rows))


def table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(record.markdown(header, lines, ["---", *["--:"] * (len(header) - 1)]))


def op() -> str:
    rows = newest(read("op.csv"), "threads", "family", "dtype", "T", "K", "V", "mode", "runner")
    parts = [f"### The op\n\n{about(rows)}."]
    rows.sort(key=lambda r: (r["family"], int(r["K"]) * int(r["V"]), r["dtype"] != "float32"))
    for (family, K, V, dtype), group in groupby(rows, lambda r: tuple(r[n] for n in ("family", "K", "V", "dtype"))):
        cells = {(r["runner"], r["mode"], r["T"]): r for r in group}
        inputs = "" if dtype == "float32" else f", {dtype}"
        columns = [(mode, T) for mode in MODES for T in sorted({T for _, _, T in cells}, key=int)]
        lines = [
            [named(runner), *(cell(cells.get((runner, *column))) for column in columns), saved(cells, runner)]
            for runner in dict.fromkeys(runner for runner, _, _ in cells)
        ]
        header = ["", *(f"{mode}, T={T}" for mode, T in columns), "kept / inputs"]
        parts.append(f"#### {family}, {K}×{V}{inputs}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def cell(row: dict | None) -> str:
    if not row:
        return ""
    floor = f", {100 * float(row['of_floor']):.0f} %" if row["of_floor"] else ""
    return f"{ratio(row)}{floor}"


def ratio(row: dict) -> str:
    return f"**{float(row['ratio']):.2f}**, {float(row['cpu_ms']):.0f} ms"


def saved(cells: dict, runner: str) -> str:
    most = max(float(row["saved_over_inputs"]) for (name, _, _), row in cells.items() if name == runner)
    return f"{most:.1f}" if most else ""


def decoding() -> str:
    rows = newest(read("decode.csv"), "threads", "name", "position")
    positions = sorted({row["position"] for row in rows}, key=int)
    by_name = {name: {r["position"]: r for r in group} for name, group in groupby(rows, lambda r: r["name"])}
    lines = [
        [name, *(f"{float(own[p]['us_per_token']):.0f}" if p in own else "" for p in positions),
         f"{int(next(reversed(own.values()))['state_bytes']):,}"]
        for name, own in by_name.items()
    ]  # fmt: skip
    header = ["", *(f"token {p}" for p in positions), "state bytes at the last"]
    return f"### Decoding, µs per token\n\n{about(rows)}.\n\n{table(header, lines)}"


def threads() -> str:
    rows = newest(read("threads.csv"), "threads", "family", "B", "mode")
    lines = [
        [f"{r['family']}, {r['mode']}, B={r['B']}", f"**{float(r['speedup']):.2f}**", r["one_ms"], r["several_ms"]]
        for r in rows
    ]
    header = ["", "times as fast", "one thread, ms", "several, ms"]
    return f"### Several threads against one, by the wall clock\n\n{about(rows)}.\n\n{table(header, lines)}"


def decays() -> str:
    rows = newest(read("decays.csv"), "family", "backend", "mode", "log_decay")
    by_call = {key: list(group) for key, group in groupby(rows, lambda r: (r["family"], r["backend"], r["mode"]))}
    lines = [[f"{family}, {backend}, {mode}", *map(ratio, own)] for (family, backend, mode), own in by_call.items()]
    header = ["", *dict.fromkeys(r["log_decay"] for r in rows)]
    title = "### At any decay: the time over that at the first, ms, by log_decay a token"
    return f"{title}\n\n{about(rows)}.\n\n{table(header, lines)}"


def stepping() -> str:
    rows = newest(read("step.csv"), "family", "K", "V", "runner")
    lines = [
        [f"{r['family']}, {r['K']}×{r['V']}: {r['runner']}", f"**{float(r['over_floor']):.2f}**", r["ratio"],
         r["us_per_layer"]]
        for r in rows
    ]  # fmt: skip
    header = ["", "over reading and writing the state", "over headrace", "µs a layer"]
    return f"### One token of the op, 24 layers in turn\n\n{about(rows)}.\n\n{table(header, lines)}"


def models() -> str:
    rows = newest(read("model.csv"), "threads", "what", "name", "layers", "width", "tokens", "batch")
    lines = [
        [f"{size(r)}: {named(r['name'])}", f"**{float(r['ratio']):.2f}**", r["over"], r["tokens_per_second"],
         f"{int(r['parameters']) / 1e6:.0f} M", r["peak_mb"] if r["what"] == "prefill" else ""]
        for r in rows
    ]  # fmt: skip
    header = ["", "time over that of", "", "tokens/s", "parameters", "peak MB over the weights"]
    parts = [f"### Language models\n\n{about(rows)}.\n\n{table(header, lines)}"]
    return "\n\n".join([*parts, *extrapolated([r for r in rows if r["what"] == "train"])])


def size(row: dict) -> str:
    layers, batch = "{what}, {layers} layers of {width}, {tokens} tokens".format(**row), row["batch"]
    return f"{layers}{f', batch {batch}' * (batch != '1')}, {row['threads']} thread(s)"


def extrapolated(rows: list[dict]) -> list[str]:
    """Training at 24 layers, on the straight line through two depths: an estimate, not a measurement."""
    lines = []
    rows = sorted(rows, key=lambda r: (r["threads"], r["tokens"], r["name"]))
    for (threads, tokens, name), group in groupby(rows, lambda r: (r["threads"], r["tokens"], r["name"])):
        at = {int(r["layers"]): float(r["seconds"]) for r in group}
        if len(at) > 1 and DEPTH not in at:
            low, high = min(at), max(at)
            seconds = at[low] + (at[high] - at[low]) * (DEPTH - low) / (high - low)
            name = f"{named(name)}, {threads} thread(s)"
            lines.append([name, f"{int(tokens) / seconds:.1f}", f"{low} and {high} layers"])
    header = ["", f"tokens/s at {DEPTH} layers", "from"]
    return [f"#### Training extrapolated, not measured\n\n{table(header, lines)}"] if lines else []


# --- the fastest peer of each measurement -----------------------------------------------------------------------------
RUNTIMES = "headrace", "transformers", "ONNX Runtime", "llama.cpp"
MIXERS = {"Mamba2": "mamba2", "Qwen3Next, linear layers alone": "gated-deltanet"}  # of the models of transformers


class Cell(NamedTuple):
    """One measurement: our time, and for each peer its time over ours."""

    what: str
    time: str
    peers: dict[str, float]


FIRST = {  # what the README shows, in words for those who have not read the page
    "op, scalar, 128×128, float32, T = 2048, forward+backward, 1 thread(s)":
        "Mamba-2's recurrence, forward and backward over 2,048 tokens, one thread",
    "op, gated-delta, 128×128, float32, T = 2048, forward+backward, 1 thread(s)":
        "Gated DeltaNet's recurrence, forward and backward over 2,048 tokens, one thread",
    "op, gated-delta, 128×128, float32, one token, 1 thread(s)": "Gated DeltaNet's recurrence, one token, one thread",
    "gla, float32, decode, 24 layers of 1024, 4096 tokens, 2 thread(s)":
        "one token of a GLA model of 24 layers of width 1,024, two threads",
    "gla, int8, decode, 24 layers of 1024, 4096 tokens, 2 thread(s)": "the same with weights in int8",
}  # fmt: skip


def cells() -> list[Cell]:
    """All measurements in which there is a peer."""
    return [cell for cell in (*op_cells(), *step_cells(), *model_cells()) if cell.peers]


def speed(brief: str = "") -> str:
    """For each measurement the peer that took the least time; brief: those of the README alone."""
    shown = FIRST if brief else {cell.what: cell.what for cell in cells()}
    found = {cell.what: [cell.time, *fastest(cell.peers.items())] for cell in cells()}
    lines = [[words, *found[what]] for what, words in shown.items()]
    return table(["", "headrace", "fastest other", "its time / headrace's"], lines)


def fastest(peers: Iterable[tuple[str, float]]) -> tuple[str, str]:
    name, over = min(peers, key=lambda peer: peer[1])
    return named(name), f"**{over:.2f}**"


def losses() -> str:
    """The measurements in which a peer takes less time than headrace."""
    faster = [(cell, peer) for cell in cells() for peer, over in cell.peers.items() if over < 1]
    lines = [[named(peer), cell.what, cell.time, f"{cell.peers[peer]:.2f}"] for cell, peer in faster]
    return table(["faster", "at", "headrace", "its time / headrace's"], lines)


ORDINARY = ("transformers Llama", "transformers SmolLM2")  # models of softmax attention, as transformers computes them


def named(runner: str) -> str:
    """A runner, and whether it is reference code: a path in PyTorch of a library whose kernels are for GPUs."""
    reference = runner.startswith(("fla ", "transformers ")) and not runner.startswith(ORDINARY)
    return f"{runner} (reference code)" if reference else runner


def peers(rows: list[dict], ours: dict) -> dict[str, float]:
    """Those that ran in turn with ours. Softmax attention is no peer: it computes another function."""
    others = [r for r in rows if not r["runner"].startswith(("headrace", "the state", "torch scaled"))]
    return {r["runner"]: float(r["ratio"]) for r in others if r["date"] == ours["date"]}


def op_cells() -> Iterator[Cell]:
    rows = newest(read("op.csv"), "threads", "family", "dtype", "T", "K", "V", "mode", "runner")
    for (family, dtype, K, V, T, mode, threads), own in grouped(
        rows, "family", "dtype", "K", "V", "T", "mode", "threads"
    ):
        ours = next((r for r in own if r["runner"] == "headrace native"), None)
        if ours is not None:
            time = ours["cpu_ms" if threads == "1" else "wall_ms"]
            what = f"op, {family}, {K}×{V}, {dtype}, T = {T}, {mode}, {threads} thread(s)"
            yield Cell(what, f"{float(time):.1f} ms", peers(own, ours))


def step_cells() -> Iterator[Cell]:
    rows = newest(read("step.csv"), "family", "K", "V", "runner")
    for (family, K, V), own in grouped(rows, "family", "K", "V"):
        ours = next(r for r in own if r["runner"] == "headrace")
        time = f"{float(ours['us_per_layer']):.0f} µs"
        yield Cell(f"op, {family}, {K}×{V}, float32, one token, 1 thread(s)", time, peers(own, ours))


def model_cells() -> Iterator[Cell]:
    """Only of peers that ran in turn with ours, and computed the same mixer with weights as narrow."""
    rows = newest(read("model.csv"), "threads", "what", "name", "layers", "width", "tokens", "batch")
    rows = [r | dict(zip(("runtime", "mixer", "weights"), model(r["name"]), strict=True)) for r in rows]
    rows = [r for r in rows if r["what"] in ("decode", "prompt", "train")]
    for (_, mixer, weights), own in grouped([r | {"size": size(r)} for r in rows], "size", "mixer", "weights"):
        ours, *others = sorted(own, key=lambda r: RUNTIMES.index(r["runtime"]))
        if ours["runtime"] == "headrace":
            over = {r["name"]: float(r["ratio"]) / float(ours["ratio"]) for r in others if r["date"] == ours["date"]}
            yield Cell(f"{mixer}, {weights}, {size(ours)}", f"{1e3 * float(ours['seconds']):.1f} ms", over)


def model(name: str) -> tuple[str, str, str]:
    """Runtime, mixer and weights of a model by its name in the results."""
    bare, _, weights = name.partition(", weights in ")
    runtime = next(known for known in RUNTIMES if bare.startswith(known))
    mixer = bare.removeprefix(f"{runtime} ")
    return runtime, MIXERS.get(mixer, mixer), weights or "float32"


def grouped(rows: list[dict], *key: str) -> Iterable[tuple[tuple[str, ...], list[dict]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in key)].append(row)
    return groups.items()


SECTIONS = {
    "op.csv": op, "decays.csv": decays, "threads.csv": threads, "step.csv": stepping, "decode.csv": decoding,
    "model.csv": models,
}  # fmt: skip


LOADS = {  # of the server's rows -> the page's name
    **{load: load for load in ("1 stream", "8 streams", "64 streams", "200 streams")},
    "a prompt alone": "a short prompt alone",
    "beside a prompt of 50,000 tokens": "the same beside a prompt of 50,000 tokens",
    "1,000 requests": "1,000 requests, 64 at a time",
}
CACHES = {"headrace": "", "headrace --prefix-cache 0": ", without the cache"}


def server() -> str:
    """Speed of the server by load, of its newest rows; times in ms, 50th and 99th percentile."""
    rows = {row["load"]: row for row in read("serving.csv") if row["server"] == "headrace"}
    columns = ("tokens_per_second",), ("first_p50", "first_p99"), ("next_p50", "next_p99"), ("memory",)
    lines = [[name, *(rounded(rows[load], *column) for column in columns)] for load, name in LOADS.items()]
    return table(["load", "tokens/s", "first token", "next token", "memory, MiB"], lines)


def prefix_cache() -> str:
    """Speed of the server on prompts with one prefix, with and without its cache."""
    rows = {(row["load"], row["server"]): row for row in read("serving.csv")}
    lines = []
    for load in ("a new prefix of 512 tokens", "the same prefix again"):
        for kind, more in CACHES.items():
            row = rows[f"64 streams, {load}", kind]
            hits = f"{100 * float(row['hit_rate']):.1f} %" if row["hit_rate"] else ""
            times = rounded(row, "tokens_per_second"), rounded(row, "first_p50", "first_p99")
            lines.append([load + more, *times, hits, rounded(row, "memory")])
    return table(["prompts", "tokens/s", "first token", "hit rate", "memory, MiB"], lines)


def beside_vllm() -> str:
    """Tokens per second of the server, and of vLLM in turn with it."""
    rows = {(row["date"], row["server"], row["load"]): row for row in read("serving.csv")}
    found = []
    for load in ("1 stream", "8 streams"):
        date = max(date for date, server, at in rows if (server, at) == ("vllm", load))
        found.append([rounded(rows[date, server, load], "tokens_per_second") for server in ("headrace", "vllm")])
    (one, their_one), (eight, their_eight) = found
    return f"{one} and {eight} tokens per second at 1 and 8 streams where vLLM gave {their_one} and {their_eight}"


def rounded(row: dict, *columns: str) -> str:
    return ", ".join(f"{float(row[name]):,.0f}" for name in columns if row[name])


def lines() -> list[str]:
    sections = [write() for name, write in SECTIONS.items() if (RESULTS / name).exists()]
    return "\n\n".join(sections).split("\n")


if __name__ == "__main__":
    print("\n".join(lines()))
