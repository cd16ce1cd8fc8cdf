"""How the tokens of a request are chosen."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from ..ops.checks import require
from ..utils.errors import InputError, reading
from ..utils.integrity import short


class Sampling(NamedTuple):
    """Settings of a generation."""

    max_tokens: int
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # number of likeliest tokens to report at each place; None: no log-probabilities
    echo: bool = False  # report the log-probabilities of the prompt too
    repetition_penalty: float | None = None  # None: that of the model


class Score(NamedTuple):
    """A token, its log-probability (None: the first of a prompt), and the likeliest tokens in its place with theirs, in
    the model's own distribution: before repetition_penalty, temperature and top_p."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def scored(logits: Tensor, tokens: list[int], count: int) -> list[Score]:
    """The scores of tokens, each with the `count` likeliest in its place. logits: [tokens, vocabulary], each row of
    the token that follows it."""
    if not tokens:
        return []
    logprobs = logits[: len(tokens)].float().log_softmax(-1)
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0]
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Score(token, value, tuple(zip(*places, strict=True)))
        for token, value, places in zip(tokens, chosen.tolist(), likeliest, strict=True)
    ]


def check_generation(model: Any) -> None:
    """Raises InputError for a generation_config that changes logits by more than a usual repetition_penalty."""
    greedy = copy.deepcopy(model.generation_config)
    greedy.update(do_sample=False, num_beams=1, repetition_penalty=None)
    model._prepare_special_tokens(greedy, device="cpu")  # which minimum lengths need
    with reading("the model's generation_config cannot be used"):
        processors = model._get_logits_processor(greedy, 1, torch.zeros(1, 1, dtype=torch.long))
    names = ", ".join(type(processor).__name__ for processor in processors)
    require(not names, f"the model's generation_config asks for {names}, which the server does not apply")
    penalty: Any = model.generation_config.repetition_penalty
    sentence = f"the model's generation_config has repetition_penalty={penalty}; expected 0.01 to 100"
    require(penalty is None or 0.01 <= penalty <= 100, sentence)


def stop_strings(model: Any) -> tuple[str, ...]:
    """The stop strings of the model's generation_config, before which every text ends. InputError for other values."""
    given = model.generation_config.stop_strings or []
    stops = [given] if isinstance(given, str) else given
    if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
        raise InputError(f"the model's generation_config has stop_strings={short(given)}; expected texts")
    return tuple(stops)


class Draw:
    """Chooses tokens as transformers does. Each request has a random generator of its own, so that its text does not
    depend on other requests. read: the tokens of its prompt."""

    def __init__(self, sampling: Sampling, device: torch.device, read: Sequence[int] = ()):
        penalty, self.sampled = float(sampling.repetition_penalty or 1), sampling.temperature > 0
        penalties = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
        temperature = [TemperatureLogitsWarper(float(sampling.temperature))] if self.sampled else []
        top_p = [TopPLogitsWarper(sampling.top_p)] if self.sampled and sampling.top_p < 1 else []
        self.processors: list[Any] = [*penalties, *temperature, *top_p]
        self.tokens = torch.tensor([read], dtype=torch.long, device=device)
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def __call__(self, out: Tensor, scores: Tensor) -> None:
        """Writes the token to out [1], for which nothing waits. scores: logits [1, vocabulary]."""
        for each in self.processors:
            scores = each(self.tokens, scores)
        token = scores.argmax(-1, keepdim=True)
        if self.sampled:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        self.tokens = torch.cat([self.tokens, token], 1)
        out.copy_(token[0])
