"""Matched parameters: every mixer's MLP is as wide as it takes to weigh what the heaviest mixer's model weighs."""

from functools import partial
from typing import Any

from torch import nn

from ..model import Backbone, Sizes, count_parameters, match_intermediate_size
from ..stack_spec import Decoder


def match(models: dict[str, Decoder], shape: Any, tokens: int) -> dict[str, int | None]:
    """MLP width by the name of a model; the heaviest has `shape.mlp`. None for all where there is no MLP to match with.

    shape: the plan's; tokens: of a row, which is as far as learned positions go."""
    if shape.mlp is None or not models:
        return dict.fromkeys(models)

    def build(model: Decoder, width: int) -> nn.Module:
        sizes = Sizes(shape.hidden_size, shape.heads, width, max_positions=tokens, style=model.style)
        return Backbone(model.over(shape.layers), sizes)

    target = max(count_parameters(partial(build, model, shape.mlp)) for model in models.values())
    return {name: match_intermediate_size(partial(build, spec), target) for name, spec in models.items()}
