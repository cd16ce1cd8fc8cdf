"""From text to packed tokens on disk, and from there to batches."""

from .preparation import Preparation, prepare
from .rows import Collator, PackedData, open_data

__all__ = ["Collator", "PackedData", "Preparation", "open_data", "prepare"]
