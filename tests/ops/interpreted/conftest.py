"""Tests of Triton kernels on CPU tensors, in Triton's interpreter.

The interpreter is on if TRITON_INTERPRET=1 when Triton is imported, so these tests have processes of their own, which
tests/ops/test_interpreted.py starts. By hand: TRITON_INTERPRET=1 pytest -n 0 tests/ops/interpreted
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import memory
    import shims
    import torch

    shims.install()
    memory.watch()
    torch.use_deterministic_algorithms(True)  # for its filling of new memory: a number that no kernel has set is NaN
else:
    collect_ignore_glob = ["test_*.py"]
