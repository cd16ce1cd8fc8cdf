"""Reading of a saved model."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from ..ops.dispatch import BACKENDS, default_backend
from ..utils.errors import InputError
from ..utils.integrity import check_weights
from .config import HeadraceConfig
from .model import HeadraceForCausalLM


def load(path: str | Path) -> HeadraceForCausalLM:
    """Returns the model that `save_pretrained` wrote to the folder `path`, on the CPU, in evaluation mode and in the
    dtype it was saved in.

    Only safetensors are read; nothing is unpickled or downloaded.

    Raises:
        InputError: the folder is no checkpoint of headrace, a file of it is missing or damaged, or its weights do not
            fit its config.json.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise InputError(f"checkpoint {str(folder)!r} has no config.json; expected a folder written by save_pretrained")
    check_weights(folder)
    default_backend()  # raises for an unknown HEADRACE_BACKEND, which is no fault of the checkpoint
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not isinstance(config, HeadraceConfig):
            raise InputError(f"its model_type is {config.model_type!r}, not 'headrace'")
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        loaded: Any = HeadraceForCausalLM.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"checkpoint {str(folder)!r} cannot be read: {_first_line(error)}") from error
    model, report = loaded
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"], *mismatched}):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(f"checkpoint {str(folder)!r} does not fit its config.json at {', '.join(wrong[:3])}{more}")
    return model


def check_backend() -> None:
    """Raises InputError if this machine has not the backend that HEADRACE_BACKEND names for what is to be computed."""
    if (name := default_backend()) != "auto" and (reason := BACKENDS[name].missing()):
        raise InputError(f"HEADRACE_BACKEND={name!r} cannot run here: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
