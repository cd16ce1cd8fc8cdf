"""The families of the op, and for each the implementations of it that other libraries have, as two tables.

A peer is an address, the names and the layout of its arguments, and what else it needs: `prepare` takes our tensors
(see `headrace.ops.reference`) to its own and is never timed, `call` runs it. Peers are imported, never copied. `op.py`
asks of them whether we are faster, the tests whether we agree.
"""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import compiled
import runtimes


@dataclass(frozen=True)
class Family:
    """One kind of recurrence: the shape of its decay, its write rule, and what else the op is given."""

    decay: str = ""  # the shape of log_decay: "", "H", "BTH" or "BTHK"
    rule: str = "add"
    bonus: bool = False
    normalize: bool = False

    def inputs(self, B=1, T=128, H=4, K=16, V=32, dtype=torch.float32, device="cpu", seed=0) -> dict[str, Tensor]:
        """Random, well-conditioned tensors; those that a model would train require a gradient."""
        draw = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(B, T, H, n, generator=draw, dtype=torch.float64) for n in (K, K, V))
        tensors = {"q": q, "k": F.normalize(k, dim=-1) if self.rule == "delta" else k, "v": v}
        if self.normalize:
            tensors |= {"q": F.elu(q) + 1, "k": F.elu(k) + 1}
        sizes = {"B": B, "T": T, "H": H, "K": K}
        if self.decay == "H":
            tensors["log_decay"] = torch.log1p(-(2.0 ** (-5.0 - torch.arange(H, dtype=torch.float64))))
        elif self.decay:
            shape = [sizes[letter] for letter in self.decay]
            tensors["log_decay"] = -0.1 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.01
        if self.rule == "delta":
            tensors["beta"] = torch.rand(B, T, H, generator=draw, dtype=torch.float64)
        if self.bonus:
            tensors["bonus"] = torch.randn(H, K, generator=draw, dtype=torch.float64)
        # RetNet's decay is a constant of the architecture: nobody asks for its gradient.
        constant = {"log_decay"} if self.decay == "H" else set()
        return {
            name: x.to(device, dtype).requires_grad_(x.is_floating_point() and name not in constant)
            for name, x in tensors.items()
        }

    def options(self) -> dict:
        """The arguments of the op that are not tensors."""
        return {"rule": self.rule, "normalize": self.normalize}


EXACT = torch.float64, torch.float32, torch.bfloat16  # the dtypes of a peer that does not compute in float32 alone
FAMILIES = {
    "linear": Family(),
    "normalized": Family(normalize=True),
    "fixed": Family("H"),
    "scalar": Family("BTH"),
    "vector": Family("BTHK"),
    "bonus": Family("BTHK", bonus=True),
    "delta": Family(rule="delta"),
    "gated-delta": Family("BTH", rule="delta"),
    "kda": Family("BTHK", rule="delta"),
}


