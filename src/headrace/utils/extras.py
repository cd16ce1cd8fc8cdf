"""The optional packages that headrace imports, and the extra of `pip install` that installs each."""

from importlib.util import find_spec

from .errors import InputError

# Import names. Each extra also installs the packages of the extras in INCLUDES.
EXTRAS = {
    "models": ("transformers", "huggingface_hub", "tokenizers", "safetensors", "accelerate"),
    "studies": ("matplotlib", "jinja2", "scipy", "pandas", "yaml"),
    "train": ("datasets", "yaml", "zstandard"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "serve": ("starlette", "uvicorn", "pydantic", "prometheus_client", "jinja2"),
    "eval": ("lm_eval", "wonderwords", "nltk", "html2text", "bs4", "httpx", "sklearn"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "gguf": ("gguf",),
    "vllm": ("vllm",),
    "gpu": ("fla", "einops", "packaging"),
}
INCLUDES = {
    **dict.fromkeys(("studies", "train", "serve", "onnx", "gguf", "vllm"), "models"),
    **dict.fromkeys(("tensorboard", "wandb", "trackio"), "train"),
    "eval": "studies,train",
}


class MissingPackage(InputError, ImportError):
    """An optional package is not installed. The message names the `pip` command that installs it."""


def packages(extras: str) -> tuple[str, ...]:
    """Returns the import names of all optional packages that extras install, which are joined by commas."""
    names: list[str] = []
    for extra in extras.split(","):
        names += packages(INCLUDES[extra]) if extra in INCLUDES else ()
        names += EXTRAS[extra]
    return tuple(dict.fromkeys(names))


def named(extras: str) -> str:
    """Returns what a message says of extras that are not installed: their names, and the command that installs them."""
    names = [f"[{extra}]" for extra in extras.split(",")]
    return f'the extra{"s" * (len(names) > 1)} {" and ".join(names)}: pip install "headrace[{extras}]"'


def require_packages(who: str, *needed: str, extra: str | None = None) -> None:
    """Raises MissingPackage if `who` needs a package that is not installed.

    Args:
        needed: import names.
        extra: the extra to name, or several joined by commas; None: the extra of the first missing package."""
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        extra = extra or next(known for known, names in EXTRAS.items() if absent[0] in names)
        raise MissingPackage(f"{who} needs {named(extra)}")


def explain(who: str, error: ImportError) -> None:
    """Raises MissingPackage in place of the failed import of an optional package; returns for any other error."""
    name = (error.name or "").partition(".")[0]
    if any(name in names for names in EXTRAS.values()):
        require_packages(who, name)
