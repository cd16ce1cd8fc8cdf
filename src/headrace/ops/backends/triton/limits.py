"""What the kernels take."""

from importlib.util import find_spec

import torch
from torch import Tensor

from ....utils.device import constant, interpreted, is_hopper

LARGEST_KEY = 256  # a program holds a state of all key channels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@constant
def missing() -> str | None:
    """Returns why the backend is not available on this machine, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None if interpreted() or torch.cuda.is_available() else "it runs on a GPU, and PyTorch finds none"


def chosen(backend: str, x: Tensor) -> bool:
    """Whether the layer's backend is this one; "auto" is, on GPUs that have run the kernels."""
    return backend == "triton" or (backend == "auto" and x.is_cuda and missing() is None and is_hopper(x.device))
