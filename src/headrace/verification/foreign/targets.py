"""What `headrace verify TARGET` takes: a model or layer of transformers, a layer of FLA, an adapter in a file."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...utils.errors import InputError, did_you_mean, reason, require
from .adapters import causal_lm, fla_layer, layer_of_model

SMALL = 5_000_000  # parameters of a model that is verified in a minute
FORMS = "transformers:MODEL_TYPE, transformers:LAYER, fla:LAYER or FILE.py:FUNCTION"

# sizes: fields of configurations that make a model small, of which a model type gets those that its configuration has.
# models: what a model type needs besides, layers of each kind and sizes that must agree.
SMALL_MODELS = json.loads(Path(__file__).with_name("small_models.json").read_text("utf-8"))
SIZES, MODELS = SMALL_MODELS["sizes"], SMALL_MODELS["models"]


class Target(NamedTuple):
    """An adapter and how a program without headrace makes it: a function of .adapters with arguments, or a file."""

    name: str
    function: Callable
    arguments: tuple = ()
    file: str | None = None

    def adapter(self) -> dict[str, Any]:
        return self.function(*self.arguments)


def target(name: str) -> Target:
    """Returns the target of a name in one of FORMS. InputError for one that is not known or cannot be imported."""
    library, _, what = name.rpartition(":")
    require(library and what, f"target={name!r}; expected {FORMS}")
    if library == "transformers":
        return Target(name, *_of_transformers(name, what))
    if library == "fla":
        return Target(name, *_of_fla(name, what))
    return Target(name, _of_file(library, what), (), library)


def sizes_of(model_type: str) -> dict[str, Any]:
    """Returns the fields that make a model of this type small."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type).to_dict()
    return {field: size for field, size in SIZES.items() if field in known} | MODELS.get(model_type, {})


def _of_transformers(name: str, what: str) -> tuple[Callable, tuple]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS

    if what in LANGUAGE_MODELS or what in MODELS:
        try:
            sizes = sizes_of(what)
            with torch.device("meta"):
                model = causal_lm(what, sizes)["module"]
            problem = "" if (size := sum(p.numel() for p in model.parameters())) <= SMALL else f"{size:,} parameters"
        except Exception as error:
            problem = reason(error)
        if problem:
            raise InputError(
                f"target={name!r}: no small model of this type can be made ({problem}); expected one of "
                f"{', '.join(MODELS)}, or a file with an adapter"
            )
        return causal_lm, (what, sizes)
    for model_type in MODELS:
        file = _modeling_file(model_type)  # not of every version of transformers
        if file.is_file() and re.search(rf"^class {re.escape(what)}\(", file.read_text("utf-8"), re.MULTILINE):
            arguments = what, model_type, sizes_of(model_type)
            with torch.device("meta"):
                layer = layer_of_model(*arguments)["module"]
            softmax = any(hasattr(module, "is_causal") for module in layer.modules())  # its mask has four dimensions
            for parameter in [*inspect.signature(layer.forward).parameters.values()][1:]:
                required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                if required or parameter.name in ("position_embeddings", *["attention_mask"] * softmax):
                    raise InputError(
                        f"target={name!r}: its forward needs {parameter.name}, which a layer alone does not have; "
                        f"expected transformers:{model_type}, the whole model"
                    )
            return layer_of_model, arguments
    meant = did_you_mean(what, [*LANGUAGE_MODELS])
    raise InputError(f"target={name!r}; expected a model type, or a layer of {', '.join(MODELS)}{meant}")


def _modeling_file(model_type: str) -> Path:
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    return Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"


def _of_fla(name: str, what: str) -> tuple[Callable, tuple]:
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.layers") is None:
        try:
            has = f"; fla-core {importlib.metadata.version('fla-core')} has the ops alone"
        except importlib.metadata.PackageNotFoundError:
            has = ""
        raise InputError(f"target={name!r} needs fla.layers, of the package flash-linear-attention{has}")
    layers = importlib.import_module("fla.layers")
    if not hasattr(layers, what):
        raise InputError(f"target={name!r}; expected a layer of fla.layers{did_you_mean(what, layers.__all__)}")
    return fla_layer, (what,)


def _of_file(path: str, function: str) -> Callable:
    if not re.search(r"\.py$", path) or not Path(path).is_file():
        fault = "is no Python file" if Path(path).is_file() else "does not exist"
        raise InputError(f"target={path + ':' + function!r}: {path!r} {fault}; expected {FORMS}")
    spec = importlib.util.spec_from_file_location(f"headrace_target_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(adapter := getattr(module, function, None)):
        raise InputError(f"target={path + ':' + function!r}: {path!r} has no function {function!r}")
    return adapter
