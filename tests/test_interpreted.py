"""Triton kernels in Triton's interpreter: the files of tests/interpreted, each in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))


@pytest.mark.slow(seconds=45)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("test_"))
def test_in_the_interpreter(path):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
