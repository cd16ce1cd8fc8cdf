"""Checkpoints: reading of ours, import from other libraries and GGUF, and export to other libraries.

A Format maps the fields of a foreign config.json to ours and our tensors to rows of foreign tensors; both directions
use this map.
"""

from ..utils.extras import require_packages

require_packages(__name__, "transformers")

from .checkpoint import load
from .exporting import export_checkpoint
from .formats import FORMATS
from .importing import import_checkpoint, import_gguf

__all__ = ["FORMATS", "export_checkpoint", "import_checkpoint", "import_gguf", "load"]
