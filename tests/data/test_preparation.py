"""Text of any size is prepared block by block: streamed or with bad rows, the tokens are the same."""

import bz2
import gzip
import json
import lzma
import pickle
import random
import re
import sys
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing import active_children
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest

pytest.importorskip("datasets", reason="the extra [train] is not installed")

import zstandard
from pyarrow import parquet
from torch.utils.data import DataLoader

from headrace.cli.train import prepare as command
from headrace.data import Preparation, open_data, preparation, prepare, sources
from headrace.data.held_out import Choice
from headrace.utils.errors import InputError

WORDS = ["alpha", "beta,", "gamma.\n", "delta\n\n", "été", "12", "it's", "—", "  x", "中文"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(preparation, "BLOCK", 1000)
    monkeypatch.setattr(sources, "WINDOW", 300)


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(150)]


@pytest.fixture(scope="module")
def jsonl(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def plan(jsonl):
    return Preparation((str(jsonl),), length=64, held_out=0.1)


def tokens(folder):
    """All that `prepare` wrote, but for the tokenizer and the manifest."""
    return {path.stem: np.load(path).tolist() for path in sorted(folder.glob("*.npy"))}


class Killed(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("after", [0, 3])
def test_killed_preparation_leaves_nothing(plan, tmp_path, monkeypatch, after):
    finished, made = preparation._result, []

    def kill(*part):
        if len(made) == after:
            raise Killed
        return made.append(part) or finished(*part)

    monkeypatch.setattr(preparation, "_result", kill)
    with pytest.raises(Killed):
        prepare(plan, tmp_path / "killed")
    assert not [*tmp_path.iterdir()]


def test_a_killed_worker_is_a_sentence_when_the_next_block_is_read():
    def blocks():
        yield preparation.parts.Block({}, [])
        for worker in active_children():
            worker.kill()
            worker.join()
        time.sleep(0.5)  # in which the pool notices
        yield preparation.parts.Block({}, [])

    with pytest.raises(InputError, match="a worker process was killed; expected fewer --workers"):
        [*preparation.tokenized_blocks(blocks(), preparation.tokenizer.load("bytes"), 1)]


@pytest.mark.parametrize("count", [1, 2])
def test_token_limit_takes_the_first_tokens(plan, tmp_path, count):
    prepare(plan, tmp_path / "whole")
    whole = tokens(tmp_path / "whole")["train"]
    made = prepare(replace(plan, tokens=2000, workers=count), tmp_path / "d")
    result = tokens(tmp_path / "d")["train"]
    assert 2000 <= len(result) == made["train"]["tokens"] < 3100 and result == whole[: len(result)]


def test_few_tokens_of_one_long_text_have_held_out_text(tmp_path):
    """That of the first piece, which lies behind the first block; the training text is that block's."""
    (tmp_path / "book.txt").write_text("".join(f"{number} words\n" for number in range(3000)))
    plan = Preparation((str(tmp_path / "book.txt"),), length=64, held_out=0.001)
    prepare(plan, tmp_path / "whole"), prepare(replace(plan, tokens=100), tmp_path / "few")
    whole, few = tokens(tmp_path / "whole"), tokens(tmp_path / "few")
    assert few["held_out"] == whole["held_out"] != [] and few["train"] == whole["train"][: len(few["train"])]
    assert 100 <= len(few["train"]) < 1400


@pytest.mark.parametrize(("share", "enough"), [(0.02, 26), (0.1, 20)])
def test_the_note_of_pieces_says_how_many_documents_are_enough(share, enough, tmp_path, capsys):
    for count in (enough - 1, enough):
        lines = [json.dumps({"text": f"text {number} " * 40}) + "\n" for number in range(count)]
        (tmp_path / f"{count}.jsonl").write_text("".join(lines))
        command(tmp_path / str(count), [str(tmp_path / f"{count}.jsonl")], length=8, held_out=share)
        said = f"--held-out {share} takes whole documents if there are {enough} or more"
        sentence = f"1 piece from all over the text; {said}"
        assert (sentence in " ".join(capsys.readouterr().out.split())) == (count < enough)


@pytest.mark.parametrize("count", [None, 20])
def test_a_tokenizer_is_not_trained_on_more_text_than_the_tokens_need(count, tmp_path, monkeypatch):
    """A data set of the Hub may have a thousand times as much."""
    monkeypatch.setattr(preparation, "BLOCK", 100)
    texts = ["one two three"] * 60 + ["zzzz zzzz"] * 200
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = Preparation((str(tmp_path / "a.jsonl"),), bpe=280, length=8, held_out=0.5, tokens=count)
    prepare(plan, tmp_path / "d")
    assert ("zz" in open_data(tmp_path / "d").tokenizer.get_vocab()) == (count is None)


@pytest.mark.parametrize(("platform", "method"), [("linux", "fork"), ("darwin", "spawn"), ("win32", "spawn")])
def test_processes_are_forked_on_linux_alone(platform, method, plan, tmp_path, monkeypatch):
    def asked(how):
        raise LookupError(how)

    monkeypatch.setattr(preparation, "get_context", asked)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LookupError, match=f"^{method}$"):
        prepare(plan, tmp_path / "d")


def test_long_text_is_read_in_windows(tmp_path, texts):
    """As one file of many windows and blocks, it has the tokens of one row."""
    book = "\n".join(texts)
    (tmp_path / "book.txt").write_text(book, "utf-8")
    (tmp_path / "book.jsonl").write_text(json.dumps({"text": book}) + "\n")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": README * 3}) + "\n")
    prepare(Preparation((str(tmp_path / "lines.jsonl"),), bpe=400, length=64, held_out=0.1), tmp_path / "bpe")
    for kind in ("txt", "jsonl"):
        plan = Preparation((str(tmp_path / f"book.{kind}"),), str(tmp_path / "bpe/tokenizer"), length=64, held_out=0.01)
        prepare(plan, tmp_path / kind)
    rows = list(sources.rows((str(tmp_path / "book.txt"),), "text", cut=True))
    assert len(rows) > 20 and "".join(row.text for row in rows) == book
    assert [row.offset for row in rows] == [len("".join(r.text for r in rows[:i]).encode()) for i in range(len(rows))]
    assert tokens(tmp_path / "txt") == tokens(tmp_path / "jsonl")
    of = open_data(tmp_path / "txt").tokenizer
    trained, held = (of.decode(tokens(tmp_path / "txt")[name]).split(of.eos_token)[:-1] for name in SPLITS)
    assert len(held) == 1 and held[0].join(trained) == book, "one piece, and what is before and behind it"
    assert len(held[0].encode()) == pytest.approx(0.01 * len(book.encode()), rel=0.5)


SPLITS = ("train", "held_out")
README = "Some words, which are trained on; it's them: 123, 4567.\n\nAnd a paragraph.\n"


def documents(folder):
    """The documents of both splits of a prepared folder, by number."""
    data = open_data(folder)
    whole = {}
    for split, rows in zip(SPLITS, (data.train, data.held_out), strict=True):
        text = data.tokenizer.decode([token for row in rows for token in row["input_ids"]])
        whole[split] = [int(number) for number in text.split("<|endoftext|>") if number]
    return whole


@pytest.mark.parametrize("seed", range(3))
def test_held_out_documents_are_drawn_independently(tmp_path, seed):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(3000)))
    made = prepare(Preparation((str(tmp_path / "texts.jsonl"),), held_out=0.1, seed=seed), tmp_path / "d")
    split = documents(tmp_path / "d")
    assert {name: len(split[name]) for name in SPLITS} == {name: made[name]["documents"] for name in SPLITS}
    assert sorted(split["train"] + split["held_out"]) == [*range(3000)]
    assert abs(len(split["held_out"]) - 300) < 6 * (3000 * 0.1 * 0.9) ** 0.5  # of a fixed draw