@dataclass(frozen=True)
class Peer:
    """Somebody else's implementation of a family."""

    family: str  # a key of FAMILIES
    source: str  # library:module:function
    names: dict[str, str] = field(default_factory=dict)  # its name for an argument, where it is not ours
    prepare: Callable = dict  # (**our tensors) -> its tensors
    call: Callable = lambda f, S, **x: f(**x, initial_state=S, output_final_state=True)  # -> (out, final state)
    heads_first: bool = False  # its layout is [B, H, T, ·], not [B, T, H, ·]
    note: str = ""
    states: bool = True  # takes an initial state and returns the final one
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # of its inputs, the most exact first
    backward: bool = True
    square: bool = False  # K = V only
    multiple: int = 1  # K must be one of this
    upto: tuple[int, int] = (8192, 8192)  # the longest T worth its time: forward, forward and backward

    @property
    def name(self) -> str:
        library, _, function = self.source.split(":")
        return f"{library} {function}{self.note and f' ({self.note})'}"

    def missing(self) -> str | None:
        """Why this peer cannot be called here, or None."""
        try:
            load(self.source)
        except ImportError as error:
            return str(error)
        return None

    def arguments(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors as its own, contiguous in its layout."""
        own = {name: self._swap(x).contiguous() for name, x in self.prepare(**tensors).items()}
        return {self.names.get(name, name): x for name, x in own.items()}

    def __call__(self, arguments: dict[str, Tensor], initial_state: Tensor | None = None):
        """(out, final state or None), out in our layout."""
        out, state = self.call(load(self.source), initial_state, **arguments)
        return self._swap(out), state

    def _swap(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.heads_first and x.dim() > 2 else x


@cache
def load(source: str) -> Callable:
    """The function at library:module:function; transformers' unwrapped, so that its torch path runs wherever we are."""
    library, module, function = source.split(":")
    if library == "fla":
        return getattr(_fla(module), function)
    if library in compiled.LIBRARIES:
        return compiled.LIBRARIES[library](function)
    if (graph := graph_of(source)) is not None:
        return compiled.Operator(graph)
    package = {"transformers": f"transformers.models.{module}.modeling_{module}", "torch": f"torch.{module}"}[library]
    return inspect.unwrap(getattr(importlib.import_module(package), function))


def graph_of(source: str) -> Callable | None:
    """What makes the graph of an operator over a list of arguments, or None for what has no graph."""
    library, module, function = source.split(":")
    if library == "ggml":
        compiled.library()
        return partial(compiled.Graph, function)
    if library == "onnxruntime":
        runtimes.require()
        return partial(runtimes.Node, module)
    return None


def _fla(module: str):
    """FLA's reference files are pure torch, but importing their package needs Triton: they are loaded as files."""
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        raise ImportError("fla-core is not installed")
    if importlib.util.find_spec("einops") is None:
        raise ImportError("fla-core's reference files need einops, which is not installed")
    for folder in found.submodule_search_locations:
        path = Path(folder, "ops", f"{module}.py")
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"fla_{module.replace('/', '_')}", path)
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
            return loaded
    raise ImportError(f"this fla-core has no ops/{module}.py")


# --- what some peers need beyond names -------------------------------------------------------------------------------
def _per_token(log_decay, **tensors):
    """A decay per head, said again for every token, for a peer whose decay depends on the data."""
    return tensors | {"log_decay": log_decay.expand(tensors["v"].shape[:3])}


def _no_decay(beta, **tensors):
    return tensors | {"log_decay": torch.zeros_like(beta), "beta": beta}


def _mamba2(q, k, v, log_decay):
    """Mamba-2 has decay A·dt, write strength dt and no scale: so A = −1, dt = −log_decay and x = v / dt."""
    dt, A = -log_decay.expand(v.shape[:3]), v.new_full(v.shape[2:3], -1.0)
    return {"hidden_states": v / dt[..., None], "dt": dt, "A": A, "B": k, "C": q * q.shape[-1] ** -0.5}


def _chunk_scan(f, S, **tensors):
    """Mamba-2's states are [B, H, V, K]."""
    S = None if S is None else S.transpose(-1, -2)
    out, S = f(**tensors, initial_states=S, return_final_states=True)
    return out, S.transpose(-1, -2)


def _lightning(q, k, v, log_decay):
    """MiniMax's recurrence sits inside its layer, whose one input is here q | k | v of each head; it has no scale."""
    return {"qkv": torch.cat([q * q.shape[-1] ** -0.5, k, v], -1).flatten(2), "slope_rate": -log_decay[:, None, None]}


