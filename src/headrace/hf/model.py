"""The language model with the interfaces of Hugging Face transformers, and its registration with the Auto classes.

Dimensions: B batch, T tokens, D hidden size, N sequences (B, or those of a pack).
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as SHIFTED
from transformers.utils import can_return_tuple

from .. import zoo
from ..layers.base import Mixer
from ..layers.blocks.block import Block
from ..layers.blocks.stack import Backbone, initialize
from ..layers.maps import asking, wanted
from ..layers.quantized import QuantizedLinear
from ..ops.checks import check_tensor, require
from ..ops.sequences import Sequences
from ..utils.errors import InputError
from ..utils.integrity import CHECKSUMS, seal
from .cache import NAME as CACHE
from .cache import PACKED, HeadraceCache, cache_argument
from .cache_layers import read_dynamic, write_dynamic
from .config import HeadraceConfig
from .generation import Engine, HeadraceGenerationMixin
from .inputs import arranged, boundaries, kept_positions
from .loss import experts_loss, token_loss
from .snapshots import refuse_gradient


class HeadraceBlock(GradientCheckpointingLayer, Block):
    """A block with activation checkpointing. What is asked for (`layers.maps`) is also asked for when the block is
    computed again. A function passes it on, since FSDP would copy a list."""

    def __call__(self, *args, **kwargs):
        maps = wanted()
        return super().__call__(*args, **kwargs, **({} if maps is None else {"maps": lambda: maps}))

    def forward(self, *args, maps: Any = None, **kwargs):
        with nullcontext() if maps is None else asking(maps()):
            return super().forward(*args, **kwargs)


class HeadracePreTrainedModel(PreTrainedModel):
    config_class = HeadraceConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeadraceBlock"]  # noqa: RUF012
    # A module of accelerate copies other lists that it is given: what a layer appends to a copy is lost.
    _skip_keys_device_placement = ["past_key_values", "cache", "next_states", "inputs", "maps"]  # noqa: RUF012
    _is_stateful = False  # True tells transformers that the cache cannot go back
    accepts_loss_kwargs = False  # to its Trainer: the losses of the other heads are means over a batch
    _keep_in_fp32_modules_strict: Any = ["choice_bias", "mlp.router"]  # noqa: RUF012

    def post_init(self) -> None:
        """As in transformers, but keeps in float32 only what the model has: transformers expects all these names."""
        super().post_init()
        names, kept = list(self.state_dict()), self._keep_in_fp32_modules_strict
        self._keep_in_fp32_modules_strict = {part for part in kept if any(part in name for name in names)}

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config.initializer_range)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers, but raises InputError for tensor parallelism: every process loads the whole model."""
        for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh"):
            value = kwargs.get(name)
            require(value is None, f"{name}={value!r}, but every process loads the whole model; expected None")
        return super().from_pretrained(*args, **kwargs)

    def save_pretrained(self, save_directory, is_main_process: bool = True, **options):  # type: ignore[override]
        """As in transformers, and writes checksums of the weights, which `load` verifies. Raises InputError for a
        quantized model, whose weights nothing can load."""
        quantized = any(isinstance(module, QuantizedLinear) for module in self.modules())
        require(not quantized, "the model is quantized, and its weights could not be loaded; expected the original")
        if is_main_process:
            (Path(save_directory) / CHECKSUMS).unlink(missing_ok=True)
        super().save_pretrained(save_directory, is_main_process, **options)
        if is_main_process:
            seal(Path(save_directory))

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        seal(Path(working_dir))  # before `save_pretrained` does, so that the Hub does not keep earlier checksums
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class HeadraceModel(HeadracePreTrainedModel):
    """The model without the language-model head: embedding, blocks and final norm."""

    def __init__(self, config: HeadraceConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.backbone = Backbone(config.stack.over(config.num_hidden_layers), config.sizes, HeadraceBlock)
        self.post_init()

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, under the name that they have in transformers' models."""
        return self.backbone.layers

    @property
    def norm(self) -> nn.Module:
        """The norm after the last block, under the name that it has in transformers' models."""
        return self.backbone.norm

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: HeadraceCache | None = None, inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None, cu_seqlens: Tensor | None = None, output_attentions: bool | None = None,
        output_hidden_states: bool | None = None, position_ids: Tensor | None = None, seq_idx: Tensor | None = None,
        cache: HeadraceCache | None = None, **flash: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """input_ids [B, T] or inputs_embeds [B, T, D] -> last_hidden_state [B, T, D].

        Args:
            attention_mask: [B, T] or, with a cache, [B, all columns]; 1 marks tokens, and 0 padding, at any place.
            past_key_values: the cache returned for the columns before these. It is updated in place, unless
                use_cache=False. A model whose layers all keep all keys and values also takes a DynamicCache.
            use_cache: None: True if past_key_values is given, else config.use_cache, but False in training.
            cu_seqlens: [N + 1], the boundaries of the sequences of a pack (B = 1).
            position_ids: [B or 1, T], the positions of the tokens, which must be consecutive; where they restart at 0
                within a row, a new sequence begins.
            seq_idx: [B, T], the index of each token's sequence; an increase within a row begins a new sequence.
            output_attentions: whether to return the `attentions`: the maps [B, H, T, L] from values to what the heads
                of a mixer read before its norm (`layers.maps`), in the order of execution. L is the number of all
                columns for softmax attention, and T for a recurrence, whose state has the earlier columns. Rows that
                are packed have one map, [1, H, B T, B T]. As in transformers, mixers without a map are left out. None:
                as in the config.
            cache: another name of past_key_values, which transformers uses from 5.24 on.
            flash: cu_seqlens under the names of transformers' collators, `cu_seq_lens_q` and `_k`; `max_length_q` and
                `_k` have no effect.

        Raises:
            InputError: arguments that contradict each other or do not fit the cache.
        """
        cu_seqlens, given = boundaries(cu_seqlens, flash), cache_argument(past_key_values, cache)
        got = "neither" if input_ids is None else "both"
        require((input_ids is None) != (inputs_embeds is None), f"expected input_ids or inputs_embeds; got {got}")
        check_tensor(*(("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)))
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        shape = x.shape
        cache = self._own(given, attention_mask, shape[1])
        x, mask, pack = arranged(x, attention_mask, cu_seqlens, position_ids, seq_idx, cache.columns)
        cache.check_sequences(x.shape[0] if pack is None else pack.count)
        wished = given is not None or (self.config.use_cache and not self.training)
        use_cache = bool(wished if use_cache is None else use_cache)
        every = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        mapped = self.config.output_attentions if output_attentions is None else output_attentions
        if mapped or pack is not None:
            self.read_pending(cache)
        ids = input_ids if pack is None else PACKED
        with asking([]) if mapped else nullcontext() as maps, _restoring(cache):
            outputs = self._continue(cache, x, mask, pack, ids, use_cache, every)
        # A view would not be the tensor that the next block reads, and would have no gradient.
        *_, last = hidden = tuple(each if each.shape == shape else each.view(shape) for each in outputs)
        if use_cache and isinstance(given, DynamicCache):
            write_dynamic(given, cache.states or [])
        results: dict[str, Any] = {CACHE: None if not use_cache else cache if given is None else given}
        results |= {"hidden_states": hidden if every else None, "attentions": None if maps is None else tuple(maps)}
        return BaseModelOutputWithPast(last_hidden_state=last, **results)

    def _own(self, given: Cache | None, attention_mask: Tensor | None, T: int) -> HeadraceCache:
        """Returns a HeadraceCache that is given, or a new one: with the keys and values of a DynamicCache, to which the
        model writes what follows, or for None without a token."""
        if isinstance(given, HeadraceCache):
            return given
        cache = HeadraceCache()
        if isinstance(given, DynamicCache):
            if attention_mask is not None:
                check_tensor("attention_mask", attention_mask)
            cache.columns, cache.states = read_dynamic(given, self, attention_mask, T)
        return cache

    def read_pending(self, cache: HeadraceCache) -> None:
        """Reads the tokens of a cache that are pending after `cache.rewind`, which the next call reads anyway: for what
        needs the states before it."""
        if cache.pending:
            nothing = cache.pending_ids()[0][:, :0]
            with _restoring(cache):
                self._continue(cache, self.embed_tokens(nothing), None, None, nothing, True, False)

    def _continue(
        self, cache: HeadraceCache, x: Tensor, mask: Tensor | None, pack: Sequences | None, ids: Tensor | str | None,
        use_cache: bool, every: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Reads pending tokens, after which there is no pack, and x [B, T, D], and returns `_read`'s outputs for x.

        ids: as in `HeadraceCache.advance`."""
        pending, both, masks = cache.pending, x, mask
        if pending:
            earlier, padded = cache.pending_ids()
            both = torch.cat([self.embed_tokens(earlier), x], 1)
            if mask is not None or padded is not None:
                parts = zip((earlier, x), (padded, mask), strict=True)
                masks = torch.cat([y.new_ones(y.shape[:2], dtype=torch.bool) if m is None else m for y, m in parts], 1)
        outputs, states = self._read(both, cache.covered_states, masks, pack, use_cache, every)
        if use_cache:
            cache.replace(states, x.shape[1], ids, mask, self.backbone.state_counts)
            if masks is not None and self.packs_keys:
                cache.forget_places()
        return [y[:, pending:] for y in outputs] if pending else outputs

    @property
    def packs_keys(self) -> bool:
        """Whether a layer takes padding out of the keys and values that it keeps."""
        layers: Any = self.backbone.layers
        return any(isinstance(each, Mixer) and not each.fixed_size for layer in layers for each in layer.children())

    def _read(
        self, x: Tensor, past: list[Any] | None, mask: Tensor | None, pack: Sequences | None, use_cache: bool,
        every: bool,
    ) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
        """Returns ([the inputs of all layers, if `every`, and the last output], the states)."""
        in_place = use_cache and not torch.is_grad_enabled()  # here, as a reentrant checkpoint disables grad in layers
        if in_place and not every and pack is None and wanted() is None:
            last, states = self.backbone.prefill(x, past, mask)
            return [last], states
        inputs: list[Tensor] | None = [] if every else None
        where = {"mask": mask, "cu_seqlens": pack, "in_place": in_place, "inputs": inputs, "keep": use_cache}
        last, states = self.backbone(x, past, **where)
        if wanted() == [] and x.shape[1]:  # before the cache gets the states
            names = ", ".join(sorted({zoo.name_of(spec) for spec in self.config.mixers}))
            reason = "whose heads have no single weight for a pair of tokens; expected a mixer that has"
            raise InputError(f"output_attentions=True with {names}, {reason}")
        block: Any = self.layers[0]
        how = block._gradient_checkpointing_func.keywords if getattr(block, "gradient_checkpointing", False) else {}
        if use_cache and last.requires_grad and block.training and how.get("use_reentrant"):
            refuse_gradient(states)
        return [*(inputs or ()), last], states


def _restoring(cache: HeadraceCache) -> AbstractContextManager[None]:
    """`cache.overwritten`, unless no state is overwritten: with gradients, and in a graph."""
    return nullcontext() if torch.is_grad_enabled() or torch.compiler.is_compiling() else cache.overwritten()


class HeadraceForCausalLM(HeadracePreTrainedModel, HeadraceGenerationMixin):
    """The language model with next-token logits, loss and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    base_class = HeadraceModel
    accepts_loss_kwargs = True

    def __init__(self, config: HeadraceConfig):
        super().__init__(config)
        self.model = HeadraceModel(config)
        style = config.sizes.style
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=style.head_bias)
        self.cap, self.balance = style.logits_cap, 0.0 if style.experts is None else style.experts.balance
        self.engine = Engine()
        self.post_init()
        self.generation_config.use_cache = None

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers, except that a stored use_cache=False does not disable the cache in generation.

        The Trainer sets use_cache=False in the config of every model that it trains and saves. An argument of
        `generate`, or a `generation_config` given here, still disables the cache."""
        loaded: Any = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if kwargs.get("generation_config") is None and model.generation_config.use_cache is False:
            model.generation_config.use_cache = None
        return loaded

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: HeadraceCache | None = None, inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int | Tensor | None = None,
        skip_logits: bool = False, cu_seqlens: Tensor | None = None, output_attentions: bool | None = None,
        output_hidden_states: bool | None = None, cache: HeadraceCache | None = None,
        position_ids: Tensor | None = None, seq_idx: Tensor | None = None, **loss_kwargs,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """input_ids [B, T] or inputs_embeds [B, T, D] -> logits [B, T, vocabulary].

        Args:
            labels: [B, T]; the model shifts them. −100 is ignored. In a pack, the first label of each sequence must be
                −100.
            logits_to_keep: the number of last positions, or the positions, with logits; None, 0: all. The loss is over
                all positions in any case.
            skip_logits: with labels, whether `logits` is None. The loss is then computed from pieces of the logits,
                without the memory of [B, T, vocabulary].
            loss_kwargs: `num_items_in_batch`, by which the loss is divided; `shift_labels` in place of labels;
                the other arguments of HeadraceModel.

        Other arguments, and errors, are those of HeadraceModel.

        Returns:
            CausalLMOutputWithPast: `loss`, the mean cross-entropy in nats over the tokens with a label plus, in
            training, the load-balancing loss of experts over this call's tokens, None without labels; `logits` [B,
            kept positions, vocabulary]; `past_key_values`, `hidden_states` and `attentions` of HeadraceModel.
        """
        loss_kwargs.pop("tokenizer", None)  # an argument of `generate` that is passed on to forward
        given = cache_argument(past_key_values, cache)
        cache = None if isinstance(given, DynamicCache) else given
        targets = {"labels": labels, "shift_labels": loss_kwargs.get("shift_labels")}
        labelled = {name: target for name, target in targets.items() if target is not None}
        kept, tokens = kept_positions(logits_to_keep), input_ids if inputs_embeds is None else inputs_embeds
        for name, target in labelled.items():  # before the cache changes; a sentence of sizes would break a graph
            check_tensor(name, target)
            if isinstance(tokens, Tensor) and target.shape != tokens.shape[:2]:
                raise InputError(f"{name} has shape {list(target.shape)}; expected {list(tokens.shape[:2])}")
        if labelled and cache is not None:
            self.read_pending(cache)  # a loss of experts is one over the tokens of the call
        others = labels, inputs_embeds, cu_seqlens, output_attentions, output_hidden_states, position_ids, seq_idx
        if use_cache is not False and all(x is None or x is False for x in others) and not loss_kwargs:
            logits = self._next_logits(input_ids, attention_mask, cache, logits_to_keep)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]
        packs = {name: loss_kwargs.pop(name) for name in loss_kwargs.keys() - {"num_items_in_batch", "shift_labels"}}
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=given, inputs_embeds=inputs_embeds,
            use_cache=use_cache, cu_seqlens=cu_seqlens, output_attentions=output_attentions,
            output_hidden_states=output_hidden_states, position_ids=position_ids, seq_idx=seq_idx, **packs,
        )  # fmt: skip
        hidden, loss, logits = output.last_hidden_state, None, None
        if not (labelled and skip_logits):
            logits = self.logits(hidden[:, kept])
        if labelled:
            everything = not isinstance(logits_to_keep, Tensor) and not logits_to_keep
            loss = token_loss(self, hidden, logits if everything else None, labels=labels, **loss_kwargs)
            loss = loss + experts_loss(self, attention_mask, labels, **loss_kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions,
            **{CACHE: getattr(output, CACHE)},
        )  # fmt: skip

    plain_forward = forward  # which the engine stands for

    def _next_logits(self, input_ids: Any, attention_mask: Tensor | None, cache: Any, logits_to_keep: Any):
        """Returns the logits of one token of each of the cache's sequences, or of a few tokens of one sequence, by the
        native engine; None for other calls."""
        ready = cache is not None and isinstance(input_ids, Tensor) and input_ids.dim() == 2
        more = self.config.output_hidden_states or self.config.output_attentions
        if not ready or torch.is_grad_enabled() or more:
            return None
        (B, T), kept = input_ids.shape, logits_to_keep
        if not T or cache.batch_size not in (-1, B) or isinstance(kept, Tensor) or not 0 <= (kept or 0) <= T:
            return None
        if attention_mask is not None:
            shapes = (B, cache.columns + T), input_ids.shape
            if getattr(attention_mask, "shape", None) not in shapes or not (attention_mask[:, -T:] == 1).all():
                return None
        logits = self.engine.read(self, input_ids, cache)
        return None if logits is None else logits[:, -(kept or 0) :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., vocabulary] of hidden states [..., D], with the style's cap."""
        logits = self.lm_head(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def read_pending(self, cache: HeadraceCache) -> None:
        """As `HeadraceModel.read_pending`."""
        nothing = torch.empty(max(cache.batch_size, 0), 0, dtype=torch.long, device=self.device)
        if cache.pending and self.engine.read(self, nothing, cache) is None:
            self.model.read_pending(cache)


AutoConfig.register(HeadraceConfig.model_type, HeadraceConfig, exist_ok=True)
AutoModel.register(HeadraceConfig, HeadraceModel, exist_ok=True)
AutoModelForCausalLM.register(HeadraceConfig, HeadraceForCausalLM, exist_ok=True)
SHIFTED[HeadraceConfig.model_type] = HeadraceForCausalLM.__name__  # whose labels Trainer shifts before it smooths them
