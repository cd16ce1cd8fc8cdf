"""Weight decay of headrace's layers under transformers' Trainer.

The Trainer leaves parameters out by patterns of their names ("bias", "norm") and by nn.LayerNorm, and asks no model, so
that it would decay A_log, skip and norm_weight. `leave_out` makes its list of names leave out what `undecayed` names.
"""

import sys
from functools import wraps

from torch import nn
from transformers import trainer_pt_utils

from ..layers.base import SelfInitialized, undecayed


def leave_out() -> None:
    """Wraps `get_parameter_names` of transformers, which calls itself for every submodule. Modules that are not of
    headrace have the names that they had."""
    listed = trainer_pt_utils.get_parameter_names

    @wraps(listed)
    def get_parameter_names(model: nn.Module, *args, **named) -> list[str]:
        names = listed(model, *args, **named)
        without = undecayed(model) if isinstance(model, SelfInitialized) else ()
        return [name for name in names if name not in without]

    for module in ("transformers.trainer_pt_utils", "transformers.trainer"):  # the latter if it is imported already
        if module in sys.modules:
            sys.modules[module].get_parameter_names = get_parameter_names  # type: ignore[attr-defined]
