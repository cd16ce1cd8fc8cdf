"""Prepares text as packed tokens in a folder, which is written atomically:

    train.npy, held_out.npy              all tokens, one document after another
    train.ends.npy, held_out.ends.npy    where documents end
    tokenizer/                           the tokenizer
    manifest.json                        sources, tokenizer, counts, and the SHA-256 of every file

Every document ends with the tokenizer's end token. Row i is the tokens [i·length, (i+1)·length) of all documents, so
that each token is in exactly one row. Text is tokenized block by block.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..files.processes import MOST, forks_end_with_parent, new_folder
from ..files.workers import without_main
from ..utils.errors import InputError, require
from ..utils.extras import require_packages
from ..utils.integrity import record, write_json
from . import parts, sources, tokenizer
from .encoding import Encoder, can_be_cut
from .held_out import Choice, choose
from .sources import Row, Sample

WHOLE = (
    "it is not known where documents can be cut for this tokenizer: each is tokenized as a whole, which is slower "
    "and takes memory for the longest"
)
FEWER = "the sources ended after {:,} of {:,} training tokens; more sources{} give more"
BLOCK = 1 << 22  # bytes of text in a block


@dataclass(frozen=True)
class Preparation:
    """The settings of a preparation.

    Args:
        sources: files of one kind (text, jsonl, Parquet), or one data set: a folder or a name on the Hub.
        tokenizer: "bytes", a file, a folder or a name on the Hub; None: bytes.
        bpe: size of a vocabulary to train on the text, in place of `tokenizer`.
        length: tokens per row.
        held_out: fraction of the documents to hold out; of fewer than 20 documents, or where it is less than half of
            one, fraction of the text, in pieces that are drawn over all of it.
        seed: seed of the choice of held-out documents.
        workers: number of processes.
        column: name of the text column in jsonl, Parquet and data sets.
        tokens: number of training tokens at which to stop, at the end of a block of about 4 MB of text, but not before
            the first with held-out text, of which no further training text is kept; None: at the end of the sources.
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
            ("workers", self.workers, 1 <= self.workers <= MOST, f"at least 1, and at most {MOST}"),
            ("tokens", self.tokens, self.tokens is None or self.tokens >= 1, "at least 1"),
            ("sample", self.sample, self.sample is None or 0 < self.sample <= 1, "a share above 0 and at most 1"),
        ):
            require(holds, f"--{option} {value}; expected {expected}")
        both = f"--train-bpe {self.bpe} and --tokenizer {self.tokenizer!r}"
        require(None in (self.bpe, self.tokenizer), f"{both}; expected one of them")

    def rows(self, cut: bool) -> Iterator[Row]:
        """The rows to prepare. cut: whether a text file may come in several."""
        sample = None if self.sample is None else Sample(self.sample, self.seed)
        return sources.rows(self.sources, self.column, cut, sample)


