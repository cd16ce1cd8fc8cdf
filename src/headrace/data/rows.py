"""Prepared rows as batches of tokens and labels.

Dimensions: B rows, L tokens in a row.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..files.checks import RECORDED, damage, read_json
from ..ops.loss import IGNORED
from ..utils.errors import InputError, reading
from ..utils.extras import require_packages
from .parts import COUNTS

if TYPE_CHECKING:
    from datasets import Dataset

PART = {**COUNTS, "rows": int}
MANIFEST = {
    "length": int, "vocab_size": int, "tokenizer_sha256": (str, None), "sources": [{"name": str}], "train": PART,
    "held_out": PART, "files?": RECORDED,
}  # fmt: skip

NOT_IDENTIFYING = ("seconds", "megabytes_per_second", "files")  # fields of a manifest that do not identify the data


class TextRows(torch.utils.data.Dataset):
    """Rows of text: row i is {"input_ids": the tokens [i·length, (i+1)·length), fewer in the last row, "starts": where
    documents begin in it}.

    Args:
        tokens: of all documents, one after another.
        ends: where documents end.
        length: tokens per row.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, length: int):
        self.tokens, self.ends, self.length = tokens, ends, length

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.length)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        i = i + len(self) if i < 0 else i
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        first = i * self.length
        ids = self.tokens[first : first + self.length]
        begin, end = np.searchsorted(self.ends, [first, first + len(ids)])  # a document that ends at `end` is the last
        starts = self.ends[begin:end] - first
        return {"input_ids": ids.tolist(), "starts": [0, *starts.tolist()] if i == 0 else starts.tolist()}

    def select(self, rows: Sequence[int]) -> "Selected":
        return Selected(self, rows)


class StoredRows(TextRows):
    """Rows of tokens that stay on the disk. What is sent to another process is the name of the file.

    Args:
        file: of the tokens; the file <name>.ends.npy beside it has where documents end.
    """

    def __init__(self, file: Path, length: int):
        tokens, ends = (np.load(path, mmap_mode="r") for path in (file, file.with_suffix(".ends.npy")))
        super().__init__(tokens, ends, length)
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredRows, (self.file, self.length)


class Selected(Subset):
    """Some of the rows."""

    def select(self, rows: Sequence[int]) -> "Selected":
        return Selected(self, rows)


@dataclass(frozen=True)
class PackedData:
    """Data written by `headrace prepare`.

    A row of text is {"input_ids": token ids, "starts": where documents begin in it}; a row of a task is {"input_ids",
    "shift_labels"}, in Arrow."""

    train: "TextRows | Selected | Dataset"
    held_out: "TextRows | Selected | Dataset"
    tokenizer: PreTrainedTokenizerFast | None  # None: the tokens of a synthetic task, which are not text
    manifest: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest says of the data alone."""
        return {name: value for name, value in self.manifest.items() if name not in NOT_IDENTIFYING}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder written by `headrace prepare`. InputError if it is not such a folder."""
    try:
        return read_json(folder / "manifest.json", MANIFEST)
    except InputError as error:
        raise InputError(f"--data {str(folder)!r} is not a folder written by `headrace prepare`: {error}") from error


def open_data(folder: str | Path) -> PackedData:
    """Opens a folder written by `headrace prepare`. InputError if it is not such a folder or is damaged.

    Under torchrun, the first process of each machine compares the files' SHA-256, the others their sizes only."""
    folder = Path(folder)
    manifest, first = read_manifest(folder), int(os.environ.get("LOCAL_RANK", 0)) == 0
    if wrong := damage(folder, manifest.get("files", {}), contents=first):
        raise InputError(f"--data {str(folder)!r} is damaged: {wrong}; prepare it again")
    with reading(f"--data {str(folder)!r} cannot be read"):
        parts = [_rows(folder, name, manifest["length"]) for name in ("train", "held_out")]
        read = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=False)
        tokens: Any = None if manifest["tokenizer_sha256"] is None else read(folder / "tokenizer")
        sizes = [len(part) for part in parts]
    for size, name in zip(sizes, ("train", "held_out"), strict=True):
        if size != manifest[name]["rows"]:
            raise InputError(f"--data {str(folder)!r} has {size} rows in {name}; expected {manifest[name]['rows']}")
    return PackedData(parts[0], parts[1], tokens, manifest)


