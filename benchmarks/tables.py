"""The measurements of docs/benchmarks.md, from the newest rows of results/*.csv: `python benchmarks/tables.py`.

`make generated` writes them to the page."""

from itertools import groupby

import record
from record import RESULTS, newest

MODES = ("forward", "forward+backward")
DEPTH = 24


def read(name: str) -> list[dict]:
    return record.read(RESULTS / name)


def about(rows: list[dict]) -> str:
    """What the rows were measured on; more than one line of it where they differ."""
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
            [runner, *(cell(cells.get((runner, *column))) for column in columns), saved(cells, runner)]
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
    rows = newest(read("model.csv"), "threads", "what", "name", "layers", "tokens")
    lines = [
        [f"{r['what']}, {r['layers']} layers, {r['tokens']} tokens, {r['threads']} thread(s): {r['name']}",
         f"**{float(r['ratio']):.2f}**", r["tokens_per_second"], f"{int(r['parameters']) / 1e6:.0f} M",
         r["peak_mb"] if r["what"] == "prefill" else ""]
        for r in rows
    ]  # fmt: skip
    header = ["", "time over the first", "tokens/s", "parameters", "peak MB over the weights"]
    parts = [f"### Language models\n\n{about(rows)}.\n\n{table(header, lines)}"]
    return "\n\n".join([*parts, *extrapolated([r for r in rows if r["what"] == "train"])])


def extrapolated(rows: list[dict]) -> list[str]:
    """Training at 24 layers, on the straight line through two depths: an estimate, not a measurement."""
    lines = []
    rows = sorted(rows, key=lambda r: (r["threads"], r["tokens"], r["name"]))
    for (threads, tokens, name), group in groupby(rows, lambda r: (r["threads"], r["tokens"], r["name"])):
        at = {int(r["layers"]): float(r["seconds"]) for r in group}
        if len(at) > 1 and DEPTH not in at:
            low, high = min(at), max(at)
            seconds = at[low] + (at[high] - at[low]) * (DEPTH - low) / (high - low)
            lines.append([f"{name}, {threads} thread(s)", f"{int(tokens) / seconds:.1f}", f"{low} and {high} layers"])
    header = ["", f"tokens/s at {DEPTH} layers", "from"]
    return [f"#### Training extrapolated, not measured\n\n{table(header, lines)}"] if lines else []


def exports() -> str:
    rows = newest(read("export.csv"), "mixer", "task", "runner")
    lines = [
        [f"{r['mixer']}, {r['task']}: {r['runner']}", f"**{float(r['over_ours']):.2f}**",
         f"{float(r['tokens_per_second']):.0f}", f"{float(r['megabytes']):.1f}"]
        for r in rows
    ]  # fmt: skip
    header = ["", "time over headrace's", "tokens/s", "MB"]
    what = f"5 layers of 256, prompts of 512 tokens, ONNX Runtime {rows[-1]['onnxruntime']}"
    return f"### Exported models\n\n{about(rows)}; {what}.\n\n{table(header, lines)}"


SECTIONS = {
    "op.csv": op, "decays.csv": decays, "threads.csv": threads, "step.csv": stepping, "decode.csv": decoding,
    "model.csv": models, "export.csv": exports,
}  # fmt: skip


def lines() -> list[str]:
    sections = [write() for name, write in SECTIONS.items() if (RESULTS / name).exists()]
    return "\n\n".join(sections).split("\n")


if __name__ == "__main__":
    print("\n".join(lines()))
