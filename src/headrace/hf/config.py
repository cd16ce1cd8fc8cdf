"""The configuration of a headrace model for transformers, which a checkpoint keeps as config.json."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from .. import zoo
from ..layers.blocks.block import Sizes
from ..layers.blocks.widths import default_intermediate_size, default_std
from ..ops.checks import require
from ..spec.record import LARGEST, require_bools, require_positive, require_positive_numbers
from ..spec.serialize import TYPES, Spec, from_json, to_json
from ..spec.stack import BlockStyle, Decoder, Layer, as_decoder, as_layers, as_style
from ..utils.errors import InputError, did_you_mean, require_each, shown

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "intermediate_size", "max_position_embeddings",
)  # fmt: skip
# Fields that transformers writes to every config.json or accepts for every config. They do not change a model.
TRANSFORMERS = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward",
    "dtype", "experts_implementation", "id2label", "is_encoder_decoder", "label2id", "model_type", "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "problem_type", "quantization_config", "return_dict",
    "tie_last_hidden_states", "torch_dtype", "transformers_version",
})  # fmt: skip
# Of these, the fields that have one value for every language model of ours.
FIXED = {"is_encoder_decoder": False, "return_dict": True}
LABELS = 2**20  # transformers makes a dict of all labels
LAYERS = 2**16  # transformers makes a list of all layers
# Names of fields of other models -> the field of HeadraceConfig with that meaning.
ELSEWHERE = {
    "d_model": "hidden_size", "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_heads",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size", "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings", "rms_norm_eps": "norm_eps", "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps", "activation_function": "mlp", "hidden_act": "mlp",
    "d_intermediate": "intermediate_size", "hidden_ratio": "intermediate_size", "d_ff": "intermediate_size",
    "rope_parameters": "rope_theta", "rope_scaling": "rope_theta",
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim", "per_layer_config", "layer_types", "attn",
                     "expand", "expand_k", "expand_v", "state_size", "conv_size", "ssm_cfg"), "mixer"),
}  # fmt: skip
# The code in a saved folder for processes that do not import headrace, and the classes that transformers finds there.
CODE = '''"""For transformers with trust_remote_code=True. It needs headrace: pip install ".[models]" in a checkout."""

from headrace.hf import *  # noqa: F403
'''
HEADS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
AUTO_MAP = {
    "AutoConfig": "modeling_headrace.HeadraceConfig",
    "AutoModel": "modeling_headrace.HeadraceModel",
    **{f"AutoModelFor{head}": f"modeling_headrace.HeadraceFor{head}" for head in HEADS},
}


class HeadraceConfig(PreTrainedConfig):
    """The configuration of a model: its sizes, and the mixer of each layer.

    Args:
        mixer: a name or expression of the zoo, a spec, or the JSON of a spec; or a list of these (or of Layers), which
            is repeated over the depth. The config stores the complete JSON, so that a checkpoint does not depend on
            later definitions of a name.
        vocab_size: number of tokens.
        hidden_size: width of the embeddings and of the residual stream.
        num_hidden_layers: number of layers; a multiple of the length of a list of mixers.
        num_heads: number of heads of every mixer that does not set its own; None: num_attention_heads, transformers'
            name for it, or 4.
        intermediate_size: width of the MLP; None: 8/3 of hidden_size, rounded up, or 4 hidden_size for an MLP without a
            gate (`layers.blocks.widths.default_intermediate_size`).
        style: the block around the mixers, as a BlockStyle or a dict of fields that differ from the mixer's style.
        mlp: short for the field `mlp` of the style.
        norm_eps: epsilon of the norms, except group norms and those of mixers whose spec has one (`read.eps`).
        initializer_range: standard deviation of the initial weights of linear layers and embeddings; None:
            `layers.blocks.widths.default_std`, 0.64 / √hidden_size.
        tie_word_embeddings: whether one matrix is the embedding and the output layer.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: the longest sequence of a style with learned positions; otherwise informative only.
        bos_token_id, eos_token_id, pad_token_id: ids of special tokens, as `generate` uses them.
        use_cache: whether the model returns its states, unless a call says otherwise; it does not in training.
        converted_from: the config.json of the foreign checkpoint that `headrace convert` has read, which it needs for
            the way back; None: the model was not converted.

    Raises:
        InputError: the mixer or a field is unknown, or sizes do not fit each other.
    """

    model_type = "headrace"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012

    mixer: Any = "softmax-gla"
    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = None  # type: ignore[assignment]
    intermediate_size: int | None = None
    style: Any = None
    mlp: str | None = None
    norm_eps: float = 1e-6
    initializer_range: float | None = None
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    converted_from: dict[str, Any] | None = None

    def __post_init__(self, **kwargs):
        heads, other = self.num_heads, kwargs.pop("num_attention_heads", None)
        both = f"num_heads={heads!r} and num_attention_heads={other!r}; expected one number of heads"
        require(None in (heads, other) or heads == other, both)
        self.num_heads = next(n for n in (heads, other, 4) if n is not None)
        _refuse_unknown(kwargs)
        for name, value in FIXED.items():
            setting = kwargs.get(name, getattr(self, name, value))
            require(setting is value, f"{name}={setting!r} is not available; expected {value}")
        require_bools(output_attentions=kwargs.get("output_attentions", False))
        dtype = kwargs.get("torch_dtype", self.dtype)  # its former name
        known = dtype is None or isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype)
        require(known, f"dtype={shown(dtype)}; expected a dtype of PyTorch, or None")
        labels = kwargs.get("num_labels", 0)
        require(type(labels) is int and 0 <= labels <= LABELS, f"num_labels={labels!r}; expected 0 to {LABELS}")
        self._check_values()
        self._set_style(self._set_mixers())
        self.stack.head_dims(self.hidden_size, self.num_heads)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, but checks the fields that `kwargs` change together with the others."""
        known = cls.__annotations__.keys() | cls.attribute_map.keys()
        changed = {name: kwargs.pop(name) for name in known & kwargs.keys()}
        replaced = {cls.attribute_map.get(name, name) for name in changed} | ({"mlp"} if "style" in changed else set())
        return super().from_dict(config_dict | dict.fromkeys(replaced) | changed, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs) -> None:
        """As in transformers, and writes the code by which transformers loads the folder without importing headrace."""
        self.auto_map = dict(AUTO_MAP)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "modeling_headrace.py").write_text(CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Does nothing; otherwise transformers would copy this file to folders saved by a model loaded by such code."""

    def _check_values(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        require_positive(**{name: n for name, n in sizes.items() if (name, n) != ("intermediate_size", None)})
        require_each(lambda n: n <= LAYERS, f"at most {LAYERS}", num_hidden_layers=self.num_hidden_layers)
        if self.initializer_range is None:
            self.initializer_range = default_std(self.hidden_size)
        require_positive_numbers(
            norm_eps=self.norm_eps, rope_theta=self.rope_theta, initializer_range=self.initializer_range
        )
        check_tokens(self)
        require_each(lambda x: isinstance(x, dict | None), "a config.json, or None", converted_from=self.converted_from)
        require_bools(tie_word_embeddings=self.tie_word_embeddings, use_cache=self.use_cache)

    def _set_mixers(self) -> BlockStyle:
        """Replaces `mixer` by its JSON, and returns the style of the mixer."""
        if not isinstance(self.mixer, list | tuple):
            spec = _known(self.mixer, Spec | Decoder)
            self.mixer = to_json(spec)
            return as_decoder(spec).style
        specs = [_known(mixer, Spec | Layer) for mixer in self.mixer]
        depth, listed = self.num_hidden_layers, len(specs)
        fits = listed > 0 and depth % listed == 0
        require(fits, f"mixer lists {listed} mixers for num_hidden_layers={depth}; expected a number that divides it")
        self.mixer = [to_json(spec) for spec in specs]
        return BlockStyle()

    def _set_style(self, base: BlockStyle) -> None:
        style = as_style({} if self.mlp is None else {"mlp": self.mlp}, as_style(self.style, base))
        self.style, self.mlp = to_json(style), style.mlp
        if self.mlp == "none" and self.intermediate_size is not None:
            raise InputError(f"mlp='none' has no width; expected intermediate_size=None, got {self.intermediate_size}")
        if self.mlp != "none" and self.intermediate_size is None:
            self.intermediate_size = default_intermediate_size(self.hidden_size, style.gated)

    @property
    def stack(self) -> Decoder:
        """The layers that are repeated over the depth, and their style."""
        mixers = self.mixer if isinstance(self.mixer, list) else [self.mixer]
        stack = _stack(json.dumps([mixers, self.style], default=shown), tuple(TYPES.rows.values()))
        both = f"mlp={shown(self.mlp)} and style.mlp={stack.style.mlp!r} in a config; expected one, of a new config"
        require(self.mlp == stack.style.mlp, both)
        return stack

    @property
    def mixers(self) -> list[Spec]:
        """The specs of all mixers, in the order of the layers; of a parallel mixer after the other one."""
        return [mixer for layer in self.stack.over(self.num_hidden_layers) for mixer in layer.mixers]

    @property
    def layer_types(self) -> list[str]:
        """What each layer keeps for later tokens, in transformers' words: "linear_attention" for a state of one size,
        "full_attention" and "sliding_attention" for keys and values, "hybrid" and "hybrid_sliding" for both."""
        stack = self.stack
        shared = [] if stack.style.shared is None else [stack.style.shared]
        return [_layer_type([*shared * layer.shared, *layer.mixers]) for layer in stack.over(self.num_hidden_layers)]

    @property
    def final_logit_softcapping(self) -> float | None:
        """The cap of the logits, for libraries that compute them from hidden states: trl reads it by this name."""
        return self.stack.style.logits_cap

    @property
    def sizes(self) -> Sizes:
        settings = self.norm_eps, self.rope_theta, self.max_position_embeddings, self.stack.style
        return Sizes(self.hidden_size, self.num_heads, self.intermediate_size, *settings)


@lru_cache
def _stack(described: str, types: tuple[type, ...]) -> Decoder:  # types: a name may be registered anew
    mixers, style = json.loads(described)
    return Decoder(tuple(layer for data in mixers for layer in as_layers(from_json(data))), as_style(style))


def check_tokens(config: Any) -> None:
    """Raises InputError unless the special tokens of a config are ids or None."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if name == "eos_token_id" and isinstance(value, list) else [value]
        fits = all(i is None or (type(i) is int and -1 <= i < LARGEST) for i in ids)
        require(fits, f"{name}={shown(value)}; expected the id of a token, or None")


def _layer_type(mixers: list[Spec]) -> str:
    whole = {getattr(mixer, "pattern", None) is None for mixer in mixers if mixer.facts.cached}
    if not whole:
        return "linear_attention"
    if all(mixer.facts.cached for mixer in mixers):
        return "full_attention" if True in whole else "sliding_attention"
    return "hybrid" if True in whole else "hybrid_sliding"


def _known(mixer, kinds):
    spec = zoo.mixer(mixer)
    expected = "a name of the zoo, a spec or its JSON, or a list of them"
    require(isinstance(spec, kinds), f"mixer={shown(mixer)}; expected {expected}")
    return spec


def _refuse_unknown(names: dict[str, Any]) -> None:
    """InputError for an unknown field. transformers would keep it and build a model with the default value instead."""
    for name in names:
        if name not in TRANSFORMERS:
            meant = did_you_mean(ELSEWHERE.get(name, name), HeadraceConfig.__annotations__)
            raise InputError(f"HeadraceConfig has no field {name!r}{meant}")
