"""Laws on layers and models of other libraries: `headrace verify TARGET`."""

from .check import LAWS, Case, Verdict, verify
from .report import HEADER, as_json, snippet, table
from .targets import MODELS, Target, target

__all__ = [
    "HEADER", "LAWS", "MODELS", "Case", "Target", "Verdict", "as_json", "snippet", "table", "target", "verify",
]  # fmt: skip
