"""Turns attention layers of a trained model into linear mixers, which take over their projections.

A new layer has the old one's q, k, v and o, with their biases, norms and rotation. k and v of grouped heads are
repeated, so that each head has a memory of its own; a mixer with a window has grouped heads too. What the old layer
does not have begins as in a new model, except a short convolution, which begins as the identity. A new layer
computes something else than the old one, until `training.transfer` has trained it to imitate that.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import zoo
from ..extra.late_norm import LateNormSpec
from ..extra.linearized import LinearizedSpec
from ..extra.specs.latent import LatentSpec
from ..extra.windowed import WindowedSpec
from ..files.quiet import quiet
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..layers.attention.attention import SoftmaxAttention
from ..layers.linear.mixer import LinearMixer
from ..layers.norms import OffsetRMSNorm
from ..spec.attention import AttentionSpec, Rope
from ..spec.expression import expression
from ..spec.linear import MixerSpec
from ..spec.serialize import to_json
from ..utils.errors import InputError, require, shown

# The gate of an attention layer -> read.gate.
GATES: dict[str, Any] = {"none": None, "channel": "sigmoid", "head": "sigmoid-head"}


def linearize(model: HeadraceForCausalLM, mixer: str | MixerSpec, layers: Iterable[int] | None = None) -> Any:
    """Returns a model whose attention layers are linear mixers.

    Args:
        model: as `headrace.load` returns it. It is not changed.
        mixer: of the new layers, such as "hedgehog" or "gla": a MixerSpec, or its expression. Its sizes, biases and
            rotation become those of the old layers.
        layers: the indices of the layers; None: of all attention layers.

    Raises:
        InputError: an index names no attention layer, the mixer is not linear, it and a layer cannot be
            combined, it sets a field such as heads.count to another value than that of a layer, or the model is
            quantized or has adapters.
    """
    return deepcopy(with_linear_layers(model, mixer, layers))


def with_linear_layers(model: Any, mixer: str | MixerSpec, layers: Iterable[int] | None = None) -> Any:
    """The same, but all that stays of the model is shared with it."""
    config: Any = model.config
    adapted = any(hasattr(module, "base_layer") for module in model.modules())  # as in `quantize`
    require(not adapted, "the model has adapters; expected model.merge_and_unload()")
    chosen = replaceable(config) if layers is None else sorted({*layers})
    changed = linear_config(config, mixer, chosen)
    parts = tuple(f"model.backbone.layers.{i}.mixer." for i in chosen)
    kept = {name: value for name, value in model.state_dict().items() if not name.startswith(parts)}
    blank = {name: torch.zeros((), dtype=x.dtype).expand(x.shape) for name, x in kept.items()}
    with quiet():
        result: Any = HeadraceForCausalLM.from_pretrained(None, config=changed, state_dict=blank, dtype=model.dtype)
    loaded = result.load_state_dict(kept, strict=False, assign=True)  # from_pretrained would copy it from a GPU
    if other := loaded.unexpected_keys:
        raise InputError(f"the model has {other[0]}, as a quantized one; expected a model as headrace.load returns it")
    result.tie_weights()
    result.to(model.device).generation_config = model.generation_config
    for i in chosen:
        _fill(result.model.backbone.layers[i].mixer, attention_of(model)[i])
    return result


def linear_config(config: HeadraceConfig, mixer: str | MixerSpec, chosen: list[int]) -> HeadraceConfig:
    """Returns the configuration of the model that `linearize` makes. Raises InputError as it does."""
    spec, known = _linear(mixer), ", ".join(map(str, replaceable(config)))
    stack: list[Any] = config.stack.over(config.num_hidden_layers)
    if not chosen:
        raise InputError(f"layers=[] makes no layer linear; expected some of {known}")
    for i in chosen:
        if not 0 <= i < len(stack) or not isinstance(stack[i].mixer, AttentionSpec):
            raise InputError(f"layer {i} is no layer of softmax attention; expected one of {known}")
        _check_form(stack[i].mixer, i)
        try:
            new = _taken_over(spec, stack[i].mixer, config)
            _refuse_other_values(mixer, spec, new, config)
            new.head_dims(config.hidden_size, config.num_heads)
        except InputError as error:
            raise InputError(f"mixer={shown(mixer)} cannot take over layer {i}: {error}") from None
        stack[i] = replace(stack[i], mixer=new)
    changed = {"mixer": [to_json(layer) for layer in stack], "converted_from": None}  # there is no way back
    return HeadraceConfig.from_dict(config.to_dict() | changed)  # type: ignore[return-value]


def replaceable(config: HeadraceConfig) -> list[int]:
    """The same as `attention_layers`; InputError if there is none."""
    if found := attention_layers(config):
        return found
    latent = any(isinstance(spec, LatentSpec) for spec in config.mixers)
    reason = ": its k and v are projections of a normalized latent, which no linear mixer has" if latent else ""
    raise InputError(f"the model has no attention layer that could become linear{reason}")


def attention_layers(config: HeadraceConfig) -> list[int]:
    """Returns the indices of the layers of softmax attention."""
    layers = config.stack.over(config.num_hidden_layers)
    return [i for i, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec)]


def attention_of(model: Any) -> dict[int, SoftmaxAttention]:
    """Returns the layers of softmax attention by their indices."""
    return {i: model.model.backbone.layers[i].mixer for i in attention_layers(model.config)}


def _linear(mixer: str | MixerSpec) -> MixerSpec:
    spec: Any = zoo.mixer(mixer)
    if not isinstance(spec, MixerSpec):
        raise InputError(
            f"mixer={mixer!r} has no q, k and v of heads, which it could take over; expected a linear mixer"
        )
    if type(spec) not in (MixerSpec, LinearizedSpec, WindowedSpec):
        raise InputError(f"mixer={mixer!r} adds steps to linear attention; expected one without, such as gla")
    if spec.inputs.key != "projected":
        raise InputError(f"mixer={mixer!r} has no k to take over: inputs.key={spec.inputs.key!r}; expected 'projected'")
    return spec


def _check_form(old: AttentionSpec, i: int) -> None:
    for name, usual in (("buckets", None), ("forget", False), ("form", "sdpa")):
        if (value := getattr(old, name)) != usual:
            raise InputError(f"layer {i} has {name}={value!r}, which no linear mixer has; expected it among --keep")


def _refuse_other_values(mixer: str | MixerSpec, spec: MixerSpec, new: MixerSpec, config: HeadraceConfig) -> None:
    """Raises InputError for a value that the mixer sets and the new layer, which has those of the old one, does not
    have. What a name of the zoo stands for is not set."""
    for name in expression(mixer, "mixer")[1] if isinstance(mixer, str) else ("heads.count", "rope.theta"):
        both: list[Any] = [spec, new]
        value, has = (reduce(lambda x, part: getattr(x, part, None), name.split("."), one) for one in both)
        if name == "rope.theta":
            has = (has or config.rope_theta) if new.inputs.rotary else None
        require(value in (None, has), f"{name}={value}, and the layer has {has}; expected the same")


def _taken_over(spec: MixerSpec, old: AttentionSpec, config: HeadraceConfig) -> MixerSpec:
    """Returns the spec of the layer that takes over an attention layer."""
    H, (d, _) = old.num_heads(config.hidden_size, config.num_heads), old.head_dims(config.hidden_size, config.num_heads)
    learned = spec.map if isinstance(spec, LinearizedSpec) else "none"
    mapped = learned != "none" or spec.inputs.feature_map != "identity"
    heads = replace(
        spec.heads, count=H, key_dim=d, expand_v=H * d / config.hidden_size, qk_groups=None, width=None, expand_k=1.0
    )
    norm: Any = "head" if old.qk_norm == "head-offset" else old.qk_norm
    if isinstance(old, LateNormSpec):
        norm = "late" if old.weights and old.rotary else "head"
    first = old.rotary and (mapped or norm == "late")
    inputs = replace(spec.inputs, bias=old.bias in (True, "qkv"), rotary=old.rotary, rotary_first=first)
    read = replace(spec.read, bias=old.bias in (True, "o"))
    if gate := GATES[old.gate]:
        read = replace(read, gate=gate, gate_bias=gate != "sigmoid-head")  # in_proj may have one
    changed: dict[str, Any] = {f.name: getattr(spec, f.name) for f in fields(MixerSpec)}
    changed |= {"heads": heads, "inputs": inputs, "read": read}
    own: dict[str, Any] = {"qk_norm": norm, "rope": _fixed(old.rope), "map": learned}
    plain = own == {"qk_norm": "none", "rope": Rope(), "map": "none"}
    if isinstance(spec, WindowedSpec):
        return WindowedSpec(**changed, **own, window=spec.window, kv_heads=old.kv_heads)
    return MixerSpec(**changed) if plain else LinearizedSpec(**changed, **own)


def _fixed(rope: Rope) -> Rope:
    """Returns the frequencies of short sequences: a memory cannot turn its keys again when a sequence grows."""
    return Rope(theta=rope.theta, dims=rope.dims) if rope.kind == "dynamic" else replace(rope, long=rope.short)


def _fill(new: Any, old: Any) -> None:
    """Copies an attention layer's weights into a linear mixer."""
    factor, sizes = _logit_factor(new, old), [*new.parts.values()]
    names = {"q": old.q_proj, "k": old.k_proj, "v": old.v_proj} | ({"gate": old.g_proj} if old.g_proj else {})
    with torch.no_grad():
        for kind in ("weight", "bias"):
            whole = getattr(new.in_proj, kind)
            parts = dict(zip(new.parts, () if whole is None else whole.split(sizes), strict=whole is not None))
            for name, module in names.items():
                if (rows := getattr(module, kind)) is not None:
                    _copy(parts[name], rows * factor if name == "q" and old.q_norm is None else rows, new)
            if getattr(old.o_proj, kind) is not None:
                getattr(new.o_proj, kind).copy_(getattr(old.o_proj, kind))
        for name in ("q_norm", "k_norm"):
            if (norm := getattr(old, name)) is not None:
                weights = getattr(new, name).weight
                weight = torch.ones_like(weights) if norm.weight is None else norm.weight
                weight = weight + isinstance(norm, OffsetRMSNorm)
                _copy(weights, weight * factor if name == "q_norm" else weight, new)
        if new.conv is not None:
            new.conv.weight.zero_()
            new.conv.weight[..., -1] = 1
            if new.conv.bias is not None:
                new.conv.bias.zero_()


def _copy(part: Tensor, rows: Tensor, new: Any) -> None:
    """Copies rows, those of a head of k or v to all heads that share it, and to all steps of a token."""
    if part.shape != rows.shape:
        steps = new.spec.write.steps
        heads = rows.unflatten(0, (-1, 1, new.K)).repeat_interleave(len(part) // (steps * len(rows)), 0)
        rows = heads.repeat_interleave(steps, 1).flatten(0, 2)
    part.copy_(rows)


def _logit_factor(new: LinearMixer, old: SoftmaxAttention) -> float:
    """Returns the factor of q by which q · k times the new layer's factor is the old layer's logit."""
    scale, d = old.spec.scale, new.K
    factor = scale if isinstance(scale, float) else {"key": d**-0.5, "one": 1.0, "half-key": (d / 2) ** -0.5}[scale]
    return factor / new.logit_scale
