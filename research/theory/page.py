"""Pictures that pages of the research site draw while they are built."""

from io import BytesIO

import matplotlib
import torch
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from headrace.report.page import PALETTE, STYLE

from ..sentences import default_runs
from . import run


def law(name: str) -> None:
    """Displays the picture and the summary of an experiment with seed 0. A property that does not hold stops the
    build."""
    torch.set_num_threads(1)
    result = run(name)
    if failed := [check for check in result.checks if not check.holds]:
        raise AssertionError(f"{name}: {failed}")
    shown(result.figure)
    display(Markdown(result.summary))


def reached(*tasks: str) -> None:
    """Displays what the mixers of the defaults of `headrace compare` reach on some tasks, from the kept rows."""
    runs = [run for run in default_runs() if run["comparison"] in tasks]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(tasks), 2.6), layout="constrained")
        for ax, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            own = [run for run in runs if run["comparison"] == task][::-1]
            ax.barh([run["mixer"] for run in own], [100 * run["score"] for run in own], color=PALETTE[0])
            ax.set(title=task, xlabel=f"{own[0]['metric']} in %, seed 0", xlim=(0, 100))
    shown(figure)


def shown(figure: Figure) -> None:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    display(Image(picture.getvalue()))
