"""Processes that tokenize blocks into parts."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..files.processes import POSIX
from ..utils.errors import InputError
from . import parts
from .encoding import Encoder

PartRecord = dict[str, Any]  # the record of a part

_write: Any = None  # of this worker


def make_parts(
    blocks: Iterator[parts.Block], tokens: PreTrainedTokenizerFast, folder: Path, workers: int, enough: int | None
) -> tuple[dict[int, PartRecord], int]:
    """Tokenizes blocks into parts of a folder, except those that are finished there.

    Args:
        enough: number of training tokens at which to stop; None: at the last block.

    Returns:
        {number of a part: its record}, in order, and the number of bytes of text that were tokenized now.

    Raises:
        InputError: a worker was killed.
    """
    folder.mkdir(exist_ok=True)
    records: dict[int, PartRecord] = {}
    new = trained = 0
    with tqdm(desc="tokenizing", unit="B", unit_scale=True) as bar, _pool(tokens, folder, workers) as pool:
        for number, record, is_new in _in_order(blocks, pool, folder, workers + 2):
            records[number] = record
            size = sum(record[split]["bytes"] for split in parts.SPLITS)
            bar.update(size)
            new += size * is_new
            trained += record["train"]["tokens"]
            if enough is not None and trained >= enough:
                break
    return records, new


def _in_order(
    blocks: Iterator[parts.Block], pool: ProcessPoolExecutor, folder: Path, ahead: int
) -> Iterator[tuple[int, PartRecord, bool]]:
    """(number, record, whether it was made now) of each block in order, while the pool works at most `ahead` blocks
    ahead."""
    queue: deque[tuple[int, PartRecord | Future[PartRecord]]] = deque()
    for block in blocks:
        record = parts.read_finished(folder, block.number)
        queue.append((block.number, record or pool.submit(_make, block)))
        if len(queue) > ahead:
            yield _result(*queue.popleft())
    while queue:
        yield _result(*queue.popleft())


def _result(number: int, record: PartRecord | Future[PartRecord]) -> tuple[int, PartRecord, bool]:
    if isinstance(record, dict):
        return number, record, False
    try:
        return number, record.result(), True
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process was killed; the same command goes on, with fewer --workers if the memory was too small"
        ) from error


@contextmanager
def _pool(tokens: PreTrainedTokenizerFast, folder: Path, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Workers of one thread each."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(workers, get_context("fork" if POSIX else "spawn"), _begin, (tokens, folder))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _begin(tokens: PreTrainedTokenizerFast, folder: Path) -> None:
    global _write
    encode = Encoder(tokens)

    def write(block: parts.Block) -> PartRecord:
        return parts.write(block, encode, tokens.eos_token_id, folder)

    _write = write


def _make(block: parts.Block) -> PartRecord:
    return _write(block)
