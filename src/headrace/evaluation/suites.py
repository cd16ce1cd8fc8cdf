"""Suites of tasks of the harness, and the items that are evaluated: a task, or a needle task at one length."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from ..utils.errors import InputError

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
SUITES = {"language": LANGUAGE, "recall": RECALL, "needle": NEEDLE, "blimp": BLIMP}
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
        raise InputError(f"--suite={name!r}; expected {', '.join(SUITES)}, or a task of lm-evaluation-harness")
    return entry.yaml_path


@lru_cache
def index() -> TaskManager:
    """The index of all tasks of the harness, cached, as reading its thousands of files takes seconds."""
    return TaskManager()
