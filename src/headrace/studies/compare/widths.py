"""Matches parameters: the MLP width of each model is chosen so that it has as many parameters as the largest model."""

from functools import cache, partial
from typing import Any

from ...layers.blocks.widths import count_parameters, default_intermediate_size, match_intermediate_size
from ...spec.encoder_decoder import ModelSpec
from ...spec.serialise import to_json
from ...spec.stack import StackSpec
from .model import build
from .plan import MATCHED, Arm, Plan


@cache
def match(plan: Plan, specs: tuple[Any, ...]) -> tuple[int | None, ...]:
    """The MLP width for each spec; None for a model without an MLP of free width, as a recurrent encoder-decoder."""
    if plan.shape.mlp == 0:
        return (None,) * len(specs)
    _ = plan.positions, plan.task.vocab_size  # cached here: on the meta device rows and files cannot be read
    builds = [partial(model, plan, spec) for spec in specs]
    if plan.shape.mlp is None and not any(isinstance(spec, ModelSpec) for spec in specs):
        sizes = [count_parameters(partial(build, None)) for build in builds]
        if max(sizes) <= MATCHED * min(sizes):
            return (None,) * len(specs)
    free = [count_parameters(partial(build, 1)) < count_parameters(partial(build, 2)) for build in builds]
    widths = [usual(plan, spec) if wide else None for spec, wide in zip(specs, free, strict=True)]
    target = max(count_parameters(partial(build, width)) for build, width in zip(builds, widths, strict=True))
    sized = zip(builds, free, strict=True)
    return tuple(match_intermediate_size(build, target) if wide else None for build, wide in sized)


def model(plan: Plan, spec: Any, width: int | None) -> Any:
    return build(Arm(plan, "", to_json(spec), width, 0))


def usual(plan: Plan, spec: Any) -> int:
    """The MLP width in the largest model."""
    if plan.shape.mlp is None and isinstance(spec, StackSpec):
        return default_intermediate_size(plan.shape.hidden_size, spec.style.gated)
    return plan.shape.mlp or plan.shape.hidden_size
