"""Theory as laws and pictures: `headrace lab NAME`. Each experiment writes and reads memories by the library's own op,
checks what is seen against what the law says, draws it, and says in one sentence, from the numbers, what is seen."""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from ...report.style import STYLE
from ...utils.environment import environment
from ...utils.errors import InputError
from ...utils.integrity import write_json
from .base import EXACT, Experiment, Finding, Row
from .capacity import Capacity
from .crowding import Backbones
from .pathologies import Collapse, Polarity
from .remembering import Past, Trained
from .rewriting import Angle, Overwriting
from .sharpness import Magnitude, Winner
from .storage import Crosstalk, Fading

__all__ = ["EXACT", "EXPERIMENTS", "Finding", "Row", "about", "chosen", "experiment", "save"]

EXPERIMENTS: dict[str, type[Experiment]] = {
    "magnitude": Magnitude,
    "winner": Winner,
    "polarity": Polarity,
    "collapse": Collapse,
    "crosstalk": Crosstalk,
    "overwriting": Overwriting,
    "angle": Angle,
    "fading": Fading,
    "capacity": Capacity,
    "backbones": Backbones,
    "past": Past,
}


def about(name: str) -> str:
    """What an experiment is about, in a sentence."""
    return " ".join((EXPERIMENTS[name].__doc__ or "").split())


def chosen(name: str, checkpoint: Path | None = None) -> list[str]:
    """The experiments with a name, or all for "all". InputError for an unknown name, or for a checkpoint with an
    experiment other than "past"."""
    if name not in (*EXPERIMENTS, "all"):
        raise InputError(f"lab: NAME={name!r} is unknown; expected all, or one of {', '.join(EXPERIMENTS)}")
    if checkpoint is not None and name != "past":
        raise InputError(f"--checkpoint {str(checkpoint)!r} with lab {name}; expected --checkpoint only with lab past")
    return list(EXPERIMENTS) if name == "all" else [name]


def experiment(name: str, seed: int = 0, checkpoint: Path | None = None) -> Finding:
    """Runs an experiment. checkpoint: a trained model to examine in place of layers with initial weights; only for
    `past`."""
    generator = torch.Generator().manual_seed(seed)
    with matplotlib.rc_context(STYLE), torch.no_grad():
        seen = EXPERIMENTS[name].measure(generator) if checkpoint is None else Trained.measure(generator, checkpoint)
        return Finding(seen.laws(), seen.sentence(), seen.figure())


def save(name: str, seed: int, finding: Finding, folder: Path) -> Path:
    """Writes NAME.png, and NAME.json with all its numbers; returns the path of the picture."""
    picture = folder / f"{name}.png"
    record = {
        "experiment": name, "about": about(name), "sentence": finding.sentence, "seed": seed,
        "laws": [row._asdict() | {"holds": row.holds} for row in finding.rows], "drawn": drawn(finding.figure),
        "command": ["headrace", *sys.argv[1:]], "environment": environment(),
    }  # fmt: skip
    try:
        write_json(picture.with_suffix(".json"), record)
        finding.figure.savefig(picture)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None
    return picture


def drawn(figure: Figure) -> list[dict[str, Any]]:
    """The numbers of each panel."""
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
