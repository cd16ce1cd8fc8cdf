"""Does competition help to imitate attention? Attention layers of a released model become linear, with gates or
without.

    python -m research.linear run NAME MODEL DATA BOOK    the arms of RUNS[NAME]; the same command continues
    python -m research.linear show NAME                   the tables, as Markdown

MODEL is a folder of `headrace convert`, DATA one of `headrace prepare --tokenizer MODEL --length 256 --held-out 0.03`,
BOOK a text file. Every arm replaces attention layers, is trained to imitate them, and then as a whole on the same rows;
the control is the unchanged model, trained as a whole. All arms of a seed read the same rows in the same order.

    error         of a layer's output, relative and squared, on held-out rows: the mean over the new layers
    nats          per token on held-out rows of DATA
    book          nats per token of BOOK
    pairs, needle nats per token of a number that the text told before: among 16 other names, or 900 tokens earlier
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import typer

from benchmarks.record import markdown, read, write
from headrace.convert import load
from headrace.convert.checkpoint import read_tokenizer
from headrace.data import PackedData, open_data
from headrace.data.sources import text_of
from headrace.files import engine, provenance
from headrace.files.engine import Claim, Point, Row
from headrace.files.processes import locked
from headrace.files.workers import Worker, place_workers
from headrace.report.differences import Difference, Unit, judged, over_seeds, table
from headrace.training.linear import Keep, held_out_loss, imitate
from headrace.training.loop import Batch, Updates
from headrace.training.processes import Processes
from headrace.training.transfer import Transfer, batches

from . import RESULTS

BASE = "hedgehog(decay.kind=sigmoid-head{})"
BACKBONES = {"gated-deltanet": "Gated DeltaNet", "gla": "GLA", "kda": "KDA"}  # whose readout a norm follows
GATES = {"softmax": "default", "sigmoid": "sigmoid"}
MIXERS = {
    "none": BASE.format(""),
    "softmax": BASE.format(",competition=default"),
    "sigmoid": BASE.format(",competition=sigmoid"),
    "published": BASE.format(",competition=paper"),
}
for backbone in BACKBONES:
    MIXERS[backbone] = backbone
    MIXERS |= {f"{backbone} {gates}": f"{backbone}(competition={form})" for gates, form in GATES.items()}
MIXERS |= {f"{backbone} published": f"{backbone}(competition=paper)" for backbone in BACKBONES}
CONTROL = "unchanged"
MEASURES = ("error", "nats", "book", "pairs", "needle")
STATES = ("released", "imitating", "trained")  # of an arm's model
COMPARED = ("after", "imitating", "trained")  # ends of the columns that are compared
LOSS = Unit("", "", 3, verdicts=("higher", "lower"), joint="−")


class Family(NamedTuple):
    """Differences that are judged together: those of pairs of arms, in some measures."""

    question: str
    pairs: tuple[tuple[str, str], ...]
    measures: tuple[str, ...] = MEASURES


class Run(NamedTuple):
    """Arms that read the same rows in the same precision, and the questions that are asked of them."""

    arms: tuple[str, ...]
    families: tuple[Family, ...]
    keep: Keep = Keep(every=2)
    precision: Literal["bfloat16", "float32"] = "float32"


GATED = ("none", "softmax", "sigmoid")
FORMS = (
    Family(
        "Does a softmax over heads lower what is lost when attention layers become linear, beyond gates of the same "
        "range without it? Student's t over the differences of arms with the same seed, corrected by Holm's rule over "
        "all differences of the table.",
        (("softmax", "none"), ("softmax", "sigmoid"), ("published", "none"), ("sigmoid", "none")),
    ),
    Family(
        "What is the size of the gates worth? In a mean of values, which no norm follows, the published form is "
        "`softmax` with gates that are a ninth in place of 1 where scores are equal.",
        (("published", "softmax"),),
        ("error", "nats"),
    ),
    *(
        Family(
            f"The first question, for {title} in place of linear attention with learned feature maps.",
            ((f"{name} softmax", name), (f"{name} softmax", f"{name} sigmoid"), (f"{name} sigmoid", name)),
            ("error", "nats"),
        )
        for name, title in BACKBONES.items()
    ),
)
PUBLISHED = Family(
    "Does the published form lower what is lost where a norm follows the readout? Expected before the runs: the norm "
    "removes the size of the gates and most of the read gate.",
    tuple((f"{name} published", name) for name in BACKBONES),
    ("error", "nats"),
)
FOUR_FORMS = ((" softmax", ""), (" softmax", " sigmoid"), (" sigmoid", ""), (" published", ""))
THREE_QUARTERS = Family(
    "The first question, of three quarters of the layers in place of half.",
    FORMS[0].pairs,
)
RUNS = {
    "half": Run((CONTROL, *(arm for arm in MIXERS if not arm.endswith(" published"))), FORMS, precision="bfloat16"),
    "published": Run(tuple(f"{name}{form}" for name in BACKBONES for form in ("", " published")), (PUBLISHED,)),
    "three-quarters": Run((CONTROL, *GATED, "published"), (THREE_QUARTERS,), keep=Keep(every=4)),
}
for backbone, title in BACKBONES.items():
    question = Family(
        f"The first question and that of the published form, of {title} in three quarters of the layers. Expected "
        "before the runs, as of half: gates help GLA on text and neither delta rule; the published form helps GLA, and "
        "harms Gated DeltaNet.",
        tuple((f"{backbone}{a}", f"{backbone}{b}") for a, b in FOUR_FORMS),
        ("error", "nats"),
    )
    arms = tuple(arm for arm in MIXERS if arm.split()[0] == backbone)
    RUNS[f"three-quarters-{backbone}"] = Run(arms, (question,), keep=Keep(every=4))
SEEDS = range(3)
IMITATION = Transfer(steps=200, rows=2, held_out=16)
WHOLE = Transfer(lr=1e-4, steps=50, rows=2, clip=1.0)
PROMPTS, NAMES = 24, 16  # texts of pairs; names in each of them
NEEDLES, DISTANCE = 8, 900  # texts of a needle; tokens between it and the question
ALONE = Processes(torch.device("cpu"))
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Arm:
    name: str
    seed: int
    run: str  # of RUNS
    model: Path
    data: Path
    book: Path
    folder: Path  # of the run


def kept(name: str) -> Path:
    return RESULTS / "linear" / f"{name}.csv"


@app.command()
def run(
    name: str, model: Path, data: Path, book: Path, folder: Path = Path("runs", "linear"), workers: int | None = None
) -> None:
    """Trains and measures every arm of a run."""
    folder = folder / name
    arms = [Arm(arm, seed, name, model, data, book, folder) for arm, seed in product(RUNS[name].arms, SEEDS)]
    points = [
        Point(f"{a.name}, seed {a.seed}", Path("arms", f"{a.name}-{a.seed}.json"), a, fingerprint=MIXERS.get(a.name))
        for a in arms
    ]
    imitation, whole = settings(arms[0])
    chosen: dict[str, Any] = {"imitation": imitation, "whole": whole, "keep": RUNS[name].keep}
    texts = [str(path.resolve()) for path in (model, data, book)]
    plan = {name: asdict(value) for name, value in chosen.items()} | {"seeds": list(SEEDS), "texts": texts}
    with locked(folder):
        claim = Claim(json.loads(json.dumps(plan)), provenance.defaults(chosen))
        rows = engine.run(folder, claim, points, measured, engine.lines(print, points), place_workers(["cpu"], workers))
    write(kept(name), rows)


def settings(arm: Arm) -> tuple[Transfer, Transfer]:
    """The settings of the imitation, and of the training of the whole model."""
    first, second = (replace(one, seed=arm.seed, precision=RUNS[arm.run].precision) for one in (IMITATION, WHOLE))
    return first, second


def measured(arm: Arm, worker: Worker) -> Row:
    """One arm's row: what is measured of the model as released, after the imitation, and after training as a whole."""
    torch.manual_seed(arm.seed)
    model, data = load(arm.model).float(), open_data(arm.data)
    result: Row = {"arm": arm.name, "seed": arm.seed, "data": data.manifest["files"]["train.npy"]["sha256"]}
    (imitation, training), tests = settings(arm), probes(arm)
    if arm.name == CONTROL:
        result |= named("released", tests(model, data))
    else:

        def tell(step: int, error: float) -> None:
            if step % 50 == 0:
                worker.report(f"step {step}, error {error:.3f}")

        work = arm.folder / "work" / f"{arm.name}-{arm.seed}"
        work.mkdir(parents=True, exist_ok=True)
        model, report = imitate(model, MIXERS[arm.name], RUNS[arm.run].keep, data, imitation, work, ALONE, tell, 1)
        layers = report["layers"].values()
        result |= {f"error_{when}": sum(layer[when] for layer in layers) / len(layers) for when in ("before", "after")}
        result |= {"nats_replaced": report["nats"]["replaced"]} | named("imitating", tests(model, data))
    whole(model, data, training)
    return result | named("trained", tests(model, data))


