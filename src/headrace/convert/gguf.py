"""GGUF files of llama.cpp, read as what transformers would have saved: config.json, tensors and generation settings.

The keys of the metadata are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..files.checks import misfit
from ..layers.rotary import DEFAULT, frequencies
from ..ops.checks import require
from ..spec.attention import Rope
from ..utils.errors import InputError, reading
from ..utils.integrity import short
from .fields import Config
from .files import Header, Tensors
from .rotary import rope_parameters

# The metadata of an architecture, in the form of `misfit`.
FORM = {
    "block_count": int, "context_length": int, "embedding_length": int, "feed_forward_length": int, "vocab_size?": int,
    "attention.head_count": int, "attention.head_count_kv?": int, "attention.key_length?": int,
    "attention.value_length?": int, "attention.layer_norm_rms_epsilon": float, "rope.dimension_count?": int,
    "rope.freq_base?": float, "rope.scaling.type?": str, "rope.scaling.factor?": float,
    "rope.scaling.original_context_length?": int, "rope.scaling.finetuned?": bool, "tensor_data_layout?": str,
    "rope.scaling.yarn_beta_fast?": float, "rope.scaling.yarn_beta_slow?": float,
}  # fmt: skip
# Keys -> fields of config.json of the same values.
FIELDS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")  # ends of a text, of a turn and of a message, at each of which a model stops
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
# Fields that a class may have -> a module with such biases.
BIASES = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
EMBEDDING, FACTORS = "token_embd.weight", "rope_freqs.weight"  # the latter divide the rotary frequencies
SLIDING, SLIDING_BASE = "attention.sliding_window", "rope.freq_base_swa"  # older files have no base
HALF = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}


class Architecture(NamedTuple):
    """What llama.cpp calls an architecture.

    model_type: in transformers.
    interleaved: whether llama.cpp rotates neighbors: q and k have the two halves of a head interleaved.
    offset: what the file's weights of norms have more than those of transformers.
    names: modules of a layer -> transformers' names, where they are not those of LAYER_NAMES.
    form: further metadata, in the form of `misfit`.
    fields: a function of the metadata and of the fields of config.json that returns other fields."""

    model_type: str
    interleaved: bool = False
    offset: float = 0.0
    names: Mapping[str, str] = {}
    form: Mapping[str, Any] = {}
    fields: Callable[[Config, Config], Config] = lambda c, described: {}


def _gemma3(c: Config, described: Config) -> Config:
    """Returns what llama.cpp's code has of Gemma 3, and a file lacks: which layers have a window, the scale of the
    model of 27B, which has 62 layers, and, in older files, the rotation of layers with a window."""
    layers, scale = c["block_count"], described["head_dim"]
    local = {"rope_type": "default", "rope_theta": c.get(SLIDING_BASE, 10000.0)}
    return {
        "sliding_window": c[SLIDING],
        "layer_types": [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(layers)],
        "query_pre_attn_scalar": c["embedding_length"] // c["attention.head_count"] if layers == 62 else scale,
        "rope_parameters": {"full_attention": described["rope_parameters"], "sliding_attention": local},
    }


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "arcee": Architecture("arcee", interleaved=True),
    "seed_oss": Architecture("seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    "gemma3": Architecture(
        "gemma3_text", offset=1.0, form={SLIDING: int, f"{SLIDING_BASE}?": float}, fields=_gemma3,
        names={"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
               "post_ffw_norm": "post_feedforward_layernorm"},
    ),
}  # fmt: skip


class GGUFFile(Tensors):
    """A file, mapped into memory: a tensor is read and dequantized when it is asked for.

    metadata: the values by their keys.
    described: the fields of config.json.
    headers: the tensors, by their names in transformers.

    Raises InputError for a file that is incomplete or a part of a model, and for an architecture, a key or a type of
    tensor that cannot be converted."""

    def __init__(self, path: Path):
        require(path.is_file(), "the file does not exist")
        with reading("it is not a GGUF file, or not a complete one"):
            reader = gguf.GGUFReader(path)
            self.metadata: Config = {key: field.contents() for key, field in reader.fields.items()}
        require(reader.byte_order == "I", "its byte order is not that of this machine")
        parts = self.metadata.get("split.count", 1)
        require(parts in (0, 1), f"it is one of {parts} parts of a model; join them by llama-gguf-split --merge")
        kind = self.metadata.get("general.architecture")
        require(kind in ARCHITECTURES, f"its architecture is {kind!r}; expected {', '.join(ARCHITECTURES)}")
        self._architecture = ARCHITECTURES[str(kind)]
        stored = {tensor.name: tensor for tensor in reader.tensors}
        _check_types(stored)
        factors = _values(stored.pop(FACTORS)) if FACTORS in stored else None
        self._tensors = {self._their_name(name): tensor for name, tensor in stored.items()}
        self.headers = {
            name: Header(path.name, [int(n) for n in reversed(x.shape)], HALF.get(x.tensor_type, torch.float32))
            for name, x in self._tensors.items()
        }
        self.described = self._describe(str(kind), factors)

    @property
    def kind(self) -> str:
        """The model_type in transformers."""
        return self._architecture.model_type

    def token(self, kind: str) -> int | None:
        """Returns the id of a special token, by the name of its key."""
        return self.metadata.get(f"tokenizer.ggml.{kind}_token_id")

    def generation(self) -> GenerationConfig:
        """Returns the settings of generation: the special tokens."""
        ends = sorted({token for kind in ENDS if (token := self.token(kind)) is not None})
        special: Config = {"bos_token_id": self.token("bos"), "pad_token_id": self.token("padding")}
        return GenerationConfig(**special, eos_token_id=ends or None)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors with these names in transformers, with its order of rows."""
        heads = {"q_proj": self.described["num_attention_heads"], "k_proj": self.described["num_key_value_heads"]}
        for name in names:
            tensor, module = _values(self._tensors[name]), name.split(".")[-2]
            if self._architecture.interleaved and module in heads:
                tensor = tensor.unflatten(0, (heads[module], -1, 2)).transpose(1, 2).flatten(0, 2)
            if module.endswith("norm"):
                tensor = tensor - self._architecture.offset
            yield name, tensor.to(self.headers[name].dtype)

    def _describe(self, kind: str, factors: Tensor | None) -> Config:
        c = _own_metadata(self.metadata, kind)
        embedding, model_type = self._their_name(EMBEDDING), self._architecture.model_type
        require(embedding in self.headers, f"it has no tensor {EMBEDDING!r}")
        heads = c["attention.head_count"]
        derived = c["embedding_length"] // max(heads, 1)
        head_dim = c.get("attention.key_length", derived)
        for key in ("attention.value_length", "rope.dimension_count"):
            fitting = c.get(key, head_dim) == head_dim
            require(fitting, f"its {kind}.{key} is {c.get(key)}; expected {head_dim}, the size of a head's keys")
        described = {theirs: c[key] for key, theirs in FIELDS.items()} | {
            "model_type": model_type, "num_key_value_heads": c.get("attention.head_count_kv", heads),
            "vocab_size": self.headers[embedding].shape[0],
            "rms_norm_eps": _decimal(c["attention.layer_norm_rms_epsilon"]),
            "rope_parameters": _rope(c, head_dim, factors), "tie_word_embeddings": "lm_head.weight" not in self.headers,
        }  # fmt: skip
        if head_dim != derived or hasattr(CONFIG_MAPPING[model_type], "head_dim"):
            described["head_dim"] = head_dim
        known = {field: module for field, module in BIASES.items() if hasattr(CONFIG_MAPPING[model_type], field)}
        biases = {field: self._their_name(f"blk.0.{module}.bias") for field, module in known.items()}
        described |= {field: name in self.headers for field, name in biases.items()}
        described |= self._architecture.fields(c, described)
        special = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return described | {f"{ours}_token_id": self.token(theirs) for ours, theirs in special.items()}

    def _their_name(self, name: str) -> str:
        """Returns the name of a tensor in transformers, or an unknown one as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in NAMES:
            return f"{NAMES[stem]}.{kind}"
        block, i, module = [*stem.split("."), "", "", ""][:3]
        names = {**LAYER_NAMES, **self._architecture.names}
        known = block == "blk" and module in names
        return f"model.layers.{i}.{names[module]}.{kind}" if known else name


def _own_metadata(metadata: Config, kind: str) -> Config:
    """Returns the metadata of the architecture. InputError for what does not have the form, and for an unknown key."""
    prefix = f"{kind}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    form = {**FORM, **ARCHITECTURES[kind].form}
    wrong = misfit(own, form, f"the metadata of {kind}")
    require(wrong is None, str(wrong))
    if unknown := sorted(own.keys() - {name.removesuffix("?") for name in form}):
        named = f"{prefix}{unknown[0]}={short(own[unknown[0]])}"
        raise InputError(f"it has {named}, which may change what the model computes; expected only known keys")
    return own


def _check_types(stored: dict[str, Any]) -> None:
    """Raises InputError for a type of tensor that the package gguf cannot dequantize. Reads no tensor."""
    for kind, name in {tensor.tensor_type: name for name, tensor in stored.items()}.items():
        size = gguf.GGML_QUANT_SIZES[kind][1]
        with reading(f"tensor {name!r} has the type {kind.name}"):
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)


def _values(tensor: Any) -> Tensor:
    return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))


def _decimal(x: float) -> float:
    """Returns the shortest decimal number that float32 rounds to x: 1e-5 for 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _rope(c: Config, head_dim: int, factors: Tensor | None) -> Config:
    """Returns transformers' parameters of rotary positions."""
    theta = c.get("rope.freq_base", 10000.0)
    kind = c.get("rope.scaling.type", "linear" if "rope.scaling.factor" in c else "none")
    known = ("none",) if factors is not None else ("none", "linear", "yarn")  # llama.cpp would scale by both
    beside = "" if factors is None else f" beside {FACTORS!r}"
    require(kind in known, f"its rope.scaling.type is {kind!r}; expected {' or '.join(known)}{beside}")
    if factors is not None:
        return rope_parameters(_llama3(factors, theta, head_dim), theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    require("rope.scaling.factor" in c, f"it has rope.scaling.type={kind!r} and no rope.scaling.factor")
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": c["rope.scaling.factor"]}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = c.get("rope.scaling.original_context_length", c["context_length"])
        named = {f"beta_{end}": f"rope.scaling.yarn_beta_{end}" for end in ("fast", "slow")}
        scaled |= {theirs: c[key] for theirs, key in named.items() if key in c}
    return scaled


def _llama3(factors: Tensor, theta: float, head_dim: int) -> Rope:
    """Returns the frequencies of Llama 3.1 to 3.3, of which a file has only the factors. InputError for other ones."""
    rope = Rope("llama3", factor=float(factors.max()), original=8192, slow=1.0, fast=4.0)
    plain, divided = (frequencies(kind, theta, head_dim, torch.ones(1, 1)) for kind in (DEFAULT, rope))
    known = factors.shape == plain.shape and torch.allclose(factors.double(), plain / divided, rtol=1e-5)
    require(known, f"the factors in {FACTORS!r} are not those of Llama 3: no others can be converted")
    return rope
