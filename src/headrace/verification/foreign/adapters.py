"""Adapters of other libraries' layers and models. The snippets of broken laws contain their source, which therefore
uses those libraries alone."""

import inspect
import re
import sys
from typing import Any


class NotOfferedError(NotImplementedError):
    """A model lacks what a law needs. PyTorch raises NotImplementedError itself, for operators without a kernel."""


def causal_lm(model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """A random language model of transformers. On a CPU it takes its PyTorch path: FLA's kernels need a GPU."""
    import torch

    cpu, fla = not torch.cuda.is_available(), sys.modules.get("fla")
    if cpu:
        sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

        config = AutoConfig.for_model(model_type, **sizes)
        has_head = type(config) in AutoModelForCausalLM._model_mapping
        model = (AutoModelForCausalLM if has_head else AutoModel).from_config(config)
    finally:
        if cpu:
            del sys.modules["fla"]
        if fla is not None:
            sys.modules["fla"] = fla
    takes = inspect.signature(model.forward).parameters
    memory = next(name for name in ("cache", "past_key_values", "cache_params", "state") if name in takes)

    has_dynamic_cache = memory != "state" and model_type not in ("minimax", "xlstm")

    def forward(model, x, state=None, mask=None, cu_seqlens=None, positions=None, use_cache=True):
        if state is None and use_cache and has_dynamic_cache:
            state = DynamicCache(config=model.config)
        given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x, memory: state, "use_cache": use_cache}
        if mask is not None:
            if "attention_mask" not in takes or model_type == "rwkv":  # which warns that it does not use it
                raise NotOfferedError("its forward does not use attention_mask")
            given["attention_mask"] = mask if "position_ids" in takes else mask[:, -x.shape[1] :]
            if "position_ids" in takes:  # as `generate` counts them
                given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -x.shape[1] :]
        if positions is not None:
            if "position_ids" not in takes:
                raise NotOfferedError("its forward takes no position_ids")
            given["position_ids"] = positions
        if cu_seqlens is not None:  # as DataCollatorWithFlattening gives them
            lengths = cu_seqlens.diff()
            longest, ends = int(lengths.max()), cu_seqlens.int()
            given["seq_idx"] = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)[None].int()
            given["position_ids"] = torch.cat([torch.arange(n, device=x.device) for n in lengths])[None]
            given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        out = model(**given)
        return out.logits if has_head else out.last_hidden_state, out.get(memory, state)

    parts = {"module": model, "forward": forward, "vocabulary": model.config.vocab_size}
    parts |= {"reload": reloaded, "cast": cast, "reorder": reorder_rows}
    # zaya's states are inputs of the last token.
    parts["recurrent"] = (lambda state: []) if model_type == "zaya" else recurrent_states
    parts["embed"] = lambda model, ids: model.get_input_embeddings()(ids)
    return parts | ({"crop": lambda model, x, remove: crop_last(model, x, remove, memory)} if has_dynamic_cache else {})


def crop_last(model, x, remove, memory):
    """The cache of all but the last tokens of x, by its own means. memory: what the model calls the cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(x, **{memory: cache}, use_cache=True)
    if not cache.is_croppable:
        raise NotOfferedError("the cache says that it is not croppable")
    cache.crop(-remove)
    return cache


def reorder_rows(state, order):
    if not hasattr(state, "reorder_cache"):
        raise NotOfferedError("its state has no reorder_cache")
    state.reorder_cache(order)
    return state


def recurrent_states(state):
    """The tensors of a state that sum over tokens."""
    import torch

    if isinstance(state, list):  # RWKV's; the first two are inputs of the last token
        return state[2:]
    if hasattr(state, "linear_cache"):
        return [s for s in state.linear_cache if isinstance(s, torch.Tensor)]
    if hasattr(state, "rnn_state"):
        return [s for layer in state.rnn_state.values() for s in layer]
    sums = [getattr(layer, "recurrent_states", {}) for layer in state.layers]
    return [s for states in sums for s in states.values() if s is not None]


def reloaded(model):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder)


def cast(model, dtype):
    """As `from_pretrained` does: some parameters stay in float32. Grouped products of experts take no float64."""
    import torch

    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    names = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, parameter in model.to(dtype).named_parameters():
        if any(re.search(kept, name) for kept in names):
            parameter.data = parameter.data.float()
    return model


def layer_of_model(class_name: str, model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The first layer of a class in a random language model of transformers."""
    import torch

    model = causal_lm(model_type, sizes)["module"]
    layer = next((module for module in model.modules() if type(module).__name__ == class_name), None)
    if layer is None:
        raise ValueError(f"a small {model_type} has no {class_name}")
    takes = inspect.signature(layer.forward).parameters
    memory = next((name for name in ("cache", "past_key_values", "cache_params") if name in takes), None)

    def forward(layer, x, state=None, mask=None, cu_seqlens=None, use_cache=True):
        from transformers import DynamicCache

        given = {memory: DynamicCache(config=model.config) if state is None else state} if memory and use_cache else {}
        if mask is not None:
            if "attention_mask" not in takes:
                raise NotOfferedError("its forward takes no attention_mask")
            given["attention_mask"] = mask[:, -x.shape[1] :]
        if cu_seqlens is not None:
            if "kwargs" not in takes:
                raise NotOfferedError("its forward takes no boundaries of sequences")
            sequence = torch.arange(len(cu_seqlens) - 1, device=x.device).repeat_interleave(cu_seqlens.diff())
            given |= {"cu_seq_lens_q": cu_seqlens.int(), "seq_idx": sequence[None].int()}
        y = layer(x, **given)
        return y[0] if isinstance(y, tuple) else y, given.get(str(memory))

    def recurrent(state):
        return [s for s in getattr(state.layers[layer.layer_idx], "recurrent_states", {}).values() if s is not None]

    parts = {"module": layer, "forward": forward, "width": model.config.hidden_size, "recurrent": recurrent}
    stateless = {"forward": lambda layer, x, mask=None, cu_seqlens=None: forward(layer, x, None, mask, cu_seqlens)}
    return parts if memory else parts | stateless


def fla_layer(class_name: str) -> dict[str, Any]:
    """A layer of flash-linear-attention, with its default settings and 64 channels in two heads."""
    import fla.layers
    from fla.models.utils import Cache

    layer = getattr(fla.layers, class_name)
    takes = inspect.signature(layer.__init__).parameters
    layer = layer(layer_idx=0, **{name: n for name, n in (("hidden_size", 64), ("num_heads", 2)) if name in takes})

    def forward(layer, x, state=None, mask=None, cu_seqlens=None, use_cache=True):
        given = {"attention_mask": None if mask is None else mask[:, -x.shape[1] :], "cu_seqlens": cu_seqlens}
        if use_cache:
            given |= {"past_key_values": Cache() if state is None else state, "use_cache": True}
        y, _, state = layer(x, **given)
        return y, state

    return {"module": layer, "forward": forward, "width": 64}


# Functions of `causal_lm`, which a program of it needs.
HELPERS = (NotOfferedError, crop_last, reorder_rows, recurrent_states, reloaded, cast)
