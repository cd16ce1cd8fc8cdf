"""Converts checkpoints of other libraries to headrace models, and headrace models to checkpoints of other libraries.

A Format maps the fields of the foreign config.json to ours and the rows of foreign tensors to our tensors; both
directions use this map. Only safetensors files are read: nothing is unpickled, and no foreign code runs.
"""

import json
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...layers import LinearMixer
from ...ops.checks import require
from ...utils.errors import InputError, reading
from ...utils.integrity import check_weights, is_inside, read_json, seal, write_json
from ...utils.provenance import difference
from ..checkpoint import check_depth
from ..config import HeadraceConfig
from ..model import HeadraceForCausalLM
from . import flash, hugging_face
from .form import SHARED, Format, View

FORMATS = hugging_face.FORMATS | flash.FORMATS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # the name of the head in every format
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def import_checkpoint(checkpoint: Path) -> HeadraceForCausalLM:
    """Converts a foreign checkpoint to a headrace model, in evaluation mode and in the precision of the checkpoint.

    Raises:
        InputError: the format is unknown, the config has a feature that headrace does not have, or a tensor is missing,
            unexpected or of another shape.
    """
    check_weights(checkpoint)
    described = read_json(checkpoint / "config.json", {})
    kind = described.get("model_type")
    if kind not in [*FORMATS]:
        raise InputError(
            f"checkpoint {str(checkpoint)!r} has model_type={kind!r}; expected one of {', '.join(FORMATS)}"
        )
    try:
        form, tensors = FORMATS[kind], _read_tensors(checkpoint)
        form.check_values(described, max(tensor.numel() for tensor in tensors.values()))
        check_depth(described.get("num_hidden_layers", 0), [*tensors])
        config = HeadraceConfig(**form.arguments(described))
        _check_shapes(form, config, tensors)
    except InputError as error:
        raise InputError(f"checkpoint {str(checkpoint)!r}: {error}") from None
    model: Any = HeadraceForCausalLM(config).eval()
    model.to(_precision(tensors))
    left, ours = set(tensors), slots(model)
    for name, view in views(form, model).items():
        _fill(ours[name], view, tensors[view.name])
        left.discard(view.name)
    if model.config.tie_word_embeddings and HEAD in left:
        left -= {HEAD} if torch.equal(tensors[HEAD], tensors[form.whole[EMBEDDING].name]) else set()
    if left:
        raise InputError(f"checkpoint {str(checkpoint)!r} has an unexpected tensor {min(left)!r}")
    return model


def export_checkpoint(model: HeadraceForCausalLM, name: str, folder: Path) -> None:
    """Writes a model as a checkpoint of another format: config.json and model.safetensors.

    Raises:
        InputError: the format is unknown or cannot represent the model.
    """
    if name not in FORMATS:
        raise InputError(f"--to {name!r} is unknown; expected one of {', '.join(FORMATS)}")
    form, described = FORMATS[name], _described(model, name)
    tensors: dict[str, Tensor] = {}
    ours = slots(model)
    for slot, view in views(form, model).items():
        value = ours[slot] - view.offset if view.offset else ours[slot]
        if view.rows is None:
            tensors[view.name] = value.contiguous()
            continue
        whole = tensors.setdefault(view.name, value.new_zeros(view.height, *value.shape[1:]))
        whole[view.rows] = value
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    seal(folder)


