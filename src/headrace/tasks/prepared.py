"""Writes the rows of a task as a folder of prepared data for `headrace train`, which learns the answers only.

train/, held_out/    Arrow: input_ids and shift_labels of the task's rows
tokenizer/           the tokenizer of the task, if there is one
manifest.json        as of prepared text; counts of tokens and bytes are those of the answers
"""

from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value
from torch.utils.data import default_collate

from ..data import tokenizer
from ..data.preparation import versions, write_folder
from ..files.memory import fitting
from ..ops.loss import IGNORED
from ..utils.errors import InputError
from ..utils.plugins import digests
from .base import Sampled, Task, generator
from .text import Text

BLOCK = 256  # rows drawn together
HELD_OUT = 512


def prepare(task: Task, name: str, rows: int, seed: int, workers: int, output: Path) -> dict[str, Any]:
    """Writes `rows` training rows drawn from a seed, and at most 512 held-out rows, to the folder `output`, which must
    not exist, and returns the manifest. InputError for a task whose rows are not tokens with labels."""
    with fitting(f"a block of rows of --task {name}"):
        row = task.held_out(1)
    if row.keys() != {"input_ids", "shift_labels"} or row["input_ids"].dim() > 2 or isinstance(task, Text):
        raise InputError(
            f"--task {name} cannot be prepared; expected a synthetic task for causal models with one token per position"
        )
    return write_folder(output, partial(_fill, task, name, rows, seed, workers))


def _fill(task: Any, name: str, rows: int, seed: int, workers: int, folder: Path) -> dict[str, Any]:
    tokens = getattr(task, "tokens", None)
    if tokens is not None:
        tokens.save_pretrained(folder / "tokenizer")
    sample = partial(_block, task=task, seed=seed, rows=rows)
    columns = Features({"input_ids": Sequence(Value("int32")), "shift_labels": Sequence(Value("int32"))})
    blocks = Dataset.from_dict({"block": range(-(-rows // BLOCK))})
    drawn = blocks.map(
        sample, batched=True, batch_size=1, remove_columns=["block"], features=columns,
        num_proc=n if (n := min(workers, len(blocks))) > 1 else None, desc="drawing rows",
    )  # fmt: skip
    held_out = Dataset.from_dict({k: v.tolist() for k, v in task.held_out(HELD_OUT).items()}, features=columns)
    counts = {}
    for part, data in (("train", drawn), ("held_out", held_out)):
        data.save_to_disk(folder / part)
        counts[part] = count(data, tokens)
    for file in {part["filename"] for part in drawn.cache_files}:
        Path(file).unlink(missing_ok=True)
    return {
        "sources": [{"name": name, **getattr(task, "provenance", {})}],
        "tokenizer_sha256": tokens and tokenizer.sha256(tokens),
        "vocab_size": task.vocab_size,
        "length": task.length,
        "seed": seed,
        **counts,
        "versions": versions() | digests(),
    }


def _block(batch: dict[str, list[int]], task: Task, seed: int, rows: int) -> dict[str, Any]:
    (number,) = batch["block"]
    begin, count = number * BLOCK, min(BLOCK, rows - number * BLOCK)
    if isinstance(task, Sampled):
        drawn = task.sample(generator("training", seed, number), count)
    else:
        every = task.training(seed, rows)
        drawn = default_collate([every[i] for i in range(begin, begin + count)])
    return {name: values.numpy() for name, values in drawn.items()}


def count(data: Dataset, tokens: Any) -> dict[str, int]:
    """Numbers of documents, rows, answer tokens and answer bytes; without a tokenizer, a token counts as a byte."""
    answers = [[label for label in row if label != IGNORED] for row in data["shift_labels"]]
    total = sum(map(len, answers))
    sizes = (len(tokens.decode(own, skip_special_tokens=True).encode()) for own in answers)
    written = total if tokens is None else sum(sizes)
    return {"documents": len(data), "rows": len(data), "tokens": total, "bytes": written}
