"""Every item with every checkpoint, by the harness; what is finished is not done again.

plan.json                     what is evaluated; the folder serves no other plan
<model>/items/<item>.json     one finished item: the harness's results, and what each row scored
<model>/results.json          the harness's format, all items of a model
"""

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from ...utils.errors import InputError
from ...utils.integrity import digest, read_json, write_json
from ...utils.provenance import own
from .checkpoint import ROOM, Checkpoint, fingerprint, named, read_checkpoint
from .local import Missing, content, haystacks, localise
from .suites import RECALL, RECALLED, Item, items
from .unigram import unigram

Tell = Callable[[str], None]
DRAWS = 1000  # of the harness's bootstrap


def silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class Plan:
    suite: str
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    data: str | None = None  # a folder of local files; without one, the Hub
    limit: int | None = None  # rows of each task
    max_length: int | None = None  # tokens of context; without it, what the model's config says
    seed: int = 1234

    def check(self) -> None:
        for name in ("limit", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}={getattr(self, name)}; expected at least 1")
        if self.data is not None and not Path(self.data).is_dir():
            raise InputError(f"--data={self.data!r}; expected a folder")


@dataclass(frozen=True)
class Machine:
    """Where it runs; no number depends on it beyond rounding."""

    device: str
    batch_size: int


@dataclass(frozen=True)
class Evaluation:
    plan: Plan
    items: dict[str, dict[str, Any]]  # of each model by its name: what was recorded of each item
    missing: dict[str, str]  # items that were not run, and why


def evaluate(
    paths: list[str],
    plan: Plan,
    machine: Machine,
    output: Path,
    accept_old: bool = False,
    tell: Tell = silent,
) -> Evaluation:
    """Raises InputError for what cannot be read, and where no item at all can be run."""
    plan.check()
    models, wanted = named(paths), items(plan.suite, list(plan.lengths))
    own(output, asdict(plan) | {"lengths": list(plan.lengths)}, accept_old, lm_eval=lm_eval.__version__)
    found, missing = find_rows(wanted, plan, output / "rows")
    if not found:
        raise InputError(f"nothing of --suite={plan.suite!r} can be run: {next(iter(missing.values()))}")
    recorded = {}
    for name, path in models.items():
        folder = output / slug(name)
        recorded[name] = dict(complete(path, found, plan, machine, folder, tell))
        write_json(folder / "results.json", merged(recorded[name]))
    return Evaluation(plan, recorded, missing)


@dataclass(frozen=True)
class Rows:
    """item's rows: what the harness loads, and a digest of them; None: they are the Hub's."""

    item: Item
    spec: Any
    digest: str | None = None


def find_rows(wanted: list[Item], plan: Plan, scratch: Path) -> tuple[list[Rows], dict[str, str]]:
    """(what can be run, why the other items cannot)"""
    if plan.data is None:
        return [Rows(item, str(item.stock)) for item in wanted], {}
    found, missing, data = [], {}, Path(plan.data)
    for item in wanted:
        try:
            found.append(Rows(item, localise(item, data, scratch), content(item, data, scratch)))
        except Missing as reason:
            missing[item.name] = str(reason)
    return found, missing


def complete(
    path: str, wanted: list[Rows], plan: Plan, machine: Machine, folder: Path, tell: Tell
) -> Iterator[tuple[str, Any]]:
    """The records of all items for one checkpoint, which is loaded only where one is not there yet."""
    checkpoint, model = None, fingerprint(path)
    for i, rows in enumerate(wanted, 1):
        name = rows.item.name
        kept, mark = folder / "items" / f"{slug(name)}.json", digest([model, rows.digest])
        record = read_json(kept) if kept.exists() else {}
        if record.get("fingerprint") != mark:
            tell(f"{folder.name}: {name}, {i} of {len(wanted)}")
            checkpoint = checkpoint or read_checkpoint(path, machine.device)
            record = run_item(checkpoint, rows.item, rows.spec, plan, machine) | {"fingerprint": mark}
            write_json(kept, record)
        yield name, record


