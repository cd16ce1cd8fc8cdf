"""Whole models: source tokens in, target tokens out; and BERT, which fills gaps."""

from ..model_spec import ModelSpec, RecurrentSpec
from ..stack_spec import BertSpec, TransformerSpec
from .base import EncoderDecoder, EncoderDecoderOutput, ModelSizes, shift_right
from .bert import BertModel
from .rnn import RecurrentModel
from .transformer import TransformerModel

Model = EncoderDecoder | BertModel
FAMILIES: dict[type, type[Model]] = {
    RecurrentSpec: RecurrentModel, TransformerSpec: TransformerModel, BertSpec: BertModel,
}  # fmt: skip


def build(spec: ModelSpec, **sizes) -> Model:
    """The model of a spec; sizes are the fields of `ModelSizes`: vocab_size, hidden_size, num_heads, num_layers, …"""
    return FAMILIES[type(spec)](spec, ModelSizes(**sizes))  # type: ignore[arg-type, call-arg]


__all__ = [
    "FAMILIES",
    "BertModel",
    "EncoderDecoder",
    "EncoderDecoderOutput",
    "Model",
    "ModelSizes",
    "build",
    "shift_right",
]
