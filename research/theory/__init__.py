"""Theoretical properties of linear attention, checked by experiment: `python -m research.theory NAME` in a checkout.

Each experiment writes to memories and reads from them with `headrace.linear_attention`, compares the measured values
with the predicted ones, plots both, and summarizes the numbers in one sentence."""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from headrace.files.environment import environment
from headrace.report.page import STYLE
from headrace.utils.errors import InputError
from headrace.utils.integrity import write_json

from .additive_memory import Crosstalk, Forgetting
from .attention import Compression, KVCache, LogitScale, Positions
from .base import TOLERANCE, Check, Experiment, Result
from .capacity import Capacity
from .delta_rule import KeyAngle, Overwriting
from .head_competition import MagnitudeNeglect, WinnerTakeAll
from .mixer_capacity import MixerCapacity
from .pathologies import ContextCollapse, PolarityLoss
from .read_gate import ReadGate
from .state_probe import CheckpointProbe, StateProbe
from .state_space import StateSpace

__all__ = ["EXPERIMENTS", "TOLERANCE", "Check", "Result", "describe", "run", "save", "select"]

EXPERIMENTS: dict[str, type[Experiment]] = {
    "magnitude": MagnitudeNeglect,
    "winner-take-all": WinnerTakeAll,
    "read-gate": ReadGate,
    "polarity": PolarityLoss,
    "context-collapse": ContextCollapse,
    "logit-scale": LogitScale,
    "positions": Positions,
    "kv-cache": KVCache,
    "compression": Compression,
    "crosstalk": Crosstalk,
    "overwriting": Overwriting,
    "key-angle": KeyAngle,
    "forgetting": Forgetting,
    "capacity": Capacity,
    "state-space": StateSpace,
    "mixer-capacity": MixerCapacity,
    "state-probe": StateProbe,
}


def describe(name: str) -> str:
    """The docstring of an experiment, on one line."""
    return " ".join((EXPERIMENTS[name].__doc__ or "").split())


def select(name: str, checkpoint: Path | None = None) -> list[str]:
    """The names of the experiments to run: `[name]`, or all of them for "all".

    Raises InputError for an unknown name, and for a checkpoint with an experiment other than "state-probe"."""
    if name not in (*EXPERIMENTS, "all"):
        raise InputError(f"NAME={name!r} is unknown; expected all, or one of {', '.join(EXPERIMENTS)}")
    if checkpoint is not None and name != "state-probe":
        raise InputError(f"--checkpoint {str(checkpoint)!r} with NAME={name!r}; expected it only with state-probe")
    return list(EXPERIMENTS) if name == "all" else [name]


def run(name: str, seed: int = 0, checkpoint: Path | None = None) -> Result:
    """Runs an experiment.

    checkpoint: folder of a trained model whose layers are probed in place of newly initialized ones; only for
    "state-probe"."""
    generator = torch.Generator().manual_seed(seed)
    with matplotlib.rc_context(STYLE), torch.no_grad():
        if checkpoint is not None:
            return result(CheckpointProbe.measure(generator, checkpoint))
        return result(EXPERIMENTS[name].measure(generator))


def result(experiment: Experiment | CheckpointProbe) -> Result:
    return Result(experiment.checks(), experiment.summary(), experiment.figure())


def save(name: str, seed: int, found: Result, folder: Path) -> Path:
    """Writes NAME.png, and NAME.json with every number; returns the path of the picture."""
    picture = folder / f"{name}.png"
    record = {
        "experiment": name, "about": describe(name), "summary": found.summary, "seed": seed,
        "checks": [check._asdict() | {"holds": check.holds} for check in found.checks],
        "plotted": plotted(found.figure), "command": ["python", "-m", "research.theory", *sys.argv[1:]],
        "environment": environment(),
    }  # fmt: skip
    try:
        write_json(picture.with_suffix(".json"), record)
        found.figure.savefig(picture)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None
    return picture


def plotted(figure: Figure) -> list[dict[str, Any]]:
    """The plotted numbers of each panel."""
    return [
        {
            "axes": [ax.get_xlabel(), ax.get_ylabel()],
            "lines": [
                {"label": str(line.get_label()), "points": np.asarray(line.get_xydata()).tolist()} for line in ax.lines
            ],
            "images": [np.asarray(image.get_array()).tolist() for image in ax.images],
        }
        for ax in figure.axes
    ]
