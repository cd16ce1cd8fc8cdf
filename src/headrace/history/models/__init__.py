"""Whole models: encoder-decoders and BERT."""

from ...utils.extras import require_packages

require_packages(__name__, "transformers")

from ... import zoo
from ...utils.errors import InputError
from ..specs.encoder_decoder import ModelSpec, RecurrentSpec
from ..specs.stack import BertSpec, TransformerSpec
from .bert import BertModel
from .encoder_decoder import EncoderDecoder, EncoderDecoderOutput, ModelSizes, shift_right
from .rnn import RecurrentModel
from .transformer import TransformerModel

Model = EncoderDecoder | BertModel
FAMILIES: dict[type, type[Model]] = {
    RecurrentSpec: RecurrentModel, TransformerSpec: TransformerModel, BertSpec: BertModel,
}  # fmt: skip


def build(spec: str | dict | ModelSpec, **sizes) -> Model:
    """Returns the encoder-decoder or BERT of a spec.

    Args:
        spec: a name or expression such as "bert" or "bert(mixer=softmax-gla)", or what `headrace.zoo.get` returns.
        sizes: the fields of `ModelSizes`; vocab_size is required.

    Raises:
        InputError: for an unknown name, a mixer or decoder in place of a whole model, and invalid sizes.
    """
    if not isinstance(model_spec := zoo.get(spec), ModelSpec):
        names = ", ".join(name for name, named in zoo.MODELS.items() if isinstance(named, ModelSpec))
        raise InputError(
            f"{spec!r} is no encoder-decoder or BERT; expected {names}; HeadraceConfig(mixer=...) has others"
        )
    return FAMILIES[type(model_spec)](model_spec, ModelSizes(**sizes))  # type: ignore[arg-type, call-arg]


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
