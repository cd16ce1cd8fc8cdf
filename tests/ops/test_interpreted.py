"""Triton kernels in Triton's interpreter: the files of tests/ops/interpreted, in processes of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import fresh

FOLDER = Path(__file__).parent / "interpreted"
LARGE = "test_fla.py", "test_triton.py"
SMALL = sorted(path.name for path in FOLDER.glob("test_*.py") if path.name not in LARGE)


@pytest.mark.slow(seconds=45)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("files", [*([name] for name in LARGE), SMALL], ids=["fla", "triton", "small"])
def test_kernels_pass_in_the_triton_interpreter(files):
    words = ["-n", "0", "-rs", "-p", "no:cacheprovider", *(FOLDER / name for name in files)]
    done = fresh.pytest(*words, folder=FOLDER.parents[2], TRITON_INTERPRET="1")
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
