"""docs/results.md, written from the newest rows of results/*.csv: python benchmarks/tables.py"""

import csv
from itertools import groupby
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS.parent.parent / "docs" / "results.md"
MODES = ("forward", "forward+backward")

INTRODUCTION = """# Measured

Written by `python benchmarks/tables.py` from `benchmarks/results/`, which `benchmarks/op.py` and `benchmarks/decode.py`
fill. Batch 1, 4 heads, float32; each cell is the ratio of the median to headrace's, then milliseconds of CPU time. All
implementations ran in turn in one process, and each peer's output was first compared with the literal equation. These
machines are shared: trust ratios to 10 %.
"""


def newest(rows: list[dict], key: tuple[str, ...]) -> list[dict]:
    """The last row for each key, in the order of first appearance."""
    return list({tuple(row[k] for k in key): row for row in rows}.values())


def read(name: str) -> list[dict]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def about(rows: list[dict]) -> str:
    """What the rows were measured on; more than one line of it where they differ."""
    said = "{machine}, {threads} thread(s), torch {torch}, commit {commit}, {date:.10}"
    found = dict.fromkeys(said.format(**row) for row in rows)
    return "; ".join(found)


def table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---", *["--:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def op() -> str:
    rows = newest(read("op.csv"), ("threads", "family", "T", "K", "V", "mode", "runner"))
    parts = [f"## The op\n\n{about(rows)}."]
    rows.sort(key=lambda r: (r["family"], int(r["K"]) * int(r["V"])))
    for (family, K, V), group in groupby(rows, lambda r: (r["family"], r["K"], r["V"])):
        cells = {(r["runner"], r["mode"], r["T"]): r for r in group}
        columns = [(mode, T) for mode in MODES for T in sorted({T for _, _, T in cells}, key=int)]
        lines = [
            [runner, *(cell(cells.get((runner, *column))) for column in columns), saved(cells, runner)]
            for runner in dict.fromkeys(runner for runner, _, _ in cells)
        ]
        header = ["", *(f"{mode}, T={T}" for mode, T in columns), "kept / inputs"]
        parts.append(f"### {family}, {K}×{V}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def cell(row: dict | None) -> str:
    return f"**{float(row['ratio']):.2f}** {float(row['cpu_ms']):.0f}" if row else ""


def saved(cells: dict, runner: str) -> str:
    most = max(float(row["saved_over_inputs"]) for (name, _, _), row in cells.items() if name == runner)
    return f"{most:.1f}" if most else ""


def decoding() -> str:
    rows = newest(read("decode.csv"), ("threads", "name", "position"))
    positions = sorted({row["position"] for row in rows}, key=int)
    by_name = {name: {r["position"]: r for r in group} for name, group in groupby(rows, lambda r: r["name"])}
    lines = [
        [name, *(f"{float(own[p]['us_per_token']):.0f}" if p in own else "" for p in positions),
         f"{int(next(reversed(own.values()))['state_bytes']):,}"]
        for name, own in by_name.items()
    ]  # fmt: skip
    header = ["", *(f"token {p}" for p in positions), "state bytes at the last"]
    return f"## Decoding, µs per token\n\n{about(rows)}.\n\n{table(header, lines)}"


if __name__ == "__main__":
    PAGE.write_text("\n\n".join([INTRODUCTION.strip(), op(), decoding()]) + "\n")
