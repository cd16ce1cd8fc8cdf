"""What `headrace linearize` does: chooses the layers of a trained model that become linear, trains them to imitate
attention, and measures what was lost; and what this needs of a machine that is not there."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..convert.importing import cast
from ..convert.linearize import attention_layers, linear_config, replaceable, with_linear_layers
from ..data import PackedData
from ..data.rows import ORDER, evenly_spaced, full_rows
from ..extra.moe import MixtureOfExperts
from ..extra.windowed import WindowedMixer
from ..files.provenance import claim, defaults, release
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..ops.dispatch import set_backend
from ..spec.serialize import to_json
from ..utils.errors import InputError
from ..utils.integrity import digest
from . import machine as machines
from .model import SHARED, WHOLE, kept_for_backward
from .processes import Processes, errors_in_all
from .transfer import Imitation, Tell, Transfer, batch_of, silent, transfer

Removed = dict[str, dict[str, float]]
SOURCE = "_name_or_path", "architectures", "transformers_version", "converted_from"  # fields of where a model is from
CONTEXTS = 2048, 8192, 32768  # tokens at which states are counted
WEIGHT = 4  # bytes per weight of the new layers
AT_WORK = 1.5  # measured: 1.4 to 1.7 with rows of 256 and 512 tokens, 2.3 with rows of 64


@dataclass(frozen=True)
class Keep:
    """The layers that keep their attention.

    layers: their indices. every: every n-th attention layer, from the first. worst: how many, by worst imitation."""

    layers: tuple[int, ...] = ()
    every: int | None = None
    worst: int = 0

    @staticmethod
    def parsed(text: str) -> "Keep":
        """Parses "4,12,20", "every=4", "worst=6" or "none"."""
        kind, _, number = text.partition("=")
        if kind in ("every", "worst") and number.isdecimal() and len(number) < 20 and int(number):
            return Keep(every=int(number)) if kind == "every" else Keep(worst=int(number))
        parts = [] if text == "none" else text.split(",")
        if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
            raise InputError(f"--keep={text[:80]}; expected layers such as 4,12,20, or every=4, worst=6 or none")
        return Keep(tuple(map(int, parts)))

    def changed(self, attention: list[int]) -> list[int]:
        """Returns which of the attention layers become linear, before the worst are known. InputError for layers that
        are none of them, and if none is left."""
        if unknown := [i for i in self.layers if i not in attention]:
            known = ", ".join(map(str, attention))
            raise InputError(f"--keep names layer {unknown[0]}, which is no attention layer; expected some of {known}")
        kept = {*self.layers, *(attention[:: self.every] if self.every else ())}
        changed = [i for i in attention if i not in kept]
        if len(changed) <= self.worst:
            raise InputError(f"--keep leaves none of the {len(attention)} attention layers to change; expected fewer")
        return changed


def imitate(
    model: Any, mixer: str, keep: Keep, data: PackedData, settings: Transfer, folder: Path,
    processes: Processes, tell: Tell, threads: int | None = None,
) -> tuple[HeadraceForCausalLM, dict[str, Any]]:  # fmt: skip
    """Makes attention layers of a model linear, and trains them to imitate attention. All processes must call it.

    Args:
        model: on the CPU; it is moved to the device of its process. What stays of it is shared with the new model, and
            is not rounded: with bfloat16 weights keep their precision, and with float32 they are widened.
        folder: of checkpoints, from which the same call goes on.

    Returns:
        The model in the precision of the settings, with new layers rounded to the dtype that `model` had, and a report:
        {"layers": {index: {"before", "after"}}, relative squared errors on held-out rows; "kept": the attention layers
        that stay; "nats": {"original", "replaced", "transferred"} per held-out token; "curve": the mean error of the
        layers in each step; "state_bytes": {tokens: {"original", "linear"}}, of one sequence in float32}.
    """
    changed = checked(model.config, mixer, keep, data, settings)
    dtype, taught = model.dtype, fingerprint(model)
    cast(model.to(processes.device), settings.weights(dtype))
    linear = with_linear_layers(model, mixer, changed)
    for i in changed:
        linear.model.backbone.layers[i].mixer.to(torch.promote_types(linear.dtype, torch.float32))
    plan = {"mixer": to_json(linear.model.backbone.layers[changed[0]].mixer.spec), "layers": changed}
    plan |= {"settings": asdict(settings), "order": ORDER, "data": data.identity, "model": taught}
    with errors_in_all():
        if processes.rank == 0:
            folder.mkdir(exist_ok=True)
            release(folder)  # where no checkpoint is
            may_lack = {*defaults({"settings": settings}), ("data",), ("model",)}
            claim(folder, json.loads(json.dumps(plan)), optional=may_lack)
    nats = {"original": held_out_loss(model, data, settings), "replaced": held_out_loss(linear, data, settings)}
    imitation = Imitation(model, linear, settings.trains, processes)
    errors, curve = transfer(imitation, data, settings, folder, tell, threads)
    imitation.finish()
    worst = sorted(errors["after"], key=errors["after"].__getitem__)[len(errors["after"]) - keep.worst :]
    if worst:
        linear = _with_attention_again(model, linear, mixer, {int(i) for i in worst})
    imitation.layers.to(dtype).to(settings.weights(dtype))  # rounded, as they are saved
    nats["transferred"] = held_out_loss(linear, data, settings)
    layers = {i: {name: found[i] for name, found in errors.items()} for i in errors["after"]}
    kept = [i for i in attention_layers(model.config) if str(i) not in layers or str(i) in worst]
    states = {n: {"original": state_bytes(model.config, n), "linear": state_bytes(linear.config, n)} for n in CONTEXTS}
    return linear.eval(), {"layers": layers, "kept": kept, "nats": nats, "curve": curve, "state_bytes": states}


def fingerprint(model: HeadraceForCausalLM) -> str:
    """A SHA-256 of what a model computes: its config and its weights."""
    config = {name: x for name, x in model.config.to_dict().items() if name not in SOURCE}
    found = hashlib.sha256(digest(config).encode())
    for x in model.state_dict().values():
        found.update(x.cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _with_attention_again(model: Any, linear: Any, mixer: str, layers: set[int]) -> Any:
    """Returns the model with the trained layers of `linear`, but for these, which keep their attention."""
    changed = [i for i in attention_layers(model.config) if i not in {*attention_layers(linear.config), *layers}]
    result = with_linear_layers(model, mixer, changed)
    for i in changed:
        result.model.backbone.layers[i].mixer = linear.model.backbone.layers[i].mixer
    return result


def checked(config: HeadraceConfig, mixer: str, keep: Keep, data: PackedData, settings: Transfer) -> list[int]:
    """Returns the layers that are to change, before the worst are known. InputError for data of another vocabulary, or
    with fewer full rows than a step has, windows that are dropped where there is none, and as `Keep.changed` and
    `linearize`."""
    if (size := data.manifest["vocab_size"]) > config.vocab_size:
        raise InputError(f"--data has a vocabulary of {size}; expected at most {config.vocab_size}, that of the model")
    if (count := len(full_rows(data.train, data.manifest["length"]))) < settings.rows:
        raise InputError(f"--rows {settings.rows}, and the data have {count} full rows; expected at most {count}")
    changed = keep.changed(replaceable(config))
    spec = linear_config(config, mixer, changed).stack.over(config.num_hidden_layers)[changed[0]].mixer
    if settings.window_dropout and not getattr(spec, "window", 0):
        raise InputError(f"--window-dropout={settings.window_dropout:g} with --mixer={mixer!r}, which has no window")
    return changed


def removed(
    original: Any, linear: Any, layers: list[int], data: PackedData, settings: Transfer,
    tell: Callable[[int], None] = lambda layer: None,
) -> Removed:  # fmt: skip
    """Returns by how much the held-out loss rises without a part of a model.

    {index of a new layer: {"original": without the old layer, "linear": without the new one}}. For layers with windows
    {"window", "memory"}, without one of the two, are there too, and {"all": {"window", "memory"}}, without those of all
    layers.

    tell: called with each layer before it is removed."""
    old, new = Without(original, data, settings), Without(linear, data, settings)
    found: Removed = {}
    summands = {i: new.mixer(i).summands for i in layers if isinstance(new.mixer(i), WindowedMixer)}
    for i in layers:
        tell(i)
        parts = {name: new.rise([part]) for name, part in summands.get(i, {}).items()}
        found[str(i)] = {"original": old.rise([old.mixer(i)]), "linear": new.rise([new.mixer(i)])} | parts
    names = list(next(iter(summands.values()), {}))
    together = {name: new.rise([parts[name] for parts in summands.values()]) for name in names}
    return found | ({"all": together} if together else {})


class Without:
    """The held-out loss of a model without some of its modules."""

    def __init__(self, model: Any, data: PackedData, settings: Transfer):
        self.model, self.loss = model, partial(held_out_loss, model, data, settings)
        self.whole = self.loss()

    def mixer(self, i: int) -> Any:
        return self.model.model.backbone.layers[i].mixer

    def rise(self, modules: list[nn.Module]) -> float:
        """Returns by how much the loss rises, in nats per token, when these modules give 0."""
        with silent(modules):
            return self.loss() - self.whole


def state_bytes(config: HeadraceConfig, tokens: int) -> int:
    """Returns what a model keeps of one sequence of so many tokens, in bytes of float32."""
    return config.stack.state_bytes(config.hidden_size, config.num_heads, tokens, config.num_hidden_layers)


@torch.no_grad()
def held_out_loss(model: HeadraceForCausalLM, data: PackedData, settings: Transfer) -> float:
    """Returns the loss in nats per token over as many held-out rows as an evaluation has."""
    total, count = 0.0, 0
    model.eval()
    for row in evenly_spaced(data.held_out, settings.held_out):
        batch = batch_of([row], model.device)
        tokens = batch["labels"].shape[1] - 1
        with settings.autocast(model.device):
            total += model(**batch, skip_logits=True, use_cache=False).loss.item() * tokens
        count += tokens
    return total / count


# --- what it needs of a machine --------------------------------------------------------------------------------------


def costs(config: HeadraceConfig, mixer: str, changed: list[int], settings: Transfer, length: int) -> dict[str, Any]:
    """Returns the bytes and FLOPs of the imitation with rows of so many tokens.

    P parameters of the old model, N of the new layers, some of which train. The old model computes 2 P FLOPs per token,
    less those of experts that are not chosen; a new layer has a backward, which is twice its forward: 6 N. Products of
    activations are not counted. One layer is in memory at a time; its backward takes AT_WORK times what it keeps.
    """
    with torch.device("meta"):
        old, new = (HeadraceForCausalLM(each).eval() for each in (config, linear_config(config, mixer, changed)))
    for model in (old, new):
        set_backend(model, "torch")
        torch.nn.Module.to(model, getattr(torch, settings.precision))  # of activations
    imitation = Imitation(old, new, settings.trains)  # type: ignore[arg-type]
    ids = torch.zeros(settings.rows, length, dtype=torch.long)
    x, layer = old.get_input_embeddings()(ids).detach(), next(iter(imitation.layers.values()))
    kept = sum(kept_for_backward(lambda: imitation.error(layer, x, x), layer.parameters()).values())
    P, N = old.num_parameters(), sum(p.numel() for p in imitation.parameters())
    trained = sum(p.numel() for p in imitation.parameters() if p.requires_grad)
    mixtures: Any = [module for module in old.modules() if isinstance(module, MixtureOfExperts)]
    idle = sum((x.up.numel() + x.down.numel()) * (x.spec.count - x.spec.chosen) // x.spec.count for x in mixtures)
    half, size = settings.precision == "bfloat16", getattr(torch, settings.precision).itemsize
    named = str(config.dtype or torch.float32).removeprefix("torch.")  # transformers has it as a name, too
    stored = settings.weights(getattr(torch, named)).itemsize
    return {
        "bytes": {
            "old model": P * stored,
            "new layers: weights": N * WEIGHT,
            "new layers: gradients and moments of what trains": trained * (SHARED + WHOLE - WEIGHT),
            **({"a new layer in bfloat16": N * size // len(changed)} if half else {}),
            "input and output of an old layer": 2 * x.nbytes,
            "kept for the backward of a layer": kept,
            "at work": int(AT_WORK * kept),
        },
        "flops": settings.steps * ids.numel() * (2 * (P - idle) + 6 * N),
    }


def plan(machine: str, mixer: str, needed: dict[str, Any]) -> dict[str, Any]:
    """Returns whether one device of a machine, such as 1xH100, has the memory, and the seconds that it takes."""
    name = machines.parse(machine).name
    device, reached = machines.DEVICES[name], machines.efficiency(mixer)
    total = sum(needed["bytes"].values())
    return needed | {
        "device": name,
        "fits": total <= device.memory,
        "bytes_of_device": int(device.memory),
        "seconds": needed["flops"] / (device.flops * reached.fraction),
        "efficiency": reached.fraction,
        "efficiency_source": reached.source,
    }
