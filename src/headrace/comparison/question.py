"""A study that is written down before its runs: a YAML file with the question, the comparisons and the test.

    question: Does competition raise the number of pairs that a memory holds?
    cost: about 2 hours of one core
    task: pair(pairs=24, least=4)         every option of `headrace compare` under its name, without the dashes
    tune: lr=3e-3,1e-2,3e-2
    seeds: 0-4
    mixers:                               name -> expression, where {…} stand for the values under `over`
      none: "{backbone}(heads.expand_v=1)"
      softmax: "softmax-{backbone}(heads.expand_v=1)"
    over:                                 optional: every mixer once for each
      - {backbone: retnet}
      - {backbone: gla}
    compare: [softmax - none]             differences of two named mixers; the first is the primary one
    measure: capacity                     score, losses, speed or capacity (hypotheses.py)
    test: t                               or wilcoxon; corrected over all comparisons by Holm's rule

The study's folder holds the plan, so that one that is changed after runs were made is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..spec.record import Record
from ..spec.serialize import record
from ..utils.errors import InputError

OWN = ("question", "cost", "mixers", "over", "compare", "measure", "test")


@dataclass(frozen=True)
class Question(Record):
    """What a study asks. pairs: (a, b) for the difference of the values of the mixers a and b."""

    text: str
    names: tuple[tuple[str, ...], ...]  # (expression, name) of each mixer
    pairs: tuple[tuple[str, ...], ...]
    measure: Literal["score", "losses", "speed", "capacity"] = "score"
    test: Literal["t", "wilcoxon"] = "t"
    cost: str = ""

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield not self.pairs, "the plan has nothing under `compare`; expected differences such as softmax - none"

    @classmethod
    def stored(cls, results: dict[str, Any]) -> "Question | None":
        """The question of a results.json, if the study has one."""
        data = results["study"].get("question")
        return record(cls, data, "question") if data else None

    def name(self, mixer: str) -> str:
        return next(name for expression, name in self.names if expression == mixer)


def read(path: Path) -> tuple[Question, dict[str, Any]]:
    """The question of a plan's file, and the options of `headrace compare`. InputError for a file that is no plan."""
    from ..training.recipes import read_yaml

    data = read_yaml(path)
    if missing := next((name for name in ("question", "mixers", "compare") if name not in data), None):
        raise InputError(f"--plan {str(path)!r} lacks {missing!r}; expected question, mixers and compare")
    options = {name: value for name, value in data.items() if name not in OWN}
    names: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for values in data.get("over", [{}]):
        filled = {name: mixer.format(**values) for name, mixer in data["mixers"].items()}
        label = " ".join(str(value) for value in values.values() if "=" not in str(value))
        names |= {mixer: f"{label} {name}".strip() for name, mixer in filled.items()}
        pairs += [named(text, filled, path) for text in data["compare"]]
    question = Question(
        str(data["question"]), tuple(names.items()), tuple(pairs), data.get("measure", "score"), data.get("test", "t"),
        str(data.get("cost", "")),
    )  # fmt: skip
    return question, options | {"mixers": ",".join(names)}


def named(text: str, mixers: dict[str, str], path: Path) -> tuple[str, str]:
    a, _, b = (part.strip() for part in text.partition(" - "))
    if not {a, b} <= mixers.keys():
        raise InputError(f"--plan {str(path)!r}: {text!r} under `compare`; expected NAME - NAME of {', '.join(mixers)}")
    return mixers[a], mixers[b]
