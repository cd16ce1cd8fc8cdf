"""GGUF, the file format of llama.cpp, for the models of which llama.cpp has an architecture."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor

from .. import zoo
from ..convert import load
from ..convert.checkpoint import read_tokenizer
from ..extra.rwkv7 import RANKS, RWKV7
from ..extra.specs.matrix import MatrixSpec
from ..ops.checks import require
from ..spec.linear import MixerSpec
from ..spec.stack import Layer, as_style
from ..utils.errors import InputError

NAME = "model.gguf"
HEAD = 32  # head dimension of `identity_layer`
Settings = dict[str, Any]
Tensors = dict[str, Tensor]


class Architecture(NamedTuple):
    """An architecture of llama.cpp."""

    mixer: str  # name in the zoo of the mixer that it computes, of which the sizes may differ
    settings: Callable[[Any], Settings]  # settings of a model, by their names in GGUF without the architecture's
    layer: Callable[[Any], Tensors]  # tensors of a mixer, by their names in GGUF without the layer's
    mlp: str = "swiglu"  # kind of MLP
    mlp_norm: str = "ffn_norm.weight"  # name of the norm before the MLP
    last: Callable[[Any], Tensors] = lambda model: {}  # tensors of one more layer


def state_space(model: Any) -> Settings:
    """The settings of Mamba-2 and Gated DeltaNet."""
    mixer = model.model.backbone.layers[0].mixer
    sizes = {"state_size": mixer.K, "time_step_rank": mixer.H, "group_count": mixer.Hq, "inner_size": mixer.H * mixer.V}
    return {f"ssm.{name}": n for name, n in sizes.items()} | {"ssm.conv_kernel": mixer.spec.inputs.conv}


def gated_deltanet_settings(model: Any) -> Settings:
    mixer, n = model.model.backbone.layers[0].mixer, model.config.num_hidden_layers
    dims = f"key dimension {mixer.K} and value dimension {mixer.V} per head"
    require(mixer.K == mixer.V, f"--to gguf: {dims}; llama.cpp needs equal ones for gated-deltanet")
    return state_space(model) | {
        "block_count": n + 1, "attention.recurrent_layers": [True] * n + [False], "attention.head_count": 1,
        "attention.head_count_kv": 1, "attention.key_length": HEAD, "attention.value_length": HEAD,
        "rope.dimension_count": HEAD, "rope.dimension_sections": [HEAD // 4, HEAD // 4, 0, 0],
    }  # fmt: skip


def gated_deltanet_layer(mixer: Any) -> Tensors:
    def tiled(x: Tensor, size: int = 1, dim: int = 0) -> Tensor:
        """Orders value heads as llama.cpp does: the first of every key head, then the second of every key head, ..."""
        return x.unflatten(dim, (mixer.Hq, -1, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    V, qk, conv = mixer.V, 2 * mixer.Hq * mixer.K, mixer.conv.weight[:, 0]
    return {
        "attn_qkv.weight": torch.cat([mixer.part("q"), mixer.part("k"), tiled(mixer.part("v"), V)]),
        "attn_gate.weight": tiled(mixer.part("gate"), V),
        "ssm_conv1d.weight": torch.cat([conv[:qk], tiled(conv[qk:], V)]),
        "ssm_beta.weight": tiled(mixer.part("beta")),
        "ssm_alpha.weight": tiled(mixer.part("decay")),
        "ssm_a": -tiled(mixer.decay.A_log).exp(),
        "ssm_dt.bias": tiled(mixer.decay.dt_bias),
        "ssm_norm.weight": mixer.norm_weight,
        "ssm_out.weight": tiled(mixer.o_proj.weight, V, 1),
    }


def identity_layer(model: Any) -> Tensors:
    """A layer of softmax attention that adds 0 to its input: llama.cpp's graph of Gated DeltaNet needs attention."""
    D, width = model.config.hidden_size, model.config.intermediate_size
    shapes = {
        "attn_q": (2 * HEAD, D), "attn_k": (HEAD, D), "attn_v": (HEAD, D), "attn_output": (D, HEAD),
        "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,), "attn_norm": (D,), "post_attention_norm": (D,),
        "ffn_gate": (width, D), "ffn_up": (width, D), "ffn_down": (D, width),
    }  # fmt: skip
    return {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


def mamba2_layer(mixer: Any) -> Tensors:
    require(mixer.Hq == 1, f"--to gguf: heads.qk_groups={mixer.Hq}; llama.cpp needs 1, as it norms groups separately")

    def vkq(x: Tensor) -> Tensor:
        q, k, v = x.split([mixer.K, mixer.K, mixer.H * mixer.V])
        return torch.cat([v, k, q])

    return {
        "ssm_in.weight": torch.cat([mixer.part(name) for name in ("gate", "v", "k", "q", "decay")]),
        "ssm_conv1d.weight": vkq(mixer.conv.weight[:, 0]),
        "ssm_conv1d.bias": vkq(mixer.conv.bias),
        "ssm_dt.bias": mixer.decay.dt_bias,
        "ssm_a": -mixer.decay.A_log.exp()[:, None],
        "ssm_d": mixer.skip[:, None],
        "ssm_norm.weight": mixer.norm_weight[None],
        "ssm_out.weight": mixer.o_proj.weight,
    }


def rwkv7_settings(model: Any) -> Settings:
    mixer, last = (model.model.backbone.layers[i].mixer for i in (0, -1))
    require(mixer.K == 64, f"--to gguf: head dimension {mixer.K}; llama.cpp computes rwkv7 only for 64")
    value = last.value or mixer.rate
    ranks = {"decay": mixer.decay, "iclr": mixer.rate, "value_residual_mix": value, "gate": mixer.gate}
    own = {f"attention.{name}_lora_rank": part.down.shape[1] for name, part in ranks.items()}
    return own | {"wkv.head_size": mixer.K, "token_shift_count": 1}


def rwkv7_layer(mixer: RWKV7) -> Tensors:
    own = {
        "w0": mixer.decay_bias, "a0": mixer.rate_bias, "k_k": mixer.k_read, "k_a": mixer.k_rate, "r_k": mixer.bonus,
        "lerp_fused": mixer.mix[:, None, None], "key": mixer.k_proj.weight, "value": mixer.v_proj.weight,
        "receptance": mixer.q_proj.weight, "output": mixer.o_proj.weight, "ln": mixer.norm_weight,
    }  # fmt: skip
    # llama.cpp loads the tensors of the value residual of the first layer, with the rank of a, and does not use them.
    own["v0"] = mixer.rate_bias if mixer.value_bias is None else mixer.value_bias
    for name, part in {"w": mixer.decay, "a": mixer.rate, "v": mixer.value or mixer.rate, "g": mixer.gate}.items():
        own |= {f"{name}1": part.down.T, f"{name}2": part.up.T}
    return {f"time_mix_{name}.weight": x for name, x in own.items()} | {"time_mix_ln.bias": mixer.norm_bias}


ARCHITECTURES = {
    "qwen35": Architecture(
        "gated-deltanet", gated_deltanet_settings, gated_deltanet_layer, mlp_norm="post_attention_norm.weight",
        last=identity_layer,
    ),
    "mamba2": Architecture("mamba2", state_space, mamba2_layer, "none"),
    "arwkv7": Architecture("rwkv7", rwkv7_settings, rwkv7_layer),
}  # fmt: skip


def export(checkpoint: Path, folder: Path) -> str:
    """Writes model.gguf in float32. Returns a sentence that says what was written.

    Raises InputError if llama.cpp has no architecture for the model, or no implementation of its tokenizer."""
    model = load(checkpoint)
    require(model.dtype != torch.float64, "the weights are float64, which --to gguf would round to float32")
    config, model = model.config, model.float()
    name, kind = architecture(config)
    settings: Settings = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size or 0,
        "attention.head_count": 0, "attention.layer_norm_rms_epsilon": config.norm_eps, **kind.settings(model),
    }  # fmt: skip
    writer = gguf.GGUFWriter(folder / NAME, name)
    add: dict[type, Callable[[str, Any], None]]
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in settings.items():
        add[type(value)](f"{name}.{key}", value)
    _add_tokenizer(writer, checkpoint, config.vocab_size)
    for key, tensor in tensors(model, kind).items():
        writer.add_tensor(key, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{NAME} has the architecture {name} of llama.cpp, in float32"


def architecture(config: Any) -> tuple[str, Architecture]:
    """Returns llama.cpp's architecture for a model, with its name. Raises InputError if it has none."""
    spec, layers, fitting = config.mixers[0], config.stack.over(config.num_hidden_layers), 0
    for name, kind in ARCHITECTURES.items():
        named: Any = zoo.get(kind.mixer)
        if isinstance(spec, MixerSpec) and isinstance(named, MixerSpec):
            named = replace(named, heads=spec.heads, inputs=replace(named.inputs, conv=spec.inputs.conv or 4))
        elif isinstance(spec, MatrixSpec) and isinstance(named, MatrixSpec):
            named = replace(named, count=spec.count, **{name: getattr(spec, name) for name in RANKS})
        first = next((i for i, layer in enumerate(layers) if layer != Layer(named)), None)
        if first is None:
            expected = f"expected style.mlp={kind.mlp!r}, and defaults otherwise"
            require(config.sizes.style == as_style({"mlp": kind.mlp}), f"--to gguf with {kind.mixer}: {expected}")
            return name, kind
        fitting = max(fitting, first)
    known = f"expected {', '.join(kind.mixer for kind in ARCHITECTURES.values())} in all layers"
    if any(getattr(each, "competition", None) for each in config.mixers):
        raise InputError(f"--to gguf: llama.cpp has no architecture for head competition; {known}")
    part = zoo.name_of(layers[fitting].mixer) if layers[fitting].mlp != "experts" else "a mixture of experts"
    source, reader = (config.converted_from or {}).get("model_type"), "for llama.cpp's own converter"
    way = "" if source is None else f", or `headrace convert --to {source}` {reader}"
    raise InputError(f"--to gguf cannot write layer {fitting} of the model, which has {part}; {known}{way}")


def tensors(model: Any, kind: Architecture) -> Tensors:
    """Returns the tensors of a GGUF file by their names."""
    layers = []
    for block in model.model.backbone.layers:
        own = kind.layer(block.mixer) | {"attn_norm.weight": block.mixer_norm.weight}
        if block.mlp is not None:
            own[kind.mlp_norm] = block.mlp_norm.weight
            own |= {f"ffn_{n}.weight": getattr(block.mlp, f"{n}_proj").weight for n in ("gate", "up", "down")}
        layers.append(own)
    by_name = {f"blk.{i}.{name}": x for i, own in enumerate([*layers, kind.last(model)]) for name, x in own.items()}
    inner = model.model
    outside = {"token_embd": inner.embed_tokens, "output_norm": inner.backbone.norm, "output": model.lm_head}
    return by_name | {f"{name}.weight": module.weight for name, module in outside.items()}


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int) -> None:
    """Adds a byte-level BPE tokenizer that splits text as GPT-2's. Raises InputError for other tokenizers."""
    tokenizer = read_tokenizer(checkpoint)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model, split = described["model"], described["pre_tokenizer"] or {}
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}.items() <= split.items()
    options = map(model.get, ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    plain = model["type"] == "BPE" and described["normalizer"] is None and not any(options)
    require(gpt2 and plain, "--to gguf needs a tokenizer of byte-level BPE that splits text as GPT-2's")
    names = {i: name for name, i in tokenizer.get_vocab().items()}
    types = dict.fromkeys(names, gguf.TokenType.NORMAL)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    types |= {token["id"]: kinds[token["special"]] for token in described["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[unused {i}]") for i in range(vocab_size)])
    writer.add_token_types([types.get(i, gguf.TokenType.UNUSED) for i in range(vocab_size)])
    # llama.cpp needs the merges, and the writer omits an empty list
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]] or [""])
    _add_ends(writer, tokenizer)
    if template := tokenizer.chat_template:  # or several by name
        several = isinstance(template, dict) and [{"name": name, "template": one} for name, one in template.items()]
        writer.add_chat_template(several or template)


def _add_ends(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    """Adds the tokens that begin and end a text, and whether the tokenizer adds them to one."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    require(eos is not None, "--to gguf needs a tokenizer with an eos token, in whose place llama.cpp takes another")
    text, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    begins, ends = whole[:1] == [bos], whole[-1:] == [eos]
    others = f"--to gguf: the tokenizer makes {whole} of {text}; llama.cpp adds bos ({bos}) and eos ({eos}) alone"
    require(whole == [bos] * begins + text + [eos] * ends, others)
    if bos is not None:  # also of a chat template alone, which would get another
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
