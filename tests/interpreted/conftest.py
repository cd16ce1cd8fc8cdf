"""Tests of Triton kernels on CPU tensors, in Triton's interpreter.

The interpreter is on if TRITON_INTERPRET=1 when Triton is imported, so these tests have processes of their own, which
tests/test_interpreted.py starts. By hand: TRITON_INTERPRET=1 pytest -n 0 tests/interpreted
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import shims

    shims.install()
else:
    collect_ignore_glob = ["test_*.py"]
