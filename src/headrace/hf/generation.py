"""`generate` of a language model: the prompt, a token, the loop, and speculation.

A token is computed in one of three ways: by a CUDA graph, in one native call, or by the modules of the model. At the
end, `HeadraceGenerationMixin` puts all of this in the places of transformers' `generate`.

Dimensions: B batch, T tokens.
"""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from ..layers.attention.attention import AttentionState, lengthened
from ..layers.blocks.token import language_model
from ..layers.graph import GraphedStep, fingerprint, unsupported_reason
from ..layers.maps import wanted
from ..ops.backends.native import library as native
from ..ops.backends.native.bound import Bound, ProgramOf
from ..ops.checks import check_tensor, require
from ..ops.modules import is_plain
from ..ops.parallel.context import current
from ..utils.errors import InputError
from .cache import NAME as CACHE
from .cache import HeadraceCache, cache_argument
from .choice import NO_NUMBERS, Choice
from .snapshots import copied

STATIC = "static"  # the cache_implementation that refuses a generation without a CUDA graph
IDS = torch.int32, torch.int64  # dtypes that an embedding takes
MOST = 32  # largest number of tokens of one sequence for which a native call takes less time than the modules
# Largest number of pending columns that a call reads with its own. If a column takes a fifth of the time of a call, and
# a call gives three tokens, √(2 · 5 · 3) minimizes the time of longer calls and of calls for pending columns alone.
CARRY = 6

# --- the prompt ------------------------------------------------------------------------------------------------------


