"""Triton kernels in Triton's interpreter: the files of tests/ops/interpreted, in a process of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import fresh

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.slow(seconds=50)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_pass_in_the_triton_interpreter():
    words = ["-n", "0", "-rs", "-p", "no:cacheprovider", FOLDER]
    done = fresh.pytest(*words, folder=FOLDER.parents[2], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
