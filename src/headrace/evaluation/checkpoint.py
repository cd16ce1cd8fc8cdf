"""A model to evaluate: a headrace model or any causal language model of transformers, from a folder or the Hub."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME, cached_file

from ..convert import load
from ..convert.checkpoint import check_backend, check_config, check_tokens, read_tokenizer
from ..data.tokenizer import could_be_on_the_hub
from ..files.checks import MODEL_FILES, check_weights
from ..files.hub import GGUF
from ..files.threads import ThreadsBySize
from ..hf import HeadraceConfig, HeadracePreTrainedModel
from ..utils.errors import InputError, reading
from ..utils.integrity import digest, sha256

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length")
ANSWERS = ("max_new_tokens", "stop_strings", "num_return_sequences", "return_dict_in_generate")
ROOM = 128  # largest number of tokens of an answer in the harness's needle tasks


@dataclass(frozen=True)
class Checkpoint:
    """A model on its device with its tokenizer."""

    path: str
    model: Any
    tokenizer: Any
    threads: ThreadsBySize | None  # None: not on a CPU

    def harness(self, max_length: int, batch_size: int) -> HFLM:
        """The checkpoint as a model of the harness. The logits cache is off, as with it rolling log-likelihoods would
        depend on the batch size."""
        made = {"pretrained": self.model, "tokenizer": self.tokenizer, "backend": "causal", "logits_cache": False}
        return HarnessModel(self.threads, **made, max_length=max_length, batch_size=batch_size)

    @property
    def trained_length(self) -> int | None:
        """Tokens of context by the config; None if the config has no such field."""
        return next(filter(None, (getattr(self.model.config, name, None) for name in LENGTHS)), None)


class HarnessModel(HFLM):
    """A model of the harness that chooses the number of threads of each call."""

    def __init__(self, threads: ThreadsBySize | None, **settings: Any):
        super().__init__(**settings)
        self.threads = threads

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._step("rows", inps):
            return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._step("answers to prompts", context):
            return super()._model_generate(context, *args, **kwargs)

    def _step(self, kind: str, tokens: Tensor) -> AbstractContextManager[None]:
        check_tokens(tokens, self.model)
        return nullcontext() if self.threads is None else self.threads.step(kind, tokens.numel())


def read_checkpoint(path: str, device: str, threads: int | None = None) -> Checkpoint:
    """Reads a causal language model and its tokenizer. InputError if either cannot be read or the device is missing.
    threads: on a CPU; None: measured (`files.threads`)."""
    if Path(path).exists():
        check_config(Path(path))
    model, tokenizer = read_model(path), read_tokenizer(path)
    model.generation_config.update(**dict.fromkeys(ANSWERS))  # where an answer ends is the harness's to say
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(f"checkpoint {path!r} has a tokenizer without bos and eos token; expected at least one")
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device={device!r} cannot be used: {str(error).splitlines()[0]}") from None
    if not isinstance(model, HeadracePreTrainedModel):
        own = "`headrace convert` may make a checkpoint of headrace of it"
        with reading(f"checkpoint {path!r} cannot be computed by transformers on {device} ({own})"), torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device))
    on_cpu = model.device.type == "cpu"
    timed = ThreadsBySize(threads, lambda line: tqdm.write(f"threads: {line}", file=sys.stderr)) if on_cpu else None
    return Checkpoint(path, model, tokenizer, timed)


def read_model(path: str) -> Any:
    folder = Path(path)
    check_weights(folder)
    check_name(path)
    with reading(unreadable(path)):
        config = None if folder.suffix == GGUF else AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config is None or (isinstance(config, HeadraceConfig) and folder.is_dir()):
        check_backend()
        return load(folder)
    with reading(unreadable(path)):
        model, report = cast(Any, AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True))
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"checkpoint {path!r} is not a causal language model: the weights of {missing[0]} are missing")
    return model


def check_name(path: str) -> None:
    """Raises InputError for what is no folder and no name of a model on the Hub."""
    if not Path(path).exists() and not could_be_on_the_hub(path):
        raise InputError(f"{unreadable(path)}: expected a folder, or OWNER/NAME")


def unreadable(path: str) -> str:
    where = "cannot be read" if Path(path).exists() else "is not a local folder and cannot be loaded from the Hub"
    return f"checkpoint {path!r} {where}"


def fingerprint(path: str) -> str:
    """A digest of the contents of the checkpoint's files or, for a model of the Hub, of its name and commit."""
    files = sorted(file for file in Path(path).glob("*") if file.suffix in MODEL_FILES)
    files = [Path(path)] if Path(path).suffix == GGUF else files
    return digest({file.name: sha256(file) for file in files} if files else [path, snapshot(path)])


def snapshot(name: str) -> str:
    """The commit of a model of the Hub, which is a folder name in the Hub's cache."""
    check_name(name)
    with reading(unreadable(name)):
        return Path(str(cached_file(name, CONFIG_NAME))).parent.name
