"""What the kernels take."""

from importlib.util import find_spec

import torch

from ....utils.device import constant, interpreted

LARGEST_KEY = 256  # a program holds a state of all key channels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@constant
def missing() -> str | None:
    """Returns why the backend is not available on this machine, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None if interpreted() or torch.cuda.is_available() else "it runs on a GPU, and PyTorch finds none"
