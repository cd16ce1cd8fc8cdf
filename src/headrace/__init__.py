"""headrace: linear-time sequence models whose heads compete by a softmax for what is written and what is read."""

from importlib import import_module
from typing import TYPE_CHECKING

from .utils import tables
from .utils.errors import GateWarning, InputError
from .utils.extras import require

if TYPE_CHECKING:
    from .cli.compare import compare
    from .cli.evaluate import evaluate
    from .cli.linearize import linearize
    from .cli.train import prepare, train
    from .cli.understand import inspect
    from .cli.use import generate
    from .comparison.registration import register_task
    from .convert import load
    from .hf import (
        HeadraceCache,
        HeadraceConfig,
        HeadraceForCausalLM,
        HeadraceModel,
        load_state,
        save_state,
    )  # fmt: skip
    from .layers import Mixer
    from .layers.blocks.compiled import compile_blocks
    from .layers.quantized import quantize
    from .layers.registration import register_mixer, register_model
    from .ops.attention import backends, linear_attention, step
    from .ops.dispatch import set_backend
    from .ops.parallel.context import context_parallel
    from .verification.verify import verify

__version__ = "0.1.0"

# Imported on first use: PyTorch and transformers take seconds, and `headrace --help` needs neither.
_LAZY = {
    "compare": "cli.compare",
    "evaluate": "cli.evaluate",
    "generate": "cli.use",
    "inspect": "cli.understand",
    "linearize": "cli.linearize",
    "prepare": "cli.train",
    "train": "cli.train",
    "linear_attention": "ops.attention",
    "step": "ops.attention",
    "context_parallel": "ops.parallel.context",
    "backends": "ops.attention",
    "set_backend": "ops.dispatch",
    "Mixer": "layers",
    "compile_blocks": "layers.blocks.compiled",
    "quantize": "layers.quantized",
    "verify": "verification.verify",
    "register_mixer": "layers.registration",
    "register_model": "layers.registration",
    "register_task": "comparison.registration",
    "HeadraceConfig": "hf",
    "HeadraceModel": "hf",
    "HeadraceForCausalLM": "hf",
    "HeadraceCache": "hf",
    "load": "convert",
    "load_state": "hf",
    "save_state": "hf",
}

# Rows of packages that the core does not import, which are imported when a row is asked for.
tables.offer(
    "headrace.history.zoo",
    scans=("s4", "s4d", "rwkv4"),
    scan_kinds=("s4", "s4d", "rwkv4"),
    attention=("longformer", "bigbird", "flash-reference"),
    others=("softmax-rnn-norm", "softmax-rnn-gate"),
    models=("rnn", "luong", "bahdanau", "transformer-2017", "t5", "bert"),
    types=("softmax-rnn", "rnn", "transformer", "bert"),
    mlps=("rwkv4",),
    attention_layers=("early",),
)
tables.offer("headrace.extra.gla_outer", matrices=("gla-outer",), matrix_kinds=("gla-outer",))
tables.offer("headrace.extra.slots", matrices=("gsa", "abc"), matrix_kinds=("gsa", "abc"))
tables.offer(
    "headrace.extra.log_linear", linear=("log-linear-mamba2", "log-linear-gated-deltanet"), types=("log-linear",)
)
tables.offer("headrace.extra.mesa", linear=("mesa",), types=("mesa",))
tables.offer("headrace.extra.linearized", linear=("hedgehog",), types=("linearized",))
del tables

__all__ = [
    "GateWarning", "HeadraceCache", "HeadraceConfig", "HeadraceForCausalLM", "HeadraceModel", "InputError",
    "Mixer", "backends", "compare", "compile_blocks", "context_parallel", "evaluate", "generate", "inspect",
    "linear_attention", "linearize", "load", "load_state", "prepare", "quantize", "register_mixer", "register_model",
    "register_task", "save_state", "set_backend", "step", "train", "verify",
]  # fmt: skip


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LAZY[name] in ("hf", "convert"):  # asked here, as a failed import has twenty lines of traceback
        require(f"{__name__}.{name}", "transformers")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
