"""Prepared rows as batches of tokens and labels.

Dimensions: B rows, L tokens in a row.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from ..utils.integrity import damage


@dataclass(frozen=True)
class PackedData:
    """Data written by `headrace prepare`."""

    train: Dataset
    held_out: Dataset
    tokenizer: PreTrainedTokenizerFast | None  # None: the tokens of a synthetic task, which are not text
    manifest: dict[str, Any]


def open_data(folder: Path) -> PackedData:
    """Opens a folder written by `headrace prepare`. InputError if it is not such a folder or is damaged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if wrong := damage(folder, manifest.get("files", {})):
            raise InputError(f"--data {str(folder)!r} is damaged: {wrong}; prepare it again")
        parts: list[Any] = [load_from_disk(str(folder / name)) for name in ("train", "held_out")]
        read = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=False)
        tokens: Any = None if manifest["tokenizer_sha256"] is None else read(folder / "tokenizer")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--data {str(folder)!r} is not a folder written by `headrace prepare`: {reason}") from error
    for part, name in zip(parts, ("train", "held_out"), strict=True):
        if len(part) != manifest[name]["rows"]:
            raise InputError(
                f"--data {str(folder)!r} has {len(part)} rows in {name}; expected {manifest[name]['rows']}"
            )
    return PackedData(parts[0], parts[1], tokens, manifest)


def unigram_loss(rows: Dataset) -> float:
    """Loss in nats per token of a unigram model with the token frequencies of the rows."""
    column = "shift_labels" if "shift_labels" in rows.column_names else "input_ids"
    tokens = torch.cat([torch.as_tensor(row) for row in rows[column]])
    counts = tokens[tokens != IGNORED].bincount().double()
    return float(torch.special.entr(counts / counts.sum()).sum())


@dataclass(frozen=True)
class Collator:
    """Makes a batch {"input_ids", "labels"} of rows; for rows of a task also "shift_labels", the only labels learnt.

    Args:
        pad: token id for padding.
        apart: keep documents separate: the batch is one pack [1, B·L] with `cu_seqlens`, and no label crosses the
            boundary of a document. False: rows [B, L] with all documents of a row in one sequence.
    """

    pad: int
    apart: bool = False

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"], dtype=torch.long) for row in rows]
        if "shift_labels" in rows[0]:
            labels = torch.tensor([row["shift_labels"] for row in rows])
            return {"input_ids": torch.stack(ids), "labels": labels, "shift_labels": labels}
        if self.apart:
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
