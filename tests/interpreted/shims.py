"""What Triton's interpreter lacks or computes wrongly, added for Triton 3.6 to 3.9.

- Products of bfloat16 matrices: it stores bfloat16 as uint16, and multiplies the integers. (Other arithmetic in
  bfloat16 is as wrong: a kernel must convert to float32 first.)
- Autotuning, which asks the driver for times: the first configuration is taken.
- NumPy's warnings: a kernel may compute infinities and NaN in entries that it masks afterwards.
"""

from functools import wraps

import numpy as np
import triton.language as tl
from triton.runtime import autotuner, interpreter


def install() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _widened(builder.create_dot)
    autotuner.Autotuner.run = first_configuration
    np.seterr(over="ignore", divide="ignore", invalid="ignore")


def _widened(create_dot):
    @wraps(create_dot)
    def dot(self, a, b, *rest):
        return create_dot(self, *(float_handle(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)

    return dot


def float_handle(x):
    """A handle of bfloat16 numbers as one of float32."""
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def first_configuration(self, *args, **kwargs):
    """In place of `Autotuner.run`: the first configuration that pruning leaves."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    self.best_config = config = next(iter(self.prune_configs(kwargs)))
    return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
