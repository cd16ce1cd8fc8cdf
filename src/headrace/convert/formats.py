"""The formats of other libraries by their model_type."""

from . import delta, flash, hybrid, recurrent, softmax
from .form import Format

FORMATS: dict[str, Format] = softmax.FORMATS | recurrent.FORMATS | delta.FORMATS | hybrid.FORMATS | flash.FORMATS
