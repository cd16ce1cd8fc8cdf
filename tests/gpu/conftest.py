import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """The GPU, or the device that HEADRACE_TEST_DEVICE names."""
    name = os.environ.get("HEADRACE_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        reason = "GPUs are hidden, because other tests run too" if hidden else "PyTorch finds no GPU"
        pytest.skip(f"{reason}; expected `make test-gpu` on a machine with a GPU")
    return name
