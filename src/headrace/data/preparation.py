"""Prepares text as packed tokens in a folder, which is written atomically:

    train.npy, held_out.npy              all tokens, one document after another
    train.ends.npy, held_out.ends.npy    where documents end
    tokenizer/                           the tokenizer
    manifest.json                        sources, tokenizer, counts, and the SHA-256 of every file

Every document ends with the tokenizer's end token. Row i is the tokens [i·length, (i+1)·length) of all documents, so
that each token is in exactly one row. What was read is tokenized block by block into parts beside the folder
(`parts.py`), from which the same command goes on when it was killed.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..files.checks import read_json
from ..files.held_out import Choice, choose
from ..files.processes import forks_end_with_parent, new_folder, resumed_folder
from ..files.provenance import defaults, difference
from ..utils.errors import InputError
from ..utils.extras import require
from ..utils.integrity import record, write_json
from . import parts, sources, tokenizer
from .encoding import can_be_cut
from .sources import Row, Sample
from .workers import PartRecord, make_parts

WHOLE = (
    "it is not known where documents can be cut for this tokenizer: each is tokenized as a whole, which is slower "
    "and takes memory for the longest"
)
FEWER = "the sources ended after {:,} of {:,} training tokens; a larger --sample, or more sources, give more"
BLOCK = 1 << 23  # bytes of text in a part
FINISHED = "parts/*.json"  # in the folder of unfinished work: the records of parts, from which a command goes on


@dataclass(frozen=True)
class Preparation:
    """The settings of a preparation.

    Args:
        sources: files of one kind (text, jsonl, Parquet), or one data set: a folder or a name on the Hub.
        tokenizer: "bytes", a file, a folder or a name on the Hub; None: bytes.
        bpe: size of a vocabulary to train on the text, in place of `tokenizer`.
        length: tokens per row.
        held_out: fraction of the documents to hold out; of fewer than 20 documents, fraction of the text, in pieces
            that are drawn over all of it.
        seed: seed of the choice of held-out documents.
        workers: number of processes.
        column: name of the text column in jsonl, Parquet and data sets.
        tokens: number of training tokens at which to stop, at the end of a block of about 8 MB of text; None: at the
            end of the sources.
        sample: share of the documents to keep, each with this probability, of files in random order, both by `seed`;
            None: all documents in order. With `tokens` the sample has equal chances for all documents of the sources.
            It reads 1 / share as much text as it keeps: with a share of 1 whole files at random, and with the share
            that `tokens` are of the sources, all files.

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
    tokens: int | None = None
    sample: float | None = None

    def __post_init__(self) -> None:
        for option, value, holds, expected in (
            ("length", self.length, self.length >= 2, "at least 2 tokens"),
            ("held-out", self.held_out, 0 < self.held_out < 1, "a fraction between 0 and 1"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
            ("workers", self.workers, self.workers >= 1, "at least 1"),
            ("tokens", self.tokens, self.tokens is None or self.tokens >= 1, "at least 1"),
            ("sample", self.sample, self.sample is None or 0 < self.sample <= 1, "a share above 0 and at most 1"),
        ):
            if not holds:
                raise InputError(f"--{option} {value}; expected {expected}")
        if self.bpe is not None and self.tokenizer is not None:
            raise InputError(f"--train-bpe {self.bpe} and --tokenizer {self.tokenizer!r}; expected one of them")

    def rows(self, cut: bool) -> Iterator[Row]:
        """The rows to prepare. cut: whether a text file may come in several."""
        sample = None if self.sample is None else Sample(self.sample, self.seed)
        return sources.rows(self.sources, self.column, cut, sample)


def write_folder(output: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Makes a folder atomically: `fill` writes its files and returns the manifest, which is added and returned."""
    with new_folder(output) as folder, forks_end_with_parent():
        return _sealed(folder, fill(folder))


def _sealed(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    manifest["files"] = record(folder)
    write_json(folder / "manifest.json", manifest)
    return manifest


def prepare(plan: Preparation, output: Path) -> dict[str, Any]:
    """Prepares the data in the folder `output`, which must not exist, and returns the manifest. Goes on with what a
    killed process with the same plan has left.

    InputError for sources or a tokenizer that cannot be read, or an unfinished preparation with another plan."""
    with resumed_folder(output, FINISHED) as (work, ready), forks_end_with_parent():
        started, existing = time.perf_counter(), None if plan.bpe else tokenizer.load(plan.tokenizer)
        _claim(plan, existing, work)
        choice = choose(partial(plan.rows, cut=True), plan.held_out, plan.seed)
        tokens = existing or _trained(plan, choice, work / "tokenizer")
        if not (cut := can_be_cut(tokens)):
            print(WHOLE, file=sys.stderr)
        groups = parts.blocks(choice.split(plan.rows(cut)), BLOCK)
        blocks = (parts.block(i, group) for i, group in enumerate(groups))
        records, new = make_parts(blocks, tokens, work / "parts", plan.workers, plan.tokens)
        tokens.save_pretrained(ready / "tokenizer")
        manifest = _described(plan, tokens) | ({"held_out_pieces": len(choice.spans)} if choice.spans else {})
        try:
            manifest |= assembled(records, work / "parts", plan.length, ready)
        except InputError:  # no text for a split or a row: no command with these sources needs the parts
            shutil.rmtree(work / "parts")
            raise
        if plan.tokens and manifest["train"]["tokens"] < plan.tokens:
            print(FEWER.format(manifest["train"]["tokens"], plan.tokens), file=sys.stderr)
        seconds = time.perf_counter() - started
        manifest |= {"seconds": round(seconds, 1), "megabytes_per_second": round(new / 1e6 / seconds, 2)}
        return _sealed(ready, manifest)


def _claim(plan: Preparation, existing: PreTrainedTokenizerFast | None, work: Path) -> None:
    """Writes what decides the parts into the folder of unfinished work. InputError if other parts are there."""
    decides = {
        name: value for name, value in asdict(plan).items() if name not in ("length", "workers", "tokens", "tokenizer")
    }
    decides |= {
        "sources": sources.state(plan.sources), "tokenizer": existing and tokenizer.sha256(existing), "block": BLOCK,
        "versions": versions(),
    }  # fmt: skip
    current, path = json.loads(json.dumps(decides)), work / "plan.json"
    changed = difference(read_json(path), current, optional=set(defaults(plan))) if path.exists() else None
    if changed and any(work.glob(FINISHED)):
        name, before, now = changed
        raise InputError(
            f"{str(work)!r} is an unfinished preparation with other settings or files ({name} is {before} there and "
            f"{now} here); repeat that command, or delete the folder"
        )
    if changed or not path.exists():
        shutil.rmtree(work / "tokenizer", ignore_errors=True)
        write_json(path, current)


def _trained(plan: Preparation, choice: Choice, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that is trained on the training text, once."""
    if not folder.exists():
        assert plan.bpe is not None
        rows = choice.split(plan.rows(cut=True))
        texts = (row.text for row, held_out in rows if not held_out and not row.bad)
        beside = folder.with_suffix(".unfinished")
        tokenizer.train_bpe(texts, plan.bpe).save_pretrained(beside)
        beside.replace(folder)
    return tokenizer.load(str(folder))


def _described(plan: Preparation, tokens: PreTrainedTokenizerFast) -> dict[str, Any]:
    limit = {"tokens_wanted": plan.tokens, "sample": plan.sample}
    return {
        "sources": sources.fingerprint(plan.sources),
        "tokenizer_sha256": tokenizer.sha256(tokens),
        "documents_cut": can_be_cut(tokens),
        "vocab_size": len(tokens),
        "length": plan.length,
        "held_out_share": plan.held_out,
        "seed": plan.seed,
        "column": plan.column,
        **{name: value for name, value in limit.items() if value is not None},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    require("headrace.data.prepare", "datasets", extra="train")
    return {name: version(name) for name in ("headrace", "datasets", "tokenizers", "transformers")}


def assembled(records: dict[int, PartRecord], where: Path, length: int, folder: Path) -> dict[str, Any]:
    """Joins the parts in the folder `where`, which the records describe, and returns the counts."""
    counts = _counts([records[n] for n in sorted(records)], length)
    for split in parts.SPLITS:
        if not counts[split]["tokens"]:
            raise InputError(f"no text is left as {split}; expected more text or another --held-out")
    if (tokens := counts["train"]["tokens"]) < length:
        raise InputError(f"--length {length} is longer than the training text of {tokens} tokens; expected less")
    parts.assemble([(parts.path(where, n), records[n]) for n in sorted(records)], folder)
    return counts


def _counts(records: list[PartRecord], length: int) -> dict[str, Any]:
    """Counts of documents, tokens, bytes and rows of both splits, and the bad rows."""
    counts: dict[str, Any] = {}
    for split in parts.SPLITS:
        total = {key: sum(record[split][key] for record in records) for key in ("documents", "tokens", "bytes")}
        counts[split] = total | {"rows": -(-total["tokens"] // length)}
    return {**counts, "bad_rows": parts.count_bad_rows(records)}