def prefill(read: Callable[..., Any], ids: Tensor, config: Any, model_kwargs: dict[str, Any], first: bool) -> Any:
    """Reads a prompt once for all of its beams or answers, and repeats its states. read: transformers' `_prefill`."""
    embeds, cache, mask = (model_kwargs.get(name) for name in ("inputs_embeds", CACHE, "attention_mask"))
    chunks = f"prefill_chunk_size={config.prefill_chunk_size} with inputs_embeds, which each chunk would read in whole"
    require(embeds is None or not config.prefill_chunk_size, f"{chunks}; expected one of them")
    rows, T = (ids if embeds is None or not first else embeds).shape[:2]
    seen = cache.get_seq_length() if isinstance(cache, Cache) else 0
    repeats = max(config.num_beams, config.num_return_sequences)
    of_text = getattr(config, "_mask_length", T) if mask is None else mask.shape[1]
    columns = f"past_key_values has {seen} columns and the text {of_text}"
    require(not seen or seen < of_text, f"{columns}; expected the whole text, longer than the cache")
    if repeats == 1 or not isinstance(cache, HeadraceCache) or cache.batch_size not in (-1, rows // repeats):
        return read(ids, config, model_kwargs, first)
    once = {
        name: x[::repeats] if isinstance(x, Tensor) and x.shape[:1] == (rows,) else x
        for name, x in model_kwargs.items()
    }
    output = read(ids[::repeats], config, once, first)
    cache.batch_repeat_interleave(repeats)
    output.logits = output.logits.repeat_interleave(repeats, 0)
    for name in ("hidden_states", "attentions"):
        if (of_layers := getattr(output, name)) is not None:
            setattr(output, name, tuple(x.repeat_interleave(repeats, 0) for x in of_layers))
    return output


# --- a token ---------------------------------------------------------------------------------------------------------


def own_reason(model: Any) -> str | None:
    """Returns why nothing can stand for a call of the model now, or None."""
    if type(model).forward is not type(model).plain_forward:
        return f"{type(model).__name__} has a forward of its own"
    if wanted() is not None:
        return "maps of its mixers are asked for"
    return None if current() is None else "its tokens are split by context_parallel"


class Engine:
    """Computes the next logits of a language model, in one native call or by the modules of the model, and keeps the
    CUDA graph of the last generation on a GPU. A copy of a model begins with an engine of its own."""

    def __init__(self) -> None:
        self.program = ProgramOf(language_model)
        self.graph: Graph | None = None
        self.graph_refused: str | None = None  # why the last generation had no graph

    def __reduce__(self) -> Any:
        return Engine, ()

    def find(self, model: Any) -> tuple[Bound | None, str | None]:
        """Returns (the program that computes a token of the model now, None), or (None, why modules compute it)."""
        if torch.compiler.is_compiling():
            return None, "a graph is traced"
        reason = own_reason(model)
        return (None, reason) if reason else self.program.find(model)

    def unsupported_reason(self, model: Any) -> str | None:
        """Returns why a token of the model is not computed in one native call now, or None."""
        return self.find(model)[1]

    def about(self, model: Any) -> str:
        """Returns which engine computes a token of the model now, or in its last generation on a GPU, and why."""
        if model.device.type == "cuda":
            reason = self.graph_refused or unsupported_reason(model)
            return "a CUDA graph" if reason is None else f"PyTorch's modules without a CUDA graph: {reason}"
        with torch.no_grad():
            reason = self.unsupported_reason(model)
        return f"one native call ({native.instructions})" if reason is None else f"PyTorch's modules: {reason}"

    def step(self, model: Any, tokens: Tensor, cache: HeadraceCache) -> Tensor:
        """tokens [B] -> logits [B, 1, vocabulary] of the next. Updates the cache."""
        ids = tokens[:, None]
        if (logits := self.read(model, ids, cache)) is not None:
            return logits
        return model.logits(model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state)

    def read(self, model: Any, ids: Tensor, cache: HeadraceCache) -> Tensor | None:
        """ids [B, T] -> logits [B, T, vocabulary] of the next tokens, in one native call, which also reads the pending
        tokens; or None, and then nothing is done. Several tokens must be of one sequence, at most MOST."""
        states, pending, rows, T = cache.covered_states, cache.pending, *ids.shape
        if not ids.is_cpu or ids.dtype not in IDS or not rows or (pending + T > 1 and (rows > 1 or pending + T > MOST)):
            return None
        bound, _ = self.find(model)
        if bound is None or (states is not None and [*map(type, states)] != bound.program.kinds):
            return None
        counts = model.model.backbone.state_counts if states is None else ()
        states = bound.first_states(rows) if states is None else states
        tokens = ids
        if pending:
            earlier, mask = cache.pending_ids()
            if mask is not None:
                return None
            tokens = torch.cat([earlier, ids], 1)
        states = [lengthened(each, pending + T) if isinstance(each, AttentionState) else each for each in states]
        if (ready := bound.take(states, rows)) is None:
            return None  # the modules copy the states, or say what is wrong
        last = len(bound.program.operations) - 1
        logits = torch.empty(tokens.numel(), model.lm_head.out_features, dtype=torch.float32, device="cpu")
        outputs = (last,) if model.cap is None else (last - 1, last)
        ready.run(dict.fromkeys(outputs, logits), tokens.to(torch.int64).flatten().contiguous(), pending + T > 1)
        cache.replace(states, T, ids, counts=counts)
        return logits.to(bound.dtype).view(rows, pending + T, -1)[:, pending:]


class Graph(NamedTuple):
    """A captured step: tokens [B] -> the next tokens [B], or with choice=None their logits [B, 1, vocabulary]."""

    key: Any
    step: GraphedStep | None  # None: the capture failed
    choice: Choice | None
    failure: str | None = None


def graph_of(model: Any, states: Any, token: Tensor, choice: Choice) -> Graph:
    """Returns the graph of the last generation, if it is of the same kind, or a new one. It begins with these states.
    Another thread that generates meanwhile captures its own."""
    key, engine = (len(token), choice.key, fingerprint(model)), model.engine
    kept, engine.graph = engine.graph, None
    if kept is None or kept.key != key:
        del kept  # its memory is free for the new one
        return capture(key, model, states, token, None if choice.key is None else choice)
    if kept.step is not None:
        kept.step.load(states)
    return kept


def capture(key: Any, model: Any, states: Any, token: Tensor, choice: Choice | None) -> Graph:
    """Captures the step of a model, with the choice of the next token if one is given."""

    def step(token: Tensor, states: Any) -> tuple[Tensor, Any]:
        x, states = model.model.backbone(model.model.embed_tokens(token[:, None]), states, in_place=True)
        logits = model.logits(x)
        return logits if choice is None else choice(None, logits), states

    kind, devices = token.device.type, [token.device] if token.is_cuda else []
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    # The memory of the graph serves generations with and without inference mode. The capture draws no random numbers,
    # and reads no weights that autocast has cast and will free.
    with (
        torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices),
        torch.autocast(kind, dtype, enabled, cache_enabled=False),
    ):  # fmt: skip
        copies = [copied(state, partial(torch.clone, memory_format=torch.contiguous_format)) for state in states]
        try:
            return Graph(key, GraphedStep(step, token.clone(), copies), choice)
        except (InputError, RuntimeError) as error:
            failure = f"the step cannot be captured: {str(error).partition(chr(10))[0]}"
    what = "a CUDA graph" if choice is None else "the choice of tokens in a CUDA graph"
    warnings.warn(f"generation without {what}: {failure}", stacklevel=2)
    return Graph(key, None, None, failure) if choice is None else capture(key, model, states, token, None)


