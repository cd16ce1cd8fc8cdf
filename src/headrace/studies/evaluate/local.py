"""Tasks of the harness on local files, with the harness's definitions and rows converted to the harness's columns."""

import gzip
import importlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import yaml
from lm_eval.api.task import Task

from ...utils.errors import InputError
from ...utils.integrity import digest, sha256
from .suites import NEEDLE, RECALL, Item

Row = dict[str, Any]
CLASSES = {"swde": "SWDE", "squad_completion": "SQUADCompletion", "fda": "FDA"}
STOCK = {  # task -> columns of its data set in the harness
    "lambada_openai": ("text",),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "blimp": ("sentence_good", "sentence_bad"),
    **dict.fromkeys(CLASSES, ("text", "value")),
}
SPLITS = ("train", "validation", "test")
TITLE = re.compile(r"^ = [^=].*[^=] = \n$")


class Missing(Exception):
    """The reason why a task cannot be run on the local files."""


def localise(item: Item, data: Path, scratch: Path) -> str | Task:
    """The argument for the harness's TaskManager: the item's definition with the rows of the folder `data`. Converted
    files are written to `scratch`.

    Raises:
        Missing: the folder has no rows for the item.
    """
    if item.task in NEEDLE:
        if item.task != "niah_single_1":
            essays(data)
        return str(item.stock)
    rows = read(item.task, data)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch.resolve() / f"{item.task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"data_files": dict.fromkeys(SPLITS, str(path)), "cache_dir": str(scratch.resolve() / "cache")}
    if item.task in RECALL:
        return local_class(item.task, source)
    derived = path.with_suffix(".yaml")
    settings = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": source}
    derived.write_text(yaml.safe_dump({"include": str(item.stock), "task": item.task, **settings}), encoding="utf-8")
    return str(derived)


def content(item: Item, data: Path, scratch: Path) -> str:
    """A digest of the rows that `localise` found for the item."""
    rows = scratch / f"{item.task}.jsonl"
    return sha256(rows) if item.task not in NEEDLE else digest(essays(data) if item.task != "niah_single_1" else "")


def local_class(name: str, source: dict[str, Any]) -> Task:
    """A task that the harness defines as a class, on local files."""
    stock = getattr(importlib.import_module(f"lm_eval.tasks.{name}.task"), CLASSES[name])

    def download(self: Any, dataset_kwargs: Any = None, **_: Any) -> None:
        stock.download(self, source)

    task = type(stock.__name__, (stock,), {"DATASET_PATH": "json", "DATASET_NAME": None, "download": download})()
    task.config.task = name
    return task


def read(task: str, data: Path) -> list[Row]:
    """The rows of a task in the columns of the harness's data set.

    Raises:
        InputError: a row lacks a column.
        Missing: there are no rows.
    """
    blimp = task.startswith("blimp_")
    if path := find(data, "blimp*.jsonl*" if blimp else f"{task}*.jsonl*"):
        of_task = [row for row in lines(path) if not blimp or row.get("UID") == task.removeprefix("blimp_")]
        rows = [in_columns(task, row, path) for row in of_task]
    elif task == "wikitext" and (path := find(data, "test.raw.txt") or find(data, "wiki.test.raw")):
        rows = [{"page": page} for page in pages(path.read_text(encoding="utf-8"))]
    else:
        rows = []
    if not rows:
        raise Missing(f"{str(data)!r} has no rows for this task")
    return rows


def in_columns(task: str, row: Row, path: Path) -> Row:
    expected = STOCK.get("blimp" if task.startswith("blimp_") else task, ())
    try:
        found = COLUMNS.get(task, lambda row: row)(row)
        if all(name in found for name in expected):
            return found
    except (KeyError, TypeError):
        pass
    raise InputError(f"a row of {str(path)!r} has {', '.join(row)}; expected {', '.join(expected)}, as {task} has")


def find(data: Path, pattern: str) -> Path | None:
    return min(data.rglob(pattern), default=None)


def lines(path: Path) -> Iterator[Row]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{str(path)!r}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f"{str(path)!r}, line {number} is not a JSON object; expected a row with its columns")
            yield row


def pages(text: str) -> list[str]:
    """The articles of WikiText, each beginning with its title."""
    found: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if TITLE.match(line):
            found.append([])
        found[-1].append(line)
    return [page for page in ("".join(part) for part in found) if page.strip()]


def hellaswag(row: Row) -> Row:
    """Splits the joined query into ctx_a and ctx_b; ctx_b is the part after the last full stop if it begins in lower
    case, as it does for a sentence to be completed."""
    if "ctx_a" in row:
        return row
    label, _, context = row["query"].partition(": ")
    before, stop, last = context.rpartition(". ")
    open_ended = stop and last[:1].islower()
    first, second = (before + ".", last) if open_ended else (context, "")
    return {"activity_label": label, "ctx_a": first, "ctx_b": second, "endings": row["endings"], "label": row["label"]}


def arc(row: Row) -> Row:
    if isinstance(row["question"], str):
        return row
    choices = row["question"]["choices"]
    columns = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    return {"question": row["question"]["stem"], "choices": columns, "answerKey": row["answerKey"]}


COLUMNS: dict[str, Callable[[Row], Row]] = {"hellaswag": hellaswag, "arc_easy": arc, "arc_challenge": arc}


def essays(data: Path) -> list[str]:
    """The essays in which needles are hidden. Raises Missing if the essays or nltk's punkt_tab are missing."""
    import nltk

    if find(data, "nltk_data"):
        nltk.data.path.append(str(find(data, "nltk_data")))
    paths = sorted(data.rglob("paul_graham_essays/*.txt"))
    if not paths:
        raise Missing(f"{str(data)!r} has no paul_graham_essays/*.txt")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise Missing("nltk's punkt_tab is not installed (python -m nltk.downloader punkt_tab)") from None
    return [path.read_text(encoding="utf-8") for path in paths]


@contextmanager
def haystacks(item: Item, data: Path | None) -> Iterator[None]:
    """Makes the harness use the essays of the folder in place of those of the Hub."""
    if data is None or item.task not in NEEDLE or item.task == "niah_single_1":
        yield
        return
    from lm_eval.tasks.ruler import prepare_niah

    texts = essays(data)
    source = SimpleNamespace(load_dataset=lambda *_, **__: {"text": texts})
    prepare_niah.get_haystack.cache_clear()
    with patch.object(prepare_niah, "datasets", source):
        yield
    prepare_niah.get_haystack.cache_clear()
