"""The language model in vLLM: headrace's blocks, with the states of their mixers in vLLM's cache.

Dimensions: R requests of a batch, T tokens of all requests one after another, D hidden size.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...layers.base import Carried, Mixer
from ...layers.blocks.stack import Backbone
from ...ops.checks import require

ALIGNMENT = 16  # bytes; vLLM lays the states of a layer one after another, and the next page after them


class CachedMixer(nn.Module, MambaBase):  # type: ignore[misc]
    """A mixer that reads the states of the requests from vLLM's cache and writes the next states there.

    mixer: a recurrent mixer, of which this module takes the place in a Block.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, mixer: Mixer, hidden_size: int, prefix: str):
        super().__init__()
        self.mixer, self.prefix, self.carries = mixer, prefix, mixer.carries
        token = next(mixer.parameters()).new_zeros(1, 1, hidden_size)
        with torch.no_grad():  # a sequence without tokens, whose state is the initial one, before a token
            _, state = mixer(token, cu_seqlens=torch.tensor([0, 0, 1], device=token.device))
        self.state_kind = type(state)
        first = {name: x[:1] for name, x in zip(state._fields, state, strict=True) if x is not None}
        self.initial = dict(sorted(first.items(), key=lambda item: -item[1].itemsize))
        self.kv_cache: tuple[Tensor, ...] = ()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape[1:]) for x in self.initial.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in self.initial.values())

    def state_bytes(self) -> int:
        """Returns the size of the state of one request."""
        return sum(x.nbytes for x in self.initial.values())

    def forward(self, x: Tensor, state: None = None, carried: Any = None, **unused: Any) -> tuple[Tensor, None]:
        """x [1, T, D] -> (y [1, T, D], None): the tokens of all requests, those that decode one token first. carried:
        what the layers below have left, separately for the requests that decode and for the others."""
        metadata_by_layer = get_forward_context().attn_metadata
        if metadata_by_layer is None:  # vLLM measures the memory of a forward pass
            return self.mixer(x)[0], None
        meta = metadata_by_layer[self.prefix]
        y, decoded, R = torch.zeros_like(x), meta.num_decodes, meta.num_decodes + meta.num_prefills
        slots, bounds = meta.state_indices_tensor[:R].long(), meta.query_start_loc[: R + 1].long()
        begins = meta.seq_lens[:R] == bounds.diff()
        lower = [None] * 2 if carried is None else vars(carried).setdefault("parts", (Carried(), Carried()))
        if decoded:
            y[0, :decoded] = self._run(x[0, :decoded, None], slots[:decoded], begins[:decoded], lower[0])[:, 0]
        if meta.num_prefills:
            many, rows = slice(decoded, R), slice(decoded, decoded + meta.num_prefill_tokens)
            y[:, rows] = self._run(x[:, rows], slots[many], begins[many], lower[1], bounds[decoded:] - decoded)
        return y, None

    def _run(self, x: Tensor, slots: Tensor, begins: Tensor, carried: Any, cu_seqlens: Tensor | None = None) -> Tensor:
        """Computes the mixer for requests with their states in `slots`; where `begins` is set, the request begins."""
        cached = dict(zip(self.initial, self.kv_cache, strict=True))
        state = self.state_kind(**{name: self._read(name, y, slots, begins) for name, y in cached.items()})
        also = {} if carried is None else {"carried": carried}
        y, state = self.mixer(x, state, cu_seqlens=cu_seqlens, in_place=True, **also)
        for name, place in cached.items():
            place[slots] = getattr(state, name)
        return y

    def _read(self, name: str, cached: Tensor, slots: Tensor, begins: Tensor) -> Tensor:
        rows = cached[slots]
        return torch.where(begins.view(-1, *[1] * (rows.dim() - 1)), self.initial[name].to(rows), rows)


class HeadraceForCausalLM(nn.Module, HasInnerState, IsAttentionFree):
    """The language model with the interface of vLLM."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".mixer.": ".mixer.mixer."})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        _check_settings(vllm_config)
        require(not config.sizes.style.head_bias, "the logits have biases; vLLM serves headrace without them")
        self.model: Any = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.model.backbone = Backbone(config.stack.over(config.num_hidden_layers), config.sizes)
        _check_layers(self.model.backbone)
        self._cache_states(vllm_config, prefix)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.sizes.style.logits_cap)

    def _cache_states(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Wraps each mixer, and announces it to vLLM, which allocates pages of one size for all layers."""
        layers = vllm_config.compilation_config.static_forward_context
        for i, block in enumerate(self.model.backbone.layers):
            name = f"{prefix}.model.backbone.layers.{i}.mixer".lstrip(".")
            block.mixer = layers[name] = CachedMixer(block.mixer, vllm_config.model_config.hf_config.hidden_size, name)
        largest = max(block.mixer.state_bytes() for block in self.model.backbone.layers)
        vllm_config.cache_config.mamba_page_size_padded = ALIGNMENT * math.ceil(largest / ALIGNMENT)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Any, positions: Tensor, intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None, **unused: Any,
    ) -> Tensor:  # fmt: skip
        """input_ids [T] or inputs_embeds [T, D] -> hidden states [T, D]."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model.backbone(x[None])[0][0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _check_settings(vllm_config: VllmConfig) -> None:
    """Raises InputError for settings of vLLM that this model does not have."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    for name, setting, expected in (
        ("tensor_parallel_size", parallel.tensor_parallel_size, 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("enable_prefix_caching", vllm_config.cache_config.enable_prefix_caching, False),
        ("num_speculative_tokens", vllm_config.num_speculative_tokens, 0),
        ("quantization", vllm_config.model_config.quantization, None),
        ("lora_config", vllm_config.lora_config, None),
    ):
        require(setting == expected, f"{name}={setting!r} is not available for headrace in vLLM; expected {expected!r}")
    mode = compilation.cudagraph_mode
    require(mode == CUDAGraphMode.NONE, f"cudagraph_mode={mode}: headrace in vLLM needs --enforce-eager")


def _check_layers(backbone: Backbone) -> None:
    """Raises InputError for a model with a state that grows with the sequence."""
    require(backbone.positions is None, "the model adds positions to its embeddings; vLLM serves headrace without them")
    for i, block in enumerate(backbone.layers):
        kind, recurrent, single = type(block.mixer).__name__, bool(block.recurrent), bool(block.states == 1)
        require(recurrent, f"layer {i} has attention ({kind}); vLLM serves headrace with recurrent mixers alone")
        require(single, f"layer {i} has {block.states} states; vLLM serves headrace with one in each layer")
