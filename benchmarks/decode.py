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
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from headrace import linear_attention, step, zoo
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from headrace.hf.cache import HeadraceCache
from peers import FAMILIES, Family
from record import append, environment

RESULTS = Path(__file__).parent / "results" / "decode.csv"
POSITIONS = (100, 1_000, 10_000, 100_000)
QUADRATIC = 10_000  # where reaching a position with softmax attention begins to take minutes
PIECE = 4096
HEADS, KEY, VALUE, HIDDEN, LAYERS, VOCABULARY = 4, 128, 256, 512, 2, 256
console = Console(width=None if Console().is_terminal else 130)


@dataclass
class Decoder:
    """Something with a state: `prefill(state, tokens)` and `token(state)` return the next one."""

    name: str
    prefill: Callable[[Any, int], Any]
    token: Callable[[Any], Any]
    measured: Callable[[Any], int]  # bytes of a state
    promised: Callable[[int], int]  # what they should be after so many tokens
    furthest: int = POSITIONS[-1]


@dataclass(frozen=True)
class Row:
    name: str
    position: int
    tokens: int
    us_per_token: float
    state_bytes: int
    promised_bytes: int


def the_op(name: str, family: Family) -> Decoder:
    """`linear_attention` to get there, `step` from there; one layer's recurrence, nothing else."""
    shape = {"H": HEADS, "K": KEY, "V": VALUE}
    piece = {key: x.detach() for key, x in family.inputs(T=PIECE, **shape).items()}
    over_time = {key for key, x in piece.items() if x.dim() > 2}
    one = {key: x[:, 0] if key in over_time else x for key, x in piece.items()}
    rest = {key: x for key, x in one.items() if key not in "qkv"}

    def prefill(state, tokens):
        given = {key: x[:, :tokens] if key in over_time else x for key, x in piece.items()}
        return linear_attention(**given, **family.options(), initial_state=state)[1]

    return Decoder(
        f"op: {name}", prefill, lambda S: step(one["q"], one["k"], one["v"], S, **rest, **family.options())[1],
        measured=lambda S: S.nbytes, promised=lambda _: 4 * HEADS * KEY * (VALUE + family.normalise),
    )  # fmt: skip


def the_model(mixer: str) -> Decoder:
    """A small language model of this mixer, its embedding, MLPs and head included."""
    torch.manual_seed(0)
    config = HeadraceConfig(
        mixer=mixer, vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_heads=HEADS
    )
    model, spec = HeadraceForCausalLM(config).eval(), zoo.get(mixer)

    def forward(cache, tokens):
        ids = torch.randint(VOCABULARY, (1, tokens))
        return model(ids, past_key_values=cache or HeadraceCache(), use_cache=True, logits_to_keep=1).past_key_values

    def promised(tokens):
        grows = {} if mixer in zoo.LINEAR or mixer.startswith("softmax-") else {"tokens": tokens}
        return LAYERS * spec.state_bytes(HIDDEN, HEADS, **grows)

    return Decoder(
        mixer, forward, lambda cache: forward(cache, 1), measured=cache_bytes, promised=promised,
        furthest=QUADRATIC if mixer in zoo.ATTENTION else POSITIONS[-1],
    )  # fmt: skip


def cache_bytes(cache: HeadraceCache) -> int:
    """Of the numbers in it; the count of tokens that rotary positions need is not one of them."""
    return sum(x.nbytes for state in cache.states for x in state if x is not None and x.is_floating_point())


def reach(decoder: Decoder, position: int):
    """The state after so many tokens, in pieces."""
    state = None
    for begin in range(0, position, PIECE):
        state = decoder.prefill(state, min(PIECE, position - begin))
    return state


@torch.inference_mode()
def measure(decoder: Decoder, positions: list[int], tokens: int) -> list[Row]:
    states = {p: reach(decoder, p) for p in positions}
    size = {p: decoder.measured(state) for p, state in states.items()}
    seconds = {p: [] for p in positions}
    for _, p in itertools.product(range(tokens), positions):
        start = time.process_time()
        states[p] = decoder.token(states[p])
        seconds[p].append(time.process_time() - start)
    # The first quarter warms up.
    return [
        Row(decoder.name, p, tokens, round(1e6 * median(seconds[p][tokens // 4 :]), 1), size[p], decoder.promised(p))
        for p in positions
    ]


def show(found: list[Row]) -> None:
    positions = sorted({row.position for row in found})
    table = Table(title="µs per token, after so many tokens", title_justify="left")
    for title in ("", *(f"{p:,}" for p in positions), "last /\nfirst", "state\nbytes", "as the spec\nsays"):
        table.add_column(title, justify="right" if title else "left")
    for name, group in itertools.groupby(found, lambda row: row.name):
        rows = {row.position: row for row in group}
        last, first = rows[max(rows)], rows[min(rows)]
        times = (f"{rows[p].us_per_token:.0f}" if p in rows else "" for p in positions)
        kept = all(row.state_bytes == row.promised_bytes for row in rows.values())
        table.add_row(
            name, *times, f"{last.us_per_token / first.us_per_token:.2f}", f"{last.state_bytes:,}",
            "yes" if kept else f"[red]no: {last.promised_bytes:,}",
        )  # fmt: skip
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Only to token 1000, and few tokens.")] = False,
    mixer: Annotated[list[str], typer.Option(help="Models of these mixers only; may be repeated.")] = [],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens decoded from each position.")] = 200,
    threads: int = 1,
    output: Annotated[Path, typer.Option(help="The CSV file to append to.")] = RESULTS,
) -> None:
    """Time decoding from token 100 to token 100 000."""
    torch.set_num_threads(threads)
    about, found = environment("cpu"), []
    decoders = [the_op(name, family) for name, family in FAMILIES.items() if not mixer]
    decoders += [the_model(name) for name in mixer or [*zoo.LINEAR, "softmax-gla", *zoo.ATTENTION]]
    for decoder in decoders:
        with console.status(decoder.name):
            positions = [p for p in POSITIONS if p <= (1_000 if quick else decoder.furthest)]
            found += measure(decoder, positions, 20 if quick else tokens)
            append(output, about, found[-len(positions) :])
    show(found)
    if not quick and any(d.furthest < POSITIONS[-1] for d in decoders):
        console.print(f"[dim]softmax attention stops at {QUADRATIC:,} tokens: reaching further takes minutes[/]")
    console.print(f"{len(found)} rows appended to {output}; {about['machine']}, {threads} thread(s)")


if __name__ == "__main__":
    typer.run(main)
