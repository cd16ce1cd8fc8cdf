import os
from importlib.util import find_spec

import pytest
import torch

from gpu_models import few_configurations


@pytest.fixture(scope="session", autouse=True)
def _little_tuning():
    """FLA's kernels compute the same by any configuration, and to try all takes minutes."""
    if find_spec("triton"):
        few_configurations(2)


@pytest.fixture(scope="session")
def device():
    """The GPU, or the device that HEADRACE_TEST_DEVICE names."""
    name = os.environ.get("HEADRACE_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        reason = "GPUs are hidden, because other tests run too" if hidden else "PyTorch finds no GPU"
        pytest.skip(f"{reason}; expected `make test-gpu` on a machine with a GPU")
    return name
