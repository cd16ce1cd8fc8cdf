"""The loop of `generate` for the plain case, with tokens as the only output: on a CPU, and on a GPU with the step as a
CUDA graph.

Dimensions: B batch, T tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layers.graph import GraphedStep
from ..ops.checks import require
from ..ops.modules import is_plain
from .cache import NAME as CACHE
from .cache import HeadraceCache

STATIC = "static"  # the cache_implementation that asks for a CUDA graph
Step = Callable[[Tensor], Tensor]  # tokens [B] -> logits [B, 1, vocabulary] of the next


def is_plain_case(model: Any, config, model_kwargs: dict[str, Any]) -> bool:
    """Whether the generation is plain: with a cache, tokens as its only output, and no hooks."""
    usual = {"attention_mask", CACHE, "use_cache", "logits_to_keep"}
    cache, passed = model_kwargs.get(CACHE), {name for name, value in model_kwargs.items() if value is not None}
    cached = isinstance(cache, HeadraceCache) and model_kwargs["use_cache"] and passed <= usual
    more = config.return_dict_in_generate or config.is_assistant
    return bool(cached and not more and is_plain(model, type(model)))


def check_graph(model: Any, is_plain: bool) -> None:
    """Raises InputError for a generation whose step cannot be a CUDA graph."""
    request, backbone = f"cache_implementation={STATIC!r} generates with a CUDA graph", model.model.backbone
    require(model.device.type == "cuda", f"{request}, and the model is on {model.device.type}; expected cuda")
    require(is_plain, f"{request}; expected an empty cache, tokens as the only output, and no hooks or synced_gpus")
    fixed_size = backbone.recurrent and (backbone.positions is None or backbone.positions.table is None)
    require(fixed_size, f"{request}; expected states of one size, without attention, experts and learned positions")


def step(model: Any, cache: HeadraceCache) -> Step:
    """Returns a step by the model's engine."""
    return partial(model.engine.step, model, cache=cache)


def graphed_step(model: Any, cache: HeadraceCache, token: Tensor) -> Step:
    """Returns a step that replays a CUDA graph, captured here. token [B]: an example."""
    assert cache.states is not None
    graph = GraphedStep(lambda *inputs: _next(model, *inputs), token[:, None], cache.states)

    def run(token: Tensor) -> Tensor:
        cache.begin()
        logits = graph(token[:, None])
        cache.advance(1, token)
        return logits

    return run


def _next(model: Any, token: Tensor, states: Any) -> tuple[Tensor, Any]:
    x, states = model.model.backbone(model.model.embed_tokens(token), states, in_place=True)
    return model.logits(x), states


def decode_loop(
    ids: Tensor, logits: Tensor, step: Step, processor: Any, criteria: Any, config: Any, streamer: Any = None,
    kept: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Continues ids [B, T], with logits [B, 1, vocabulary] of the next token, until the criteria are met. kept: a list
    to which the scores of each token are appended."""
    unfinished, pad = ids.new_ones(ids.shape[0]), config._pad_token_tensor
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    while True:
        scores = processor(ids, logits[:, -1].to(torch.float32, copy=True))
        if kept is not None:
            kept.append(scores)
        if config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            token = scores.argmax(-1)
        if ends:
            token = token * unfinished + pad * (1 - unfinished)
        ids = torch.cat([ids, token[:, None]], 1)
        if streamer is not None:
            streamer.put(token.cpu())
        unfinished = unfinished & ~criteria(ids, kept)
        if not unfinished.any():
            if streamer is not None:
                streamer.end()
            return ids
        logits = step(token)
