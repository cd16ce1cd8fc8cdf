"""The tests of tests/gpu, as far as a CPU can run them: a mistake in them must not wait for a GPU."""

from pathlib import Path

import fresh

ROOT = Path(__file__).parents[2]


def test_gpu_tests_pass_on_a_cpu():
    chosen = "float32 and (scalar and reference or retnet) or packed or compiled and retnet or loss"
    known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plug-ins that this process has imported
    words = ["-n", "0", "-p", "no:cacheprovider", *known, "tests/gpu", "-k", chosen]
    result = fresh.pytest(*words, folder=ROOT, before=None, HEADRACE_TEST_DEVICE="cpu")
    said = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0 and " passed" in said, said  # not all are skipped
