"""What of transformers' `generate` is different for models whose caches go back, and which have an engine of their own.

Dimensions: B batch, T tokens.
"""

from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from ..ops.checks import require
from ..utils.errors import InputError
from .cache import NAME as CACHE
from .cache import HeadraceCache
from .decoding import Choice, changed_reason, decode_loop, special_reason
from .drafts import CARRY, count_drafts, draft_loop, is_draft, prepare_draft
from .graphs import unsupported_reason
from .marks import Marks

STATIC = "static"  # the cache_implementation that refuses a generation without a CUDA graph


class HeadraceGenerationMixin(GenerationMixin):  # by this word in the name transformers knows that a model generates
    """`generate` of HeadraceForCausalLM."""

    model: Any
    base_class: type
    forward: Any
    plain_forward: Any
    engine: Any

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        kind, sampled = generation_config.cache_implementation, generation_mode in ("sample", "greedy_search")
        if kind not in (None, STATIC) or (kind == STATIC and not sampled):
            raise InputError(
                f"cache_implementation={kind!r} is not available for {generation_mode.value}; expected None, for a "
                f"HeadraceCache, or {STATIC!r} for greedy search and sampling, for a CUDA graph"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = HeadraceCache()

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # whose arguments `generate` looks for
    def prepare_inputs_for_generation(self, *args, **kwargs):
        """As in transformers, but with the earlier name of the cache. PEFT looks for it by this name, and would put its
        prefix or prompt before each token if there were none."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if CACHE in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE)
        return inputs

    plain_inputs = prepare_inputs_for_generation

    def _get_candidate_generator(self, *args, **kwargs):
        """The generator of transformers, whose tokens and those accepted of them are noted in `cache.drafts`."""
        generator = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        return count_drafts(generator, kwargs["model_kwargs"][CACHE])

    def _assisted_decoding(self, input_ids, *args, **kwargs):
        """Assisted generation of transformers. The cache goes back to the end of what was accepted by a mark, first of
        the prompt and then of each call whose tokens were all accepted. Raises InputError for a cache with columns."""
        if (cache := kwargs.get(CACHE)) is None:
            raise InputError("use_cache=False with a draft model or prompt lookup; expected a cache, which goes back")
        kind = f"past_key_values is a {type(cache).__name__}"
        require(isinstance(cache, HeadraceCache), f"{kind}; expected a HeadraceCache, which goes back")
        columns = f"past_key_values has {cache.columns} columns"
        require(not cache.is_initialized, f"{columns}; expected an empty cache with a draft model or prompt lookup")
        marks = cache.marks
        cache.marks = replace(marks or Marks(), recent=max(1, marks.recent if marks else 0), carry=CARRY)
        if input_ids.shape[1] > 1 and not kwargs["generation_config"].output_attentions:  # maps are of a whole call
            cache.mark(input_ids.shape[1] - 1)
        try:
            return super()._assisted_decoding(input_ids, *args, **kwargs)  # type: ignore[misc]
        finally:
            cache.marks = marks

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        """As in transformers, but reads a prompt once for all of its beams or answers, and repeats its states."""
        repeats = max(generation_config.num_beams, generation_config.num_return_sequences)
        cache, rows = model_kwargs.get(CACHE), len(input_ids)
        if repeats == 1 or not isinstance(cache, HeadraceCache) or cache.batch_size not in (-1, rows // repeats):
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)  # type: ignore[misc]
        once = {
            name: x[::repeats] if isinstance(x, Tensor) and x.shape[:1] == (rows,) else x
            for name, x in model_kwargs.items()
        }
        output = super()._prefill(input_ids[::repeats], generation_config, once, is_first_iteration)  # type: ignore[misc]
        cache.batch_repeat_interleave(repeats)
        output.logits = output.logits.repeat_interleave(repeats, 0)
        for name in ("hidden_states", "attentions"):
            if (of_layers := getattr(output, name)) is not None:
                setattr(output, name, tuple(x.repeat_interleave(repeats, 0) for x in of_layers))
        return output

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        **model_kwargs,
    ):  # fmt: skip
        """Greedy search and sampling of transformers with the same tokens. In the plain case (`special_reason`) a
        shorter loop leaves out work per token that a recurrent model does not need. On a GPU a CUDA graph computes each
        token of a model whose states have one size; `engine.about` has the reason where none does.

        Raises InputError for cache_implementation="static" where there is no CUDA graph."""
        cache: Any = model_kwargs.get(CACHE)
        options = (logits_processor, stopping_criteria, generation_config)
        changed = changed_reason(self)
        special = changed or special_reason(generation_config, model_kwargs, synced_gpus)
        if generation_config.is_assistant and isinstance(cache, HeadraceCache):
            prepare_draft(cache, 1 if generation_config.output_attentions else input_ids.shape[1])
        if changed is None and is_draft(generation_config, model_kwargs) and input_ids.device.type == "cpu":
            return draft_loop(self, input_ids, cache, *options)
        refused = self.engine.graphs.refused = special or unsupported_reason(self, cache)
        if asked := generation_config.cache_implementation == STATIC:
            require(refused is None, f"cache_implementation={STATIC!r} asks for a CUDA graph, and {refused}")
        if special is not None:
            return super()._sample(input_ids, *options, synced_gpus, streamer, **model_kwargs)  # type: ignore[misc]
        first, choice = self._prefill(input_ids, generation_config, model_kwargs), Choice(input_ids, *options)
        if refused is None:
            return self.engine.graphs.continued(self, cache, input_ids, first.logits, choice, streamer, asked)
        step = partial(self.engine.step, self, cache=cache)
        return decode_loop(input_ids, first.logits, step, choice, streamer)
