"""Prepares text as packed rows of tokens in a folder, which is written atomically:

    train/, held_out/    Arrow: input_ids, `length` tokens per row (fewer in the last), and starts of documents
    tokenizer/           the tokenizer
    manifest.json        sources, tokenizer, counts, and the SHA-256 of every file

Every document ends with the tokenizer's end token. Documents are concatenated and cut into rows, so that each token is
in exactly one row.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerFast

from ..utils.errors import InputError
from ..utils.integrity import record, write_json
from ..utils.processes import forks_end_with_parent, new_folder
from . import sources, tokenizer

BATCH = 64  # rows or documents per batch of a worker


@dataclass(frozen=True)
class Preparation:
    """The settings of a preparation.

    Args:
        sources: files of one kind (text, jsonl, parquet), or the name of a data set on the Hub.
        tokenizer: a file, a folder or a name on the Hub; None: bytes.
        bpe: size of a vocabulary to train on the text, in place of `tokenizer`.
        length: tokens per row.
        held_out: fraction of the documents to hold out; of the text, if it is less than half a document (as for one
            book).
        seed: seed of the choice of held-out documents.
        workers: number of processes.
        column: name of the text column in jsonl, parquet and Hub data.

    Raises:
        InputError: a value is out of range, or both `bpe` and `tokenizer` are given.
    """

    sources: tuple[str, ...]
    tokenizer: str | None = None
    bpe: int | None = None
    length: int = 4096
    held_out: float = 0.001
    seed: int = 0
    workers: int = 1
    column: str = "text"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"--length {self.length}; expected at least 2 tokens")
        if not 0 < self.held_out < 1:
            raise InputError(f"--held-out {self.held_out}; expected a fraction between 0 and 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}; expected at least 0")
        if self.workers < 1:
            raise InputError(f"--workers {self.workers}; expected at least 1")
        if self.bpe is not None and self.tokenizer is not None:
            raise InputError(f"--train-bpe {self.bpe} and --tokenizer {self.tokenizer!r}; expected one of them")


def prepare(plan: Preparation, output: Path) -> dict[str, Any]:
    """Prepares the data in the folder `output`, which must not exist, and returns the manifest. InputError for sources
    or a tokenizer that cannot be read."""
    return finished(output, partial(_prepare, plan))


def finished(output: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Makes a folder atomically: `fill` writes its files and returns the manifest, which is added and returned."""
    with new_folder(output) as folder, forks_end_with_parent():
        manifest = fill(folder)
        manifest["files"] = record(folder)
        write_json(folder / "manifest.json", manifest)
    return manifest


def _prepare(plan: Preparation, folder: Path) -> dict[str, Any]:
    started, texts = time.perf_counter(), sources.documents(list(plan.sources), plan.column)
    parts = split(texts, plan.held_out, plan.seed)
    tokens = tokenizer.find(plan.tokenizer) if plan.bpe is None else _trained(parts["train"], plan.bpe)
    tokens.save_pretrained(folder / "tokenizer")
    counts = {name: _write(part, tokens, plan, folder / name) for name, part in parts.items()}
    seconds = time.perf_counter() - started
    return {
        "sources": sources.fingerprint(list(plan.sources)),
        "tokenizer_sha256": hashlib.sha256(tokens.backend_tokenizer.to_str().encode()).hexdigest(),
        "vocab_size": len(tokens),
        "length": plan.length,
        "held_out_share": plan.held_out,
        "seed": plan.seed,
        **counts,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(sum(part["bytes"] for part in counts.values()) / 1e6 / seconds, 2),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("headrace", "datasets", "tokenizers", "transformers")}


def split(texts: Dataset, held_out: float, seed: int) -> dict[str, Dataset]:
    """Splits documents into training and held-out ones, each in the order of the source. If the fraction is less than
    half a document, the end of one document is held out instead. InputError for no documents or a fraction that no
    document is long enough for."""
    count = len(texts)
    if not count:
        raise InputError("the sources hold no documents; expected at least 1")
    apart = np.random.default_rng(seed).permutation(count)[: min(round(held_out * count), count - 1)]
    if not len(apart):
        return _cut(texts, held_out, seed)
    chosen = np.zeros(count, dtype=bool)
    chosen[apart] = True
    return {"train": texts.select(np.flatnonzero(~chosen)), "held_out": texts.select(np.flatnonzero(chosen))}