def _rows(folder: Path, name: str, length: int) -> Any:
    if not (folder / name).is_dir():
        return StoredRows(folder / f"{name}.npy", length)
    require_packages("reading the rows of a task", "datasets", extra="train")
    from datasets import load_from_disk

    return load_from_disk(str(folder / name))


# --- which rows, and in which order ----------------------------------------------------------------------------------
ORDER = "torch.randperm"  # of the rows: a run does not go on in another


def full_rows(rows: Any, length: int) -> Any:
    """The rows without the last one if it is not full, as it would make a step smaller."""
    return rows if len(rows[-1]["input_ids"]) == length else rows.select(range(len(rows) - 1))


def evenly_spaced(rows: Any, count: int) -> Any:
    """At most `count` of the rows, evenly spaced."""
    last, steps = len(rows) - 1, max(count - 1, 1)
    return rows if last < count else rows.select([i * last // steps for i in range(count)])


def order(rows: Sized, seed: int, epoch: int) -> Iterable[int]:
    """The numbers of the rows in random order, which is another one in each epoch; they take 8 bytes each."""
    (own,) = np.random.SeedSequence([seed, epoch]).generate_state(1)  # no epoch has that of another seed
    return torch.randperm(len(rows), generator=torch.Generator().manual_seed(int(own))).numpy().data


def by_step(order: Callable[[int], Iterable[int]], rows: int, each: int, after: int = 0) -> Iterator[list[int]]:
    """The numbers of the `each` rows of every step that follows step number `after`, without an end. An epoch takes the
    rows in its order, and leaves those to another that would not fill a step."""
    epoch, within = divmod(after, rows // each)
    while True:
        numbers = islice(order(epoch), within * each, None)
        for _ in range(within, rows // each):
            yield list(islice(numbers, each))
        epoch, within = epoch + 1, 0


def unigram_loss(rows: Any) -> float:
    """Loss in nats per token of a unigram model with the token frequencies of the rows.

    rows: of PackedData, or dicts with "input_ids" or "shift_labels", of which labels IGNORED are left out."""
    counts = torch.zeros(0, dtype=torch.long)
    for row in rows:
        tokens = torch.as_tensor(row["shift_labels" if "shift_labels" in row else "input_ids"])
        more_counts = tokens[tokens != IGNORED].bincount(minlength=len(counts))
        more_counts[: len(counts)] += counts
        counts = more_counts
    return float(torch.special.entr(counts / counts.sum(dtype=torch.double)).sum())


# --- batches ---------------------------------------------------------------------------------------------------------
def shifted(labels: Tensor) -> Tensor:
    """The labels [..., L] for the outputs at the same positions: the next label, and none at the end of a row."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Collator:
    """Makes a batch {"input_ids", "labels"} of rows; for rows of a task also "shift_labels", the only labels learnt.

    Args:
        pad: token id for padding.
        separate_documents: the batch is one pack [1, B·L] with `cu_seqlens`, and no label crosses the boundary of a
            document. False: rows [B, L] with all documents of a row in one sequence.
    """

    pad: int
    separate_documents: bool = False

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"], dtype=torch.long) for row in rows]
        if "shift_labels" in rows[0]:
            labels = torch.tensor([row["shift_labels"] for row in rows])
            return {"input_ids": torch.stack(ids), "labels": labels, "shift_labels": labels}
        if self.separate_documents:
            return self._pack(ids, [row["starts"] for row in rows])
        filled = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad)
        labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORED)
        return {"input_ids": filled, "labels": labels}

    def _pack(self, ids: list[Tensor], starts: list[list[int]]) -> dict[str, Tensor]:
        begins, before = {0}, 0
        for row, places in zip(ids, starts, strict=True):
            begins |= {before, *(before + place for place in places)}
            before += len(row)
        packed = torch.cat(ids)[None]
        cu_seqlens = torch.tensor([*sorted(begins), before])
        labels = packed.clone()
        labels[0, cu_seqlens[:-1]] = IGNORED
        return {"input_ids": packed, "labels": labels, "cu_seqlens": cu_seqlens}