# --- the loop --------------------------------------------------------------------------------------------------------


def loop(
    ids: Tensor, logits: Tensor, step: Callable[[Tensor], Tensor], choice: Choice, streamer: Any, chosen: bool = False
) -> Tensor:
    """Continues ids [B, T] until all sequences have ended.

    Args:
        logits: [B, 1, vocabulary], of the first new token.
        step: tokens [B] -> logits [B, 1, vocabulary] of the next; with `chosen` the next tokens [B].
    """
    token = choice(ids, logits)
    while True:
        ids = torch.cat([ids, token[:, None]], 1)
        over = choice.finished(ids)  # before the streamer gets a token of logits that are no numbers
        if streamer is not None:
            streamer.put(token.cpu())
        if over:
            if streamer is not None:
                streamer.end()
            return ids
        token = step(token) if chosen else choice(ids, step(token))


def graph_loop(
    model: Any, cache: HeadraceCache, ids: Tensor, logits: Tensor, choice: Choice, streamer: Any, required: bool
) -> Tensor:
    """`loop`, with each token by a CUDA graph, which has states of its own: the cache gets its states at the end.

    required: raise InputError where the step cannot be captured, in place of a warning and a loop without a graph."""
    graph, engine = graph_of(model, cache.states, ids[:, -1], choice), model.engine
    engine.graph_refused = graph.failure
    require(not (required and graph.failure), f"expected a CUDA graph, and {graph.failure}")
    step, chooser = graph.step or partial(engine.step, model, cache=cache), graph.choice or choice
    chooser.restart(choice)  # also after a capture that failed, in which it may have chosen
    out = loop(ids, logits, step, chooser, streamer, graph.choice is not None)
    if graph.step is not None and (read := out[:, ids.shape[1] : -1]).shape[1]:  # the last token is not read
        cache.replace([copied(state) for state in graph.step.states], read.shape[1], read)
    engine.graph = graph
    return out


# --- speculation -----------------------------------------------------------------------------------------------------
# A draft model or earlier text proposes tokens, and the model reads all of them in one call (arXiv 2211.17192).
# transformers' assisted generation decides what is accepted. Both caches then go back behind the first wrong token.


def begin_round(model: Any, cache: HeadraceCache) -> None:
    """Takes the snapshot to which the cache goes back if some of the tokens that are read next are rejected."""
    if cache.pending > CARRY:
        model.read_pending(cache)
    if not cache.pending:
        cache.snapshot(temporary=True)


