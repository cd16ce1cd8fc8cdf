"""Matches parameters and states: the MLP width of each model is chosen so that it has as many parameters as the largest
model, and a size of each mixer so that its state has as many numbers as the largest state."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import nn

from .. import zoo
from ..extra.specs.matrix import KINDS, MatrixSpec
from ..extra.specs.scan import ScanSpec
from ..history.specs.stack import StackSpec
from ..layers.blocks.widths import count_parameters, default_intermediate_size
from ..ops.checks import require
from ..spec.linear import MixerSpec
from ..spec.mixer import ModelSpec, Spec
from ..spec.serialize import change, to_json
from ..tasks import Task
from ..utils.errors import InputError
from .model import Candidate, build, positions
from .shape import MATCHED, ArmRecipe, Shape

MOST = 2**14  # largest value of a size that is tried


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


# --- states ----------------------------------------------------------------------------------------------------------
def match_states(mixers: tuple[str, ...], shape: Shape) -> tuple[str, ...]:
    """The mixers as expressions that set a size of each (`size_field`), so that its state has as nearly as many numbers
    as possible as the largest state of them. Attention, whose cache grows, mixers without such a size, and those that
    set it themselves stay as they are.

    Raises:
        InputError: one of the mixers is a whole model, or a sequence of several mixers.
    """
    specs = {mixer: zoo.get(mixer) for mixer in mixers}
    if whole := next((mixer for mixer, spec in specs.items() if not isinstance(spec, Spec)), None):
        raise InputError(f"--match state with {whole!r}, which has several mixers; expected single mixers")
    sizes = [numbers(spec, shape) for spec in specs.values() if not spec.facts.cached]
    return tuple(resized(mixer, spec, shape, max(sizes)) if sizes else mixer for mixer, spec in specs.items())


def numbers(spec: Spec, shape: Shape) -> int:
    """The numbers in the state of one layer."""
    return spec.state_bytes(shape.hidden_size, shape.heads, itemsize=1)


def size_field(spec: Spec) -> str | None:
    """The field that sets how many numbers the state has, without another number of heads or channels."""
    if isinstance(spec, ScanSpec):
        return "state_size" if spec.state_size else None
    if isinstance(spec, MatrixSpec):
        return "slots" if "slots" in KINDS[spec.kind].fields else None
    return "heads.key_dim" if isinstance(spec, MixerSpec) else None


def resized(mixer: str, spec: Spec, shape: Shape, target: int) -> str:
    """The expression of the mixer whose state is the nearest to `target` numbers."""
    (name, settings), field = zoo.expression(mixer, "mixer"), size_field(spec)
    if field is None or field in settings or numbers(spec, shape) == target:
        return mixer
    found: dict[int, int] = {}  # value of the field -> distance to the target; it falls, then grows
    for value in range(1, MOST):
        try:
            size = numbers(change(spec, field, value), shape)
        except InputError:  # an odd number of channels that rotate
            continue
        found[value] = abs(size - target)
        if size >= target:
            break
    best = min(found, key=found.__getitem__)
    return f"{name}({', '.join(f'{key}={value}' for key, value in (settings | {field: str(best)}).items())})"


def match_intermediate_size(build: Callable[[int], nn.Module], target: int) -> int:
    """Returns the MLP width with which the model build(width) has the number of parameters nearest to `target`.

    The number of parameters is linear in the width, so that two models are counted. Raises InputError if the model has
    no MLP, or more than `target` parameters with width 1."""
    least, per_width = count_parameters(partial(build, 1)), count_parameters(partial(build, 2))
    per_width -= least
    require(per_width > 0, f"the model has {least} parameters for every MLP width; expected a model with an MLP")
    width = round(1 + (target - least) / per_width)
    require(width >= 1, f"the model has {least} parameters with the narrowest MLP; expected at most target={target}")
    return width
