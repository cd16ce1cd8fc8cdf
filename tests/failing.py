"""Runs in which one process of a group fails alone."""

from functools import partial
from unittest.mock import patch

import torch.distributed as dist

from headrace import HeadraceForCausalLM, InputError
from headrace.training import card, checkpoints, run
from headrace.training.history import History
from trained import recipe

SETTINGS = {"tokens": 128 * 2, "warmup": 0, "save_every": 2, "evaluate_every": 2, "evaluate_rows": 2}
FULL = OSError(28, "No space left on device")
LOST = TypeError("of a kind that nobody foresaw")


def failing(of, name, process, error):
    """A patch by which a function raises in one process."""
    function = getattr(of, name)

    def fails(*given, **named):
        if dist.get_rank() == process:
            raise error
        return function(*given, **named)

    return patch.object(of, name, fails)


CASES = {  # where it fails: the patch
    "choosing": partial(failing, run, "begin", 0, LOST),
    "building": partial(failing, run, "build", 1, InputError("weights='x' has no config.json")),
    "logging": partial(failing, History, "add", 0, FULL),
    "weights": partial(failing, HeadraceForCausalLM, "save_pretrained", 0, FULL),
    "random state": partial(failing, checkpoints, "save_random_state", 1, FULL),
    "marking": partial(failing, checkpoints, "complete", 0, FULL),
    "card": partial(failing, run, "write_card", 0, LOST),
}


def sentences(data, damaged, folder):
    """{where: what this process says when one fails there}"""
    messages = {"data": error_of(damaged, folder / "data")}
    for name, fails in CASES.items():
        with fails(), patch.object(card, "draw_curves"):
            messages[name] = error_of(data, folder / name)
    return messages


def error_of(data, folder):
    try:
        run.train(*recipe(**SETTINGS), data, folder, trackers="none")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
