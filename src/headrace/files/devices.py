"""The devices on which a command runs."""

import os
import sys
from functools import cache
from typing import Any

import torch

from ..ops.dispatch import default_backend
from ..utils.device import is_hopper
from ..utils.errors import InputError, require

BFLOAT16 = "avx512_bf16", "amx_bf16", "bf16"  # instructions, by PyTorch's names
SLOW = "Note: precision bfloat16: this processor has no bfloat16 instructions; float32 is faster here"
UNSEEN = (
    "Note: on this GPU, FLA's kernels, if installed, or PyTorch's operations are used, as headrace's own kernels have "
    "run on Hopper only; `headrace verify --backend triton` checks them, and HEADRACE_BACKEND=triton uses them"
)


def present_device() -> torch.device:
    """Returns the accelerator if there is one, else the CPU. (PyTorch's build for CUDA names one on every machine.)"""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def on_device(name: str | None, float64: bool = False) -> str:
    """Returns the device of this name; for None or "auto" the accelerator if there is one, else the CPU.

    float64: whether the device must support float64; Apple's does not. Raises InputError if the device is unusable."""
    if name in (None, "auto"):
        device = present_device().type
        return "cpu" if float64 and device == "mps" else device
    try:
        torch.empty(0, device=name, dtype=torch.float64 if float64 else None)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"--device={name!r} cannot be used: {str(error).splitlines()[0]}") from None
    require(torch.device(name).type != "meta", f"--device={name!r} cannot be used: its tensors have no numbers")
    return "cpu" if torch.device(name).type == "cpu" else name  # "cpu:0" has no other memory


def all_devices(name: str | None) -> list[str]:
    """Returns the devices that a name, as in `on_device`, stands for: every GPU for "cuda", else one device."""
    device = on_device(name)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]


@cache
def note_speed(device: str, precision: str) -> None:
    """Says, once, what is slow here: bfloat16 on a processor without instructions for it (with AVX-512 alone, training
    steps took 3.4 times as long as in float32), and a GPU for which "auto" leaves out our kernels."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if (device, precision) == ("cpu", "bfloat16") and known and not any(map(known.get, BFLOAT16)):
        print(SLOW, file=sys.stderr)
    if device.startswith("cuda") and default_backend() == "auto" and not is_hopper(torch.device(device)):
        print(UNSEEN, file=sys.stderr)


def see_only(device: str) -> None:
    """Hides all GPUs except this one from the process, before CUDA is initialized, so that training takes this one."""
    kind, _, number = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible != [""] else number
    elif kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
