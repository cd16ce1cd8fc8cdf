"""What `headrace linearize` needs of a machine that is not there: memory and hours, counted on the meta device."""

from typing import Any

import torch

from ..convert.linearize import linear_config
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..ops.dispatch import set_backend
from . import machine as machines
from .efficiency import efficiency
from .model import SHARED, WHOLE, kept_for_backward
from .transfer import Imitation, Transfer

HOUR = 3600.0
WEIGHT = 4  # bytes per weight of the new layers


def costs(config: HeadraceConfig, mixer: str, changed: list[int], settings: Transfer, length: int) -> dict[str, Any]:
    """Returns the bytes and FLOPs of the imitation with rows of so many tokens.

    P parameters of the old model, N of the new layers, some of which train. The old model computes 2 P FLOPs per token;
    a new layer has a backward, which is twice its forward: 6 N. Products of activations are not counted. The backward
    of a layer holds about as much as its forward kept ("at work").
    """
    with torch.device("meta"):
        old, new = (HeadraceForCausalLM(each).eval() for each in (config, linear_config(config, mixer, changed)))
    for model in (old, new):
        set_backend(model, "torch")
        torch.nn.Module.to(model, getattr(torch, settings.precision))  # of activations
    imitation = Imitation(old, new, settings.trains)  # type: ignore[arg-type]
    ids = torch.zeros(settings.rows, length, dtype=torch.long)
    kept = kept_for_backward(lambda: imitation(ids), [*old.parameters(), *new.parameters()])
    P, N = old.num_parameters(), sum(p.numel() for p in imitation.parameters())
    trained = sum(p.numel() for p in imitation.parameters() if p.requires_grad)
    half = settings.precision == "bfloat16"
    named = str(config.dtype or torch.float32).removeprefix("torch.")  # transformers has it as a name, too
    stored = settings.weights(getattr(torch, named)).itemsize
    size = 2 if half else 4
    seen = 2 * len(changed) * ids.numel() * config.hidden_size * size
    return {
        "bytes": {
            "old model": P * stored,
            "new layers: weights": N * WEIGHT,
            "new layers: gradients and moments of what trains": trained * (SHARED + WHOLE - WEIGHT),
            **({"new layers in bfloat16": N * size} if half else {}),
            "inputs and outputs of the old layers": seen,
            "kept for the backward": sum(kept.values()),
            "at work": sum(kept.values()) // len(changed),
        },
        "flops": settings.steps * ids.numel() * (2 * P + 6 * N),
    }


def plan(machine: str, mixer: str, needed: dict[str, Any]) -> dict[str, Any]:
    """Returns whether one device of a machine, such as 1xH100, has the memory, and the hours that it takes."""
    name = machines.parse(machine).name
    device, reached = machines.DEVICES[name], efficiency(mixer)
    total = sum(needed["bytes"].values())
    return needed | {
        "device": name,
        "fits": total <= device.memory,
        "bytes_of_device": int(device.memory),
        "hours": needed["flops"] / (device.flops * reached.fraction) / HOUR,
        "efficiency": reached.fraction,
        "efficiency_source": reached.source,
    }
