"""The language model with the interfaces of Hugging Face transformers, and generation."""

from ..utils.extras import require_packages

require_packages(__name__, "transformers")

from .cache import HeadraceCache
from .config import HeadraceConfig
from .heads import HeadraceForQuestionAnswering, HeadraceForSequenceClassification, HeadraceForTokenClassification
from .model import HeadraceForCausalLM, HeadraceModel, HeadracePreTrainedModel

__all__ = [
    "HeadraceCache", "HeadraceConfig", "HeadraceForCausalLM", "HeadraceForQuestionAnswering",
    "HeadraceForSequenceClassification", "HeadraceForTokenClassification", "HeadraceModel", "HeadracePreTrainedModel",
]  # fmt: skip
