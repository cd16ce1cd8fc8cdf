"""What is evaluated on: suites of the harness's tasks, each an item of its own."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from ...utils.errors import InputError

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
RECALLED = 4096  # tokens that an input of `recall` is cut to, as in section 5 of arXiv 2602.01744


@dataclass(frozen=True)
class Item:
    """One row of the table: a task of the harness, a needle at one length."""

    task: str
    stock: Path  # the harness's own definition
    length: int | None = None  # of a needle's prompt, in tokens

    @property
    def name(self) -> str:
        return self.task if self.length is None else f"{self.task}@{self.length}"


def items(suite: str, lengths: list[int]) -> list[Item]:
    """The items of suites and tasks, with commas between. InputError for a name that the harness does not know."""
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
    """Of all tasks; reading their thousands of files takes seconds."""
    return TaskManager()
