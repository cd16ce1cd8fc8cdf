"""headrace: linear-time sequence models whose heads compete by a softmax for what is written and what is read."""

from importlib import import_module

from . import backends as _package  # first: whoever imported it later would put it in the place of the function
from .dispatch import backends
from .errors import GateWarning, InputError
from .recurrence import linear_attention, step

__version__ = "0.1.0"

# transformers takes seconds to import: its classes are loaded, and registered with its Auto classes, on first use.
_LAZY = {
    "HeadraceConfig": "hf",
    "HeadraceModel": "hf",
    "HeadraceForCausalLM": "hf",
    "HeadraceCache": "hf",
    "load": "hf",
    "quantize": "quantized",
    "verify": "laws",
}

del _package
__all__ = ["GateWarning", "InputError", "backends", "linear_attention", "step", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
