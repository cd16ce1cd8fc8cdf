"""Matched parameters: each mixer's MLP is as wide as it takes to weigh what the first mixer's model weighs."""

from functools import partial

from torch import nn

from ..errors import InputError
from ..model import Backbone, Sizes, Spec, count_parameters, match_intermediate_size


def match(specs: dict[str, Spec], hidden_size: int, heads: int, layers: int, mlp: int | None) -> dict[str, int | None]:
    """MLP width by the name of a mixer, all without gates; None everywhere where there is no MLP to match with.

    InputError for a mixer that is heavier without an MLP than the first one with it."""
    if mlp is None:
        return dict.fromkeys(specs)

    def build(spec: Spec, width: int) -> nn.Module:
        return Backbone([spec] * layers, Sizes(hidden_size, heads, width))

    target = count_parameters(partial(build, next(iter(specs.values())), mlp))
    widths: dict[str, int | None] = {}
    for name, spec in specs.items():
        try:
            widths[name] = match_intermediate_size(partial(build, spec), target)
        except InputError as error:
            raise InputError(f"{name} cannot be matched to the first mixer's parameters: {error}") from None
    return widths
