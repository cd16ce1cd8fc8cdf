"""Adds head competition to a trained model, whose outputs do not change until the new gates are trained."""

from pathlib import Path
from typing import Any

import torch

from .. import zoo
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..layers.linear.competition import Gate
from ..spec.linear import Competition, MixerSpec
from ..spec.serialize import to_json
from ..utils.errors import InputError
from .checkpoint import load
from .importing import cast


def retrofit(checkpoint: Path, competition: Competition | None = None) -> HeadraceForCausalLM:
    """The model of a checkpoint with competition gates in every layer of linear attention. The gates start at 1, so the
    logits equal those of the checkpoint bit by bit.

    Raises:
        InputError: the model has no layer of linear attention or has competition already, or the gates of `competition`
            do not start at 1.
    """
    model, gates = load(checkpoint), competition or Competition()
    if gates.scale != "identity":
        raise InputError(f"competition.scale={gates.scale!r} changes the initial outputs; expected 'identity'")
    specs = model.config.mixers
    if any(isinstance(spec, MixerSpec) and spec.competition is not None for spec in specs):
        raise InputError(f"checkpoint {str(checkpoint)!r} has competition already")
    if not any(isinstance(spec, MixerSpec) for spec in specs):
        raise InputError(
            f"checkpoint {str(checkpoint)!r} has no layer of linear attention, so there is nothing to gate"
        )
    layers = model.config.stack.over(model.config.num_hidden_layers)
    mixers = [to_json(zoo.each_mixer(layer, lambda spec: zoo.compete(spec, gates))) for layer in layers]
    gated: Any = HeadraceForCausalLM(HeadraceConfig.from_dict(model.config.to_dict() | {"mixer": mixers}))  # type: ignore[arg-type]
    _fill(cast(gated, model.dtype), model)
    gated.generation_config = model.generation_config
    return gated.eval()


def _fill(gated: Any, model: Any) -> None:
    missing = gated.load_state_dict(model.state_dict(), strict=False).missing_keys
    gates = {name for name, module in gated.named_modules() if isinstance(module, Gate)}
    assert all(name.rpartition(".")[0] in gates for name in missing), missing
    with torch.no_grad():
        for name in gates:
            gated.get_submodule(name).reset_parameters()
