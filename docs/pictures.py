"""Draws the pictures of the manual that no command of headrace draws: `python docs/pictures.py [NAME ...]`.

Each function is one picture, `_static/NAME.svg`, on a white ground, with its text as text.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from drawing import AMBER, BLUE, GREEN, GREY, RED, arrow, box, canvas, note
from matplotlib.axis import Axis
from matplotlib.patches import FancyArrowPatch, Rectangle

from headrace import zoo
from headrace.spec.decay import DECAYS, DecayShape
from headrace.spec.linear import MixerSpec
from headrace.spec.stack import as_decoder

FOLDER = Path(__file__).parent / "_static"


def install() -> None:
    """Which extra includes which."""
    ax = canvas(7.9, 2.9)
    box(ax, (0.95, 1.45), (1.6, 0.8), "no extra\nop, layer, zoo\nverify, backends", BLUE)
    box(ax, (2.85, 1.45), (1.5, 0.8), "models\nlanguage model\ngenerate, convert", BLUE)
    arrow(ax, (1.75, 1.45), (2.1, 1.45))
    uses = {
        "studies": "compare, bench, inspect", "train": "prepare, train, recipes", "serve": "OpenAI's API",
        "onnx": "export to ONNX, web", "gguf": "llama.cpp, both ways", "vllm": "a plug-in of vLLM",
    }  # fmt: skip
    for i, (name, use) in enumerate(uses.items()):
        y = 2.6 - 0.46 * i
        box(ax, (4.7, y), (1.0, 0.34), name, GREEN)
        arrow(ax, (3.6, 1.45), (4.2, y))
        note(ax, (5.28, y), use, ha="left")
    box(ax, (7.4, 2.37), (0.7, 0.5), "eval", AMBER)
    arrow(ax, (6.75, 2.6), (7.06, 2.45))
    arrow(ax, (6.75, 2.14), (7.06, 2.29))
    box(ax, (0.95, 0.45), (1.6, 0.5), "gpu\nFLA's Triton kernels", GREY)
    note(ax, (2.0, 0.45), "beside any of them", ha="left")


def forms() -> None:
    """The three forms of the op on eight tokens."""
    ax = canvas(7.4, 2.75)
    side, T = 0.2, 8
    for start, name, about in (
        (0.35, "recurrent", "one state after another:\nT steps, for decoding"),
        (2.9, "chunkwise", "weights inside a chunk, a state\nbetween chunks: O(T), the default"),
        (5.45, "parallel", "all T × T weights:\nO(T²), for short rows and inspection"),
    ):
        note(ax, (start + 0.8, 2.58), name, fontsize=10, color="black", weight="bold")
        note(ax, (start + 0.8, 0.22), about)
        for i in range(T):
            for j in range(i + 1):
                filled = name == "parallel" or (name == "chunkwise" and i // 4 == j // 4)
                place = (start + j * side, 2.3 - (i + 1) * side)
                ax.add_patch(Rectangle(place, side, side, fc=BLUE if filled else "#f1f3f5", ec="white", lw=1))
        if name == "recurrent":
            for i in range(T):
                place = (start + i * side, 2.3 - (i + 1) * side)
                ax.add_patch(Rectangle(place, side, side, fc=RED, ec="white", lw=1))
            for i in range(T - 1):  # on top of the squares
                middle = start + (i + 0.5) * side, 2.3 - (i + 0.5) * side
                arrow(ax, middle, (middle[0] + side, middle[1] - side), "black")
        if name == "chunkwise":
            box(ax, (start + 0.4, 1.1), (0.5, 0.34), "S", RED, weight="bold")
            arrow(ax, (start + 0.4, 1.5), (start + 0.4, 1.28), RED)
            arrow(ax, (start + 0.66, 1.1), (start + 0.82, 1.1), RED)


def stages() -> None:
    """The stages of a linear layer, with the two parts of its state."""
    ax = canvas(7.4, 3.0)
    box(ax, (0.4, 1.6), (0.6, 0.5), "x\n[B,T,D]")
    box(ax, (1.3, 1.6), (0.8, 0.5), "in_proj")
    arrow(ax, (0.7, 1.6), (0.9, 1.6))
    box(ax, (2.5, 2.35), (1.1, 0.5), "convolution\nSiLU", BLUE)
    box(ax, (3.75, 2.35), (0.95, 0.5), "q, k, v\nfeatures, norm", BLUE, fontsize=8)
    box(ax, (2.5, 1.6), (1.1, 0.44), "decay", AMBER)
    box(ax, (2.5, 1.05), (1.1, 0.44), "β", AMBER)
    box(ax, (2.5, 0.5), (1.1, 0.44), "gates of heads", RED)
    for y in (2.35, 1.6, 1.05, 0.5):
        arrow(ax, (1.7, 1.6), (1.95, y))
    arrow(ax, (3.05, 2.35), (3.27, 2.35))
    box(ax, (4.85, 1.6), (0.9, 1.2), "op\n\nS′ = αS\nS = S′ + β kᵀv\no = qS", GREEN, fontsize=8)
    arrow(ax, (4.22, 2.35), (4.5, 2.2))
    arrow(ax, (3.05, 1.6), (4.4, 1.6))
    arrow(ax, (3.05, 1.05), (4.4, 1.35))
    arrow(ax, (3.05, 0.55), (4.45, 1.08), RED)
    note(ax, (3.85, 0.95), "write", color=RED)
    box(ax, (6.0, 1.6), (0.9, 1.2), "norm\n× read gate\n× output gate", BLUE, fontsize=8)
    arrow(ax, (5.3, 1.6), (5.55, 1.6))
    ax.add_patch(FancyArrowPatch(
        (3.05, 0.42), (6.0, 1.0), arrowstyle="-|>", mutation_scale=9, color=RED, lw=1.2,
        connectionstyle="angle,angleA=0,angleB=90,rad=6", shrinkA=2, shrinkB=2,
    ))  # fmt: skip
    note(ax, (5.2, 0.56), "read", color=RED)
    box(ax, (7.0, 1.6), (0.6, 0.5), "o_proj\ny", fontsize=8)
    arrow(ax, (6.45, 1.6), (6.7, 1.6))
    note(ax, (2.5, 2.8), "state.conv: the last inputs", color=BLUE)
    note(ax, (4.85, 2.4), "state.memory: S [H, K, V]", color=GREEN, ha="left")
    note(ax, (3.7, 0.12), "A mixer has the stages that its spec names; the others are not there.")


def mixers() -> None:
    """The linear mixers by rule and decay."""
    columns = "none", "fixed", "per head", "per key channel"
    cells: dict[tuple[str, str], list[str]] = {}
    for name in sorted(zoo.names()):
        spec = zoo.get(name)
        if isinstance(spec, MixerSpec) and zoo.plain(spec) == spec:
            cells.setdefault((spec.write.rule, decay(spec)), []).append(name)
    ax = canvas(7.85, 3.4)
    for i, column in enumerate(columns):
        note(ax, (1.37 + 1.83 * i, 3.24), f"decay: {column}", color="black", fontsize=9, weight="bold")
        for rule, colour, middle, height in (("add", BLUE, 2.32, 1.5), ("delta", RED, 0.8, 1.45)):
            box(
                ax,
                (1.37 + 1.83 * i, middle),
                (1.75, height),
                "\n".join(cells.get((rule, column), "–")),
                colour,
                fontsize=8,
            )
            note(ax, (0.22, middle), f"rule: {rule}", color=colour, fontsize=9, weight="bold", rotation=90)


def decay(spec: MixerSpec) -> str:
    if spec.decay.kind == "none":
        return "none"
    kind = DECAYS[spec.decay.kind]
    if kind.fixed:
        return "fixed"
    return "per head" if kind.shape is DecayShape.SCALAR else "per key channel"


NAMED = {  # the labelled points, and where their labels stand
    "transformer": (6, -3), "mamba2": (6, -3), "deltanet": (6, -3), "gated-deltanet": (6, 1), "gla": (-4, -12),
    "softmax-gated-deltanet": (6, -3),
}  # fmt: skip
RAISED = {"gated-deltanet": 1.35, "mamba2": 0.75}  # labels of lines that lie close together


def choose() -> None:
    """What a sequence costs to remember, and what small models recall with it."""
    _, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.9), layout="constrained")
    lengths = [2**n for n in range(7, 18)]
    shown = {"transformer": RED, "gqa": AMBER, "mamba2": GREEN, "gated-deltanet": BLUE, "gla": GREY}
    for name, colour in shown.items():
        sizes = [as_decoder(zoo.get(name)).state_bytes(1024, 4, n, 1) / 2**20 for n in lengths]
        left.loglog(lengths, sizes, color=colour)
        left.text(lengths[-1] * 1.2, sizes[-1] * RAISED.get(name, 1), name, color=colour, va="center", fontsize=8)
    about = {"xlabel": "tokens read", "ylabel": "MiB in float32", "title": "State of a layer of width 1,024"}
    left.set(**about, xlim=(100, 8e6))
    powers(left.xaxis, (100, 1_000, 10_000, 100_000))
    powers(left.yaxis, (1, 10, 100, 1_000))
    for name, numbers, score in recalled():
        right.plot(numbers, score, "o", color=shown.get(name, GREY))
        if name in NAMED:
            right.annotate(name, (numbers, score), NAMED[name], textcoords="offset points", fontsize=8)
    right.set(
        xscale="log", xlabel="numbers in the state", ylabel="recall, %", title="MQAR at 4 times the training length",
        xlim=(700, 1e5), ylim=(0, 100),
    )  # fmt: skip
    note(right, (9e4, 4), "no label: other mixers of the leaderboard", ha="right", fontsize=7)
    powers(right.xaxis, (1_000, 10_000, 100_000))


def powers(axis: Axis, places: Iterable[int]) -> None:
    """Labels of a logarithmic axis as numbers, for browsers without the font of powers."""
    axis.set_ticks(list(places), [f"{place:,}" for place in places])
    axis.minorticks_off()


def recalled() -> Iterable[tuple[str, float, float]]:
    """Mixer, numbers in its state, and median recall in %, of the leaderboard."""
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    import leaderboard

    kept = leaderboard.rows.read(leaderboard.KEPT)
    states = {row["mixer"]: row["state_bytes"] / 4 for row in kept if row["comparison"] == "mqar"}
    return [(name, states[name], 100 * score) for name, score in leaderboard.medians(kept, "mqar", 4).items()]


def own_mixer() -> None:
    """What follows from a spec."""
    ax = canvas(7.4, 2.7)
    box(
        ax,
        (1.15, 1.35),
        (2.0, 1.9),
        "MixerSpec\n\ninputs: conv, norm of q, k\ndecay: retnet\nwrite: delta, β\nread: norm, gate",
        BLUE,
    )
    box(ax, (3.35, 1.35), (1.45, 0.7), 'register_mixer(\n"fading-delta")', RED)
    arrow(ax, (2.15, 1.35), (2.62, 1.35))
    uses = {
        "Mixer": "a layer, with competition too", "HeadraceConfig": "a language model",
        "verify": "against the loop, in float64",
        "compare": "against others, of equal size", "train, serve, export": "with --plugin my_file.py",
    }  # fmt: skip
    for i, (name, use) in enumerate(uses.items()):
        y = 2.4 - 0.52 * i
        box(ax, (4.95, y), (1.35, 0.38), name, GREEN, fontsize=8.5)
        arrow(ax, (4.08, 1.35), (4.27, y))
        note(ax, (5.72, y), use, ha="left")


def run() -> None:
    """The folders that prepare and train write."""
    ax = canvas(7.4, 3.75)
    lines = [
        (0, "data/", "headrace prepare", BLUE),
        (1, "train.npy, train.ends.npy", "all tokens, and where documents end", None),
        (1, "held_out.npy, held_out.ends.npy", "the same of the documents that are not trained on", None),
        (1, "tokenizer/", "taken or trained", None),
        (1, "manifest.json", "sources, settings, counts, bad rows, SHA-256", None),
        (0, "runs/laptop-5m-gla/", "headrace train", RED),
        (1, "run.json", "the recipe with every field, and the data", None),
        (1, "checkpoint-1000/", "the newest two: weights, optimizer, history, random states", None),
        (1, "model/", "the result, which every command takes", GREEN),
        (2, "model.safetensors, config.json", "weights and the whole spec", None),
        (2, "tokenizer.json", "the tokenizer of the data", None),
        (2, "README.md, curves.png", "the model card: losses, versions, machine", None),
        (2, "history.json", "losses, norms of gradients, gates", None),
    ]
    for i, (depth, name, about, colour) in enumerate(lines):
        y = 3.55 - 0.275 * i
        place = (0.2 + 0.35 * depth, y)
        note(
            ax,
            place,
            name,
            ha="left",
            color=colour or "black",
            family="monospace",
            fontsize=9,
            weight="bold" if colour else "normal",
        )
        note(ax, (3.75, y), about, ha="left", color=colour or "#555555")


def convert() -> None:
    """Where models come from and where they go."""
    ax = canvas(7.4, 2.6)
    box(
        ax,
        (3.7, 1.3),
        (1.5, 1.9),
        "a headrace model\n\ngenerate, inspect\nretrofit, linearize\ntrain, PEFT, TRL\nsave_state",
        BLUE,
    )
    for i, name in enumerate(("transformers", "FLA", "GGUF of llama.cpp")):
        y = 2.2 - 0.9 * i
        box(ax, (1.0, y), (1.8, 0.44), name, GREEN)
        arrow(ax, (1.9, y), (2.95, 1.3 + (y - 1.3) * 0.55))
    note(ax, (2.43, 2.25), "convert", color="black")
    targets = {
        "transformers, FLA": "convert --to",
        "ONNX Runtime, a browser": "export",
        "llama.cpp": "export",
        "OpenAI's API, vLLM": "serve",
    }
    for i, (name, by) in enumerate(targets.items()):
        y = 2.3 - 0.66 * i
        box(ax, (6.35, y), (1.85, 0.44), name, AMBER)
        arrow(ax, (4.45, 1.3 + (y - 1.3) * 0.6), (5.42, y))
        note(ax, (4.98, y + 0.13 if i < 2 else y - 0.12), by, color="black")


def states() -> None:
    """A cache that goes back."""
    ax = canvas(7.4, 2.2)

    def place(token: int) -> float:
        return 0.4 + token * 6.6 / 300

    y = 1.35
    ax.add_patch(Rectangle((place(0), y), place(200) - place(0), 0.28, fc=BLUE, alpha=0.75))
    ax.add_patch(Rectangle((place(200), y), place(240) - place(200), 0.28, fc=AMBER, alpha=0.75))
    ax.add_patch(Rectangle((place(240), y), place(300) - place(240), 0.28, fc="#eeeeee", ec=GREY, ls="--"))
    for token in (0, 200):
        ax.plot([place(token)] * 2, [y - 0.1, y + 0.42], color=GREEN, lw=2)
        note(ax, (place(token), y + 0.55), "snapshot", color=GREEN)
    for token in (0, 200, 240, 300):
        note(ax, (place(token), y - 0.2), f"{token}")
    note(ax, (place(100), y + 0.14), "the state after 200 tokens: one size", color="white", weight="bold")
    arrow(ax, (place(300), y + 0.32), (place(242), y + 0.32), RED, bend=0.35)
    note(ax, (place(278), y + 0.68), "rewind(60)", color=RED, weight="bold")
    arrow(ax, (place(220), 0.55), (place(220), y - 0.04), AMBER)
    note(ax, (place(220), 0.42), "40 pending tokens: the next call reads them\ntogether with its own", color=AMBER)
    note(ax, (place(80), 0.42), "columns of the cache")


def serving() -> None:
    """How the server shares its time."""
    ax = canvas(7.4, 2.3)
    lanes = ("long prompt", "short prompts", "streams")
    for i, lane in enumerate(lanes):
        note(ax, (0.1, 1.85 - 0.55 * i), lane, ha="left", color="black", fontsize=9)
    x = 1.3
    turns = (
        ("layer", 0),
        ("", 2),
        ("layer", 0),
        ("", 1),
        ("", 2),
        ("layer", 0),
        ("", 2),
        ("layer", 0),
        ("", 2),
        ("", 2),
    )
    widths = {0: 0.85, 1: 0.6, 2: 0.35}
    for text, lane in turns:
        ax.add_patch(Rectangle((x, 1.68 - 0.55 * lane), widths[lane] - 0.05, 0.34, fc=(AMBER, BLUE, GREEN)[lane]))
        note(ax, (x + widths[lane] / 2 - 0.02, 1.85 - 0.55 * lane), text, color="white")
        x += widths[lane]
    arrow(ax, (1.3, 0.42), (7.2, 0.42))
    note(ax, (7.2, 0.3), "time", ha="right", va="top")
    note(
        ax,
        (1.3, 0.2),
        "A piece of 128 tokens stops between layers; then every stream gets a token, in one call.",
        ha="left",
    )
    note(ax, (1.3, 2.15), "at least half of the time", ha="left", color=AMBER)


def errors() -> None:
    """The parts of an error."""
    ax = canvas(7.4, 1.5)
    parts = (
        ("num_heads=8", 0.88, RED, "argument and value"),
        ("does not divide heads.expand_v · hidden_size = 100;", 3.24, GREY, "what is wrong"),
        ("expected a multiple of 8", 6.06, GREEN, "what was expected"),
    )
    for text, x, colour, about in parts:
        ax.text(x, 0.95, text, color=colour, family="monospace", fontsize=8.5, ha="center", va="center", weight="bold")
        note(ax, (x, 0.5), about, color=colour)
    note(ax, (3.7, 1.3), "InputError in Python; a line on standard error and exit code 2 on the command line")


def reference() -> None:
    """The layers of the library."""
    ax = canvas(7.4, 2.9)
    rows = (
        ("commands", "headrace compare, train, inspect, serve …; the same as Python functions", GREY),
        ("model", "HeadraceConfig, HeadraceForCausalLM, HeadraceCache", AMBER),
        ("layer", "Mixer(name): x, state → y, state", GREEN),
        ("spec", "MixerSpec, zoo: which stages, which settings", RED),
        ("op", "linear_attention, step", BLUE),
        ("backends", "native   triton   fla   torch   onnx", GREY),
    )
    for i, (name, what, colour) in enumerate(rows):
        y = 2.65 - 0.47 * i
        box(ax, (4.3, y), (6.0, 0.38), what, colour)
        note(ax, (1.15, y), name, ha="right", color=colour, fontsize=10, weight="bold")


PICTURES = {
    "install": install, "forms": forms, "stages": stages, "mixers": mixers, "choose": choose, "own-mixer": own_mixer,
    "run": run, "convert": convert, "states": states, "serving": serving, "errors": errors, "reference": reference,
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        PICTURES[name]()
        plt.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
        plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
