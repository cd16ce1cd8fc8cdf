"""Matched parameters: every mixer's MLP is as wide as it takes to weigh what the heaviest mixer's model weighs."""

from functools import partial

from torch import nn

from ..model import Backbone, Sizes, Spec, count_parameters, match_intermediate_size


def match(specs: dict[str, Spec], hidden_size: int, heads: int, layers: int, mlp: int | None) -> dict[str, int | None]:
    """MLP width by the name of a mixer; the heaviest has `mlp`. None for all where there is no MLP to match with."""
    if mlp is None or not specs:
        return dict.fromkeys(specs)

    def build(spec: Spec, width: int) -> nn.Module:
        return Backbone([spec] * layers, Sizes(hidden_size, heads, width))

    target = max(count_parameters(partial(build, spec, mlp)) for spec in specs.values())
    return {name: match_intermediate_size(partial(build, spec), target) for name, spec in specs.items()}