def set_use_cache(folder: Path, name: str | None) -> None:
    """Sets use_cache in the generation_config.json of a checkpoint that was converted to the format `name`, or removes
    it for None, the format of headrace, whose models all have a cache."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    if name is not None and not FORMATS[name].cache:
        write_json(path, settings | {"use_cache": False})
    elif name is None and "use_cache" in settings:
        write_json(path, {field: value for field, value in settings.items() if field != "use_cache"})


def _described(model: Any, name: str) -> dict[str, Any]:
    """The foreign config.json. InputError if reading it back would not give the same model."""
    form, config = FORMATS[name], model.config
    if not all(isinstance(spec, form.mixer) for spec in config.mixers):
        raise InputError(f"--to {name!r} cannot represent this model: not all its mixers are {form.mixer.__name__}")
    described = {field: values[0] for field, values in form.only.items()} | form.describe(config)
    described |= {field: getattr(config, field) for field in SHARED if field in form.read}
    described |= {"model_type": name, "architectures": [form.architecture]}
    described["dtype"] = str(model.dtype).removeprefix("torch.")
    if not form.cache:
        described["use_cache"] = False
    try:
        again = HeadraceConfig(**form.arguments(described))
    except InputError as reason:
        raise InputError(f"--to {name!r} cannot represent this model: in this format its {reason}") from None
    sizes = replace(again.sizes, max_positions=config.sizes.max_positions)  # matters for learned positions only
    theirs, ours = ([*map(asdict, parts)] for parts in ((*again.mixers, sizes), (*config.mixers, config.sizes)))
    if changed := difference(theirs, ours):
        where, converted, original = changed
        raise InputError(f"--to {name!r} cannot represent this model: {where} is {original} here and {converted} there")
    return described


def views(form: Format, model: Any) -> dict[str, View]:
    """Our name of each tensor, or part of a tensor -> its place in the foreign tensors."""
    by_name = dict(form.whole)
    if model.config.tie_word_embeddings:
        del by_name[HEAD]
    for i in range(model.config.num_hidden_layers):
        for name, view in form.layer(model.config).items():
            by_name[f"model.backbone.layers.{i}.{name}"] = view._replace(name=view.name.replace("#", str(i)))
    return by_name


def slots(model: Any) -> dict[str, Tensor]:
    """Name -> detached view of each parameter. Parameters that combine several tensors are split into parts. Writing to
    a view changes the model."""
    by_name = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, LinearMixer):
            kept = {"in_proj.weight": module.parts, "conv.weight": None, "conv.bias": None}
            for name, parts in kept.items():
                if (whole := by_name.pop(f"{path}.{name}", None)) is not None:
                    sizes = parts or {part: module.parts[part] for part in "qkv"}
                    pieces = zip(sizes, whole.split(list(sizes.values())), strict=True)
                    by_name |= {f"{path}.{name.replace('in_proj.weight', 'in_proj')}.{part}": x for part, x in pieces}
    return by_name


def _precision(tensors: dict[str, Tensor]) -> torch.dtype:
    """The lowest precision that represents every tensor without rounding."""
    for name, tensor in tensors.items():
        if tensor.dtype not in PRECISIONS:
            expected = ", ".join(str(dtype) for dtype in PRECISIONS)
            raise InputError(f"tensor {name!r} has dtype {tensor.dtype}; expected one of {expected}")
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})


def _check_shapes(form: Format, config: HeadraceConfig, tensors: dict[str, Tensor]) -> None:
    """Raises InputError for a tensor that is missing or of another shape, without the memory that a model takes."""
    with torch.device("meta"):
        model: Any = HeadraceForCausalLM(config)
    ours = slots(model)
    for name, view in views(form, model).items():
        require(view.name in tensors, f"it has no tensor {view.name!r}")
        foreign_shape, shape = [*tensors[view.name].shape], [*ours[name].shape]
        part = foreign_shape if view.rows is None else [len(view.rows), *foreign_shape[1:]]
        same_height = not view.height or foreign_shape[:1] == [view.height]
        fits = same_height and [n for n in part if n > 1] == [n for n in shape if n > 1]
        require(fits, f"tensor {view.name!r} has shape {foreign_shape}, which does not fit {shape}")


def _fill(slot: Tensor, view: View, tensor: Tensor) -> None:
    value = tensor if view.rows is None else tensor[view.rows]
    with torch.no_grad():
        slot.copy_(value.reshape(slot.shape) + view.offset)


def _read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    index = checkpoint / INDEX
    files = {WEIGHTS}
    if index.is_file():
        files = {*read_json(index, {"weight_map": {...: str}})["weight_map"].values()}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        require(is_inside(name), f"{INDEX} names {name!r}, which is outside the folder")
        with reading(f"{name} cannot be read"):
            tensors |= load_file(checkpoint / name)
    return tensors
