"""Processes that tokenize blocks of texts."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..files.processes import POSIX
from ..utils.errors import InputError
from .encoding import Encoder
from .parts import Block, Texts, Tokens, tokenized
from .sources import Row

Made = tuple[dict[str, Tokens], list[Row]]  # of a block: the tokens of each split, and the bad rows

_tokenizer: Any = None  # of this worker: its Encoder, and the end token


def tokenized_blocks(
    blocks: Iterable[Block], tokens: PreTrainedTokenizerFast, workers: int
) -> Generator[Made, None, None]:
    """What is made of each block, in order. At most `workers` blocks wait for the one before them. InputError if a
    worker was killed."""
    queue: deque[tuple[Future[dict[str, Tokens]], list[Row]]] = deque()
    with _pool(tokens, workers) as pool:
        for block in blocks:
            queue.append((pool.submit(_tokenize, block.texts), block.bad))
            if len(queue) > workers:
                yield _result(*queue.popleft())
        while queue:
            yield _result(*queue.popleft())


def _result(tokens: Future[dict[str, Tokens]], bad: list[Row]) -> Made:
    try:
        return tokens.result(), bad
    except BrokenProcessPool as error:
        raise InputError("a worker process was killed; expected fewer --workers if the memory was too small") from error


@contextmanager
def _pool(tokens: PreTrainedTokenizerFast, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Workers of one thread each."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(workers, get_context("fork" if POSIX else "spawn"), _begin, (tokens,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _begin(tokens: PreTrainedTokenizerFast) -> None:
    global _tokenizer
    _tokenizer = Encoder(tokens), tokens.eos_token_id


def _tokenize(texts: dict[str, Texts]) -> dict[str, Tokens]:
    return {split: tokenized(own, *_tokenizer) for split, own in texts.items()}
