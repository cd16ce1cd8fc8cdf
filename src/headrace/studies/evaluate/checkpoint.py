"""A model to evaluate: ours or any causal language model of transformers, from a folder or the Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME, cached_file

from ...hf.generate import read_tokenizer
from ...hf.model import HeadraceConfig, load
from ...utils.errors import InputError
from ...utils.integrity import check_weights, digest, sha256

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length")
READ = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")  # files of a model and its tokenizer
ROOM = 128  # tokens that the harness lets a needle's answer take


@dataclass(frozen=True)
class Checkpoint:
    path: str
    model: Any
    tokenizer: Any

    def harness(self, max_length: int, batch_size: int) -> HFLM:
        """The harness's view of it. Its cache of logits would make rolling likelihoods depend on the batch size."""
        return HFLM(
            pretrained=self.model,
            tokenizer=self.tokenizer,
            backend="causal",
            max_length=max_length,
            batch_size=batch_size,
            logits_cache=False,
        )

    @property
    def trained_length(self) -> int | None:
        """Tokens of context, as its config says."""
        found = (getattr(self.model.config, name, None) for name in LENGTHS)
        return next((length for length in found if length), None)


def read_checkpoint(path: str, device: str) -> Checkpoint:
    """Raises InputError for what is no causal language model with a tokenizer, or a device that is not here."""
    if Path(path).exists() and not Path(path, "config.json").is_file():
        raise InputError(f"checkpoint {path!r} has no config.json; expected a folder written by save_pretrained")
    model, tokenizer = read_model(path), read_tokenizer(path)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(f"checkpoint {path!r} has a tokenizer without bos and eos; expected one to begin a text with")
    try:
        return Checkpoint(path, model.to(device).eval(), tokenizer)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device={device!r} cannot be used: {str(error).splitlines()[0]}") from None


def read_model(path: str) -> Any:
    folder = Path(path)
    check_weights(folder)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if isinstance(config, HeadraceConfig) and folder.is_dir():
            return load(folder)
        found: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(path, error) from error
    model, loaded = found
    if missing := sorted(loaded["missing_keys"]):
        raise InputError(f"checkpoint {path!r} is no causal language model: it holds no weights of {missing[0]}")
    return model


def unreadable(path: str, error: Exception) -> InputError:
    where = "cannot be read" if Path(path).exists() else "is no folder here, and the Hub does not give it"
    return InputError(f"checkpoint {path!r} {where}: {str(error).strip().splitlines()[0]}")


def fingerprint(path: str) -> str:
    """Changes when what a folder's files hold does; of a model of the Hub, with its commit."""
    files = sorted(file for file in Path(path).glob("*") if file.suffix in READ)
    if not files:
        return digest([path, snapshot(path)])
    return digest({file.name: sha256(file) for file in files})


def snapshot(name: str) -> str:
    """The commit of a model of the Hub, by which its cache is ordered."""
    try:
        return Path(str(cached_file(name, CONFIG_NAME))).parent.name
    except OSError as error:
        raise unreadable(name, error) from error


def named(paths: list[str]) -> dict[str, str]:
    """By short names: the folder's, or its parent's where it is called `model`; by whole paths where those clash."""
    if len({str(Path(path)) for path in paths}) < len(paths):
        raise InputError("a checkpoint is given twice; expected each once")
    shorts = [Path(path).parent.name if Path(path).name == "model" else Path(path).name for path in paths]
    return {short if shorts.count(short) == 1 else path: path for short, path in zip(shorts, paths, strict=True)}
