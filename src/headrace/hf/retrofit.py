"""Head competition for a model that is trained already: the same function at first, with gates that can learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import zoo
from ..layers.parts import Gate
from ..spec.linear import Competition, MixerSpec, to_json
from ..utils.errors import InputError
from .config import HeadraceConfig
from .model import HeadraceForCausalLM, load


def retrofit(checkpoint: Path, competition: Competition | None = None) -> HeadraceForCausalLM:
    """The model with the heads of every linear layer competing; its logits are the checkpoint's, to the bit.

    Gates begin at zero scores, where they are 1. InputError where no layer can have them, or has them already, and for
    a competition whose gates do not begin at 1."""
    model, wanted = load(checkpoint), competition or Competition()
    if wanted.scale != "identity":
        raise InputError(f"competition.scale={wanted.scale!r} changes the outputs at once; expected 'identity'")
    specs = model.config.mixers
    if any(isinstance(spec, MixerSpec) and spec.competition is not None for spec in specs):
        raise InputError(f"checkpoint {str(checkpoint)!r} has competition already")
    if not any(isinstance(spec, MixerSpec) for spec in specs):
        raise InputError(f"checkpoint {str(checkpoint)!r} has no layer of linear attention; it has nothing to gate")
    layers = model.config.stack.over(model.config.num_hidden_layers)
    mixers = [
        to_json(replace(layer, mixer=zoo.compete(layer.mixer, wanted)) if isinstance(layer.mixer, MixerSpec) else layer)
        for layer in layers
    ]
    gated: Any = HeadraceForCausalLM(HeadraceConfig.from_dict(model.config.to_dict() | {"mixer": mixers}))  # type: ignore[arg-type]
    _fill(gated.to(model.dtype), model)
    return gated.eval()


def _fill(gated: Any, model: Any) -> None:
    missing = gated.load_state_dict(model.state_dict(), strict=False).missing_keys
    gates = {name for name, module in gated.named_modules() if isinstance(module, Gate)}
    assert all(name.rpartition(".")[0] in gates for name in missing), missing
    with torch.no_grad():
        for name in gates:
            gated.get_submodule(name).reset_parameters()
