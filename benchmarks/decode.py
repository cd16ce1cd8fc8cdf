"""Decoding: a token costs as much at position 100 000 as at 100, and the state is as large as the spec says.

    python benchmarks/decode.py --quick                         up to token 1000
    python benchmarks/decode.py --mixer softmax-gla             one model; otherwise the op's families and the whole zoo

The state at each position is really reached: by the chunkwise form, in pieces. Then tokens are decoded one by one from
all positions in turn, so that a busy moment hits them alike.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer

from headrace import linear_attention, step, zoo
from headrace.studies.bench.decoding import PIECE, Decoder
from headrace.studies.bench.models import Shape, build
from peers import FAMILIES, Family
from program import Log, Output, console, show
from record import RESULTS, Row

POSITIONS = (100, 1_000, 10_000, 100_000)
QUADRATIC = 10_000  # where reaching a position with softmax attention begins to take minutes
HEADS, KEY, VALUE, HIDDEN, LAYERS, VOCABULARY = 4, 128, 256, 512, 2, 256


@dataclass
class Subject:
    """What is measured: `start()` gives a decoder with `read(tokens)`, `token()` and `state_bytes()`."""

    name: str
    start: Callable[[], Any]
    promised: Callable[[int], int]  # tokens read -> bytes of the state by the spec
    furthest: int = POSITIONS[-1]


class OpDecoder:
    """One recurrence and nothing else: `linear_attention` reads the context, `step` decodes."""

    def __init__(self, family: Family):
        self.family, self.state = family, None
        inputs = family.inputs(T=PIECE, H=HEADS, K=KEY, V=VALUE)
        self.piece = {key: x.detach() for key, x in inputs.items()}
        self.one = {key: x[:, 0] if x.dim() > 2 else x for key, x in self.piece.items()}

    def read(self, tokens: int) -> None:
        tensors = {key: x[:, :tokens] if x.dim() > 2 else x for key, x in self.piece.items()}
        self.state = linear_attention(**tensors, **self.family.options(), initial_state=self.state)[1]

    def token(self) -> None:
        q, k, v, rest = (self.one["q"], self.one["k"], self.one["v"], self.one.keys() - set("qkv"))
        self.state = step(q, k, v, self.state, **{key: self.one[key] for key in rest}, **self.family.options())[1]

    def state_bytes(self) -> int:
        return self.state.nbytes


def of_the_op(name: str, family: Family) -> Subject:
    size = 4 * HEADS * KEY * (VALUE + family.normalize)
    return Subject(f"op: {name}", lambda: OpDecoder(family), lambda _: size)


def of_a_model(mixer: str) -> Subject:
    """A small language model of this mixer, its embedding, MLPs and head included."""
    shape, spec = Shape(LAYERS, HIDDEN, HEADS, VOCABULARY), zoo.get(mixer)
    model = build(mixer, shape)

    def promised(tokens):
        return LAYERS * spec.state_bytes(HIDDEN, HEADS, tokens)

    furthest = QUADRATIC if mixer in zoo.ATTENTION else POSITIONS[-1]
    return Subject(mixer, lambda: Decoder(model), promised, furthest)


def reached(subject: Subject, position: int) -> Any:
    """A decoder that has read so many tokens, in pieces."""
    decoder = subject.start()
    for begin in range(0, position, PIECE):
        decoder.read(min(PIECE, position - begin))
    return decoder


@torch.inference_mode()
def measure(subject: Subject, positions: list[int], tokens: int) -> list[Row]:
    decoders = {p: reached(subject, p) for p in positions}
    size = {p: decoder.state_bytes() for p, decoder in decoders.items()}
    seconds = {p: [] for p in positions}
    for _, p in itertools.product(range(tokens), positions):
        start = time.process_time()
        decoders[p].token()
        seconds[p].append(time.process_time() - start)
    # The first quarter warms up.
    return [
        {
            "name": subject.name, "position": p, "tokens": tokens,
            "us_per_token": round(1e6 * median(seconds[p][tokens // 4 :]), 1), "state_bytes": size[p],
            "promised_bytes": subject.promised(p),
        }
        for p in positions
    ]  # fmt: skip


def line(name: str, rows: dict[int, Row], positions: list[int]) -> list[str]:
    last, first = rows[max(rows)], rows[min(rows)]
    times = (f"{rows[p]['us_per_token']:.0f}" if p in rows else "" for p in positions)
    kept = all(row["state_bytes"] == row["promised_bytes"] for row in rows.values())
    return [
        name, *times, f"{last['us_per_token'] / first['us_per_token']:.2f}", f"{last['state_bytes']:,}",
        "yes" if kept else f"[red]no: {last['promised_bytes']:,}",
    ]  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option(help="Only to token 1000, and few tokens.")] = False,
    mixer: Annotated[list[str], typer.Option(help="Models of these mixers only; may be repeated.")] = [],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens decoded from each position.")] = 200,
    threads: int = 1,
    output: Output = RESULTS / "decode.csv",
) -> None:
    """Time decoding from token 100 to token 100 000."""
    torch.set_num_threads(threads)
    log = Log(output)
    subjects = [of_the_op(name, family) for name, family in FAMILIES.items() if not mixer]
    subjects += [of_a_model(name) for name in mixer or [*zoo.LINEAR, "softmax-gla", *zoo.ATTENTION]]
    for subject in subjects:
        with console.status(subject.name):
            positions = [p for p in POSITIONS if p <= (1_000 if quick else subject.furthest)]
            log.add(measure(subject, positions, 20 if quick else tokens))
    positions = sorted({row["position"] for row in log.rows})
    header = ["", *(f"{p:,}" for p in positions), "last /\nfirst", "state\nbytes", "as the spec\nsays"]
    groups = itertools.groupby(log.rows, lambda row: row["name"])
    lines = [line(name, {row["position"]: row for row in rows}, positions) for name, rows in groups]
    show("µs per token, after so many tokens", header, lines)
    if not quick and any(subject.furthest < POSITIONS[-1] for subject in subjects):
        console.print(f"[dim]softmax attention stops at {QUADRATIC:,} tokens: reaching further takes minutes[/]")
    log.end()


if __name__ == "__main__":
    typer.run(main)
