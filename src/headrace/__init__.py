"""headrace: linear-time sequence models whose heads compete by a softmax for what is written and what is read."""

from importlib import import_module
from typing import TYPE_CHECKING

from .utils import tables
from .utils.errors import GateWarning, InputError
from .utils.extras import require

if TYPE_CHECKING:
    from .cli.compare import compare
    from .cli.evaluate import evaluate, inspect
    from .cli.linearize import linearize
    from .cli.train import prepare, train
    from .cli.use import generate
    from .comparison.registration import register_task
    from .convert import load
    from .extra.registration import register_mixer, register_model
    from .files.state import load_state, save_state
    from .hf import HeadraceCache, HeadraceConfig, HeadraceForCausalLM, HeadraceModel
    from .layers import Mixer
    from .layers.blocks.compiled import compile_blocks
    from .layers.quantized import quantize
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
    "compile_blocks": "layers.blocks.compiled",
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

# Rows of packages that the core does not import, which are imported when a row is asked for.
tables.offer("headrace.extra.gla_outer", matrices=("gla-outer",), matrix_kinds=("gla-outer",))
tables.offer("headrace.extra.slots", matrices=("gsa", "abc"), matrix_kinds=("gsa", "abc"))
tables.offer(
    "headrace.extra.log_linear", linear=("log-linear-mamba2", "log-linear-gated-deltanet"), types=("log-linear",)
)
tables.offer("headrace.extra.mesa", linear=("mesa",), types=("mesa",))
tables.offer("headrace.extra.hgrn2", stages=("complement-key",))
tables.offer("headrace.extra.freeze", stages=("freeze",))
tables.offer("headrace.extra.taylor", linear=("taylor-softmax", "based"), stages=("taylor",))
tables.offer(
    "headrace.extra.mamba3", linear=("mamba3",), stages=("biased-norm", "turn", "trapezoid"), rules=("inputs.turns",)
)
tables.offer("headrace.extra.mlstm", linear=("mlstm",), stages=("exponential-gate", "divide-by-weights"))
tables.offer(
    "headrace.extra.deltaproduct",
    linear=("deltaproduct", "gated-deltaproduct"),
    stages=("keys-of-steps", "steps"),
    rules=("write.steps",),
)
tables.offer(
    "headrace.extra.residual", linear=("residual-delta",), stages=("residual",), rules=("write.residual_chunk",)
)
tables.offer(
    "headrace.extra.erasing",
    linear=("comba", "gated-deltanet-2"),
    stages=("gate-of-channels", "erase"),
    rules=("write.erase",),
)
tables.offer(
    "headrace.extra.memories",
    stages=("memories", "values-of-memories", "sum-of-memories"),
    rules=("competition.memories_per_head",),
)
tables.offer("headrace.extra.attention_token", tokens=("headrace.layers.attention.attention.SoftmaxAttention",))
tables.offer("headrace.extra.shared", shared_blocks=("block", "adapters"))
tables.offer("headrace.extra.averages", stages=("value-gate", "over-length", "divide-detached", "divide-by-length"))
tables.offer("headrace.extra.mamba", scans=("mamba",), scan_kinds=("mamba",), models=("jamba", "zamba"))
tables.offer("headrace.extra.rg_lru", scans=("rg-lru",), scan_kinds=("rg-lru",))
tables.offer("headrace.extra.gated", scans=("mingru", "minlstm", "hgrn"), scan_kinds=("mingru", "minlstm", "hgrn"))
tables.offer("headrace.extra.short_conv", scans=("short-conv",), scan_kinds=("short-conv",))
tables.offer("headrace.extra.rwkv7", matrices=("rwkv7",), matrix_kinds=("rwkv7",))
tables.offer("headrace.extra.channel_mixing", mlps=("rwkv4", "rwkv7"))
tables.offer("headrace.extra.encoder", linear_layers=("encoder", "both-ways"))
tables.offer("headrace.extra.latent", others=("mla",))
tables.offer("headrace.extra.capped", types=("capped",))
tables.offer("headrace.extra.clamped", types=("clamped-experts",))
tables.offer("headrace.extra.late_norm", types=("late-norm",))
tables.offer("headrace.extra.growing", types=("growing",))
tables.offer("headrace.extra.xielu", mlps=("xielu",))
tables.offer("headrace.extra.sparsemixer", types=("near-experts",))
tables.offer("headrace.extra.specs.scan", types=("scan",))
tables.offer("headrace.extra.specs.matrix", types=("matrix",))
tables.offer("headrace.extra.specs.latent", types=("latent",))
tables.offer("headrace.extra.linearized", linear=("hedgehog",), types=("linearized",))
tables.offer("headrace.extra.windowed", linear=("lolcats",), types=("windowed",))
tables.offer(
    "headrace.history.zoo",
    scans=("s4", "s4d", "rwkv4"),
    scan_kinds=("s4", "s4d", "rwkv4"),
    attention=("longformer", "bigbird", "flash-reference"),
    others=("softmax-rnn-norm", "softmax-rnn-gate"),
    models=("rnn", "luong", "bahdanau", "transformer-2017", "t5", "bert"),
    types=("softmax-rnn", "rnn", "transformer", "bert"),
    attention_layers=("early",),
)
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
    if _LAZY[name] in ("hf", "convert", "files.state"):  # asked here, as a failed import has twenty lines of traceback
        require(f"{__name__}.{name}", "transformers")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