def named(when: str, values: dict[str, float]) -> Row:
    return {f"{name}_{when}": value for name, value in values.items()}


def whole(model: Any, data: PackedData, settings: Transfer) -> None:
    """Trains all weights on the rows of the data."""
    updates = Updates(model, settings, loss, ALONE, settings.precision)
    for batch in islice(batches(data, settings, ALONE), settings.steps):
        updates.backward([batch])
        updates.clip()
        updates.step()


def loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    return model(**batch, num_items_in_batch=count, skip_logits=True, use_cache=False).loss


# --- what is measured ------------------------------------------------------------------------------------------------


def probes(arm: Arm) -> Callable[[Any, PackedData], dict[str, float]]:
    """A function of a model and the data that returns its losses, on the same texts for every arm."""
    tokenizer, prose = read_tokenizer(arm.model), text_of(arm.book)
    ids = tokenizer(prose[: 16 * 256 * 8])["input_ids"]
    rows = torch.tensor(ids[: 16 * 256]).view(16, 256)
    filler = tokenizer(prose[200_000:400_000])["input_ids"]
    recall = {
        "pairs": list(prompts(tokenizer, PROMPTS, NAMES, [])),
        "needle": list(prompts(tokenizer, NEEDLES, 1, filler)),
    }

    @torch.no_grad()
    def losses(model: Any, data: PackedData) -> dict[str, float]:
        model.eval()
        found = {"nats": held_out_loss(model, data, settings(arm)[0])}
        book = [float(model(row[None], labels=row[None], skip_logits=True).loss) for row in rows]
        found["book"] = sum(book) / len(book)
        return found | {name: answer_loss(model, texts) for name, texts in recall.items()}

    return losses


