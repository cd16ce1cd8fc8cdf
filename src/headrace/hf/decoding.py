"""The loop of `generate` for the plain case: on a CPU, from an empty cache, with tokens as the only output.

Dimensions: B batch, T tokens.
"""

from typing import Any

import torch
from torch import Tensor

from .cache import HeadraceCache


def plain(model: Any, input_ids: Tensor, config, given: dict[str, Any]) -> bool:
    """Whether the generation is plain: on a CPU, from an empty cache, with tokens as its only output, no hooks."""
    usual = {"attention_mask", "past_key_values", "use_cache", "logits_to_keep"}
    cache, there = given.get("past_key_values"), {name for name, value in given.items() if value is not None}
    fresh = isinstance(cache, HeadraceCache) and cache.states is None and given["use_cache"] and there <= usual
    more = config.return_dict_in_generate or config.is_assistant or config.prefill_chunk_size
    hooks = any(m._forward_hooks or m._forward_pre_hooks for m in (model, model.model))
    patched = "forward" in vars(model)
    return bool(fresh and not patched and not more and not hooks and input_ids.device.type == "cpu")


def continued(model: Any, ids: Tensor, logits: Tensor, cache: HeadraceCache, processor, criteria, config) -> Tensor:
    """Continues ids [B, T], with logits [B, 1, vocabulary] of the next token, until the criteria are met."""
    unfinished, pad = ids.new_ones(ids.shape[0]), config._pad_token_tensor
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    while True:
        scores = processor(ids, logits[:, -1].to(torch.float32, copy=True))
        if config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            token = scores.argmax(-1)
        if ends:
            token = token * unfinished + pad * (1 - unfinished)
        ids = torch.cat([ids, token[:, None]], 1)
        unfinished = unfinished & ~criteria(ids, None)
        if not unfinished.any():
            return ids
        x, states = model.model.backbone(model.model.embed_tokens(token[:, None]), cache.states, in_place=True)
        cache.replace(states, 1)
        logits = model.lm_head(x)
