"""The operations of one token of a linear mixer in a program of the native backend.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.attention import linear_attention
from ...ops.backends.native.bound import Bound
from ...ops.backends.native.layer import ABSENT
from ...ops.backends.native.library import DTYPES
from ...ops.backends.native.program import Program, UnsupportedError
from ...ops.call import NORMALIZER_EPS, like
from ...ops.derivatives import has_address
from ...spec.linear import Competition
from ...utils.tables import Table
from ..quantized import QuantizedLinear


class MixerState(NamedTuple):
    """The recurrent state of N sequences; None for parts that the spec does not have."""

    memory: Tensor  # [N, H, K, V]
    conv: Tensor | None = None  # [N, width − 1, channels], the last inputs of the short convolution
    shift: Tensor | None = None  # [N, 1, D], the last input of the token shift; k, v and γ of the trapezoidal update
    tokens: Tensor | None = None  # [N], number of tokens so far, if the spec `counts_tokens`
    before: Tensor | None = None  # [N, H, K, V], the memory before the current chunk, decayed, for write.residual_chunk
    peak: Tensor | None = None  # [N, H], the largest exponent of an exponential gate, by which the memory is scaled
    angles: Tensor | None = None  # [N, H, F], by which q and k were turned last (inputs.turns)


# The parameters of a linear mixer that are weights of its native layer, by path.
WEIGHTS = {
    "conv.weight": "conv_weight", "conv.bias": "conv_bias", "q_norm.weight": "q_norm", "k_norm.weight": "k_norm",
    "learned_map.q": "map_q", "learned_map.k": "map_k", "window_factor": "window_factor", "decay.up": "decay_up",
    "decay.up.weight": "decay_up", "decay.up.bias": "decay_bias", "decay.dt_bias": "decay_bias",
    "decay.bias": "decay_bias", "decay.A_log": "decay_log", "bonus": "bonus", "skip": "skip",
    "read_competition.weight": "read_scores", "write_competition.weight": "write_scores",
    "gate.up.weight": "gate_up", "gate.up.bias": "gate_bias", "norm_weight": "norm_weight", "norm_bias": "norm_bias",
}  # fmt: skip


def mixer_program(program: Program, mixer: Any) -> None:
    """Builds the program x [B, 1, D] -> y [B, 1, D] of a linear mixer, whose state is the only one."""
    D = mixer.hidden_size
    x, y = program.columns(D), program.columns(D)
    program.add("load", out=x, outputs=D)
    add_mixer(program, mixer, x, y, 0)
    program.add("store", x=y, inputs=D)


def find_program(mixer: Any, x: Tensor) -> tuple[Bound | None, str | None]:
    """Returns (the native program that computes x [B, T, D] in place, None), or (None, why there is none)."""
    if token_of(type(mixer)) is None or "run" in vars(mixer):
        return None, f"the mixer is a {type(mixer).__name__}" + " with a run of its own" * ("run" in vars(mixer))
    if torch.compiler.is_compiling():
        return None, "a graph is traced"
    if x.dim() != 3 or not len(x) or x.shape[1] != 1 or x.shape[2] != mixer.hidden_size:
        return None, "it takes one token of each sequence"
    if not (x.is_cpu and has_address(x)) or x.dtype not in DTYPES:
        known = "it runs on the CPU, in float32 and bfloat16"
        return None, f"{known}; x is a {type(x).__name__} of {x.dtype} on {x.device}"
    program, reason = mixer.program.find(mixer)
    if program is not None and not program.has_dtype(x.dtype):
        return None, f"the weights have another dtype than x, {x.dtype}"
    return program, reason


def run_mixer(program: Bound, mixer: Any, x: Tensor, state: Any) -> Tensor | None:
    """Runs the program of `mixer_program`: x [B, 1, D] -> y [B, 1, D], and updates the state in place. Returns None,
    and does nothing, for a state that cannot be: one of another mixer or number of sequences, with a tensor that
    autograd needs, of another dtype, or not contiguous.

    Raises InputError for a state that shares memory."""
    held = sum(each is not None for each in state) if isinstance(state, mixer.state_kind) else None
    if held != len(program.program.states) or (ready := program.take([state], len(x))) is None:
        return None
    y = like(x)
    ready.run({0: x.contiguous(), len(program.program.operations) - 1: y})
    return y


def add_mixer(program: Program, mixer: Any, x: int, out: int, place: int, add: bool = False) -> None:
    """Adds a linear mixer to a program: out = mixer(x), or out += mixer(x).

    Args:
        x, out: first columns of D each.
        place: index of the mixer's state.

    Raises:
        UnsupportedError: for a spec, an `op` or a backend that the program does not compute.
    """
    if mixer.op is not linear_attention or mixer.stages != mixer.made:
        raise UnsupportedError("the mixer has another `op`, or other stages than its spec asks for")
    if mixer.backend not in ("auto", "native"):
        raise UnsupportedError(f"the layer's backend is {mixer.backend}")
    settings = "norm_eps", "group_eps", "rope_theta", "rope", "scale", "logit_scale", "backend", "op", "spec", "stages"
    program.fixed(mixer, *settings)
    spec, parts, gate = mixer.spec, mixer.parts, mixer.spec.competition or Competition()
    H, K, V = mixer.H, mixer.K, mixer.V
    fields = ABSENT | {
        "D": mixer.hidden_size, "H": H, "Hq": mixer.Hq, "Hk": parts.get("k", K) // K, "Hv": parts["v"] // V,
        "K": K, "F": K, "V": V, "conv_width": spec.inputs.conv, "decay_reads": parts.get("decay", 0),
        "gate_reads": parts.get("gate", 0), "scale": mixer.scale, "logit_scale": mixer.logit_scale,
        "norm_eps": mixer.norm_eps, "group_eps": mixer.group_eps, "sum_eps": NORMALIZER_EPS,
        "temperature": gate.temperature, "gate_range": float(mixer.H if gate.range == "heads" else gate.range),
    }  # fmt: skip
    for path, kind in mixer.part_classes.items():
        parent, _, name = path.rpartition(".")
        if path and path.partition(".")[0] not in OUTSIDE:
            module = program.module(mixer.get_submodule(parent), name, kind)
            for setting in {"eps", "kind"} & vars(module).keys():
                program.fixed(module, setting)
    # Also plain tensors, which pruning puts in place of parameters: the program has no weight then, and is refused.
    held = {f"{path}.{n}".lstrip(".") for path, each in mixer.named_modules() for n in (*each._parameters, *vars(each))}
    paths = [path for path in WEIGHTS if path in held and attrgetter(path)(mixer) is not None]
    for stage in mixer.stages:
        fields |= stage.native(mixer)
    weights = {WEIGHTS[path]: (mixer, path) for path in paths}
    if len(weights) < len(paths):
        raise UnsupportedError("it has one bias, and the decay has two")
    layer = program.layer(fields, weights, place)
    start = projected = program.columns(sum(parts.values()))
    if mixer.shift is None:
        add_linear(program, mixer, "in_proj", x, projected)
    else:
        shift = program.module(mixer, "shift", mixer.part_classes["shift"])
        shift.add_projections(program, mixer, x, projected, place)
    read = program.columns(H * V)
    reads_input = spec.competition is not None and gate.source == "hidden"
    program.add("layer", x=projected, out=read, other=x if reads_input else -1, layer=layer)
    add_linear(program, mixer, "o_proj", read, out, add)
    program.release(start)


def add_linear(
    program: Program, parent: nn.Module, name: str, x: int, out: int, add: bool = False,
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Adds the linear layer `parent.name` to a program, as `Program.linear`."""
    program.linear(program.module(parent, name, nn.Linear, QuantizedLinear), x, out, add, rows)


OUTSIDE = "in_proj", "o_proj", "shift"  # modules that are operations of their own
# How the token of a mixer is added to a program, by the path of its class; the arguments are those of `add_mixer`.
TOKENS: Table[Callable[..., None]] = Table("tokens", {"headrace.layers.linear.mixer.LinearMixer": add_mixer})


def token_of(kind: type) -> Callable[..., None] | None:
    """Returns the row of a class of mixers in TOKENS, which a subclass does not inherit."""
    return TOKENS.get(f"{kind.__module__}.{kind.__qualname__}")
