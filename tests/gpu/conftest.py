import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """The GPU, or the device that HEADRACE_TEST_DEVICE names."""
    name = os.environ.get("HEADRACE_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        reason = "GPUs are hidden, because other tests run too" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else None
        pytest.skip(f"{reason or 'PyTorch finds no GPU'}; expected a GPU and `make test-gpu`")
    return name
