"""The model with the other heads of transformers. From the folder of a language model, `from_pretrained` loads the
backbone and reports that the head is new."""

from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .config import HeadraceConfig
from .model import HeadracePreTrainedModel


class HeadraceForSequenceClassification(GenericForSequenceClassification, HeadracePreTrainedModel):
    """input_ids [B, T] -> logits [B, num_labels] of the last token that is no padding, and the loss of labels [B]. With
    one label, the head of a reward model."""


class HeadraceForTokenClassification(GenericForTokenClassification, HeadracePreTrainedModel):
    """input_ids [B, T] -> logits [B, T, num_labels], and the loss of labels [B, T]; −100 is ignored."""


class HeadraceForQuestionAnswering(GenericForQuestionAnswering, HeadracePreTrainedModel):
    """input_ids [B, T] -> start_logits and end_logits [B, T] of a span, and the loss of start_positions and
    end_positions [B]."""


AutoModelForSequenceClassification.register(HeadraceConfig, HeadraceForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(HeadraceConfig, HeadraceForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(HeadraceConfig, HeadraceForQuestionAnswering, exist_ok=True)