def _cut(texts: Dataset, held_out: float, seed: int) -> dict[str, Dataset]:
    """Holds out the end of one document: the first in random order that is longer than the held-out text."""
    documents = texts["text"][:]
    wanted = max(round(held_out * sum(map(len, documents))), 1)
    order = np.random.default_rng(seed).permutation(len(documents))
    at = next((i for i in order if len(documents[i]) > wanted), None)
    if at is None:
        raise InputError(f"--held-out {held_out} is {wanted} characters; expected a document with more characters")
    text = documents[at]
    documents[at] = text[:-wanted]
    parts = {"train": documents, "held_out": [text[-wanted:]]}
    return {name: Dataset.from_dict({"text": part}) for name, part in parts.items()}


def _trained(texts: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    return tokenizer.train_bpe((text for batch in texts.iter(BATCH) for text in batch["text"]), vocab_size)


def _write(texts: Dataset, tokens: PreTrainedTokenizerFast, plan: Preparation, folder: Path) -> dict[str, int]:
    word = Value("uint16" if len(tokens) <= 1 << 16 else "int32")
    encoded = texts.map(
        _encode, fn_kwargs={"tokens": tokens}, batched=True, batch_size=BATCH, remove_columns=["text"],
        features=Features({"ids": Sequence(word), "bytes": Value("int64")}), num_proc=_processes(plan, len(texts)),
        desc=f"tokenising {folder.name}",
    )  # fmt: skip
    ends = np.cumsum(lengths(encoded))
    count = -(-int(ends[-1]) // plan.length)
    rows = Dataset.from_dict({"row": range(count)}).map(
        _pack, fn_kwargs={"documents": encoded, "ends": ends, "length": plan.length}, batched=True, batch_size=BATCH,
        remove_columns=["row"], features=Features({"input_ids": Sequence(word), "starts": Sequence(Value("int32"))}),
        num_proc=_processes(plan, count), desc=f"packing {folder.name}",
        cache_file_name=str(folder.with_suffix(".arrow")),  # else the rows of a data set in memory stay in memory
    )  # fmt: skip
    rows.save_to_disk(folder)
    total = {"documents": len(texts), "tokens": int(ends[-1]), "rows": count, "bytes": int(sum(encoded["bytes"]))}
    for file in {part["filename"] for data in (encoded, rows) for part in data.cache_files}:
        Path(file).unlink(missing_ok=True)
    return total


def _processes(plan: Preparation, items: int) -> int | None:
    """Number of worker processes; None: this process does the work."""
    count = min(plan.workers, items)
    return count if count > 1 else None


def _encode(batch: dict[str, list[str]], tokens: PreTrainedTokenizerFast) -> dict[str, list[Any]]:
    tokens.backend_tokenizer.encode_special_tokens = (
        True  # as text, so that only the end of a document is the end token
    )
    encoded = tokens.backend_tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {
        "ids": [[*text.ids, tokens.eos_token_id] for text in encoded],
        "bytes": [len(text.encode()) for text in batch["text"]],
    }


def lengths(encoded: Dataset) -> np.ndarray:
    """Number of tokens of each document."""
    column = encoded.with_format("arrow")["ids"]
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks])


def _between(documents: Any, first: int, count: int) -> np.ndarray:
    """Returns `count` tokens from the token `first` of an Arrow column of documents on. Copies no others, because one
    document can be the whole text."""
    parts, passed = [], 0
    for chunk in documents.chunks:
        tokens = chunk.flatten().to_numpy(zero_copy_only=True)
        parts.append(tokens[max(first - passed, 0) : max(first + count - passed, 0)])
        passed += len(tokens)
    return np.concatenate(parts)


def _pack(batch: dict[str, list[int]], documents: Dataset, ends: np.ndarray, length: int) -> dict[str, list[Any]]:
    """Rows of consecutive tokens, with the positions in each row at which documents begin."""
    first, last = batch["row"][0] * length, min((batch["row"][-1] + 1) * length, int(ends[-1]))
    begin, end = (int(i) for i in np.searchsorted(ends, [first, last - 1], side="right"))
    begins = np.concatenate([ends[begin - 1 : begin] if begin else [0], ends[begin:end]])
    ids = _between(documents.with_format("arrow")[begin : end + 1]["ids"], first - int(begins[0]), last - first)
    places = begins[begins >= first] - first
    rows = [ids[i : i + length] for i in range(0, len(ids), length)]
    starts = [places[(places >= i) & (places < i + length)] - i for i in range(0, len(ids), length)]
    return {"input_ids": rows, "starts": starts}
