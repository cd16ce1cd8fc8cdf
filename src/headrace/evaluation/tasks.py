"""Tasks of the harness by suite, and their rows from local files.

For local rows, a YAML file includes the harness's definition of a task and replaces its data set. Rows are converted to
the columns of that data set.
"""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from glob import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lm_eval.tasks
import nltk
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ..files.checks import decode
from ..utils.errors import InputError, reading
from ..utils.integrity import digest, sha256
from . import SUITES as NAMES
from . import UNKNOWN

HOME = Path(lm_eval.tasks.__file__).parent
LANGUAGE = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
}
RECALL = {name: f"{name}/{name}.yaml" for name in ("swde", "squad_completion", "fda")}
NEEDLE = {name: f"ruler/{name}.yaml" for name in ("niah_single_1", "niah_single_2", "niah_single_3")}
BLIMP = {f"blimp_{path.stem}": f"blimp/{path.name}" for path in sorted((HOME / "blimp").glob("[!_]*.yaml"))}
SUITES = dict(zip(NAMES, (LANGUAGE, RECALL, NEEDLE, BLIMP), strict=True))
PATHS = {name: path for suite in SUITES.values() for name, path in suite.items()}
RECALLED = 4096  # tokens to which inputs of `recall` are truncated, as in section 5 of arXiv 2602.01744


@dataclass(frozen=True)
class Item:
    """A task of the harness; a needle task is one item for each length."""

    task: str
    stock: Path  # the YAML definition in the harness
    length: int | None = None  # tokens of the prompt of a needle task

    @property
    def name(self) -> str:
        return self.task if self.length is None else f"{self.task}@{self.length}"


@dataclass(frozen=True)
class Rows:
    """The rows of an item: `folder` has the YAML definition of the task, `digest` identifies local rows (None: the
    Hub's)."""

    item: Item
    folder: Path
    digest: str | None = None


def items(suite: str, lengths: list[int]) -> list[Item]:
    """The items of suites and tasks, separated by commas. InputError for a name that the harness does not know."""
    names = [name for part in suite.split(",") for name in SUITES.get(part.strip(), [part.strip()])]
    return [
        Item(name, stock(name), length)
        for name in dict.fromkeys(names)
        for length in (lengths if name in NEEDLE else [None])
    ]


def stock(name: str) -> Path:
    if name in PATHS:
        return HOME / PATHS[name]
    entry = index().task_index.get(name)
    if entry is None or entry.yaml_path is None or name not in index().all_subtasks:
        raise InputError(UNKNOWN.format(name))
    return entry.yaml_path


@lru_cache
def index() -> TaskManager:
    """The index of all tasks of the harness, cached, as reading its thousands of files takes seconds."""
    return TaskManager()


# --- local rows ------------------------------------------------------------------------------------------------------
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
SPLIT = re.compile(r"(_(train|val|valid|validation|dev|test))?\.jsonl.*")  # after the name of a task in that of a file
TITLE = re.compile(r"^ = [^=].*[^=] = \n$")


class Missing(Exception):
    """The reason why a task cannot be run on the local files."""


def localize(item: Item, data: Path, scratch: Path) -> Rows:
    """The item on the rows of the folder `data`; the definition and the converted rows are written in `scratch`, unless
    the item needs no data.

    Raises:
        Missing: the folder has no rows for the item, or not the examples of its prompts.
    """
    if item.task == REPEATED:
        return Rows(item, item.stock.parent, digest(""))
    if item.task in NEEDLE:
        known = digest([*essays(data), *([] if has_punkt() else [UNTRAINED])])
        return Rows(item, define(item, scratch, {"data": str(data.resolve())}, "custom_dataset"), known)
    definition = load_yaml(item.stock, resolve_func=False)
    if definition.get("num_fewshot") and "samples" not in (definition.get("fewshot_config") or {}):
        raise Missing("its prompts have examples of other rows, and one of a local file may be the tested row itself")
    rows = read(item.task, data)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch.resolve() / f"{item.task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if "::" in str(path):
        raise InputError(f"--output {str(scratch.parent)!r} has '::' in its path, a chain to `datasets`; name another")
    # `datasets` reads the paths of files as patterns
    source = {"data_files": dict.fromkeys(SPLITS, escape(str(path))), "cache_dir": str(scratch.resolve() / "cache")}
    return Rows(item, define(item, scratch, source, "class" if item.task in RECALL else None), sha256(path))