def _lightning_core(layer_class, S, qkv, slope_rate):
    H = len(slope_rate)
    layer = _lightning_layer(layer_class, H, qkv.shape[-1] // (3 * H))
    if layer.slope_rate is not slope_rate:  # a layer computes its decays once, so only the first call here does
        layer.slope_rate = slope_rate
        layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(slope_rate)
    out, state = layer(qkv, None, None)
    return out.unflatten(-1, (H, -1)), state


@cache
def _lightning_layer(layer_class, heads, head_dim):
    """The layer with all but its recurrence taken out; its output gate cannot be, but sigmoid(∞) = 1."""
    config = importlib.import_module("transformers").MiniMaxConfig(
        num_attention_heads=heads, head_dim=head_dim, hidden_act="linear", num_hidden_layers=2, hidden_size=16
    )
    layer = layer_class(config, layer_idx=0)
    layer.qkv_proj = layer.norm = layer.out_proj = torch.nn.Identity()
    layer.output_gate = torch.nn.Identity()
    layer.output_gate.forward = lambda x: x.new_tensor(math.inf)
    return layer


FLA, HF = {"log_decay": "g"}, {"q": "query", "k": "key", "v": "value", "log_decay": "g"}
RWKV = {"log_decay": "w", "bonus": "u"}
QUADRATIC = (2048, 2048)  # memory grows with T²
LOOP = (512, 512)  # a Python loop over tokens: seconds a call, and its history for backward takes gigabytes


def _stateless(f, S, **tensors):
    result = f(**tensors)
    return (result[0] if isinstance(result, tuple) else result), None


def _unscaled(q, **tensors):
    """For a peer without a scale."""
    return tensors | {"q": q * q.shape[-1] ** -0.5}


def _multiplied(log_decay, **tensors):
    """For a peer that multiplies by the decay as it is given."""
    return tensors | {"decay": log_decay.exp()}


def _delta_net(log_decay, beta, **tensors):
    """For ggml, whose numbers per head have a dimension of their own."""
    return tensors | {"log_decay": log_decay if log_decay.dim() == 4 else log_decay[..., None], "beta": beta[..., None]}


def _wkv7(q, k, v, log_decay, beta):
    """RWKV-7 erases along a and writes along b, both free, and has no scale: a = −e^g k and b = β k make it KDA."""
    decay, written = log_decay.exp(), beta[..., None] * k
    return _unscaled(q) | {"decay": decay, "k": written, "v": v, "a": -decay * k, "b": written}


def ggml(family: str, function: str, prepare: Callable, **fields) -> Peer:
    """One of ggml's operators: C, token by token, forward alone."""
    return Peer(
        family, f"ggml:ops:{function}", prepare=prepare, call=_stateless, states=False, backward=False, square=True,
        dtypes=(torch.float32,), **fields,
    )  # fmt: skip


def _from_state(f, S, **tensors):
    return f(**tensors if S is None else tensors | {"state": S})


def node(family: str, rule: str, prepare: Callable = dict) -> Peer:
    """ONNX Runtime's LinearAttention: C++, forward alone."""
    source = f"onnxruntime:{rule}:LinearAttention"
    return Peer(family, source, prepare=prepare, call=_from_state, backward=False, dtypes=(torch.float32,))


def _vllm(**tensors):
    """vLLM's operator takes packed sequences: their bounds, and the rows of the states, which it overwrites."""
    B, T = tensors["v"].shape[:2]
    packed = {name: x.flatten(0, 1)[None] for name, x in tensors.items()}
    rows = torch.arange(B + 1, dtype=torch.int32)
    return packed | {"log_decay": packed["log_decay"].float(), "cu_seqlens": rows * T, "rows": rows[:B]}


def _chunk_cpu(f, S, q, k, v, log_decay, beta, cu_seqlens, rows):
    B, H, K, V = len(rows), *k.shape[2:], v.shape[-1]
    S = torch.zeros(B, H, K, V) if S is None else S.float()
    out, S = f(q, k, v, log_decay, beta, S, True, cu_seqlens, False, False, rows)
    return out.unflatten(1, (B, -1))[0], S


PEERS = [
    Peer(
        "linear", "idiap:causal_product:causal_product", prepare=_unscaled, states=False, heads_first=True,
        call=lambda f, S, q, k, v: (f(q, k, v), None),
    ),
    ggml("vector", "gated_linear_attn", _multiplied),
    ggml("bonus", "rwkv_wkv6", lambda **x: _multiplied(**_unscaled(**x))),
    ggml("gated-delta", "gated_delta_net", _delta_net),
    ggml("kda", "gated_delta_net", _delta_net, note="a decay per key"),
    ggml("kda", "rwkv_wkv7", _wkv7, multiple=64),
    *(
        node(family, rule, prepare)
        for family, rule, prepare in (
            ("linear", "linear", dict), ("fixed", "gated", _per_token), ("scalar", "gated", dict),
            ("vector", "gated", dict), ("delta", "delta", dict), ("gated-delta", "gated_delta", dict),
            ("kda", "gated_delta", dict),
        )
    ),
    Peer(
        "gated-delta", "vllm:cpu:chunk_gated_delta_rule_cpu", prepare=_vllm, call=_chunk_cpu, backward=False,
        square=True, multiple=64, dtypes=(torch.bfloat16,),
    ),
    Peer("linear", "fla:linear_attn/naive:naive_chunk_linear_attn", call=_stateless, states=False, dtypes=EXACT),
    Peer("linear", "fla:linear_attn/naive:naive_recurrent_linear_attn", upto=LOOP),
    Peer(
        "normalized", "fla:linear_attn/naive:naive_chunk_linear_attn", states=False,
        call=lambda f, S, **x: (f(**x, normalize=True), None),
    ),
    Peer(
        "normalized", "fla:linear_attn/naive:naive_recurrent_linear_attn", states=False, upto=LOOP,
        call=lambda f, S, **x: f(**x, normalize=True),
    ),
    Peer(
        "fixed", "transformers:minimax:MiniMaxLightningAttention", prepare=_lightning, call=_lightning_core,
        states=False, dtypes=EXACT, square=True,
    ),
    Peer("fixed", "transformers:mamba2:mamba2_chunk_scan", prepare=_mamba2, call=partial(_chunk_scan, chunk_size=256)),
    Peer("fixed", "fla:simple_gla/naive:naive_chunk_simple_gla", FLA, _per_token),
    Peer(
        "fixed", "fla:retention/naive:naive_retention", prepare=lambda log_decay, **x: x, call=_stateless,
        heads_first=True, states=False, upto=QUADRATIC,
    ),
    Peer(
        "scalar", "transformers:mamba2:mamba2_chunk_scan", prepare=_mamba2, call=partial(_chunk_scan, chunk_size=256),
        note="chunk 256",
    ),
    Peer(
        "scalar", "transformers:mamba2:mamba2_chunk_scan", prepare=_mamba2, call=partial(_chunk_scan, chunk_size=64),
        note="chunk 64",
    ),
    Peer("scalar", "fla:simple_gla/naive:naive_chunk_simple_gla", FLA),
    Peer(
        "scalar", "fla:simple_gla/naive:naive_parallel_simple_gla", FLA, call=_stateless, states=False, upto=QUADRATIC
    ),
    Peer("scalar", "fla:simple_gla/naive:naive_recurrent_simple_gla", FLA, upto=LOOP),
    Peer("vector", "fla:gla/naive:naive_recurrent_gla", {"log_decay": "gk"}, upto=(2048, 512)),
    Peer("bonus", "fla:rwkv6/recurrent_naive:naive_recurrent_rwkv6", RWKV, heads_first=True, upto=(2048, 512)),
    Peer(
        # Its backward writes over what it needs; it has no scale.
        "bonus", "fla:rwkv6/chunk_naive:naive_chunk_rwkv6", RWKV, _unscaled, _stateless,
        heads_first=True, states=False, backward=False,
    ),
    Peer(
        "delta", "fla:delta_rule/naive:delta_rule_chunkwise", call=lambda f, S, **x: f(**x), heads_first=True,
        states=False, dtypes=EXACT,
    ),
    Peer("delta", "fla:delta_rule/naive:delta_rule_recurrence", heads_first=True, upto=LOOP),
    Peer("delta", "transformers:qwen3_next:torch_chunk_gated_delta_rule", HF, _no_decay),
    Peer("gated-delta", "transformers:qwen3_next:torch_chunk_gated_delta_rule", HF),
    Peer("gated-delta", "transformers:qwen3_next:torch_recurrent_gated_delta_rule", HF, upto=(2048, 512)),
    Peer("gated-delta", "fla:gated_delta_rule/naive:naive_chunk_gated_delta_rule", FLA),
    Peer("gated-delta", "fla:gated_delta_rule/naive:naive_recurrent_gated_delta_rule", FLA, upto=LOOP),
    Peer("kda", "transformers:kimi_linear:chunk_kimi_delta_attention", HF, upto=(2048, 2048)),
    Peer("kda", "transformers:kimi_linear:recurrent_kimi_delta_attention", HF, upto=(2048, 512)),
    Peer("kda", "fla:kda/naive:naive_chunk_kda", FLA, upto=(2048, 2048)),
    Peer("kda", "fla:kda/naive:naive_recurrent_kda", FLA, upto=LOOP),
]  # fmt: skip

# What softmax attention takes on the same shapes. It is another function, so it stands outside the table. PyTorch has a
# fast kernel for K = V alone; the other is T² in memory.
ATTENTION = Peer(
    "attention", "torch:nn.functional:scaled_dot_product_attention", {"q": "query", "k": "key", "v": "value"},
    lambda q, k, v, **_: {"q": q, "k": k, "v": v}, lambda f, S, **x: (f(**x, is_causal=True), None), heads_first=True,
    states=False, dtypes=EXACT, square=True,
)  # fmt: skip
