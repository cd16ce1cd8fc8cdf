"""The formats of other libraries by their model_type."""

from . import delta, flash, hybrid, recurrent, softmax
from .form import Format

FORMATS: dict[str, Format] = softmax.FORMATS | recurrent.FORMATS | delta.FORMATS | hybrid.FORMATS | flash.FORMATS

# Of formats with a recurrence that are not converted, what no mixer or model here has.
MISSING: dict[str, str] = {
    "rwkv7": "the values of the first layer mixed into those of all others (value residual)",
    "zamba": "Mamba layers of several heads, each with projections of its own (n_mamba_heads)",
    "xlstm": "a cap on the logits of mLSTM's gates (gate_soft_cap)",
}
