"""The loop of `generate` for the plain case, with tokens as the only output.

Dimensions: B batch, T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..ops.modules import is_plain
from .cache import NAME as CACHE
from .cache import HeadraceCache

Step = Callable[[Tensor], Tensor]  # tokens [B] -> logits [B, 1, vocabulary] of the next
Advance = Callable[[Tensor, Tensor], Tensor]  # (ids [B, T], their last column [B]) -> the next tokens [B]
# Processors that see the scores of one token alone, so that a CUDA graph may include them.
OF_SCORES = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper


def changed_reason(model: Any) -> str | None:
    """Returns why a loop of our own cannot stand for calls of the model, or None."""
    if type(model).forward is not type(model).plain_forward:
        return f"{type(model).__name__} has a forward of its own"
    if model.prepare_inputs_for_generation != model.plain_inputs:  # such as one of PEFT
        return "the inputs of the model are prepared by another function"
    plain = is_plain(model, type(model)) and is_plain(model.model, model.base_class)
    return None if plain else "the model has a hook or a forward of its own"


def special_reason(config: Any, model_kwargs: dict[str, Any], synced_gpus: bool) -> str | None:
    """Returns why a generation is not plain, or None: it has a cache, and tokens as its only output."""
    if not (isinstance(model_kwargs.get(CACHE), HeadraceCache) and model_kwargs["use_cache"]):
        return "the last generation had no cache"
    if config.return_dict_in_generate or config.is_assistant:
        return "the last generation returned more than tokens"
    usual = {"attention_mask", CACHE, "use_cache", "logits_to_keep"}
    more = [name for name, value in model_kwargs.items() if value is not None and name not in usual]
    if more:
        return f"the last generation was given {', '.join(more)}"
    return "the last generation had synced_gpus=True" if synced_gpus else None


class Choice:
    """Chooses the next tokens by their logits, and knows which sequences have ended, as transformers does.

    Args:
        ids: [B, T], the tokens so far.
        processor, criteria, config: of transformers' `generate`.
        kept: a list to which the scores of each token are appended.
    """

    def __init__(self, ids: Tensor, processor: Any, criteria: Any, config: Any, kept: list[Tensor] | None = None):
        self.processor, self.sampled, self.kept = processor, config.do_sample, kept
        ends = [each.eos_token_id.to(ids.device) for each in criteria if type(each) is EosTokenCriteria]
        self.ends = torch.cat(ends) if ends else None
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self.pad: Any = config._pad_token_tensor.to(ids.device) if self.pads else None
        known = [each for each in criteria if type(each) is MaxLengthCriteria and each.max_position_embeddings is None]
        self.longest = min((each.max_length for each in known), default=None)
        self.others = StoppingCriteriaList(
            each for each in criteria if each not in known and type(each) is not EosTokenCriteria
        )
        with torch.inference_mode(False):  # a graph may write them in either mode
            self.unfinished = ids.new_ones(len(ids), dtype=torch.bool)
            self.invalid = ids.new_zeros((), dtype=torch.bool)

    @property
    def key(self) -> Any:
        """What a CUDA graph of the choice depends on; None if the choice also depends on earlier tokens."""
        if self.others or self.kept is not None or any(type(each) not in OF_SCORES for each in self.processor):
            return None
        ends = None if self.ends is None else (*self.ends.tolist(), int(self.pad))
        return self.sampled, ends, *((type(each), *sorted(vars(each).items())) for each in self.processor)

    def restart(self) -> None:
        """Begins other sequences."""
        self.unfinished.fill_(True)
        self.invalid.fill_(False)

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """ids [B, T], logits [B, 1, vocabulary] -> tokens [B]. ids: None if the choice has a `key`."""
        scores = self.processor(ids, logits[:, -1].to(self.unfinished.device, torch.float32, copy=True))
        if self.kept is not None:
            self.kept.append(scores)
        token = self._sample(scores.softmax(-1)) if self.sampled else scores.argmax(-1)
        if self.pads:
            token = torch.where(self.unfinished, token, self.pad)
        if self.ends is not None:
            self.unfinished &= (token[:, None] != self.ends).all(1)
        return token

    def _sample(self, chances: Tensor) -> Tensor:
        """The tokens of torch.multinomial by the same random numbers. Its check of the chances, which waits for a
        GPU, is made by `finished`, there once."""
        self.invalid |= ~(chances.amax() < torch.inf)
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)

    def finished(self, ids: Tensor) -> bool:
        """Whether the last tokens of ids [B, T] end all sequences. Raises RuntimeError for chances that are no numbers.
        Waits for the device only where tokens decide."""
        if self.others:
            self.unfinished &= ~self.others(ids, self.kept)
        over = self.longest is not None and ids.shape[1] >= self.longest
        if not over and (self.others or self.ends is not None):
            over = not self.unfinished.any()
        if self.sampled and (over or self.invalid.is_cpu) and self.invalid:
            raise RuntimeError("the model's logits have NaN or infinite values, and no token can be sampled")
        return over


def decode_loop(ids: Tensor, logits: Tensor, step: Step, choice: Choice, streamer: Any = None) -> Tensor:
    """Continues ids [B, T], with logits [B, 1, vocabulary] of the next token, until all sequences have ended."""
    return token_loop(ids, choice(ids, logits), lambda ids, token: choice(ids, step(token)), choice, streamer)


def token_loop(ids: Tensor, token: Tensor, advance: Advance, choice: Choice, streamer: Any = None) -> Tensor:
    """Continues ids [B, T] by token [B] and those that `advance` gives, until all sequences have ended."""
    while True:
        ids = torch.cat([ids, token[:, None]], 1)
        if streamer is not None:
            streamer.put(token.cpu())
        if choice.finished(ids):
            if streamer is not None:
                streamer.end()
            return ids
        token = advance(ids, token)
