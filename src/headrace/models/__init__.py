"""Whole models from sequence to sequence: source tokens in, target tokens out."""

from ..model_spec import ModelSpec, RecurrentSpec
from ..stack_spec import TransformerSpec
from .base import EncoderDecoder, EncoderDecoderOutput, ModelSizes, shift_right
from .rnn import RecurrentModel
from .transformer import TransformerModel

FAMILIES: dict[type, type[EncoderDecoder]] = {RecurrentSpec: RecurrentModel, TransformerSpec: TransformerModel}


def build(spec: ModelSpec, **sizes) -> EncoderDecoder:
    """The model of a spec; sizes are the fields of `ModelSizes`: vocab_size, hidden_size, num_heads, num_layers, …"""
    return FAMILIES[type(spec)](spec, ModelSizes(**sizes))  # type: ignore[arg-type, call-arg]


__all__ = ["FAMILIES", "EncoderDecoder", "EncoderDecoderOutput", "ModelSizes", "build", "shift_right"]
