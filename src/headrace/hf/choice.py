"""The choice of the next tokens by their logits, with transformers' processors and criteria.

Dimensions: B batch, T tokens.
"""

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

# Processors that see the scores of one token alone, so that a CUDA graph may include them.
OF_SCORES = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper
NO_NUMBERS = "the model's logits have NaN or infinite values, and no token can be chosen"


class Choice:
    """Chooses the next tokens by their logits, and knows which sequences have ended, as transformers does.

    Args:
        ids: [B, T], the tokens so far.
        processor, criteria, config: of transformers' `generate`.
    """

    def __init__(self, ids: Tensor, processor: Any, criteria: Any, config: Any):
        self.processor, self.sampled = processor, config.do_sample
        self.scores: list[Tensor] | None = [] if config.is_assistant else None  # of each token
        ends = [each.eos_token_id.to(ids.device) for each in criteria if type(each) is EosTokenCriteria]
        self.ends = torch.cat(ends) if ends else None
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self.pad: Any = config._pad_token_tensor.to(ids.device) if self.pads else None
        self.lengths = [each for each in criteria if type(each) is MaxLengthCriteria]
        own = MaxLengthCriteria, EosTokenCriteria
        self.others = StoppingCriteriaList(each for each in criteria if type(each) not in own)
        with torch.inference_mode(False):  # a graph may write them in either mode
            self.unfinished = ids.new_ones(len(ids), dtype=torch.bool)
            self.invalid = ids.new_zeros((), dtype=torch.bool)

    @property
    def key(self) -> Any:
        """What a CUDA graph of the choice depends on; None if the choice also depends on earlier tokens."""
        if self.others or self.scores is not None or any(type(each) not in OF_SCORES for each in self.processor):
            return None
        ends = None if self.ends is None else (*self.ends.tolist(), int(self.pad))
        return self.sampled, ends, *((type(each), *sorted(vars(each).items())) for each in self.processor)

    def restart(self, other: "Choice") -> None:
        """Begins other sequences, with the largest lengths of another choice, which has the same `key`."""
        self.lengths = other.lengths
        self.unfinished.fill_(True)
        self.invalid.fill_(False)

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """ids [B, T], logits [B, 1, vocabulary] -> tokens [B]. ids: None if the choice has a `key`."""
        scores = self.processor(ids, logits[:, -1].to(self.unfinished.device, torch.float32, copy=True))
        if self.scores is not None:
            self.scores.append(scores)
        token = self._choose(scores.softmax(-1) if self.sampled else scores)
        if self.pads:
            token = torch.where(self.unfinished, token, self.pad)
        if self.ends is not None:
            self.unfinished &= (token[:, None] != self.ends).all(1)
        return token

    def _choose(self, scores: Tensor) -> Tensor:
        """The likeliest tokens, or those of torch.multinomial by the same random numbers. `finished` checks the numbers
        instead; on a GPU, for which the check waits, once at the end."""
        self.invalid |= scores.amax().isnan()
        return (scores / torch.empty_like(scores).exponential_() if self.sampled else scores).argmax(-1)

    def finished(self, ids: Tensor) -> bool:
        """Whether the last tokens of ids [B, T] end all sequences. Raises RuntimeError for logits that are no numbers.
        Waits for the device only where tokens decide."""
        if self.others:
            self.unfinished &= ~self.others(ids, self.scores)
        for each in self.lengths:
            each(ids[:0], None)  # which may warn that a text is longer than the model's longest
        over = any(ids.shape[1] >= each.max_length for each in self.lengths)
        if not over and (self.others or self.ends is not None):
            over = not self.unfinished.any()
        if (over or self.invalid.is_cpu) and self.invalid:
            raise RuntimeError(NO_NUMBERS)
        return over
