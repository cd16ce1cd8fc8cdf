"""The one rule for where a command computes."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import InputError


def on_device(name: str | None, float64: bool = False) -> str:
    """The device of this name; for None or "auto" the accelerator where there is one, or else the CPU.

    float64: the device has to have it, which Apple's does not. Raises InputError where the device cannot be used."""
    if name in (None, "auto"):
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None or (float64 and found.type == "mps") else found.type
    try:
        torch.empty(0, device=name, dtype=torch.float64 if float64 else None)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"--device={name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name


def all_devices(name: str | None) -> list[str]:
    """What a name stands for, as `on_device` takes it: for "cuda" every GPU."""
    device = on_device(name)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]


def see_only(device: str) -> None:
    """Hide all GPUs but this one from this process, before CUDA starts in it: Trainer would use them all."""
    kind, _, number = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible != [""] else number
    elif kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Leaves autocast on the device of x; the meta device, on which a model is counted, has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