def read_prompt(model: Any, ids: Tensor, cache: HeadraceCache, mask: Tensor | None) -> None:
    """Reads all tokens of a prompt [1, T] but the last, so that there is a snapshot between them."""
    if ids.shape[1] > 1:
        mask = None if mask is None else mask[:, : ids.shape[1] - 1]
        model(ids[:, :-1], attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


def speculative(generator: Any, model: Any, cache: HeadraceCache) -> Any:
    """Returns a generator of candidates that also begins the rounds of the model's cache, and notes in `cache.drafts`
    what it proposed and what was accepted."""
    propose, update = generator.get_candidates, generator.update_candidate_strategy

    def get_candidates(*args: Any, **kwargs: Any) -> Any:
        begin_round(model, cache)
        return propose(*args, **kwargs)

    def update_candidate_strategy(ids: Tensor, scores: Tensor, accepted: Any) -> Any:
        if scores.isnan().any():
            raise RuntimeError(NO_NUMBERS)
        cache.drafts.append((scores.shape[1] - 1, int(accepted)))
        return update(ids, scores, accepted)

    generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
    return generator


# --- transformers' `generate` ----------------------------------------------------------------------------------------


def changed_reason(model: Any) -> str | None:
    """Returns why a loop of our own cannot stand for calls of the model, or None."""
    if reason := own_reason(model):
        return reason
    if model.prepare_inputs_for_generation != model.plain_inputs:  # such as one of PEFT
        return "the inputs of the model are prepared by another function"
    plain = is_plain(model, type(model)) and is_plain(model.model, model.base_class)
    return None if plain else "the model has a hook or a forward of its own"


def special_reason(config: Any, model_kwargs: dict[str, Any], synced_gpus: bool) -> str | None:
    """Returns why a generation is not plain, or None. A plain generation has a cache, and returns only tokens or, for
    a draft, tokens and their scores."""
    if not (isinstance(model_kwargs.get(CACHE), HeadraceCache) and model_kwargs["use_cache"]):
        return "the last generation had no cache"
    more = config.output_logits or config.output_hidden_states or config.output_attentions or not config.is_assistant
    if config.return_dict_in_generate and more:
        return "the last generation returned more than tokens"
    usual = {"attention_mask", CACHE, "use_cache", "logits_to_keep"}
    if others := [name for name, value in model_kwargs.items() if value is not None and name not in usual]:
        return f"the last generation was given {', '.join(others)}"
    return "the last generation had synced_gpus=True" if synced_gpus else None


class HeadraceGenerationMixin(GenerationMixin):  # transformers finds this word in the name of a model that generates
    """`generate` of HeadraceForCausalLM."""

    model: Any
    base_class: type
    forward: Any
    plain_forward: Any
    engine: Any
    device: Any

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        kind, sampled = generation_config.cache_implementation, generation_mode in ("sample", "greedy_search")
        given = f"cache_implementation={kind!r} is not available for {generation_mode.value}"
        expected = f"None, for a HeadraceCache, or {STATIC!r} for greedy search and sampling, for a CUDA graph"
        require(kind is None or (kind == STATIC and sampled), f"{given}; expected {expected}")
        if generation_config.use_cache is not False and cache_argument(model_kwargs.get(CACHE), None) is None:
            model_kwargs[CACHE] = HeadraceCache()

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # whose arguments `generate` looks for
    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, *args, prompt_read=False, **kwargs):
        """As in transformers, but with the earlier name of the cache. PEFT looks for it by this name, and would put its
        prefix or prompt before each token if there were none. prompt_read: whether the cache has read the beginning of
        input_ids."""
        if prompt_read and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - kwargs[CACHE].columns
        inputs = super().prepare_inputs_for_generation(input_ids, next_sequence_length, *args, **kwargs)  # type: ignore[misc]
        if CACHE in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE)
        return inputs

    plain_inputs = prepare_inputs_for_generation

    def _prepare_model_inputs(self, *args, **kwargs):
        given, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)  # type: ignore[misc]
        check_tensor(str(name), given)
        require(given.dim() > 1 <= given.numel(), f"{name} has shape {list(given.shape)}; expected [B, T], not empty")
        return given, name, model_kwargs

    def _prepare_position_ids_for_generation(self, *args, **kwargs):
        """Returns None: layers count tokens. `forward` names position_ids for Trainer, which drops other columns."""

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        return prefill(super()._prefill, input_ids, generation_config, model_kwargs, is_first_iteration)  # type: ignore[misc]

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        tokenizer=None, **model_kwargs,
    ):  # fmt: skip
        """Greedy search and sampling of transformers with the same tokens. In the plain case (`special_reason`) a
        shorter loop leaves out work per token that a recurrent model does not need. On a GPU a CUDA graph computes each
        token of a model whose states have one size; `engine.about` has the reason where none does.

        Raises InputError for cache_implementation="static" where there is no CUDA graph."""
        cache: Any = model_kwargs.get(CACHE)
        options, drafts = (logits_processor, stopping_criteria, generation_config), generation_config.is_assistant
        if drafts and isinstance(cache, HeadraceCache):
            if not cache.is_initialized and not generation_config.output_attentions:  # maps are of a whole call
                read_prompt(self, input_ids, cache, model_kwargs.get("attention_mask"))
            begin_round(self, cache)
        moved = "" if input_ids.device == self.device else "the last generation had its tokens on another device"
        special = changed_reason(self) or moved or special_reason(generation_config, model_kwargs, synced_gpus)
        refused = self.engine.graph_refused = special or unsupported_reason(self)
        if static := generation_config.cache_implementation == STATIC:
            require(refused is None, f"cache_implementation={STATIC!r} asks for a CUDA graph, and {refused}")
        if special is not None:
            return super()._sample(input_ids, *options, synced_gpus, streamer, **model_kwargs)  # type: ignore[misc]
        logits = self._prefill(input_ids, generation_config, model_kwargs, not drafts).logits
        choice = Choice(input_ids, *options)
        if refused is None:
            ids = graph_loop(self, cache, input_ids, logits, choice, streamer, static)
        else:
            ids = loop(input_ids, logits, partial(self.engine.step, self, cache=cache), choice, streamer)
        if not drafts:
            return ids
        return GenerateDecoderOnlyOutput(sequences=ids, scores=tuple(choice.scores or ()), **{CACHE: cache})  # type: ignore[arg-type]

    def _get_candidate_generator(self, *args, model_kwargs, **kwargs):  # type: ignore[override]
        """The generator of transformers, whose tokens and those accepted of them are noted in `cache.drafts`."""
        of_draft = {name: value for name, value in model_kwargs.items() if name != "prompt_read"}
        generator = super()._get_candidate_generator(*args, model_kwargs=of_draft, **kwargs)  # type: ignore[misc]
        return speculative(generator, self, model_kwargs[CACHE])

    def _assisted_decoding(self, input_ids, *args, **kwargs):
        """Assisted generation of transformers, with `speculative`. Raises InputError for a cache with columns, and
        for tokens on another device."""
        if (cache := kwargs.get(CACHE)) is None:
            raise InputError("use_cache=False with a draft model or prompt lookup; expected a cache, which goes back")
        kind = f"past_key_values is a {type(cache).__name__}"
        require(isinstance(cache, HeadraceCache), f"{kind}; expected a HeadraceCache, which goes back")
        where = f"input_ids is on {input_ids.device}; expected {self.device}, the model's device, with"
        require(input_ids.device == self.device, f"{where} a draft model or prompt lookup")
        columns = f"past_key_values has {cache.columns} columns"
        require(not cache.is_initialized, f"{columns}; expected an empty cache with a draft model or prompt lookup")
        config = kwargs["generation_config"]
        if not (config.output_attentions or config.output_hidden_states):  # which are of the whole prompt
            read_prompt(self, input_ids, cache, kwargs.get("attention_mask"))
        return super()._assisted_decoding(input_ids, *args, prompt_read=cache.columns > 0, **kwargs)  # type: ignore[misc]
