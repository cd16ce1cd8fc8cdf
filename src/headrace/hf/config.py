"""What a model is made of, as transformers' configuration: written to a checkpoint's config.json."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from .. import zoo
from ..layers.stack import Sizes, default_intermediate_size
from ..spec.linear import Spec, from_json, to_json
from ..spec.record import require_positive
from ..spec.stack import BlockStyle, Decoder, Layer, as_decoder, as_layers, as_style
from ..utils.errors import InputError, nearest

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "intermediate_size", "max_position_embeddings",
)  # fmt: skip
# What transformers itself keeps in any config.json, or takes when one is made. Nothing of it changes a model.
TRANSFORMERS = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward",
    "dtype", "experts_implementation", "id2label", "is_encoder_decoder", "label2id", "model_type", "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "problem_type", "quantization_config", "return_dict",
    "tie_last_hidden_states", "torch_dtype", "transformers_version",
})  # fmt: skip
# Our fields by the names that other models have for them.
ELSEWHERE = {
    "d_model": "hidden_size", "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_heads",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size", "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings", "rms_norm_eps": "norm_eps", "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps", "activation_function": "mlp", "hidden_act": "mlp",
    "rope_parameters": "rope_theta", "rope_scaling": "rope_theta", "num_key_value_heads": "mixer", "head_dim": "mixer",
    "per_layer_config": "mixer", "layer_types": "mixer",
}  # fmt: skip
# What a saved folder holds for processes that do not import headrace, and the names that transformers looks for in it.
CODE = '''"""For transformers with trust_remote_code=True. It needs: pip install "headrace[models]"."""

from headrace.hf import HeadraceConfig, HeadraceForCausalLM, HeadraceModel

__all__ = ["HeadraceConfig", "HeadraceForCausalLM", "HeadraceModel"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_headrace.HeadraceConfig",
    "AutoModel": "modeling_headrace.HeadraceModel",
    "AutoModelForCausalLM": "modeling_headrace.HeadraceForCausalLM",
}


class HeadraceConfig(PreTrainedConfig):
    """Sizes of a model and a mixer for each of its layers.

    Args:
        mixer: a name or expression of the zoo, a spec, or its JSON; or a list of them (or of Layers), repeated over the
            depth. Kept, and saved, as JSON in full, so that a checkpoint does not depend on what a name means later.
        num_heads: of every mixer that does not set its own.
        intermediate_size: the MLP's width; None: `model.default_intermediate_size`.
        style: what stands around the mixers: a BlockStyle, or a dict of what differs from the mixer's own.
            mlp: its `mlp`, in short.
        initializer_range: standard deviation of linear layers and embeddings at the start.
        max_position_embeddings: the longest sequence of a style with learned positions; otherwise for tools that ask.
    Raises InputError for an unknown mixer, sizes that do not fit, and a field that is neither one of these nor one that
    transformers keeps in any config.
    """

    model_type = "headrace"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012

    mixer: Any = "softmax-gla"
    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 4
    intermediate_size: int | None = None
    style: Any = None
    mlp: str | None = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        for name in self.attribute_map.keys() & kwargs.keys():
            setattr(self, name, kwargs.pop(name))
        _refuse_unknown(kwargs)
        self._check_values()
        self._set_style(self._set_mixers())
        self.stack.head_dims(self.hidden_size, self.num_heads)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As of any config; but what is changed of our fields is checked with the others, and means what it does when
        a config is made."""
        own = cls.__annotations__.keys() | cls.attribute_map.keys()
        changed = {name: kwargs.pop(name) for name in own & kwargs.keys()}
        kept = config_dict | ({"mlp": None} if "style" in changed else {})
        return super().from_dict(kept | changed, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs) -> None:
        """As of any config; with the code by which transformers reads the folder where headrace is not imported."""
        self.auto_map = dict(AUTO_MAP)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "modeling_headrace.py").write_text(CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Nothing: transformers would copy this file into what is saved after it was read by the folder's code."""

    def _check_values(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        require_positive(**{name: n for name, n in sizes.items() if (name, n) != ("intermediate_size", None)})
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise InputError(f"{name}={value!r}; expected a positive number")
        for name in ("tie_word_embeddings", "use_cache"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name}={value!r}; expected True or False")

    def _set_mixers(self) -> BlockStyle:
        """Replaces what was given by its JSON; returns the style that goes with it."""
        if not isinstance(self.mixer, list | tuple):
            spec = _known(self.mixer, Spec | Decoder)
            self.mixer = to_json(spec)
            return as_decoder(spec).style
        specs = [_known(mixer, Spec | Layer) for mixer in self.mixer]
        if not specs or self.num_hidden_layers % len(specs):
            raise InputError(
                f"mixer lists {len(specs)} mixers for num_hidden_layers={self.num_hidden_layers}; "
                "expected a number that divides it"
            )
        self.mixer = [to_json(spec) for spec in specs]
        return BlockStyle()

    def _set_style(self, base: BlockStyle) -> None:
        style = as_style(self.style, base)
        if self.mlp is not None:
            style = as_style({"mlp": self.mlp}, style)
        self.style, self.mlp = to_json(style), style.mlp
        if self.mlp == "none" and self.intermediate_size is not None:
            raise InputError(f"mlp='none' has no width; expected intermediate_size=None, got {self.intermediate_size}")
        if self.mlp != "none" and self.intermediate_size is None:
            self.intermediate_size = default_intermediate_size(self.hidden_size, style.gated)

    @property
    def stack(self) -> Decoder:
        """The layers that repeat over the depth, and the style of all."""
        given = self.mixer if isinstance(self.mixer, list) else [self.mixer]
        layers = [layer for data in given for layer in as_layers(from_json(data))]
        return Decoder(tuple(layers), as_style(self.style))

    @property
    def mixers(self) -> list[Spec]:
        """The spec of each layer's mixer."""
        return [layer.mixer for layer in self.stack.over(self.num_hidden_layers)]

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.hidden_size, self.num_heads, self.intermediate_size, self.norm_eps, self.rope_theta,
            self.max_position_embeddings, as_style(self.style),
        )  # fmt: skip


def _known(mixer, kinds):
    spec = zoo.mixer(mixer)
    if isinstance(spec, kinds):
        return spec
    raise InputError(f"mixer={mixer!r}; expected a name of the zoo, a spec or its JSON, or a list of them")


def _refuse_unknown(names: Iterable[str]) -> None:
    """transformers keeps every field it is given, and would build a model of other sizes than were asked for."""
    for name in names:
        if name not in TRANSFORMERS:
            meant = ELSEWHERE.get(name) or nearest(name, HeadraceConfig.__annotations__)
            raise InputError(f"HeadraceConfig has no field {name!r}; did you mean {meant!r}?")
