"""The optional packages that headrace imports, and the extra of `pip install` that installs each."""

from importlib.util import find_spec

from .errors import InputError

# Import names. Each extra also installs the packages of the extra in INCLUDES.
EXTRAS = {
    "models": (
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "accelerate",
        "matplotlib",
        "jinja2",
        "pandas",
        "scipy",
        "yaml",
    ),
    "train": ("datasets", "tensorboard", "omegaconf"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "serve": ("starlette", "uvicorn", "pydantic", "prometheus_client"),
    "eval": ("lm_eval", "wonderwords", "nltk", "html2text", "bs4", "httpx", "sklearn"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "gguf": ("gguf",),
    "vllm": ("vllm",),
    "gpu": ("fla", "einops", "packaging"),
}
INCLUDES = {
    "train": "models",
    "wandb": "train",
    "trackio": "train",
    "serve": "models",
    "eval": "train",
    "onnx": "models",
    "gguf": "models",
    "vllm": "models",
}


class MissingPackage(InputError, ImportError):
    """An optional package is not installed. The message names the `pip` command that installs it."""


def packages(extra: str) -> tuple[str, ...]:
    """Returns the import names of all optional packages that the extra installs."""
    return (*(packages(INCLUDES[extra]) if extra in INCLUDES else ()), *EXTRAS[extra])


def require(who: str, *needed: str, extra: str | None = None) -> None:
    """Raises MissingPackage if `who` needs a package that is not installed.

    Args:
        needed: import names.
        extra: the extra to name; None: the extra of the first missing package."""
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        extra = extra or next(known for known, names in EXTRAS.items() if absent[0] in names)
        are = "is" if len(absent) == 1 else "are"
        raise MissingPackage(
            f'{who} needs {", ".join(absent)}, which {are} not installed: pip install "headrace[{extra}]"'
        )


def explain(who: str, error: ImportError) -> None:
    """Raises MissingPackage in place of the failed import of an optional package; returns for any other error."""
    name = (error.name or "").partition(".")[0]
    if any(name in names for names in EXTRAS.values()):
        require(who, name)
