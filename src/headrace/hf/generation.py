"""What of transformers' `generate` is different for models whose caches go back, and which have an engine of their own.

Dimensions: B batch, T tokens.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from ..ops.checks import require
from ..ops.modules import is_plain
from ..utils.errors import InputError
from .cache import NAME as CACHE
from .cache import HeadraceCache
from .decoding import STATIC, check_graph, decode_loop, graphed_step, is_plain_case, step
from .drafts import CARRY, count_drafts, draft_loop, is_draft, prepare_draft
from .marks import Marks


class HeadraceGenerationMixin(GenerationMixin):  # by this word in the name transformers knows that a model generates
    """`generate` of HeadraceForCausalLM."""

    model: Any
    base_class: type
    forward: Any
    plain_forward: Any

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        kind, sampled = generation_config.cache_implementation, generation_mode in ("sample", "greedy_search")
        if kind not in (None, STATIC) or (kind == STATIC and not sampled):
            raise InputError(
                f"cache_implementation={kind!r} is not available for {generation_mode.value}; expected None, for a "
                f"HeadraceCache, or {STATIC!r} for greedy search and sampling, for a CUDA graph"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = HeadraceCache()

    def _get_candidate_generator(self, *args, **kwargs):
        """The generator of transformers, whose tokens and those accepted of them are noted in `cache.drafts`."""
        generator = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        return count_drafts(generator, kwargs["model_kwargs"][CACHE])

    def _assisted_decoding(self, input_ids, *args, **kwargs):
        """Assisted generation of transformers. The cache goes back to the end of what was accepted by a mark, first of
        the prompt and then of each call whose tokens were all accepted. Raises InputError for a cache with columns."""
        if (cache := kwargs.get(CACHE)) is None:
            raise InputError("use_cache=False with a draft model or prompt lookup; expected a cache, which goes back")
        columns = f"past_key_values has {cache.columns} columns"
        require(not cache.is_initialized, f"{columns}; expected an empty cache with a draft model or prompt lookup")
        marks = cache.marks
        cache.marks = replace(marks or Marks(), recent=max(1, marks.recent if marks else 0), carry=CARRY)
        if input_ids.shape[1] > 1:
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
        if output.hidden_states is not None:
            output.hidden_states = tuple(x.repeat_interleave(repeats, 0) for x in output.hidden_states)
        return output

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        **model_kwargs,
    ):  # fmt: skip
        """Greedy search and sampling of transformers with the same tokens. In the plain case (`decoding.is_plain_case`)
        a shorter loop leaves out work per token that a recurrent model does not need: on a CPU, and on a GPU with
        cache_implementation="static", which makes the step a CUDA graph.

        Raises InputError for cache_implementation="static" in another case or on a CPU."""
        cache: Any = model_kwargs.get(CACHE)
        options = (logits_processor, stopping_criteria, generation_config)
        ours = type(self).forward is type(self).plain_forward and is_plain(self.model, self.base_class)
        simple = ours and not synced_gpus and is_plain_case(self, generation_config, model_kwargs)
        if generation_config.is_assistant and isinstance(cache, HeadraceCache):
            prepare_draft(cache, input_ids.shape[1])
        if ours and is_draft(generation_config, model_kwargs) and input_ids.device.type == "cpu":
            return draft_loop(self, input_ids, cache, *options)
        if graphed := generation_config.cache_implementation == STATIC:
            check_graph(self, simple and not cache.is_initialized)
        elif not simple or input_ids.device.type != "cpu":
            return super()._sample(input_ids, *options, synced_gpus, streamer, **model_kwargs)  # type: ignore[misc]
        first = self._prefill(input_ids, generation_config, model_kwargs)
        advance = graphed_step(self, cache, input_ids[:, -1]) if graphed else step(self, cache)
        return decode_loop(input_ids, first.logits, advance, *options, streamer)