def prompts(tokenizer: Any, count: int, names: int, filler: Sequence[int]) -> Iterator[tuple[torch.Tensor, int]]:
    """Pairs (token ids of a text, number of its last tokens that are the answer)."""
    chance = random.Random(0)
    for i in range(count):
        people = chance.sample(PEOPLE, names)
        codes = {name: "".join(chance.choices("0123456789", k=5)) for name in people}
        told = tokenizer(" ".join(f"The code of {name} is {code}." for name, code in codes.items()))["input_ids"]
        asked = chance.choice(people)
        question = tokenizer(f" The code of {asked} is")["input_ids"]
        answer = tokenizer(f" {codes[asked]}")["input_ids"]
        between = list(filler[i * DISTANCE : (i + 1) * DISTANCE])
        yield torch.tensor(told + between + question + answer), len(answer)


PEOPLE = (
    "Anna", "Bert", "Carl", "Dora", "Emil", "Frank", "Grace", "Henry", "Irene", "James", "Karen",
    "Louis", "Maria", "Nancy", "Oscar", "Peter", "Quinn", "Rose", "Simon", "Tina", "Victor", "Walter",
    "Xenia", "Yvonne", "Zoe", "Albert", "Bella", "Clara", "David", "Edith", "Felix", "Gina",
)  # fmt: skip


def answer_loss(model: Any, texts: Sequence[tuple[torch.Tensor, int]]) -> float:
    """The mean loss in nats of the tokens of an answer."""
    total, count = 0.0, 0
    for ids, length in texts:
        logits = model(ids[None], use_cache=False, logits_to_keep=length + 1).logits[0, :-1]
        total += float(F.cross_entropy(logits.float(), ids[-length:], reduction="sum"))
        count += length
    return total / count


# --- what is shown ---------------------------------------------------------------------------------------------------


@app.command()
def show(name: str) -> None:
    print(*lines(name), sep="\n")


def lines(name: str) -> list[str]:
    """The means of the arms of a run, and their differences of one seed."""
    rows = read(kept(name))
    shown = means(rows)
    for family in RUNS[name].families:
        if found := differences(rows, family):
            header, *cells = table(found, "of")
            shown += ["", family.question, "", *markdown(header, cells)]
    return shown


def means(rows: list[dict[str, str]]) -> list[str]:
    """A row for each arm and state of its model, of the means over seeds."""
    shown = []
    for arm, state in product(dict.fromkeys(row["arm"] for row in rows), STATES):
        own = [row for row in rows if row["arm"] == arm]
        names = [f"error_{'after' if state == 'imitating' else state}", *(f"{name}_{state}" for name in MEASURES[1:])]
        cells = [[float(row[name]) for row in own if row.get(name)] for name in names]
        if any(cells):
            means = (f"{sum(cell) / len(cell):.3f}" if cell else "" for cell in cells)
            shown.append([arm, state, str(len(own)), *means])
    return markdown(["arm", "model", "seeds", *MEASURES], shown)


def differences(rows: list[dict[str, str]], family: Family) -> list[Difference]:
    """The differences of a family of which there are rows, judged together."""
    columns = [name for name in rows[0] if name.split("_")[0] in family.measures and name.endswith(COMPARED)]
    values = {(row["arm"], row["seed"]): row for row in rows}
    found = []
    for column, (a, b) in product(columns, family.pairs):
        seeds = [seed for arm, seed in values if arm == a and (b, seed) in values]
        if seeds:
            gains = [float(values[a, i][column]) - float(values[b, i][column]) for i in seeds]
            found.append(over_seeds(a, b, gains, LOSS, where=column.replace("_", " ")))
    return judged([found])[0]


if __name__ == "__main__":
    app()