def test_every_file_format_gives_the_same_documents(texts, jsonl, tmp_path, plan):
    prepare(plan, tmp_path / "whole")
    raw = jsonl.read_bytes()
    files = {"a.jsonl.gz": gzip.compress(raw), "b.jsonl.bz2": bz2.compress(raw), "c.jsonl.xz": lzma.compress(raw)}
    half = len(raw) // 2
    files |= {"d.jsonl.zst": zstandard.compress(raw[:half]) + zstandard.compress(raw[half:])}
    files["d.json"] = json.dumps([{"text": text} for text in texts]).encode()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "e.parquet", tmp_path / "folder" / "train.parquet"):
        parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), path, row_group_size=70)
    columns = {"body": pyarrow.array(texts).dictionary_encode(), "view": pyarrow.array(texts, pyarrow.string_view())}
    parquet.write_table(pyarrow.table(columns), tmp_path / "f.parquet")
    for column in columns:
        prepare(replace(plan, sources=(str(tmp_path / "f.parquet"),), column=column), tmp_path / column)
        assert tokens(tmp_path / column) == tokens(tmp_path / "whole")
    for name in (*files, "e.parquet", "folder"):
        prepare(replace(plan, sources=(str(tmp_path / name),)), tmp_path / f"of {name}")
        assert tokens(tmp_path / f"of {name}") == tokens(tmp_path / "whole"), name


