"""What `headrace verify TARGET` takes: a model or layer of transformers, a layer of FLA, an adapter in a file."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...utils.errors import InputError, did_you_mean, reason, require
from .adapters import causal_lm, fla_layer, layer_of_model

SMALL = 5_000_000  # parameters of a model that is verified in a minute
FORMS = "transformers:MODEL_TYPE, transformers:LAYER, fla:LAYER or FILE.py:FUNCTION"

# Fields of configurations that make a model small. A model type gets those that its configuration has.
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "time_step_rank": 4, "mamba_dt_rank": 4, "num_heads": 4,
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "attention_hidden_size": 32, "context_length": 256,
    "lru_width": 32, "block_size": 16, "chunk_size": 16, "mamba_chunk_size": 16, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_num_heads": 4, "mamba_head_dim": 16, "sliding_window": 16,
}  # fmt: skip
LINEAR, FULL, CONV, HYBRID = "linear_attention", "full_attention", "conv", "hybrid"
SHARED = {
    "layers_block_type": [LINEAR, HYBRID] * 2, "attention_hidden_size": 64, "attention_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
WINDOWED = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "n_shared_experts": 1, "d_rel": 4,
    "rel_extent": 256, "sliding_window_size": 16, "unpadded_vocab_size": 64,
}  # fmt: skip
# What a model type needs besides: layers of each kind, and sizes that must agree.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": {}, "mamba": {}, "falcon_mamba": {}, "mamba2": {"head_dim": 16, "n_groups": 2},
    "rwkv": {}, "recurrent_gemma": {}, "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 4},
    "qwen3_5_text": {}, "qwen3_5_moe_text": {}, "qwen3_next": {},
    "qwen4_exp_text": {
        "layer_types": [LINEAR, "indexed_attention"] * 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 64, "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
        "ple_embed_dim": 32, "output_gate_type": "silu",
    },
    "olmo_hybrid": {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "kimi_linear": {"layer_types": [LINEAR, FULL] * 2, "num_key_value_heads": 4},
    "bailing_hybrid": {
        "layer_types": [LINEAR, FULL] * 2, "num_key_value_heads": 4, "num_expert_group": 2, "topk_group": 1,
    },
    "minimax": {}, "bamba": {"attn_layer_indices": [1, 3]}, "falcon_h1": {},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL] * 2}, "nemotron_h": {"n_groups": 2}, "zamba": SHARED,
    "zamba2": SHARED | {"n_mamba_heads": 4, "mamba_headdim": 16, "adapter_rank": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": [CONV, FULL] * 2, "full_attn_idxs": None}, "lfm2_moe": {"layer_types": [CONV, FULL] * 2},
    "lfm3": {}, "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "glm5_next_text": {
        "layer_types": [LINEAR, "indexed_attention"] * 2, "num_key_value_heads": 4, "qk_rope_head_dim": 0,
        "index_topk": 64, "index_kpool": 4, "index_head_dim": 8, "index_n_heads": 2, "n_shared_experts": 1,
        "hc_mult": 2,
    },
    "inkling_text": WINDOWED, "inkling2_text": WINDOWED,
    "lara_mini": {"layer_types": [LINEAR, "sliding_attention", LINEAR, FULL]},
}  # fmt: skip


class Target(NamedTuple):
    """An adapter and how a program without headrace makes it: a function of .adapters with arguments, or a file."""

    name: str
    function: Callable
    arguments: tuple = ()
    file: str | None = None

    def adapter(self) -> dict[str, Any]:
        return self.function(*self.arguments)


def target(name: str) -> Target:
    """Returns the target of a name in one of FORMS. InputError for one that is not known or cannot be imported."""
    library, _, what = name.rpartition(":")
    require(library and what, f"target={name!r}; expected {FORMS}")
    if library == "transformers":
        return Target(name, *_of_transformers(name, what))
    if library == "fla":
        return Target(name, *_of_fla(name, what))
    return Target(name, _of_file(library, what), (), library)


def sizes_of(model_type: str) -> dict[str, Any]:
    """Returns the fields that make a model of this type small."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type).to_dict()
    return {field: size for field, size in SIZES.items() if field in known} | MODELS.get(model_type, {})


def _of_transformers(name: str, what: str) -> tuple[Callable, tuple]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS

    if what in LANGUAGE_MODELS or what in MODELS:
        try:
            sizes = sizes_of(what)
            with torch.device("meta"):
                model = causal_lm(what, sizes)["module"]
            problem = "" if (size := sum(p.numel() for p in model.parameters())) <= SMALL else f"{size:,} parameters"
        except Exception as error:
            problem = reason(error)
        if problem:
            raise InputError(
                f"target={name!r}: no small model of this type can be made ({problem}); expected one of "
                f"{', '.join(MODELS)}, or a file with an adapter"
            )
        return causal_lm, (what, sizes)
    for model_type in MODELS:
        file = _modeling_file(model_type)  # not of every version of transformers
        if file.is_file() and re.search(rf"^class {re.escape(what)}\(", file.read_text("utf-8"), re.MULTILINE):
            arguments = what, model_type, sizes_of(model_type)
            with torch.device("meta"):
                layer = layer_of_model(*arguments)["module"]
            softmax = any(hasattr(module, "is_causal") for module in layer.modules())  # its mask has four dimensions
            for parameter in [*inspect.signature(layer.forward).parameters.values()][1:]:
                required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                if required or parameter.name in ("position_embeddings", *["attention_mask"] * softmax):
                    raise InputError(
                        f"target={name!r}: its forward needs {parameter.name}, which a layer alone does not have; "
                        f"expected transformers:{model_type}, the whole model"
                    )
            return layer_of_model, arguments
    meant = did_you_mean(what, [*LANGUAGE_MODELS])
    raise InputError(f"target={name!r}; expected a model type, or a layer of {', '.join(MODELS)}{meant}")


def _modeling_file(model_type: str) -> Path:
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    return Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"


def _of_fla(name: str, what: str) -> tuple[Callable, tuple]:
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.layers") is None:
        try:
            has = f"; fla-core {importlib.metadata.version('fla-core')} has the ops alone"
        except importlib.metadata.PackageNotFoundError:
            has = ""
        raise InputError(f"target={name!r} needs fla.layers, of the package flash-linear-attention{has}")
    layers = importlib.import_module("fla.layers")
    if not hasattr(layers, what):
        raise InputError(f"target={name!r}; expected a layer of fla.layers{did_you_mean(what, layers.__all__)}")
    return fla_layer, (what,)


def _of_file(path: str, function: str) -> Callable:
    if not re.search(r"\.py$", path) or not Path(path).is_file():
        fault = "is no Python file" if Path(path).is_file() else "does not exist"
        raise InputError(f"target={path + ':' + function!r}: {path!r} {fault}; expected {FORMS}")
    spec = importlib.util.spec_from_file_location(f"headrace_target_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(adapter := getattr(module, function, None)):
        raise InputError(f"target={path + ':' + function!r}: {path!r} has no function {function!r}")
    return adapter
