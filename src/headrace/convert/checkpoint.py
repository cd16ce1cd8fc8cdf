"""Reading of a saved model and of its tokenizer."""

from os import PathLike, sep
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from ..files.checks import check_files, check_weights, read_json, reading_tokenizer
from ..files.devices import on_device
from ..files.hub import GGUF, check_config, is_on_the_hub
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..layers.quantized import KINDS, quantize
from ..ops.checks import require
from ..ops.dispatch import BACKENDS, default_backend
from ..utils.errors import InputError, reading, require_each
from .files import check_depth, tensor_names
from .importing import check_alone, check_generation, import_checkpoint, import_config, import_gguf, import_tokenizer

FETCHED = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"]
UNUSED = ["consolidated*", "*/*.safetensors"]  # the weights once more: Mistral's own form, and those of other programs


def load(path: str | Path) -> HeadraceForCausalLM:
    """Returns the model of the folder or GGUF file `path`, on the CPU, in evaluation mode and in the dtype it was saved
    in. A GGUF file, and a model of transformers or flash-linear-attention, are converted (`headrace.convert`).

    Only safetensors and GGUF are read; nothing is unpickled, and no code of the folder runs.

    Args:
        path: a folder written by `save_pretrained`, a file of llama.cpp whose name ends in .gguf, or, if there is none
            of that name, a name on the Hugging Face Hub such as "Qwen/Qwen3-0.6B", whose files are downloaded to the
            Hub's cache.

    Raises:
        InputError: the folder is no checkpoint of a known format, a file of it is missing or damaged, or its weights do
            not fit its config.json.
    """
    require_each(lambda x: isinstance(x, str | PathLike), "a folder, or a name on the Hugging Face Hub", path=path)
    folder, foreign = _located(path)
    if foreign:
        return import_gguf(folder)[0] if folder.suffix == GGUF else import_checkpoint(folder)
    check_weights(folder)
    default_backend()  # raises for an unknown HEADRACE_BACKEND, which is no fault of the checkpoint
    with reading(f"checkpoint {str(folder)!r} cannot be read"):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_depth(config.num_hidden_layers, tensor_names(folder))
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        loaded: Any = HeadraceForCausalLM.from_pretrained(folder, config=config, output_loading_info=True, **options)
        model, report = loaded
        check_generation(model.generation_config)  # of generation_config.json
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"], *mismatched}):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(f"checkpoint {str(folder)!r} does not fit its config.json at {', '.join(wrong[:3])}{more}")
    return model


def load_on(path: str | Path, device: str | None, weights: str | None = None) -> HeadraceForCausalLM:
    """Returns the model of `load` on a device. InputError as `load` and `on_device`, and for weights on another device
    than a CPU.

    weights: of linear layers, "int8" or "bfloat16", as in `quantize`, on a CPU; None: those of the folder."""
    device = on_device(device)
    require(weights in (None, *KINDS), f"--weights={weights!r}; expected one of {', '.join(KINDS)}")
    alone = weights is None or device == "cpu"
    require(alone, f"--weights={weights!r} with --device={device!r}; expected the CPU")
    model: Any = load(path) if weights is None else quantize(load(path), weights)
    return model.to(device)


def check_tokens(ids: Tensor, model: Any) -> None:
    """Raises InputError for a token that a model lacks, as where a tokenizer got more and the model was not resized."""
    if (last := int(ids.max())) >= (size := model.config.get_text_config().vocab_size):
        raise InputError(f"the prompt has the token {last}; the model has {size}: its tokenizer is another model's")


def read_config(path: str | Path) -> HeadraceConfig:
    """Returns the config of the model that `load` returns, of which no weights are read. InputError as `load`."""
    folder, foreign = _located(path)
    if foreign:
        return import_config(folder)
    with reading(f"checkpoint {str(folder)!r} cannot be read"):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def _located(path: str | Path) -> tuple[Path, bool]:
    """Returns the folder or GGUF file, and whether its model is of another library. InputError for a folder without
    config.json, or with an adapter."""
    folder = fetched(path)
    check_config(folder)
    if folder.suffix == GGUF:
        return folder, True
    check_alone(folder)
    return folder, read_json(folder / "config.json", {}).get("model_type") != HeadraceConfig.model_type


def fetched(path: str | Path) -> Path:
    """Returns the folder or file `path`, or the folder of the model of this name in the Hugging Face Hub's cache, after
    a download of the files that it lacks. InputError if it cannot be downloaded."""
    if not is_on_the_hub(path):
        return Path(path)
    with reading(f"checkpoint {str(path)!r} is no folder here, and cannot be fetched from the Hugging Face Hub"):
        return Path(snapshot_download(str(path).replace(sep, "/"), allow_patterns=FETCHED, ignore_patterns=UNUSED))


def check_backend() -> None:
    """Raises InputError if this machine has not the backend that HEADRACE_BACKEND names for what is to be computed."""
    if (name := default_backend()) != "auto" and (reason := BACKENDS[name].missing()):
        raise InputError(f"HEADRACE_BACKEND={name!r} cannot run here: {reason}")


def read_tokenizer(checkpoint: Path | str) -> Any:
    """The tokenizer of a checkpoint: a Path is a folder or GGUF file, a string one of these or a name on the Hub.
    InputError if there is none that can be read."""
    if Path(checkpoint).suffix == GGUF:
        return import_tokenizer(checkpoint)
    local = isinstance(checkpoint, Path)
    check_files(Path(checkpoint))
    sentence = f"checkpoint {str(checkpoint)!r} has no readable tokenizer; expected a tokenizer.json"
    with reading_tokenizer(checkpoint, sentence):
        name = str(checkpoint).replace(sep, "/")  # of the Hub, also in a path of Windows
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        tokenizer.decode(tokenizer("It was").input_ids)  # some fields of tokenizer_config.json are read only now
    return tokenizer
