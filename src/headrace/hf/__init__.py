"""The language model on Hugging Face's interfaces, and what is done with its checkpoints."""

from .cache import HeadraceCache
from .config import HeadraceConfig
from .model import HeadraceForCausalLM, HeadraceModel, HeadracePreTrainedModel, load

__all__ = [
    "HeadraceCache", "HeadraceConfig", "HeadraceForCausalLM", "HeadraceModel", "HeadracePreTrainedModel", "load",
]  # fmt: skip
