"""The speed of `generate` after contexts of several lengths, which are not read."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..files.quiet import quiet
from ..hf.cache import NAME as CACHE
from .decoding import Decoder
from .measure import Measured, clock, free, taking_turns, too_large
from .models import too_long
from .plan import BenchPlan

NEW = 4  # tokens of a turn that are timed
ROUNDS = 3


class Ticks(BaseStreamer):
    """The times at which `generate` had the prompt and each token."""

    def __init__(self, now: Callable[[], float]):
        self.now, self.times = now, list[float]()

    def put(self, value: Any) -> None:
        self.times.append(self.now())

    def end(self) -> None:
        """There is nothing to flush."""


@torch.inference_mode()
def speeds(models: dict[str, Any], bytes_at: dict[int, dict[str, int]]) -> dict[str, Any]:
    """Measures how fast models generate with PyTorch's present number of threads.

    Args:
        models: language models of headrace on one device, whose settings of `generate` are replaced.
        bytes_at: {tokens of context: {model: bytes of its cache}}.

    Returns:
        {"tokens_per_second": {tokens of context: {model: median}}, "left_out": {tokens of context: why}, "engine":
        {model: what computed the tokens}, "threads", "clock", "max_position_embeddings": of the first model}.
    """
    first, threads = next(iter(models.values())), torch.get_num_threads()
    plan = BenchPlan((), device=str(first.device), threads=threads, rounds=ROUNDS)
    for model in models.values():
        model.generation_config = GenerationConfig(max_new_tokens=1 + NEW, do_sample=False)
    found, left_out = {}, {}
    for context, needed in bytes_at.items():
        taken = _at(context, models, needed, plan)
        if why := next((x["left_out"] for x in taken.values() if "left_out" in x), None):
            left_out[context] = why
        else:
            found[context] = {name: 1 / median(x["seconds"]) for name, x in taken.items()}
    engine = {name: model.engine.about(model) for name, model in models.items()}
    about = {"threads": threads, "clock": plan.clock, "max_position_embeddings": first.config.max_position_embeddings}
    return {"tokens_per_second": found, "left_out": left_out, "engine": engine} | about


def _at(context: int, models: dict[str, Any], needed: dict[str, int], plan: BenchPlan) -> dict[str, Measured]:
    """Returns the measurement of each model by turns, or why there is none."""
    reasons = {name: _obstacle(model.config, context, needed[name], plan) for name, model in models.items()}
    if barred := {name: {"left_out": why} for name, why in reasons.items() if why is not None}:
        return barred
    decoders = {name: Decoder(model) for name, model in models.items()}
    for decoder in decoders.values():
        decoder.reach(context)
    with quiet():  # of contexts longer than those that the model was trained with
        return taking_turns(decoders, lambda name: _seconds(decoders[name], plan), plan)


def _obstacle(config: Any, context: int, needed: int, plan: BenchPlan) -> str | None:
    memory, why = free(plan), too_long(config, context + (ROUNDS + 1) * (NEW + 1))
    return why or ("the system does not tell its free memory" if memory is None else too_large(needed, memory))


def _seconds(decoder: Decoder, plan: BenchPlan) -> float:
    """Seconds of a token, the median of those behind the first, with which `generate` begins."""
    ids, ticks = decoder.next.new_zeros(1, decoder.cache.columns + 1), Ticks(clock(plan))
    mask = torch.ones_like(ids)
    decoder.model.generate(ids, attention_mask=mask, streamer=ticks, **{CACHE: decoder.cache})
    return median(after - before for before, after in pairwise(ticks.times[1:]))
