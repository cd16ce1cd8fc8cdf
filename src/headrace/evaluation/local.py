"""Tasks of the harness on local files: each is a YAML file that includes the harness's definition and replaces its data
set. Rows are converted to the columns of that data set.
"""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from ..utils.errors import InputError
from ..utils.integrity import digest, sha256
from .suites import NEEDLE, RECALL, Item

Row = dict[str, Any]
REPEATED = "niah_single_1"  # the needle task whose haystack is a repeated sentence, not essays
UNTRAINED = (
    "nltk's punkt_tab is not installed (python -m nltk.downloader punkt_tab): essays are cut into sentences without "
    "its list of abbreviations, so that a few needles stand elsewhere than in the harness"
)
STOCK = {  # task -> columns of its data set in the harness
    "lambada_openai": ("text",),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "blimp": ("sentence_good", "sentence_bad"),
    **dict.fromkeys(RECALL, ("text", "value")),
}
SPLITS = ("train", "validation", "test")
TITLE = re.compile(r"^ = [^=].*[^=] = \n$")


class Missing(Exception):
    """The reason why a task cannot be run on the local files."""


def localize(item: Item, data: Path, scratch: Path) -> Path:
    """The folder with the YAML definition of the item on the rows of the folder `data`; `scratch`, in which the
    definition and the converted rows are written, unless the item needs no data.

    Raises:
        Missing: the folder has no rows for the item.
    """
    if item.task == REPEATED:
        return item.stock.parent
    if item.task in NEEDLE:
        essays(data)  # raises if they are missing
        return define(item, scratch, {"data": str(data.resolve())}, f"custom_dataset: !function {LOCAL}.{item.task}")
    rows = read(item.task, data)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch.resolve() / f"{item.task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if "::" in str(path):
        raise InputError(f"--output {str(scratch.parent)!r} has '::' in its path, a chain to `datasets`; name another")
    # `datasets` reads the paths of files as patterns
    source = {"data_files": dict.fromkeys(SPLITS, escape(str(path))), "cache_dir": str(scratch.resolve() / "cache")}
    return define(item, scratch, source, f"class: !function {LOCAL}.{item.task}" if item.task in RECALL else "")


LOCAL = f"{__package__}.local_data"


def define(item: Item, folder: Path, source: dict[str, Any], function: str) -> Path:
    """Writes the definition of a task on another data set, whose arguments are `source`; returns the folder.

    function: a line of YAML that names a function of local_data.py; "" for a data set of JSON Lines."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"include": str(item.stock), "task": item.task, "dataset_kwargs": source}
    settings |= {} if function else {"dataset_path": "json", "dataset_name": None}
    text = f"{yaml.safe_dump(settings)}{function}\n"
    (folder / f"{item.task}.yaml").write_text(text, encoding="utf-8")
    return folder


def content(item: Item, data: Path, scratch: Path) -> str:
    """A digest of the rows that `localize` found for the item."""
    if item.task in NEEDLE:
        return digest("" if item.task == REPEATED else [*essays(data), *([] if has_punkt() else [UNTRAINED])])
    return sha256(scratch / f"{item.task}.jsonl")


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
        rows = [{"page": page} for page in pages(path.read_text(encoding="utf-8-sig"))]
    else:
        rows = []
    if not rows:
        raise Missing(f"{str(data)!r} has no rows for this task")
    return rows


def in_columns(task: str, row: Row, path: Path) -> Row:
    expected = STOCK.get("blimp" if task.startswith("blimp_") else task, ())
    try:
        columns = COLUMNS.get(task, lambda row: row)(row)
        if all(name in columns for name in expected):
            return columns
    except (KeyError, TypeError):
        pass
    raise InputError(f"a row of {str(path)!r} has {', '.join(row)}; expected {', '.join(expected)}, as {task} has")


def find(data: Path, pattern: str) -> Path | None:
    return min(data.rglob(pattern), default=None)


def lines(path: Path) -> Iterator[Row]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
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
    articles: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if TITLE.match(line):
            articles.append([])
        articles[-1].append(line)
    return [page for page in ("".join(part) for part in articles) if page.strip()]


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
    """The essays in which needles are hidden. Raises Missing if there are none.

    The harness hides a needle behind a sentence as nltk's punkt_tab splits them. Where punkt_tab is not installed and
    not in the folder, `without_tables` takes its place."""
    import nltk

    if find(data, "nltk_data"):
        nltk.data.path.append(str(find(data, "nltk_data")))
    paths = sorted(data.rglob("paul_graham_essays/*.txt"))
    if not paths:
        raise Missing(f"{str(data)!r} has no paul_graham_essays/*.txt")
    if not has_punkt():
        without_tables()
    return [path.read_text(encoding="utf-8") for path in paths]


def has_punkt() -> bool:
    """Whether punkt_tab is installed, with its tables."""
    import nltk

    try:
        return "headrace-punkt" not in str(nltk.data.find("tokenizers/punkt_tab"))
    except LookupError:
        return False


@cache
def without_tables() -> TemporaryDirectory[str]:
    """Makes and adds a folder of nltk's data with empty tables of punkt, by which a sentence ends at every full stop,
    exclamation mark and question mark before a space. It is removed at the end of the process."""
    import nltk

    folder = TemporaryDirectory(prefix="headrace-punkt")
    language = Path(folder.name, "tokenizers", "punkt_tab", "english")
    language.mkdir(parents=True)
    for table in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (language / table).touch()
    nltk.data.path.append(folder.name)
    print(UNTRAINED, file=sys.stderr)
    return folder
