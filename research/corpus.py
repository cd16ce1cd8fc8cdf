"""The text of the studies `text-*`: novels and the source code of Python's standard library, half of each.

    python -m research.corpus BOOK ...        writes build/text/corpus.txt and build/text/tokenizer.json

BOOKs are files of text. Pieces of 65,536 characters of prose and code alternate, so that every part of the text has
both. The tokenizer, byte-level BPE with 4,096 tokens, is trained on the first nine tenths.
"""

from itertools import chain
from pathlib import Path

import typer

from headrace.data.corpus import SHARE
from headrace.data.sources import text_of
from headrace.data.tokenizer import train_bpe
from headrace.tasks.text import standard_library

FOLDER, PIECE, VOCABULARY = Path("build", "text"), 65536, 4096


def main(books: list[Path]) -> None:
    prose, code = ("".join(map(text_of, files)) for files in (books, map(Path, standard_library())))
    size = min(len(prose), len(code))
    pieces = [(prose[i : i + PIECE], code[i : i + PIECE]) for i in range(0, size - PIECE + 1, PIECE)]
    text = "".join(chain.from_iterable(pieces))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "corpus.txt").write_text(text, encoding="utf-8")
    learnt = text[: int(len(text) * (1 - SHARE))]
    train_bpe(learnt.splitlines(keepends=True), VOCABULARY).backend_tokenizer.save(str(FOLDER / "tokenizer.json"))
    print(f"{len(text):,} characters in {FOLDER}")


if __name__ == "__main__":
    typer.run(main)
