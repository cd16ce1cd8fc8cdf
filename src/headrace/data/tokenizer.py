"""Tokenizers, as fast tokenizers of transformers: an existing one, one trained on the data, or bytes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..files.checks import check_files, reading_tokenizer
from ..files.hub import GGUF
from ..utils.errors import InputError, require

BYTES = "bytes"
END = "<|endoftext|>"
LARGEST = 2**24  # vocabulary; tokenizers reserves the memory of one before it trains
ENDS = (END, "</s>", "<eos>", "<|end_of_text|>")  # names of the end token to try if a file sets none


def load(name: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer of a `tokenizers` JSON file, a folder, a GGUF file or a name on the Hub; None or "bytes": bytes.

    Raises:
        InputError: the tokenizer cannot be read or has no end-of-text token.
    """
    if name in (None, BYTES):
        return byte_level()
    if Path(name).suffix == ".json" and not Path(name).is_file():
        raise InputError(f"--tokenizer {name!r} cannot be read: the file does not exist")
    if not Path(name).exists() and not could_be_on_the_hub(name):
        raise InputError(
            f"--tokenizer {name!r} is no file, folder or name on the Hub (OWNER/NAME); expected one, or bytes"
        )
    check_files(Path(name))
    with reading_tokenizer(name, f"--tokenizer {name!r} cannot be read"):
        tokenizer = _read(name)
    if tokenizer.eos_token is None:
        vocabulary = tokenizer.get_vocab()
        end = next((token for token in ENDS if token in vocabulary), None)
        require(end is not None, f"--tokenizer {name!r} has no end-of-text token; expected one of {', '.join(ENDS)}")
        tokenizer.eos_token = end
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # as transformers makes of a model without a tokenizer
        raise InputError(f"--tokenizer {name!r} has no tokens of text; expected one with a vocabulary")
    if tokenizer.num_special_tokens_to_add():  # the prepared rows have none of them, so a prompt must have none
        tokenizer.backend_tokenizer.post_processor = None
    tokenizer.backend_tokenizer.no_truncation()  # which a file may set for another use: documents are whole
    tokenizer.backend_tokenizer.no_padding()
    return _padded(tokenizer)


def _read(name: str) -> Any:
    if Path(name).suffix == GGUF:
        from ..convert.importing import import_tokenizer  # whose packages need more time to import

        return import_tokenizer(name)
    if Path(name).is_file():
        return PreTrainedTokenizerFast(tokenizer_file=name)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def size(tokenizer: PreTrainedTokenizerFast) -> int:
    """The number of ids up to the largest, some of which may have no token."""
    return 1 + max(tokenizer.get_vocab().values())


def could_be_on_the_hub(name: str) -> bool:
    """Whether a repository of the Hub can have this name. transformers asks the Hub for any other name too, for a
    minute if the Hub cannot be reached."""
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the 256 bytes and the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _finished(Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])))


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on texts. InputError for a vocabulary without room for all bytes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not len(alphabet) < vocab_size <= LARGEST:
        wanted = f"more than the {len(alphabet)} bytes and an end of text, and at most {LARGEST}"
        raise InputError(f"--train-bpe {vocab_size}; expected {wanted}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    return _padded(made)


def _padded(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Pads a tokenizer without a padding token by the end token, on the left, as generation appends on the right."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
        tokenizer.init_kwargs["padding_side"] = "left"  # what save_pretrained writes
    return tokenizer
