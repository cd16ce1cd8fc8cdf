"""Matches parameters: the MLP width of each model is chosen so that it has as many parameters as the largest model."""

from functools import cache, partial
from typing import Any, NamedTuple

from ...layers.blocks.widths import count_parameters, default_intermediate_size, match_intermediate_size
from ...spec.encoder_decoder import ModelSpec
from ...spec.serialize import to_json
from ...spec.stack import StackSpec
from ...tasks import Task
from .model import build, positions
from .shape import MATCHED, ArmRecipe, Shape


class Candidate(NamedTuple):
    """A model of some width. See `model.Subject`."""

    task: Task
    shape: Shape
    recipe: ArmRecipe
    spec: dict[str, Any]
    width: int | None


@cache
def match(
    task: Task, shape: Shape, recipe: ArmRecipe, specs: tuple[Any, ...], reference: Any = None
) -> tuple[int | None, ...]:
    """The MLP width for each spec; None for a model without an MLP of free width, as a recurrent encoder-decoder.

    reference: the spec whose number of parameters the models have, with the MLP of `shape`; None: the largest model's.
    InputError if a model has more than the reference with the narrowest MLP."""
    if shape.mlp == 0:
        return (None,) * len(specs)
    _ = positions(task), task.vocab_size  # cached here: on the meta device rows and files cannot be read
    if reference is not None:
        target = count_parameters(partial(model, task, shape, recipe, to_json(reference), usual(shape, reference)))
    builds = [partial(model, task, shape, recipe, to_json(spec)) for spec in specs]
    if shape.mlp is None and reference is None and not any(isinstance(spec, ModelSpec) for spec in specs):
        sizes = [count_parameters(partial(build, None)) for build in builds]
        if max(sizes) <= MATCHED * min(sizes):
            return (None,) * len(specs)
    free = [count_parameters(partial(build, 1)) < count_parameters(partial(build, 2)) for build in builds]
    if reference is None:
        widths = [usual(shape, spec) if is_free else None for spec, is_free in zip(specs, free, strict=True)]
        target = max(count_parameters(partial(build, width)) for build, width in zip(builds, widths, strict=True))
    sized = zip(builds, free, strict=True)
    return tuple(match_intermediate_size(build, target) if is_free else None for build, is_free in sized)


def model(task: Task, shape: Shape, recipe: ArmRecipe, spec: dict[str, Any], width: int | None) -> Any:
    return build(Candidate(task, shape, recipe, spec, width))


def usual(shape: Shape, spec: Any) -> int:
    """The MLP width in the largest model."""
    if shape.mlp is None and isinstance(spec, StackSpec):
        return default_intermediate_size(shape.hidden_size, spec.style.gated)
    return shape.mlp or shape.hidden_size
