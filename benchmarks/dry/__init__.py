"""A GPU that is not there: Triton compiles every launch for it, and the launch is recorded and not run.

    with dry.gpu("sm_90") as launches:
        out = function(*cpu_tensors)
        out.sum().backward()
    print(launches[0].kernel, launches[0].code.registers)

Works for any code that launches Triton kernels (3.6 to 3.9), forward and backward: grids, specialization and choices of
configurations are those of the real machine. The results are not computed.
"""

from .code import Code, Loop
from .driver import GPUS, Launch, gpu

__all__ = ["GPUS", "Code", "Launch", "Loop", "gpu"]
