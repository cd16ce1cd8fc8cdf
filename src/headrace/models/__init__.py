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
    """Returns the encoder-decoder or BERT of a spec.

    Args:
        spec: a RecurrentSpec, TransformerSpec or BertSpec, as `headrace.zoo.get` returns it for a whole model.
        sizes: the fields of `ModelSizes`; vocab_size is required.

    Raises:
        InputError: for invalid sizes.
    """
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
