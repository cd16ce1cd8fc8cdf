import os

import pytest
import torch

from equation import skip_if_missing

# Two processes of two threads on two cores wait for each other more than they compute.
THREADS = int(os.environ.get("HEADRACE_TEST_THREADS", "1"))


@pytest.fixture(autouse=True)
def _a_number_of_threads_and_a_fixed_seed():
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)


@pytest.fixture(params=["torch", "native"])
def backend(request):
    skip_if_missing(request.param)
    return request.param
