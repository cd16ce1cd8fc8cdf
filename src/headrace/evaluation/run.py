"""Evaluates checkpoints on the items of a plan with lm-evaluation-harness. Finished items are not evaluated again.

plan.json                     the plan; the folder is for this plan only
<model>/items/<item>.json     one finished item: the results of the harness and the scores of each row
<model>/results.json          all items of a model, in the format of the harness
"""

import json
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from ..files import engine
from ..files.engine import Claim, Point, Row, Tell
from ..files.environment import environment
from ..files.provenance import defaults
from ..files.results import file_names, short_names, write_result
from ..files.workers import Worker
from ..utils.errors import InputError, require
from ..utils.integrity import digest
from .checkpoint import ROOM, Checkpoint, fingerprint, read_checkpoint
from .scores import unigram
from .tasks import RECALL, RECALLED, Item, Missing, Rows, items, localize

DRAWS = 1000  # bootstrap samples of the harness
RECORD = {"fingerprint": str, "max_length": int, "seconds": float, "unigram": {}, "samples": [{}], "results": {}}


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated."""

    suite: str  # names of suites and tasks, separated by commas
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)  # of needle prompts, in tokens
    data: str | None = None  # a folder of local files; None: the Hub
    limit: int | None = None  # number of rows of each task; None: all
    max_length: int | None = None  # tokens of context; None: the length in the model's config
    seed: int = 1234

    def claim(self) -> Claim:
        """The claim of the folder of its records."""
        content = asdict(self) | {"lengths": list(self.lengths)}
        return Claim(content, set(defaults(self)), made={"lm_eval": lm_eval.__version__})


@dataclass(frozen=True)
class Machine:
    """The device, batch size and number of threads on a CPU, on which scores depend only by rounding."""

    device: str
    batch_size: int
    threads: int | None = None  # None: measured (`files.threads`)


@dataclass(frozen=True)
class Evaluation:
    """The results of a plan."""

    plan: EvaluationPlan
    items: dict[str, dict[str, Any]]  # model -> item -> record
    missing: dict[str, str]  # item that was not run -> reason


def evaluate(
    paths: list[str], plan: EvaluationPlan, machine: Machine, output: Path, tell: Tell = lambda line: None
) -> Evaluation:
    """Evaluates the checkpoints `paths` and writes the records to the folder `output`.

    Raises:
        InputError: a checkpoint or file cannot be read, or no item can be run.
    """
    require(plan.data is None or Path(plan.data).is_dir(), f"--data={plan.data!r}; expected a folder")
    models = short_names(paths, "checkpoint")
    with engine.claimed(output, plan.claim()), removed_after_errors(output / "rows"):
        rows, missing = find_rows(items(plan.suite, list(plan.lengths)), plan, output / "rows")
        if not rows:
            raise InputError(f"no task of --suite={plan.suite!r} can be run: {next(iter(missing.values()))}")
        recorded, folders = {}, file_names(models, slug)
        found = {name: fingerprint(path) for name, path in models.items()}  # a missing one is refused before any is run
        for name, path in models.items():
            points = [point(one, folders[name], found[name]) for one in rows]
            read = partial(read_checkpoint, path, machine.device, machine.threads)
            load = cache(read)  # only if a record is missing or outdated
            measure = partial(run_item, load=load, plan=plan, machine=machine)
            records = engine.run(output, None, points, measure, engine.lines(tell, points))
            recorded[name] = {one.item.name: record for one, record in zip(rows, records, strict=True)}
            write_result(output / folders[name] / "results.json", merged(recorded[name]))
    return Evaluation(plan, recorded, missing)


@contextmanager
def removed_after_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def point(rows: Rows, folder: str, model: str) -> Point:
    """The evaluation of a checkpoint by its fingerprint, in a folder of its own."""
    name = rows.item.name
    path = Path(folder, "items", f"{slug(name)}.json")
    return Point(f"{folder}, {name}", path, rows, RECORD, digest([model, rows.digest]))


def find_rows(chosen: list[Item], plan: EvaluationPlan, scratch: Path) -> tuple[list[Rows], dict[str, str]]:
    """(rows of the items that can be run, item that cannot -> reason)"""
    if plan.data is None:
        return [Rows(item, item.stock.parent) for item in chosen], {}
    rows, missing, data = [], {}, Path(plan.data)
    for item in chosen:
        try:
            rows.append(localize(item, data, scratch))
        except Missing as reason:
            missing[item.name] = str(reason)
    return rows, missing


def run_item(rows: Rows, worker: Worker, load: Callable[[], Checkpoint], plan: EvaluationPlan, machine: Machine) -> Row:
    """The record of the checkpoint that `load` returns on an item."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else the harness's bootstrap starts a process per core
    checkpoint, item = load(), rows.item
    if item.stock.parent.name == "ruler" and "auto_map" in getattr(checkpoint.tokenizer, "init_kwargs", {}):
        more = "expected one without auto_map in tokenizer_config.json"
        raise InputError(f"the harness would run code of the tokenizer of {checkpoint.path!r} for {item.name}; {more}")
    max_length = context(item, checkpoint, plan)
    model = checkpoint.harness(max_length, machine.batch_size)
    made = {"tokenizer": checkpoint.path} | ({} if item.length is None else {"max_seq_lengths": [item.length]})
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    started = time.perf_counter()
    with explained(item, max_length):
        out: Any = lm_eval.simple_evaluate(
            model,
            tasks=[item.task],
            task_manager=TaskManager(include_path=str(rows.folder), include_defaults=False, metadata=made),
            limit=plan.limit,
            bootstrap_iters=DRAWS,
            **dict.fromkeys(seeds, plan.seed),
        )
    samples, results = out.pop("samples")[item.task], plain(renamed(out, item))
    if any(map(undefined, samples)):
        scores = results["results"][item.name]
        scores |= {name: math.nan for name in scores if name.partition(",")[0] in samples[0]["metrics"]}
    return {
        "environment": environment(machine.device),
        "max_length": max_length,
        "trained_length": checkpoint.trained_length,
        "seconds": round(time.perf_counter() - started, 2),
        "unigram": unigram(samples, model),
        "samples": [scored(sample) for sample in samples],
        "results": results,
    }


