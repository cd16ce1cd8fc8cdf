"""Speculative decoding: a draft model or earlier text proposes tokens, and the model reads all of them in one call
(arXiv 2211.17192).

transformers' assisted generation decides what is accepted; here is what a draft with a state needs for it.

Dimensions: B batch.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .cache import NAME as CACHE
from .cache import HeadraceCache
from .decoding import Choice, decode_loop
from .marks import Marks

# Pending columns that a call reads with its own. Where a column costs a fifth of a call, and a call gives three tokens,
# √(2 · 5 · 3) makes the sum of longer calls and of those that read pending columns alone the least.
CARRY = 6
ROOM = 2**26  # bytes for the marks of a draft, which is to go back to any of its tokens
MOST = 32  # its tokens that can be gone back to
FEW = 4  # tokens that the engine reads one by one in less time than the modules read them together


def is_draft(config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether `generate` is called for the tokens of a draft: from transformers' generator of candidates."""
    usual = {"attention_mask", CACHE, "use_cache", "logits_to_keep"}
    passed = {name for name, value in model_kwargs.items() if value is not None}
    cached = isinstance(model_kwargs.get(CACHE), HeadraceCache) and model_kwargs.get("attention_mask") is None
    wanted = config.return_dict_in_generate and config.output_scores and not config.output_logits
    hidden = config.output_hidden_states or config.output_attentions or config.prefill_chunk_size
    return bool(config.is_assistant and cached and wanted and not hidden and passed <= usual)


def prepare_draft(cache: HeadraceCache, columns: int) -> None:
    """Sets which marks the cache of a draft makes, before it reads up to `columns` (1: its maps are asked for, so that
    the call is not divided). The next call goes back to the last token that is accepted, or to the one before it."""
    if cache.is_initialized:
        cache.marks = Marks(recent=max(1, min(MOST, ROOM // max(cache.state_bytes, 1))), carry=0)
    elif columns > 1:
        cache.mark(columns - 1)


def draft_loop(
    model: Any, ids: Tensor, cache: HeadraceCache, processor: Any, criteria: Any, config: Any
) -> GenerateDecoderOnlyOutput:
    """Continues ids [B, T], of which the cache has read the first columns."""
    unread, step = ids[:, cache.columns :], partial(model.engine.step, model, cache=cache)
    if cache.is_initialized and not cache.pending and unread.shape[1] <= FEW:
        logits = [step(token) for token in unread.unbind(1)][-1]
    else:
        logits = model(unread, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    scores: list[Tensor] = []
    out = decode_loop(ids, logits, step, Choice(ids, processor, criteria, config, scores))
    return GenerateDecoderOnlyOutput(sequences=out, scores=tuple(scores), **{CACHE: cache})  # type: ignore[arg-type]


def count_drafts(generator: Any, cache: Any) -> Any:
    """Returns a generator of candidates that also notes in `cache.drafts` what it proposed and what was accepted."""
    update = generator.update_candidate_strategy

    def counted(ids: Tensor, scores: Tensor, accepted: Any) -> Any:
        cache.drafts.append((scores.shape[1] - 1, int(accepted)))
        return update(ids, scores, accepted)

    generator.update_candidate_strategy = counted
    return generator