def test_a_text_file_of_a_folder_is_one_document(tmp_path):
    texts = [f"Chapter {i}\n\nhas lines.\n" for i in range(3)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    assert read(tmp_path) == [(text, "") for text in texts]


def test_a_folder_is_named_from_within_it(tmp_path, monkeypatch):
    """`datasets` takes a name from the last part of a path."""
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert read(".") == [("train.txt", "")]


def test_a_folder_with_a_row_that_is_no_json_is_read_by_the_names_of_its_files(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\nno json\n")
    with pytest.raises(InputError, match=r"cannot be read: .*; expected its files by name, of which invalid rows"):
        read(tmp_path)
    assert [text for text, _ in read(tmp_path / "a.jsonl")] == ["one", ""]


def test_a_folder_of_two_kinds_is_refused(tmp_path):
    """`datasets` takes one kind and leaves the other out. What is about the data is none."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    (tmp_path / "LICENSE.txt").write_text("free")
    assert read(tmp_path) == [("one", "")]
    (tmp_path / "b.txt").write_text("two")
    with pytest.raises(InputError, match=r"mixes (json files and 'b.txt'|text files and 'a.jsonl'); expected a folder"):
        read(tmp_path)


def test_what_is_left_out_of_a_folder_is_said(tmp_path, capsys):
    """`datasets` tells splits by the names of files."""
    for name in ("a.txt", "b.txt", "test.txt", "valid.txt.gz", "README.txt", ".hidden.txt"):
        (tmp_path / name).write_bytes(gzip.compress(b"packed") if name.endswith("gz") else name.encode())
    (tmp_path / "train.txt").write_text("read")
    assert read(tmp_path) == read(tmp_path) == [("read", "")]
    assert capsys.readouterr().err.count("Left out by their names: a.txt, b.txt, test.txt and 1 more. Give files") == 1


@pytest.mark.parametrize(
    ("files", "given", "sentence"),
    [
        (("a.txt", "b.jsonl"), ("a.txt", "b.jsonl"), "the sources mix json and text files; expected one kind"),
        # `datasets` reads test.jsonl alone, and leaves out a.jsonl
        (("a.jsonl", "test.jsonl"), ".", r"has no split train, .*\['test'\].*; expected one, or files by name"),
        (("a.txt",), ("a.txt", "./a.txt"), "a.txt' is given twice; expected each file once"),  # and be in both splits
    ],
)
def test_sources_that_do_not_go_together_are_refused(files, given, sentence, tmp_path):
    for name in files:
        (tmp_path / name).write_text(json.dumps({"text": "one"}) + "\n")
    with pytest.raises(InputError, match=sentence):
        read(*(f"{tmp_path}/{name}" for name in given))


@pytest.mark.parametrize("suffix", [".md", ".py"])
def test_files_that_are_read_by_name_alone(tmp_path, suffix):
    """`datasets` leaves them out of a folder. Beside data of other kinds they are about the data, or its program."""
    for name in (f"a{suffix}", "README.md", f".git/b{suffix}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    with pytest.raises(InputError, match=rf"is a folder of {suffix} files; expected them by name, as in .*/\*{suffix}"):
        read(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    if suffix == ".md":
        with pytest.raises(InputError, match=r"mixes text files and 'a\.md'"):
            read(tmp_path)
        (tmp_path / "b.txt").rename(tmp_path / "b.jsonl").write_text('{"text": "two"}')
    assert read(tmp_path) == [("two", "")]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_lines_of_which_the_first_is_an_array(tmp_path, name):
    """As opposed to a file that is one array."""
    path, row = tmp_path / name, json.dumps({"text": "one"})
    for content, bad in ((f"[1]\n{row}\n", ["no JSON object", ""]), (f"[{row},\n{row}]", ["", ""])):
        path.write_text(content)
        assert [each for _, each in read(path)] == bad
    path.write_text(f"[{row},\n{row}")
    with pytest.raises(InputError, match="cannot be read: Expecting ',' delimiter"):
        read(path)


def test_names_on_the_hub_may_have_a_dot(monkeypatch, tmp_path):
    class Items(list):
        info = SimpleNamespace(builder_name="parquet")

    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **_: asked.append(name) or Items([{"text": "a"}]))
    for name in ("wikimedia/wikipedia:20231101.en", "mlfoundations/dclm-baseline-1.0"):
        assert [row.text for row in sources.rows((name,), "text", True)] == ["a"]
    assert asked == [("wikimedia/wikipedia", "20231101.en"), ("mlfoundations/dclm-baseline-1.0", None)]
    with pytest.raises(InputError, match="is not a file"):
        read(tmp_path / "absent.txt.bz2")


@pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", zstandard)])
def test_a_packed_file_that_was_cut_off_is_refused(suffix, module, tmp_path):
    packed = module.compress("".join(f"{i} {i**9}\n" for i in range(20_000)).encode())
    (path := tmp_path / f"a.txt.{suffix}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match="cannot be read: Compressed file ended before the end"):
        read(path)


@pytest.mark.parametrize("cut", [False, True])
def test_a_byte_that_is_not_utf8_is_named_by_its_place_in_the_file(cut, tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"\xef\xbb\xbf" + b"one line\n" * 5000 + b"\xff"))
    with pytest.raises(InputError, match="can't decode byte 0xff in position 45003: invalid start byte"):
        list(sources.rows((str(tmp_path / "a.txt.zst"),), "text", cut))


def test_bad_rows_are_counted_and_named(texts, tmp_path, capsys):
    bad = [b'{"text": "\xff"}', b'{"text": ', b"[1]", b'{"body": "x"}', b'{"text": null}', b'{"text": ""}', b""]
    bad += [b'{"text": 5}', b'{"text": "\\ud800"}', b'{"body": "y", "more": 1}', b"[" * 100_000]
    good = [json.dumps({"text": text}).encode() for text in texts[:40]]
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join([*good[:20], *bad, *good[20:]]))
    for name in ("good", "mixed"):
        command(tmp_path / name, [str(tmp_path / f"{name}.jsonl")], length=16, held_out=0.1)
    assert tokens(tmp_path / "good") == tokens(tmp_path / "mixed")
    result = open_data(tmp_path / "mixed").manifest["bad_rows"]
    assert {what: (one["rows"], one["first"]) for what, one in result.items()} == {
        "not UTF-8": (2, "mixed.jsonl row 21"),
        "not JSON": (2, "mixed.jsonl row 22"),
        "no JSON object": (1, "mixed.jsonl row 23"),
        "without a column 'text'": (2, 'mixed.jsonl row 24, with ["body"]'),
        "null": (1, "mixed.jsonl row 25"),
        "empty": (2, "mixed.jsonl row 26"),
        "of type int, not text": (1, "mixed.jsonl row 28"),
    }
    sentence = capsys.readouterr().out
    assert "left out: 2 rows without a column 'text', first mixed.jsonl row 24, with [\"body\"]\n" in sentence
    assert "left out: 1 row null, first mixed.jsonl row 25\n" in sentence


def test_bad_rows_of_parquet_are_counted(tmp_path):
    values = pyarrow.array([b"good", b"\xff", None, b"", b"also good"] * 3).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    made = prepare(Preparation((str(tmp_path / "a.parquet"),), length=8, held_out=0.2), tmp_path / "d")
    assert {what: one["rows"] for what, one in made["bad_rows"].items()} == {"not UTF-8": 3, "null": 3, "empty": 3}
    assert made["train"]["bytes"] + made["held_out"]["bytes"] == 3 * len("goodalso good")
    parquet.write_table(pyarrow.table({"n": [1, 2]}), tmp_path / "b.parquet")
    wrong = {"text": "--column 'text' is not in .*; expected one of n", "n": "holds int64; expected text"}
    for column, sentence in wrong.items():
        with pytest.raises(InputError, match=sentence):
            prepare(Preparation((str(tmp_path / "b.parquet"),), column=column), tmp_path / "none")


# What a URL, a pattern of paths or a shell would read as more than letters.
NAMES = ("My Documents", "é", "100%", "%20", "a#b", "what?", "[a]", "*", "{a,b}", "a::b", "C:", "~", "$HOME", "a&b;'")


def read(*sources_):
    return [(row.text, row.bad) for row in sources.rows(tuple(map(str, sources_)), "text", cut=False)]


@pytest.mark.parametrize("name", NAMES)
def test_paths_may_have_special_characters(name, tmp_path, monkeypatch):
    """A file by its whole path and by its own name, below and beside files that a pattern would find."""
    for folder in ("aX", name):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.txt").write_text(folder)
        (tmp_path / folder / "aX.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": folder}).encode()))
        parquet.write_table(pyarrow.table({"text": [folder]}), tmp_path / folder / f"{name}.parquet")
    for file in (f"{name}.txt", "aX.jsonl.gz", f"{name}.parquet"):
        assert read(tmp_path / name / file) == [(name, "")]
    monkeypatch.chdir(tmp_path / name)
    assert read(f"{name}.txt") == [(name, "")]


@pytest.mark.parametrize("name", NAMES)
def test_folders_with_pattern_characters_are_refused(name, tmp_path):
    """`datasets` takes the path of a folder as a pattern: what it would not find, or find elsewhere, is refused."""
    for folder in ("aX", name):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(json.dumps({"text": folder}) + "\n")
    if odd := [mark for mark in ("*", "?", "[", "::") if mark in name]:
        with pytest.raises(InputError, match=re.escape(f"is a folder whose path has {odd[0]!r}")):
            read(tmp_path / name)
    else:
        assert read(tmp_path / name) == [(name, "")]


MARKED = {
    "a.jsonl": ('{"text": "one"}\n{"text": "two"}\n', [("one", ""), ("two", "")]),
    "b.json": ('[{"text": "one"}, {"text": "two"}]', [("one", ""), ("two", "")]),
    "c.txt": ("one\r\ntwo\n", [("one\ntwo\n", "")]),
    "d.txt": ("", [("", "empty")]),
}


@pytest.mark.parametrize("name", MARKED)
def test_byte_order_mark_is_dropped_and_line_ends_are_newlines(name, tmp_path):
    text, expected = MARKED[name]
    for file, content in ((name, text.encode("utf-8-sig")), (f"{name}.gz", gzip.compress(text.encode("utf-8-sig")))):
        (tmp_path / file).write_bytes(content)
        assert read(tmp_path / file) == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(encoding, tmp_path):
    for name in ("a.txt", "b.jsonl", "c.json"):
        (tmp_path / name).write_text('{"text": "one"}\n', encoding)
        with pytest.raises(InputError, match=f"^source '.*{name}' is {encoding.upper()}; expected UTF-8$"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl.gz", "c.parquet"])
def test_unreadable_file_is_named(name, tmp_path):
    (tmp_path / name).write_bytes(b"\xff no text")
    with pytest.raises(InputError, match=f"source .*{name}' cannot be read"):
        prepare(Preparation((str(tmp_path / name),)), tmp_path / "none")


def test_rows_are_memory_mapped(plan, tmp_path):
    """What another process gets is names, and loaders read rows in any order and many at once."""
    prepare(plan, tmp_path / "d")
    rows = open_data(tmp_path / "d").train
    assert len(rows.tokens) > 2000 and len(pickle.dumps(rows)) < 1000
    again = pickle.loads(pickle.dumps(rows))
    assert list(again) == list(rows) and rows[-1] == rows[len(rows) - 1]
    assert isinstance(rows.tokens, np.memmap) and rows.tokens.dtype == np.uint16
    for i in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[i]
    chosen = rows.select(range(1, 9)).select([0, 7, 3])
    assert [chosen[i] for i in range(3)] == [rows[1], rows[8], rows[4]]
    assert next(iter(DataLoader(chosen, 3, collate_fn=list))) == [rows[1], rows[8], rows[4]]


# --- samples ---------------------------------------------------------------------------------------------------------
FILES, DOCUMENTS = 8, 40  # of a source, and of each file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of documents that are their own numbers, each of six bytes."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(FILES):
        numbers = range(file * DOCUMENTS, (file + 1) * DOCUMENTS)
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": f"{n:06d}"}) + "\n" for n in numbers))
    return folder


def chosen(source, share, seed):
    """Numbers of the documents of a sample in order."""
    return [int(row.text) for row in sources.rows(source, "text", True, sources.Sample(share, seed))]


def test_a_row_of_a_sampled_data_set_is_named_by_its_file(files):
    """The files are in another order there."""
    sample, file, row = sources.Sample(1.0, 0), FILES - 1, 2
    read = sources.rows((str(files),), "text", True, sample)
    (where,) = (each.where for each in read if int(each.text) == file * DOCUMENTS + row)
    assert where == f"{files} file {file + 1} row {row + 1}"


@pytest.mark.parametrize("streamed", [False, True], ids=["files", "data set"])
def test_sample_gives_every_document_the_same_chance(files, streamed):
    """Of 60 seeds; counts per document are binomial, and so is the number of the first file to be read."""
    source = (str(files),) if streamed else tuple(map(str, sorted(files.glob("*"))))
    samples = [chosen(source, 0.3, seed) for seed in range(60 if not streamed else 6)]
    assert chosen(source, 0.3, 0) == samples[0] != samples[1]
    assert all(len(set(sample)) == len(sample) for sample in samples)
    counts = np.bincount(np.concatenate(samples), minlength=FILES * DOCUMENTS)
    expected, n = 0.3 * len(samples), FILES * DOCUMENTS
    # the sum of squared deviations over the variance is chi-squared: mean n, variance 2 n; six standard deviations
    assert abs(((counts - expected) ** 2 / (expected * 0.7)).sum() - n) < 6 * (2 * n) ** 0.5
    first = {sample[0] // DOCUMENTS for sample in samples}
    assert len(first) >= (6 if not streamed else 2)  # of 8; 60 draws miss three of them once in 10^8 times


@pytest.mark.parametrize("seed", range(3))
def test_the_sample_is_independent_of_what_is_held_out(seed):
    """Both draw by the same seed: of equal shares they would agree on every document, where chance agrees on half."""
    documents = [sources.Row("a", i, "text", 4) for i in range(3000)]
    kept = {row.number for row in sources.Sample(0.5, seed).kept(documents)}
    held_out = {row.number for row, held in Choice(0.5, seed).split(documents) if held}
    agreeing = sum((i in kept) == (i in held_out) for i in range(3000))
    assert abs(agreeing - 1500) < 6 * (3000 * 0.25) ** 0.5


def test_a_sample_has_all_parts_of_a_document_or_none():
    parts = [sources.Row("a", i, "text", 4, 4 * part, part == 2) for i in range(100) for part in range(3)]
    kept = list(sources.Sample(0.5, 0).kept(parts))
    chosen = {row.number for row in kept}
    assert kept == [row for row in parts if row.number in chosen] and 20 < len(chosen) < 80


def test_sample_of_all_documents_reads_whole_files_in_random_order(files):
    source = tuple(map(str, sorted(files.glob("*"))))
    order = chosen(source, 1.0, 3)
    assert sorted(order) == list(range(FILES * DOCUMENTS)) != order
    assert all(b == a + 1 for a, b in pairwise(order) if b % DOCUMENTS)


def test_sampled_rows_are_held_out_and_disjoint(files, tmp_path):
    plan = Preparation(tuple(map(str, files.glob("*"))), length=8, held_out=0.2, sample=0.5, seed=2)
    manifest = prepare(plan, tmp_path / "whole")
    split = documents(tmp_path / "whole")
    assert not set(split["train"]) & set(split["held_out"]) and manifest["sample"] == 0.5
    drawn = chosen(plan.sources, 0.5, 2)
    assert sorted(split["train"] + split["held_out"]) == sorted(drawn)
    assert 0.1 * len(drawn) < len(split["held_out"]) < 0.3 * len(drawn)


def test_sample_stops_at_the_tokens_and_its_share_is_checked(files, tmp_path, capsys):
    plan = Preparation(tuple(map(str, files.glob("*"))), length=8, held_out=0.2, sample=1.0, tokens=200)
    prepare(plan, tmp_path / "some")
    assert "the sources ended" not in capsys.readouterr().err
    prepare(replace(plan, sample=None, tokens=10_000), tmp_path / "all")
    assert "of 10,000 training tokens; more sources give more" in capsys.readouterr().err
    short = prepare(replace(plan, sample=0.1, tokens=10_000), tmp_path / "short")["train"]["tokens"]
    assert f"the sources ended after {short:,} of 10,000 training tokens" in capsys.readouterr().err
    read = documents(tmp_path / "some")
    assert len(read["train"] + read["held_out"]) < FILES * DOCUMENTS
    with pytest.raises(InputError, match=r"--sample 1\.5; expected a share above 0 and at most 1"):
        replace(plan, sample=1.5)


def test_a_refused_preparation_leaves_nothing(jsonl, tmp_path):
    refusals = {
        "is not a file": Preparation((str(tmp_path / "none.txt"),)),
        "no documents": Preparation((str(jsonl),), column="body"),
        "no text is left as train": Preparation((str(jsonl),), held_out=1 - 1e-9),
        "--length 20000000 is longer": Preparation((str(jsonl),), length=20_000_000, held_out=0.1),
    }
    for sentence, plan in refusals.items():
        with pytest.raises(InputError, match=sentence):
            prepare(plan, tmp_path / "new" / "data")
        assert not (tmp_path / "new").exists()


def test_an_existing_folder_and_a_link_to_nothing_are_refused_at_once(jsonl, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("data", "link"):
        with pytest.raises(InputError, match="exists; name another"):
            prepare(Preparation((str(jsonl),), length=64), tmp_path / name)
