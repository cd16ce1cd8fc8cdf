"""CPU time and memory of `headrace prepare` for one document of a gigabyte, or a million documents, killed on the way.

python benchmarks/prepare.py TOKENIZER BOOK ... --size 1e9      a tokenizer.json, and text to repeat (.txt or .txt.gz)
"""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import typer

from headrace.utils.integrity import sha256
from program import show
from record import RESULTS, Row, append, environment

RENEWED = 20  # of so many words one is another in each repetition of the text
MEAN = 980  # characters of one of many documents


def main(tokenizer: Path, books: list[Path], size: float = 1e9, folder: Path | None = None) -> None:
    """Prepares both texts, the second also after a kill, in a temporary folder beside `folder`."""
    about = environment()
    with tempfile.TemporaryDirectory(dir=folder) as path:
        here = Path(path)
        one, many = write_texts(books, size, here)
        for text in (one, many):
            measured(about, text, tokenizer, here / "whole", killed=False)
        measured(about, many, tokenizer, here / "killed", killed=True)


def write_texts(books: list[Path], size: float, here: Path) -> tuple[Path, Path]:
    """The same text as one document, and as JSON Lines of short ones."""
    words, rng = " ".join(map(read, books)).split(" "), random.Random(0)
    one, many = here / "one.txt", here / "many.jsonl"
    with one.open("w", encoding="utf-8") as whole, many.open("w", encoding="utf-8") as lines:
        for repetition in count():
            text = repeated(words, repetition, rng)
            whole.write(text)
            lines.writelines(json.dumps({"text": part}) + "\n" for part in cut(text, rng))
            if whole.tell() >= size:
                return one, many
    raise AssertionError


def read(book: Path) -> str:
    opened = gzip.open if book.suffix == ".gz" else open
    with opened(book, "rt", encoding="utf-8") as file:
        return file.read()


def repeated(words: list[str], repetition: int, rng: random.Random) -> str:
    """The words with one in RENEWED changed, so that not all of a repetition has been seen."""
    mine = list(words)
    for i in rng.sample(range(len(mine)), len(mine) // RENEWED if repetition else 0):
        mine[i] += str(repetition)
    return " ".join(mine)


def cut(text: str, rng: random.Random) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = begin + rng.randrange(MEAN // 5, MEAN * 9 // 5)
        yield text[begin:end]
        begin = end


def measured(about: Row, text: Path, tokenizer: Path, output: Path, killed: bool) -> None:
    """killed: by SIGKILL when half of the parts were written; the figures are of the same command again, which found
    `reused` parts. resident: the peak in MB; together, pages that both processes have count once. load: of the machine,
    on average over the last minute at the end. sha256: of the training tokens."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, __file__, "prepare-once", str(text), str(tokenizer), str(output)]
    parts = output.with_name(f".{output.name}.parts") / "parts"
    reused = kill_halfway(command, text, parts) if killed else 0
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    counts = {key: manifest["train"][key] + manifest["held_out"][key] for key in ("documents", "bytes")}
    row = {
        "text": text.name, "documents": counts["documents"], "megabytes": counts["bytes"] / 1e6, "killed": killed,
        "reused": reused, **said, "load": os.getloadavg()[0], "tokens": manifest["train"]["tokens"],
        "sha256": sha256(output / "train.npy"),
    }  # fmt: skip
    append(RESULTS / "prepare.csv", about, [row])
    lines = [[name, f"{value:,.2f}" if isinstance(value, float) else str(value)] for name, value in row.items()]
    show(f"{text.name}{', killed and resumed' if killed else ''}", ["figure", "value"], lines)


def kill_halfway(command: list[str], text: Path, parts: Path) -> int:
    """Kills the command and its worker when half of the parts are there, and returns their number."""
    half = text.stat().st_size // (2 * 2**23)
    running = psutil.Popen(command, stdout=subprocess.DEVNULL)
    while len(written := list(parts.glob("*.json"))) < half:
        if running.poll() is not None:
            raise RuntimeError(f"{text.name} was prepared before half of its parts were counted")
        time.sleep(0.2)
    for process in [running, *running.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    running.wait()
    return len(written)


def prepare_once(text: Path, tokenizer: Path, output: Path) -> None:
    """Prepares one text in this process and one worker, and prints what they took as JSON."""
    from headrace.data import Preparation, prepare

    together = [0.0]
    threading.Thread(target=watch, args=(together,), daemon=True).start()
    begun = time.perf_counter()
    prepare(Preparation((str(text),), tokenizer=str(tokenizer)), output)
    own, worker = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        json.dumps({
            "seconds": time.perf_counter() - begun,
            "cpu_parent": own.ru_utime + own.ru_stime,
            "cpu_worker": worker.ru_utime + worker.ru_stime,
            "resident_parent": peak_of_this_process(),
            "resident_worker": worker.ru_maxrss / 1024,
            "resident_together": together[0],
        })
    )  # fmt: skip


def peak_of_this_process() -> float:
    """MB. Other than ru_maxrss it does not begin with the peak of the process that started this one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def watch(together: list[float]) -> None:
    me = psutil.Process()
    while True:
        try:
            shared = sum(p.memory_full_info().pss for p in (me, *me.children(recursive=True)))
            together[0] = max(together[0], shared / 2**20)
        except psutil.NoSuchProcess:  # the worker ended in between
            pass
        time.sleep(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["prepare-once"]:
        prepare_once(*map(Path, sys.argv[2:]))
    else:
        typer.run(main)
