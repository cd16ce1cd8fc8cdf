"""Export: a headrace model as a checkpoint of another library, where the model is one of its format."""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .. import zoo
from ..files.checks import read_json
from ..files.provenance import difference
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..spec.linear import MixerSpec
from ..spec.serialize import TYPES, to_json
from ..utils.errors import InputError, require
from ..utils.integrity import seal, write_json
from .describe import DESCRIPTIONS, has_cache
from .fields import Config
from .files import WEIGHTS
from .form import RENAMED, SHARED, SPECIAL, Format, Model
from .formats import FORMATS
from .slots import slots
from .views import View

# Fields of the original config.json that are not true of the new folder: dtype has the precision, and there is no code.
STALE = ("quantization_config", "torch_dtype", "auto_map")


def check_format(name: str) -> None:
    """Raises InputError for an unknown format."""
    require(name in FORMATS, f"--to {name!r} is unknown; expected one of {', '.join(FORMATS)}")


def export_checkpoint(model: HeadraceForCausalLM, name: str, folder: str | Path) -> bool:
    """Writes a model as a checkpoint of another format: config.json and model.safetensors. Returns whether the foreign
    library can decode the model with its cache.

    Raises:
        InputError: the format is unknown or cannot represent the model, or the model has other parameters than its
            config says, as a quantized one.
    """
    check_format(name)
    folder = Path(folder)
    described, foreign = _described(model, name)
    tensors: dict[str, Tensor] = {}
    ours = slots(model)
    other = min(ours.keys() ^ foreign.views.keys(), default="")
    plain = "expected neither quantized layers nor adapters, nor a wrapper around the model"
    require(not other, f"--to {name!r}: the model and its config differ in {other}; {plain}")
    for slot, view in foreign.views.items():
        if view.name not in tensors:
            tensors[view.name] = ours[slot].new_zeros(_whole_shape(view, ours[slot].shape))
        view.write(tensors[view.name], (ours[slot] - view.offset) / view.factor)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    seal(folder)
    return has_cache(name, model.config)


def set_use_cache(folder: Path, name: str | None, cached: bool) -> None:
    """Sets use_cache in the generation_config.json of a checkpoint in the format `name`, whose library cannot decode
    it with a cache, or removes it for None, the format of headrace."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    if not cached:
        write_json(path, settings | {"use_cache": False})
    elif name is None and "use_cache" in settings:
        write_json(path, {field: value for field, value in settings.items() if field != "use_cache"})


def _described(model: Any, name: str) -> tuple[Config, Model]:
    """The foreign config.json, and the foreign model that it describes. InputError if that is not the same model."""
    form, config = FORMATS[name], _with_heads(model.config)
    if any(getattr(spec, "competition", None) for spec in config.mixers):
        raise InputError(f"--to {name!r} cannot represent this model: no other library has its head competition")
    kind = (config.converted_from or {}).get("model_type")
    if form.inner is not None:
        meant = f"--to {kind}" if kind else "another format"
        raise InputError(f"--to {name!r} cannot represent this model: it reads text alone; expected {meant}")
    if kind == name:
        described = {field: x for field, x in config.converted_from.items() if field not in STALE}
    elif (description := DESCRIPTIONS.get(name)) is None:
        raise InputError(f"--to {name!r} cannot represent this model: expected a model that was converted from {name}")
    else:
        kinds = {cls: kind for kind, cls in TYPES.items()}
        for i, spec in enumerate(config.mixers):
            if not isinstance(spec, description.mixers):
                kind = kinds.get(type(spec), type(spec).__name__)
                mixers = f"layer {i} has a mixer of type {kind!r}; expected {kinds[description.mixers]!r}"
                raise InputError(f"--to {name!r} cannot represent this model: {mixers}")
        described = {field: getattr(config, field) for field in (*SHARED, *SPECIAL)} | description.fields(config)
    described |= {field: getattr(config, field) for field in ("vocab_size", "tie_word_embeddings", *SPECIAL)}
    described |= {"model_type": name, "architectures": [form.architecture]}
    described["dtype"] = str(model.dtype).removeprefix("torch.")
    if not has_cache(name, config):
        described["use_cache"] = False
    try:
        described = _with_length(form, described, config.max_position_embeddings)
        foreign, _ = form.model(described)
        if form.offset and config.sizes.style.norm == "rms":
            foreign = _with_offset(foreign)
        again = HeadraceConfig(**foreign.arguments)
    except InputError as reason:
        raise InputError(f"--to {name!r} cannot represent this model: in this format its {reason}") from None
    sizes = replace(again.sizes, max_positions=config.sizes.max_positions)  # matters for learned positions only
    theirs, ours = (
        [*map(to_json, each.mixers), asdict(its_sizes), {"tie_word_embeddings": each.tie_word_embeddings}]
        for each, its_sizes in ((again, sizes), (config, config.sizes))
    )
    if changed := difference(theirs, ours):
        where, converted, original = changed
        rounded = (config.converted_from or {}).get("dtype", "bfloat16")
        way = f"; expected model.to(torch.{rounded}), in which both are equal" if where == "embedding_scale" else ""
        differs = f"{where} is {original} here and {converted} there"
        raise InputError(f"--to {name!r} cannot represent this model: {differs}{way}")
    return described, foreign


def _with_length(form: Format, described: Config, longest: int) -> Config:
    """The fields with the longest sequence of the model, which training on longer rows raises, where no frequencies and
    no window depend on it."""
    name = "max_position_embeddings"
    longer = described | {field: longest for field in RENAMED[name] if field in described}
    before, after = (form.model(fields)[0].arguments for fields in (described, longer))
    stays = before.get(name) == longest or before | {name: longest} != after
    return described if stays else longer


def _with_heads(config: Any) -> Any:
    """The config with the number of heads as num_heads that all its mixers have, if widths of heads give it."""
    found = {spec.num_heads(config.hidden_size, config.num_heads) for spec in config.mixers}
    by_width = any(isinstance(spec, MixerSpec) and spec.heads.width for spec in config.mixers)
    if len(found) > 1 or not by_width:
        return config
    config = copy(config)
    layers = zoo.each_mixer(config.stack, lambda spec: replace(spec, heads=replace(spec.heads, width=None))).layers
    config.mixer, config.num_heads = [to_json(layer) for layer in layers], *found
    return config


def _with_offset(foreign: Model) -> Model:
    """Returns the foreign model for a model of ours whose norms do not store their weights minus 1."""
    names = ("mixer_norm.weight", "mlp_norm.weight", "backbone.norm.weight")
    views = {n: view._replace(offset=1.0) if n.endswith(names) else view for n, view in foreign.views.items()}
    return Model(foreign.arguments | {"style": replace(foreign.arguments["style"], norm="rms")}, views)


def _whole_shape(view: View, shape: Sequence[int]) -> list[int]:
    """Returns the shape of the foreign tensor, for the shape of ours."""
    if view.shape is not None:
        return [*view.shape]
    whole = [*shape] if view.block is None else [view.block.groups * view.block.each, *shape[1:]]
    return whole[::-1] if view.transposed else whole