def define(item: Item, folder: Path, source: dict[str, Any], key: str | None) -> Path:
    """Writes the definition of a task on another data set, whose arguments are `source`; returns the folder.

    key: of the definition, whose value is what local_data.py has under the task's name; None: the data set is a file of
    JSON Lines."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"include": str(item.stock), "task": item.task, "dataset_kwargs": source}
    settings |= {} if key else {"dataset_path": "json", "dataset_name": None}
    own = f"{key}: !function {__package__}.local_data.{item.task}\n" if key else ""
    (folder / f"{item.task}.yaml").write_text(yaml.safe_dump(settings) + own, encoding="utf-8")
    return folder


def read(task: str, data: Path) -> list[Row]:
    """The rows of a task in the columns of the harness's data set.

    Raises:
        InputError: a row lacks a column.
        Missing: there are no rows.
    """
    rows, blimp = list[Row](), task.startswith("blimp_")
    if path := find(data, "blimp*.jsonl*") if blimp else file_of(task, data):
        of_task = [row for row in lines(path) if not blimp or row.get("UID") == task.removeprefix("blimp_")]
        rows = [in_columns(task, row, path) for row in of_task]
    elif task == "wikitext" and (path := find(data, "test.raw.txt*") or find(data, "wiki.test.raw*")):
        rows = [{"page": page} for page in pages(content(path))]
    if not rows:
        raise Missing(f"{str(data)!r} has no rows for this task")
    return rows


def in_columns(task: str, row: Row, path: Path) -> Row:
    expected = STOCK.get("blimp" if task.startswith("blimp_") else task, ())
    try:
        columns = COLUMNS.get(task, lambda row: row)(row)
        if all(name in columns for name in expected):
            return columns
    except (KeyError, TypeError, AttributeError):
        pass
    raise InputError(f"a row of {str(path)!r} has {', '.join(row)}; expected {', '.join(expected)}, as {task} has")


def file_of(task: str, data: Path) -> Path | None:
    """The first file by a name of the task and not of a longer one, as piqa_ar.jsonl; one of training rows is last."""
    paths = sorted(data.rglob(f"{task}*.jsonl*"))
    if not all(SPLIT.fullmatch(path.name[len(task) :]) for path in paths):  # to read the names of all takes seconds
        longer = tuple(name for name in index().all_subtasks if name.startswith(task) and name != task)
        paths = [path for path in paths if not path.name.startswith(longer)]
    return min(paths, key=lambda path: (path.name.startswith(f"{task}_train"), path), default=None)


def find(data: Path, pattern: str) -> Path | None:
    return min(data.rglob(pattern), default=None)


def lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(StringIO(content(path)), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{str(path)!r}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{str(path)!r}, line {number} is not a JSON object; expected a row with its columns")
        yield row


def content(path: Path) -> str:
    """The text of a file, which may be compressed. InputError if it cannot be read or is not UTF-8."""
    with reading(f"{str(path)!r} cannot be read"):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    return StringIO(decode(data, repr(str(path))), newline=None).read()  # every line ends in \n


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
    if find(data, "nltk_data"):
        nltk.data.path.append(str(find(data, "nltk_data")))
    paths = sorted(data.rglob("paul_graham_essays/*.txt"))
    if not paths:
        raise Missing(f"{str(data)!r} has no paul_graham_essays/*.txt")
    if not has_punkt():
        without_tables()
    return [content(path) for path in paths]


def has_punkt() -> bool:
    """Whether punkt_tab is installed, with its tables."""
    try:
        return "headrace-punkt" not in str(nltk.data.find("tokenizers/punkt_tab"))
    except LookupError:
        return False


@cache
def without_tables() -> TemporaryDirectory[str]:
    """Makes and adds a folder of nltk's data with empty tables of punkt, by which a sentence ends at every full stop,
    exclamation mark and question mark before a space. It is removed at the end of the process."""
    folder = TemporaryDirectory(prefix="headrace-punkt")
    language = Path(folder.name, "tokenizers", "punkt_tab", "english")
    language.mkdir(parents=True)
    for table in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (language / table).touch()
    nltk.data.path.append(folder.name)
    print(UNTRAINED, file=sys.stderr)
    return folder
