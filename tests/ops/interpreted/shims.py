"""What Triton's interpreter lacks or computes wrongly, added for Triton 3.6 to 3.9.

- Products of bfloat16 matrices: it stores bfloat16 as uint16, and multiplies the integers. (Other arithmetic in
  bfloat16 is as wrong: a kernel must convert to float32 first.)
- Products in TF32: it multiplies float32, whatever input_precision says. Here operands are rounded to TF32 for "tf32",
  and split into two numbers of TF32 for "tf32x3".
- Autotuning, which asks the driver for times: the first configuration is taken.
- Scalars as bounds of a loop: they are arrays of one number, which NumPy 2.4 no longer converts to
  integers, as Triton 3.6 expects.
- NumPy's warnings: a kernel may compute infinities and NaN in entries that it masks afterwards.

And two that only take less time:

- A launch changes the functions of the language once for each module whose functions it calls, not at each of the
  thousands of calls.
- Sums and products of integers are not computed a second time in int64 for a check of overflow, whose result the
  interpreter drops unless its option `debug` is set.
"""

from dataclasses import replace
from functools import wraps

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import autotuner, interpreter


def install() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _rounded(builder.create_dot)
    autotuner.Autotuner.run = first_configuration
    interpreter._patch_lang_tensor = _with_integers(interpreter._patch_lang_tensor)
    _change_the_language_once_a_launch()
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    np.seterr(over="ignore", divide="ignore", invalid="ignore")


def _change_the_language_once_a_launch() -> None:
    """At its end a launch restores what the change for its own kernel, the first, has replaced. Triton has no use for
    what the changes for device functions return."""
    run, change = interpreter.GridExecutor.__call__, interpreter._patch_lang
    changed: set[int] = set()

    @wraps(run)
    def launch(*args, **kwargs):
        changed.clear()
        return run(*args, **kwargs)

    def once(function):
        module = id(function.__globals__)
        if module in changed:
            return None
        changed.add(module)
        return change(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch, once


def _with_integers(patch):
    @wraps(patch)
    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def _rounded(create_dot):
    """Makes `create_dot` multiply bfloat16, and float32 by its argument input_precision."""

    @wraps(create_dot)
    def dot(self, a, b, d, precision, *rest):
        a, b = (float_handle(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        if a.dtype.scalar != tl.float32 or precision == ir.INPUT_PRECISION.IEEE:
            return create_dot(self, a, b, d, precision, *rest)
        high_a, high_b = tf32(a), tf32(b)
        if precision == ir.INPUT_PRECISION.TF32x3:
            d = create_dot(self, tf32(rest_of(a, high_a)), high_b, d, precision, *rest)
            d = create_dot(self, high_a, tf32(rest_of(b, high_b)), d, precision, *rest)
        return create_dot(self, high_a, high_b, d, precision, *rest)

    return dot


def tf32(x):
    """A handle of float32 numbers rounded to the 11 significant digits of TF32, ties away from zero, as GPUs do."""
    bits = (x.data.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFFFFF << 13 & 0xFFFFFFFF)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def rest_of(x, rounded):
    """A handle of what the rounding has taken away; nothing of infinities."""
    return interpreter.TensorHandle(np.where(np.isfinite(x.data), x.data - rounded.data, np.float32(0)), tl.float32)


def float_handle(x):
    """A handle of bfloat16 numbers as one of float32."""
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def first_configuration(self, *args, **kwargs):
    """In place of `Autotuner.run`: the first configuration that pruning leaves."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    self.best_config = config = next(iter(self.prune_configs(kwargs)))
    return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
