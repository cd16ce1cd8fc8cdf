"""headrace: linear-time sequence models, with or without gates over their heads."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import extra, history  # noqa: F401  which offer their mixers
from .utils.errors import GateWarning, InputError
from .utils.extras import require_packages

if TYPE_CHECKING:
    from .cli.compare import compare
    from .cli.evaluate import evaluate, inspect
    from .cli.linearize import linearize
    from .cli.train import prepare, train
    from .cli.use import generate
    from .comparison.registration import register_task
    from .convert import load
    from .extra.compiled import compile_blocks
    from .extra.context_parallel import context_parallel
    from .extra.registration import register_mixer, register_model
    from .files.state import load_state, save_state
    from .hf import HeadraceCache, HeadraceConfig, HeadraceForCausalLM, HeadraceModel
    from .layers import Mixer
    from .layers.quantized import quantize
    from .ops.attention import backends, linear_attention, step
    from .ops.dispatch import set_backend
    from .verification.verify import verify

__version__ = "0.1.0"

# Imported on first use: PyTorch and transformers take seconds, and `headrace --help` needs neither.
_LAZY = {
    "compare": "cli.compare",
    "evaluate": "cli.evaluate",
    "generate": "cli.use",
    "inspect": "cli.evaluate",
    "linearize": "cli.linearize",
    "prepare": "cli.train",
    "train": "cli.train",
    "linear_attention": "ops.attention",
    "step": "ops.attention",
    "context_parallel": "ops.parallel.context",
    "backends": "ops.attention",
    "set_backend": "ops.dispatch",
    "Mixer": "layers",
    "compile_blocks": "extra.compiled",
    "quantize": "layers.quantized",
    "verify": "verification.verify",
    "register_mixer": "extra.registration",
    "register_model": "extra.registration",
    "register_task": "comparison.registration",
    "HeadraceConfig": "hf",
    "HeadraceModel": "hf",
    "HeadraceForCausalLM": "hf",
    "HeadraceCache": "hf",
    "load": "convert",
    "load_state": "files.state",
    "save_state": "files.state",
}

__all__ = [
    "GateWarning", "HeadraceCache", "HeadraceConfig", "HeadraceForCausalLM", "HeadraceModel", "InputError",
    "Mixer", "backends", "compare", "compile_blocks", "context_parallel", "evaluate", "generate", "inspect",
    "linear_attention", "linearize", "load", "load_state", "prepare", "quantize", "register_mixer", "register_model",
    "register_task", "save_state", "set_backend", "step", "train", "verify",
]  # fmt: skip


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LAZY[name] in ("hf", "convert", "files.state"):  # asked here, as a failed import has twenty lines of traceback
        require_packages(f"{__name__}.{name}", "transformers")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
