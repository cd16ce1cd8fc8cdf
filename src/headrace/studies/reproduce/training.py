"""The training runs of an experiment: their recipes, and the rows per pass with which each fits a machine's memory."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ...training import machine as machines
from ...training import recipes
from ...training.machine import Machine
from ...training.model import counted
from ...training.recipes import Recipe
from ...utils.errors import GateWarning, InputError
from ..settings import assignments
from .experiment import called


class Training(NamedTuple):
    """A training run of an experiment."""

    name: str  # of its recipe
    recipe: Recipe
    stated: frozenset[str]  # fields that the command sets


class Fitted(NamedTuple):
    """A training run with the rows per pass and the recomputation with which it fits, if any do, and its costs."""

    training: Training
    plan: dict[str, Any]  # of `machine.plan`

    @property
    def gibibytes(self) -> float:
        """Peak memory of a device."""
        return sum(self.plan["bytes"].values()) / 2**30


def trained(command: list[str]) -> Training | None:
    """The training run of a command; None for another command, or a dry run."""
    if "headrace" not in command or called(command)[0] != "train" or {"--json", "--dry-run"} & set(command):
        return None
    name, *arguments = called(command)[1:]
    options = dict(itertools.pairwise(arguments))
    values = [word for before, word in itertools.pairwise([name, *arguments]) if _is_setting(before, word)]
    changes = assignments(values) | ({"mixer": options["--mixer"]} if "--mixer" in options else {})
    return Training(name, recipes.load(name, changes)[0], frozenset(changes))


def _is_setting(before: str, word: str) -> bool:
    return "=" in word and not before.startswith("--")


def fit(training: Training, machine: Machine) -> Fitted:
    """The run with the most rows per pass, up to those of the recipe, that fit; where not even one row does, with
    recomputation. What the command states stays. Of the machine's devices as many work as share a step evenly.

    The plan has `fits` False if nothing fits."""
    devices = max(n for n in range(1, machine.devices + 1) if training.recipe.rows % n == 0)
    used = machine._replace(devices=devices)
    plan: dict[str, Any] = {}
    for recipe in _candidates(training, devices):
        plan = machines.plan(recipe, used)
        if plan["fits"]:
            break
    return Fitted(training._replace(recipe=recipe), plan)


def _candidates(training: Training, devices: int) -> Iterator[Recipe]:
    recipe, stated = training.recipe, training.stated
    each = recipe.rows // devices
    most = min(recipe.micro_batch, each)
    rows = [recipe.micro_batch] if "micro_batch" in stated else [n for n in range(most, 0, -1) if each % n == 0]
    for recompute in (recipe.recompute,) if "recompute" in stated else (False, True):
        for micro_batch in rows:
            yield replace(recipe, micro_batch=micro_batch, recompute=recompute)


def on_machine(steps: list[list[str]], usual: str, named: str | None) -> tuple[list[list[str]], list[Fitted]]:
    """The steps and trainings of `fitted` on the machine `named`, or else on the experiment's usual one. Of a scale
    without a machine the steps as they are. InputError for a machine that the scale has no use for."""
    if not usual:
        if named is not None:
            raise InputError(f"--machine={named} has no effect: no run is for a GPU; expected --scale paper")
        return steps, []
    return fitted(steps, machines.parse(named or usual))


def fitted(steps: list[list[str]], machine: Machine) -> tuple[list[list[str]], list[Fitted]]:
    """The steps with the settings by which each training fits the machine, and the trainings in order."""
    commands, fits = [], []
    for step in steps:
        if (training := trained(step)) is None:
            commands.append(step)
            continue
        with counting():
            fits.append(fit(training, machine))
        commands.append(_on_devices(step, fits[-1]))
    return commands, fits


def _on_devices(step: list[str], one: Fitted) -> list[str]:
    """The command with the rows per pass and the recomputation of the fit, by torchrun where several devices work."""
    recipe, stated, devices = one.training.recipe, one.training.stated, one.plan["devices"]
    more = [] if "micro_batch" in stated else [f"micro_batch={one.plan['rows_per_pass']}"]
    more += ["recompute=true"] if recipe.recompute and "recompute" not in stated else []
    start = step.index("train") + 2
    words = [*step[:start], *more, *step[start:]]
    return words if devices == 1 else ["torchrun", "--nproc-per-node", str(devices), "--no-python", *words]


def refuse_unfitting(fits: list[Fitted]) -> None:
    """InputError if a training does not fit its devices."""
    for one in fits:
        if not one.plan["fits"]:
            available = one.plan["bytes_of_device"] / 2**30
            raise InputError(
                f"{one.training.name} with {one.training.recipe.mixer} needs {one.gibibytes:.0f} GiB of a "
                f"{one.plan['device']}, which has {available:.0f}, with {one.plan['rows_per_pass']} rows in a pass "
                f"and recompute={one.training.recipe.recompute}; expected another --machine"
            )


@contextmanager
def counting() -> Iterator[None]:
    """Counts without the warning that a gate has no effect, which the training itself gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GateWarning)
        yield


def sizes(steps: list[list[str]]) -> tuple[str, str]:
    """(parameters, tokens) of all trainings, as text: "1.3M and 5.3M", "0.4M"."""
    used = [one.recipe for one in map(trained, steps) if one is not None]
    with counting():
        counts = set(map(parameters, used))
    return listed(counts), listed({round(recipe.tokens) for recipe in used})


def parameters(recipe: Recipe) -> int:
    """Parameters of the model that is trained."""
    return counted(recipe).parameters["tied" if recipe.tie else "untied"]


def listed(numbers: set[int]) -> str:
    """Numbers as text, of more than two the least and the largest."""
    texts = list(dict.fromkeys(short(number) for number in sorted(numbers)))
    return " and ".join(texts) if len(texts) < 3 else f"{texts[0]} to {texts[-1]}"


def short(number: int) -> str:
    unit, size = ("B", 1e9) if number >= 1e9 else ("M", 1e6)
    return f"{number / size:.2g}{unit}" if number < 10 * size else f"{number / size:.0f}{unit}"