def run_item(checkpoint: Checkpoint, item: Item, spec: Any, plan: Plan, machine: Machine) -> dict[str, Any]:
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of the harness's bootstrap: it would start a process per core
    max_length = context(item, checkpoint, plan)
    model = checkpoint.harness(max_length, machine.batch_size)
    needle = {} if item.length is None else {"max_seq_lengths": [item.length], "tokenizer": checkpoint.path}
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    started = time.perf_counter()
    with haystacks(item, None if plan.data is None else Path(plan.data)), roomy(item, max_length):
        out: Any = lm_eval.simple_evaluate(
            model,
            tasks=[spec],
            task_manager=TaskManager(include_defaults=False, metadata=needle),
            limit=plan.limit,
            bootstrap_iters=DRAWS,
            **dict.fromkeys(seeds, plan.seed),
        )
    samples = out.pop("samples")[item.task]
    return {
        "max_length": max_length,
        "trained_length": checkpoint.trained_length,
        "seconds": round(time.perf_counter() - started, 2),
        "unigram": unigram(samples, model),
        "samples": [scored(sample) for sample in samples],
        "results": plain(renamed(out, item)),
    }


@contextmanager
def roomy(item: Item, max_length: int) -> Iterator[None]:
    """The harness's own errors for a length that no needle, or no answer, fits in, as an InputError."""
    try:
        yield
    except AssertionError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name not in ("_loglikelihood_tokens", "generate_until"):
            raise
        raise InputError(
            f"the answers of {item.name} do not fit in a context of {max_length} tokens; expected a larger --max-length"
        ) from error
    except ValueError as error:
        if item.length is None or "Could not generate any sample" not in str(error):
            raise
        raise InputError(
            f"--lengths={item.length} leaves no room for a needle and its {ROOM} tokens of answer"
        ) from None


def context(item: Item, checkpoint: Checkpoint, plan: Plan) -> int:
    """Tokens that the model sees at once: a needle's prompt is never cut, `recall` has the paper's length."""
    if item.length is not None:
        return item.length + ROOM
    if item.task in RECALL and plan.max_length is None:
        return RECALLED
    length = plan.max_length or checkpoint.trained_length
    if length is None:
        raise InputError(f"the config of {checkpoint.path!r} names no length of context; name one with --max-length")
    return length


def scored(sample: dict[str, Any]) -> dict[str, Any]:
    """What of a row is kept: its identity, its scores, and how many answers there were to choose from."""
    scores = {name: plain(sample[name]) for name in sample["metrics"]}
    answer = [str(text)[:200] for text in sample["filtered_resps"]] if len(sample["arguments"]) == 1 else []
    return {
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "choices": len(sample["arguments"]),
        "answer": answer,
        "scores": scores,
    }


def renamed(out: dict[str, Any], item: Item) -> dict[str, Any]:
    """The harness's results with the item's name in place of the task's: lengths of a needle share one task."""
    by_task = {name: part for name, part in out.items() if isinstance(part, dict) and set(part) == {item.task}}
    return out | {name: {item.name: part[item.task]} for name, part in by_task.items()}


def merged(records: dict[str, Any]) -> dict[str, Any]:
    """The harness's results of one run with all items."""
    whole: dict[str, Any] = {}
    for name, record in records.items():
        for key, part in record["results"].items():
            by_item = isinstance(part, dict) and set(part) == {name}
            whole[key] = {**whole.get(key, {}), **part} if by_item else part
    return whole


def plain(value: Any) -> Any:
    """As JSON has it: what the harness holds of numpy, functions and infinities becomes numbers and text."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return handle_non_serializable(value)


def slug(name: str) -> str:
    return re.sub(r"[^\w.@-]+", "_", name).strip("_")
