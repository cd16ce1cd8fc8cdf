import pytest
import torch

from equation import skip_if_missing


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    # Two processes of two threads on two cores wait for each other more than they compute.
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=["torch", "native"])
def backend(request):
    skip_if_missing(request.param)
    return request.param
