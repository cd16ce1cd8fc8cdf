"""Prepares text as packed tokens on disk, and reads these as batches."""

from ..utils.extras import require_packages

require_packages(__name__, "transformers")

from .preparation import Preparation, prepare
from .rows import Collator, PackedData, open_data, read_manifest, unigram_loss

__all__ = [
    "Collator", "PackedData", "Preparation", "open_data", "prepare", "read_manifest",
    "unigram_loss",
]  # fmt: skip
