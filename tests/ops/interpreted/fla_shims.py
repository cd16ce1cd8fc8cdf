"""What FLA's kernels need of Triton's interpreter beside shims.py."""

import os
import sys
import warnings
from importlib import import_module

import triton.language as tl
from shims import first_configuration
from triton.runtime import autotuner, interpreter


class LoopIndex(int):
    """A loop variable with the conversions of a tensor, which a compiled kernel's loop variable has."""

    def to(self, dtype, **_):
        return interpreter._implicit_cvt(int(self)).to(dtype)


def loop(*bounds):
    """In place of `range`: its bounds may be tensors, and its variable is one."""
    plain = [int(b.handle.data.item()) if isinstance(b, tl.tensor) else int(getattr(b, "value", b)) for b in bounds]
    return (LoopIndex(i) for i in range(*plain))


def install() -> None:
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # the precision of products that name none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA warns on a machine without a GPU
        import_module("fla.ops")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fla.") and module is not None]
    for module in modules:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, autotuner.Autotuner):
                kind.run = first_configuration
        if getattr(module, "tl", None) is tl:
            module.range = loop
        if callable(getattr(module, "gather", None)):
            module.gather = lambda *args, **options: tl.gather(*args, **options)
