"""All families together, and their configurations."""

from copy import deepcopy

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import Family, delta, dense, hybrid, parallel, recurrent, softmax, sparse

FAMILIES: dict[str, Family] = softmax.FAMILIES | parallel.FAMILIES | recurrent.FAMILIES | delta.FAMILIES
FAMILIES |= hybrid.FAMILIES | dense.FAMILIES | sparse.FAMILIES
VARIANTS = [(kind, name) for kind, family in FAMILIES.items() for name in ("base", *family.variants)]


def described(kind, variant="base", **changes):
    """transformers' configuration of a small model."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    variants = {"base": {}} | FAMILIES[kind].variants
    return CONFIG_MAPPING[kind](**deepcopy(FAMILIES[kind].base | variants[variant] | changes))  # which some change
