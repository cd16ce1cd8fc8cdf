"""Generates text from a checkpoint, optionally printing tokens as they are generated."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, set_seed
from transformers.generation import BaseStreamer

from ..convert.checkpoint import check_backend, check_tokens, load_on, read_tokenizer
from ..files.devices import on_device
from ..files.state import check_new, load_state, save_state
from ..files.text import Text, text_of
from ..files.threads import Threads
from ..hf.cache import NAME as CACHE
from ..hf.cache import HeadraceCache
from ..ops.checks import require
from ..utils.errors import InputError
from ..utils.integrity import short

# Fields of a GenerationConfig that ask for another search than sampling or greedy search, or for another result than
# the text after a whole prompt, with the values that do not.
OTHER_SEARCHES = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "token_healing": False, "use_mtp": False, "is_assistant": False,
    "assistant_early_exit": None, "return_dict_in_generate": False,
}  # fmt: skip


def generate(
    checkpoint: Path, prompt: str, seed: int | None, stream: bool, device: str | None = None, draft: Path | None = None,
    resume: Path | None = None, save: Path | None = None, echo: bool = True, threads: int | None = None,
    weights: str | None = None, **sampling: Any,
) -> dict[str, Any]:  # fmt: skip
    """Continues a prompt.

    Args:
        prompt: text, to which the tokenizer adds the special tokens that it is set to add, such as Llama's first token,
            unless it follows a state. It may then be empty.
        seed: seed of sampling; None: torch's current random state.
        stream: print the text while it is generated.
        echo: with `stream`, print what has been read and the prompt before it.
        threads: number of PyTorch's threads on a CPU; None: measured with the first tokens (`files.threads`).
        draft: a checkpoint with the same tokens that proposes the next ones; not with `resume`.
        resume, save: files of a state to go on from, and to write after the last token: new, or the one of `resume`.
        weights: of linear layers on a CPU, also of the draft: "int8" or "bfloat16" (see `quantize`); None: as stored.
        sampling: arguments of transformers' `generate`.

    Other settings are those of the folder's generation_config.json. A line on standard error names those of
    OTHER_SEARCHES, which are not used.

    Returns:
        {"text": without special tokens, "tokens": token ids, "tokens_per_second"} of the continuation, "engine": what
        computed single tokens, "threads": the number of PyTorch's at the end, and "seed"; with proposed tokens also
        "accepted", the share of them that the model accepted, and "tokens_per_pass", the tokens that a call of the
        model gave.

    Raises:
        InputError: the checkpoint, device, tokenizer or a state cannot be used, there is no token to read, or the draft
            has another vocabulary.
    """
    check_backend()
    replace = resume is not None and save is not None and resume.absolute() == save.absolute()
    if save is not None:
        check_new(save, replace)
    if (device := on_device(device)) and "cache_implementation" in sampling and not device.startswith("cuda"):
        raise InputError(f"--cuda-graph with --device={device!r}; expected a GPU")
    model: Any = load_on(checkpoint, device, weights)
    _leave_out_other_searches(model.generation_config)
    tokenizer = read_tokenizer(checkpoint)
    cache, ids = resumed(resume, model)
    ids = torch.cat([ids, ids.new_tensor([tokenizer(prompt, add_special_tokens=resume is None).input_ids])], 1)
    require(ids.shape[1] > cache.columns, "the prompt has no tokens; expected some text")
    check_tokens(ids, model)
    if draft is not None:
        sampling["assistant_model"] = _draft(draft, model, tokenizer, weights)
    if seed is not None:
        set_seed(seed)
    started = time.perf_counter()
    sampling |= {"attention_mask": torch.ones_like(ids), CACHE: cache, "tokenizer": tokenizer}
    with _timed(model, threads, "assistant_model" in sampling or "prompt_lookup_num_tokens" in sampling) as timed:
        printer = Printer(tokenizer, stream, echo, timed) if stream or (timed and timed.measures) else None
        with torch.inference_mode(), _sampling(checkpoint, printer):
            out = model.generate(ids, streamer=printer, pad_token_id=tokenizer.eos_token_id, **sampling)
        used = torch.get_num_threads()
    seconds, new = time.perf_counter() - started, out[0, ids.shape[1] :].tolist()
    if save is not None:
        save_state(save, cache, model, out, replace=replace)
    text = {"text": _added(tokenizer, ids[0], out[0]), "tokens": new}
    about = {"tokens_per_second": len(new) / seconds, "engine": model.engine.about(model), "threads": used}
    return text | about | _proposals(cache, len(new)) | {"seed": seed}


def _added(tokenizer: Any, before: Tensor, after: Tensor) -> str:
    """The text that tokens [L] have more than their beginning, `before`: with the space that tokenizers such as Llama's
    drop at the start of a text."""
    given, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, after))
    if whole.startswith(given):
        return whole[len(given) :]
    return tokenizer.decode(after[len(before) :], skip_special_tokens=True)  # `before` ends within a character


@contextmanager
def _sampling(checkpoint: Path, printer: "Printer | None") -> Iterator[None]:
    """Raises InputError for logits from which our loop or torch.multinomial cannot choose, and for settings of the
    folder that transformers refuses. Ends the line of the printed text, also before an error."""
    try:
        yield
    except RuntimeError as error:
        if "infinite values" not in str(error) and "probability tensor" not in str(error):
            raise
        sentence = f"checkpoint {str(checkpoint)!r} gives NaN or infinite logits; no token can be chosen"
        raise InputError(sentence) from error
    except ValueError as error:
        if not str(error).startswith("`"):  # the name of a setting
            raise
        raise InputError(f"generation_config.json of checkpoint {str(checkpoint)!r} cannot be used: {error}") from error
    finally:
        if printer is not None:
            printer.end()


def _timed(model: Any, threads: int | None, drafted: bool) -> AbstractContextManager[Threads | None]:
    """Sets PyTorch's threads within the block; None: they are as they are, on a GPU and, without a number, for tokens
    that a draft proposes, whose times are not alike."""
    return nullcontext() if model.device.type != "cpu" or (drafted and threads is None) else Threads(threads)


def _proposals(cache: HeadraceCache, new: int) -> dict[str, float]:
    """The share of proposed tokens that were accepted, and the new tokens of a pass; empty without proposals."""
    if not cache.drafts:
        return {}
    proposed, accepted = map(sum, zip(*cache.drafts, strict=True))
    return {"accepted": accepted / max(proposed, 1), "tokens_per_pass": new / len(cache.drafts)}


def _leave_out_other_searches(settings: GenerationConfig) -> None:
    asked = {name: getattr(settings, name, None) for name in OTHER_SEARCHES}
    unused = {name: value for name, value in asked.items() if value not in (None, OTHER_SEARCHES[name])}
    if unused:
        listed = ", ".join(f"{name}={short(value)}" for name, value in unused.items())
        print(f"not used of generation_config.json, as one text is generated: {listed}", file=sys.stderr)
    settings.update(**dict.fromkeys(unused))


class Printer(BaseStreamer):
    """Prints the text as its tokens come, and notes how long each took for the choice of the number of threads."""

    def __init__(self, tokenizer: Any, stream: bool, echo: bool, threads: Threads | None):
        self.tokenizer, self.stream, self.echo, self.threads = tokenizer, stream, echo, threads
        self.text: Text | None = None  # after the prompt
        self.times: list[float] = []  # of the prompt and of the last two tokens

    def put(self, value: Tensor) -> None:
        if self.stream:
            self._print(value.flatten().tolist())
        self.times = [*self.times[-2:], time.perf_counter()]
        if self.threads is not None and len(self.times) == 3:  # the first token also waited for the prompt
            self.threads.took(self.times[2] - self.times[1])

    def _print(self, tokens: list[int]) -> None:
        if self.text is not None:
            print(*map(self.text.add, tokens), sep="", end="", flush=True)
            return
        self.text = Text(self.tokenizer, (), tokens)
        if self.echo:
            print(text_of(self.tokenizer, tokens), end="", flush=True)

    def end(self) -> None:
        if self.text is not None:
            print(self.text.rest(), flush=True)
            self.text = None


def _draft(checkpoint: Path, model: Any, tokenizer: Any, weights: str | None) -> Any:
    draft, own = load_on(checkpoint, str(model.device), weights), read_tokenizer(checkpoint)
    sizes = draft.config.vocab_size, model.config.vocab_size
    other = f"{sizes[0]} tokens; expected {sizes[1]}" if sizes[0] != sizes[1] else "other tokens; expected"
    same = sizes[0] == sizes[1] and own.get_vocab() == tokenizer.get_vocab()
    require(same, f"--draft {str(checkpoint)!r} has {other}, those of the model")
    return draft


def resumed(path: Path | None, model: Any) -> tuple[HeadraceCache, Tensor]:
    """Returns the cache and the tokens [1, L] of a state, or an empty cache and no token. InputError for a state of
    several sequences."""
    if path is None:
        return HeadraceCache(), torch.zeros(1, 0, dtype=torch.long, device=model.device)
    cache, ids = load_state(path, model)
    require(len(ids) == 1, f"state {str(path)!r} is of {len(ids)} sequences; expected one")
    return cache, ids