def write_folder(output: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Makes a folder atomically: `fill` writes its files and returns the manifest, which is added and returned."""
    with new_folder(output) as folder, forks_end_with_parent():
        manifest = fill(folder)
        manifest["files"] = record(folder)
        write_json(folder / "manifest.json", manifest)
        return manifest


def prepare(plan: Preparation, output: Path) -> dict[str, Any]:
    """Prepares the data in the folder `output`, which must not exist, and returns the manifest.

    InputError for sources or a tokenizer that cannot be read."""
    return write_folder(output, partial(_fill, plan))


def _fill(plan: Preparation, folder: Path) -> dict[str, Any]:
    started, existing = time.perf_counter(), None if plan.bpe is not None else tokenizer.load(plan.tokenizer)
    choice = choose(partial(plan.rows, cut=True), plan.held_out, plan.seed)
    tokens = existing or _trained(plan, choice)
    if not can_be_cut(tokens):
        print(WHOLE, file=sys.stderr)
    tokens.save_pretrained(folder / "tokenizer")
    counts = _written(plan, choice, tokens, folder)
    if plan.tokens and counts["train"]["tokens"] < plan.tokens:
        also = "" if plan.sample is None else ", or a larger --sample,"
        print(FEWER.format(counts["train"]["tokens"], plan.tokens, also), file=sys.stderr)
    seconds, size = time.perf_counter() - started, sum(counts[split]["bytes"] for split in parts.SPLITS)
    speed = {"seconds": round(seconds, 1), "megabytes_per_second": round(size / 1e6 / seconds, 2)}
    pieces = {"held_out_pieces": len(choice.spans)} if choice.spans else {}
    return _described(plan, tokens) | pieces | counts | speed


def _trained(plan: Preparation, choice: Choice) -> PreTrainedTokenizerFast:
    """The tokenizer that is trained on the training text; with --tokens on a first part that surely has as many."""
    assert plan.bpe is not None
    read = parts.blocks(choice.split(plan.rows(cut=True)), BLOCK)
    most = None if plan.tokens is None else -(-16 * plan.tokens // BLOCK)  # bytes of a long token
    texts = (text for block in islice(read, most) for text in block.texts["train"].texts)
    return tokenizer.train_bpe(texts, plan.bpe)


def _written(plan: Preparation, choice: Choice, tokens: PreTrainedTokenizerFast, folder: Path) -> dict[str, Any]:
    """Writes the tokens of both splits, and returns their counts and the bad rows."""
    blocks, bad = parts.blocks(choice.split(plan.rows(can_be_cut(tokens))), BLOCK), parts.BadRows()
    wanted = plan.tokens or float("inf")
    with ExitStack() as opened:
        splits = {split: opened.enter_context(closing(parts.Split(folder, split))) for split in parts.SPLITS}
        made = opened.enter_context(closing(tokenized_blocks(blocks, tokens, plan.workers)))
        bar = opened.enter_context(tqdm(desc="tokenizing", unit="B", unit_scale=True))
        for part, rows in made:
            parts.bad_rows(rows, bad)
            for split, own in part.items():
                if split != "train" or splits[split].tokens.length < wanted:
                    splits[split].add(own)
            bar.update(sum(own.size for own in part.values()))
            if splits["train"].tokens.length >= wanted and splits["held_out"].tokens.length:
                break
        counts: dict[str, Any] = {name: split.counts(plan.length) for name, split in splits.items()}
    if empty := next((name for name in parts.SPLITS if not counts[name]["tokens"]), None):
        raise InputError(f"no text is left as {empty}; expected more text or another --held-out")
    longer = f"--length {plan.length} is longer than the training text of {counts['train']['tokens']} tokens"
    require(counts["train"]["tokens"] >= plan.length, f"{longer}; expected more text, or a smaller --length")
    return counts | {"bad_rows": bad}


def _described(plan: Preparation, tokens: PreTrainedTokenizerFast) -> dict[str, Any]:
    limit = {"tokens_wanted": plan.tokens, "sample": plan.sample}
    return {
        "sources": [*map(sources.fingerprint, plan.sources)],
        "tokenizer_sha256": tokenizer.sha256(tokens),
        "documents_cut": can_be_cut(tokens),
        "vocab_size": tokenizer.size(tokens),
        "length": plan.length,
        "held_out_share": plan.held_out,
        "seed": plan.seed,
        "column": plan.column,
        **{name: value for name, value in limit.items() if value is not None},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    require_packages("headrace.data.prepare", "datasets", extra="train")
    return {name: version(name) for name in ("headrace", "datasets", "tokenizers", "transformers")}


# --- the processes that tokenize -------------------------------------------------------------------------------------

Made = tuple[dict[str, parts.Tokens], list[Row]]  # of a block: the tokens of each split, and the bad rows

_tokenizer: Any = None  # of this worker: its Encoder, and the end token


def tokenized_blocks(
    blocks: Iterable[parts.Block], tokens: PreTrainedTokenizerFast, workers: int
) -> Generator[Made, None, None]:
    """What is made of each block, in order. At most `workers` blocks wait for the one before them. InputError if a
    worker was killed."""
    queue: deque[tuple[Future[dict[str, parts.Tokens]], list[Row]]] = deque()
    with _pool(tokens, workers) as pool:
        for block in blocks:
            with without_main():  # where a process may begin
                queue.append((pool.submit(_tokenize, block.texts), block.bad))
            if len(queue) > workers:
                yield _result(*queue.popleft())
        while queue:
            yield _result(*queue.popleft())


def _result(tokens: Future[dict[str, parts.Tokens]], bad: list[Row]) -> Made:
    return tokens.result(), bad


@contextmanager
def _pool(tokens: PreTrainedTokenizerFast, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Workers of one thread each. On Linux they are forked; elsewhere processes begin anew, as macOS's libraries do not
    survive a fork, and a user's script is not run again for them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    how = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, how, _begin, (tokens,))
    try:
        yield pool
    except BrokenProcessPool as error:  # of a result, or of the next block
        raise InputError("a worker process was killed; expected fewer --workers if the memory was too small") from error
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _begin(tokens: PreTrainedTokenizerFast) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokenizer = Encoder(tokens), tokens.eos_token_id


def _tokenize(texts: dict[str, parts.Texts]) -> dict[str, parts.Tokens]:
    return {split: parts.tokenized(own, *_tokenizer) for split, own in texts.items()}
