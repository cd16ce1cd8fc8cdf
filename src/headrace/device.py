"""The one rule for where a command computes."""

from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import InputError


def on_device(name: str | None, float64: bool = False) -> str:
    """The device of this name; without one the accelerator where there is one, or else the CPU.

    float64: the device has to have it, which Apple's does not. Raises InputError where the device cannot be used."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None or (float64 and found.type == "mps") else found.type
    try:
        torch.empty(0, device=name, dtype=torch.float64 if float64 else None)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"--device={name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Leaves autocast on the device of x; the meta device, on which a model is counted, has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