@contextmanager
def explained(item: Item, max_length: int) -> Iterator[None]:
    """Turns the errors of the harness for rows that cannot be downloaded, and for a context too short for the needle or
    the answers, into InputErrors."""
    try:
        yield
    except ConnectionError as error:
        raise InputError(
            f"the rows of {item.name} cannot be downloaded: {error}; expected internet, or files of --data"
        ) from None
    except AssertionError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name not in ("_loglikelihood_tokens", "generate_until"):
            raise
        raise InputError(
            f"the answers of {item.name} do not fit in a context of {max_length} tokens; expected a larger --max-length"
        ) from error
    except ValueError as error:
        if item.length is None or "Could not generate any sample" not in str(error):
            raise
        raise InputError(f"--lengths={item.length} is too short for a needle and an answer of {ROOM} tokens") from None


def context(item: Item, checkpoint: Checkpoint, plan: EvaluationPlan) -> int:
    """Tokens of context for an item. The prompt of a needle task is never truncated; `recall` has the length of the
    paper by default."""
    if item.length is not None:
        return item.length + ROOM
    if item.task in RECALL and plan.max_length is None:
        return RECALLED
    length = plan.max_length or checkpoint.trained_length
    if length is None:
        raise InputError(f"the config of {checkpoint.path!r} gives no context length; expected one as --max-length")
    return length


def scored(sample: dict[str, Any]) -> dict[str, Any]:
    """The recorded part of a row: its id and hash, its scores, its answer and the number of choices. The harness gives
    a row once for each of its filters of answers, whose names it appends to those of the scores, as done here."""
    end = "" if sample["filter"] == "none" else f",{sample['filter']}"
    scores = {f"{name}{end}": math.nan if undefined(sample) else plain(sample[name]) for name in sample["metrics"]}
    answer = [str(text)[:200] for text in sample["filtered_resps"]] if len(sample["arguments"]) == 1 else []
    return {
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "choices": len(sample["arguments"]) // (1 + ("acc_mutual_info" in sample["metrics"])),  # it asks each twice
        "answer": answer,
        "scores": scores,
    }


def undefined(sample: dict[str, Any]) -> bool:
    """Whether a log-likelihood of a row is NaN. The harness would choose an answer nevertheless, the first."""
    answers = (answer if isinstance(answer, tuple | list) else [answer] for answer in sample["filtered_resps"])
    return any(isinstance(x, float) and math.isnan(x) for answer in answers for x in answer)


def renamed(out: dict[str, Any], item: Item) -> dict[str, Any]:
    """The results of the harness with the name of the item in place of the task, as the lengths of a needle task share
    one task name."""
    by_task = {name: part for name, part in out.items() if isinstance(part, dict) and set(part) == {item.task}}
    return out | {name: {item.name: part[item.task]} for name, part in by_task.items()}


def merged(records: dict[str, Any]) -> dict[str, Any]:
    """The records of all items as the results of one run of the harness."""
    whole: dict[str, Any] = {}
    for name, record in records.items():
        for key, part in record["results"].items():
            by_item = isinstance(part, dict) and set(part) == {name}
            whole[key] = {**whole.get(key, {}), **part} if by_item else part
    return whole


def plain(value: Any) -> Any:
    """A value as JSON, apart from numbers that are not finite: numpy values and functions of the harness become numbers
    and text."""
    return json.loads(json.dumps(value, default=handle_non_serializable))


def slug(name: str) -> str:
    return re.sub(r"[^\w.@-]+", "_", name).strip("_")
