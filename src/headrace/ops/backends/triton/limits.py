"""What the kernels take."""

from importlib.util import find_spec

import torch
from torch import Tensor

from ....utils.device import interpreted

LARGEST_KEY = 256  # a program holds a state of all key channels
LARGEST_NORM = 16384  # channels of a norm, which a program holds at once
LARGEST_HEADS = 16384  # channels of all heads that compete, which a program holds at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def missing() -> str | None:
    """Returns why the backend is not available on this machine, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None if interpreted() or torch.cuda.is_available() else "it runs on a GPU, and PyTorch finds none"


def unsupported_tokens(x: Tensor) -> str | None:
    """Returns why a kernel cannot compute x [B, T, ...], or None."""
    if not (x.is_cuda or interpreted()):
        return f"it runs on a GPU, and x is on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"it computes in float32, from float32, bfloat16 or float16, and x is {x.dtype}"
    return "x has no tokens" if x.shape[1] == 0 else None
