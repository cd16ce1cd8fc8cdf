"""headrace: linear-time sequence models whose heads compete by a softmax for what is written and what is read."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import auto, dispatch
from .errors import GateWarning, InputError
from .recurrence import linear_attention, step

__version__ = "0.1.0"

# transformers takes seconds to import: what needs it is loaded on first use.
_LAZY = {
    "Mixer": "mixers",
    "HeadraceConfig": "hf",
    "HeadraceModel": "hf",
    "HeadraceForCausalLM": "hf",
    "HeadraceCache": "hf",
    "load": "hf",
    "quantize": "quantized",
    "verify": "laws",
}

if TYPE_CHECKING:
    from .dispatch import backends
else:
    from . import backends

    class _Backends(ModuleType):
        """The package of the backends, which has the name of a function: called, it is that function."""

        def __call__(self, q=None, k=None, v=None, **kwargs):
            return dispatch.backends(q, k, v, **kwargs)

    backends.__class__, backends.__doc__ = _Backends, dispatch.backends.__doc__

auto.install()
del auto

__all__ = ["GateWarning", "InputError", "backends", "linear_attention", "step", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
