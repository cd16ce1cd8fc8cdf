"""Whole models: encoder-decoders and BERT."""

from ..utils.extras import require

require(__name__, "transformers")

from ..spec.encoder_decoder import ModelSpec, RecurrentSpec
from ..spec.stack import BertSpec, TransformerSpec
from .bert import BertModel
from .encoder_decoder import EncoderDecoder, EncoderDecoderOutput, ModelSizes, shift_right
from .rnn import RecurrentModel
from .transformer import TransformerModel

Model = EncoderDecoder | BertModel
FAMILIES: dict[type, type[Model]] = {
    RecurrentSpec: RecurrentModel, TransformerSpec: TransformerModel, BertSpec: BertModel,
}  # fmt: skip


def build(spec: ModelSpec, **sizes) -> Model:
    """Returns the model of a spec. sizes: the fields of `ModelSizes`. Raises InputError for invalid sizes."""
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
