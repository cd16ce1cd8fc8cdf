"""From text to packed rows: no token lost, none twice, and nothing half done."""

import json
import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

import fresh
import tiny
from headrace.comparison.choose import choose as study
from headrace.convert.checkpoint import read_tokenizer
from headrace.data import Collator, Preparation, open_data, prepare, tokenizer, unigram_loss
from headrace.data.held_out import PIECE, choose
from headrace.data.sources import Row
from headrace.ops.loss import IGNORED
from headrace.utils.errors import InputError

TEXTS = [f"Document {i}. " + "some words of it, and more; " * (7 * i % 11) for i in range(40)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def tokens_of(part):
    return [token for row in part for token in row["input_ids"]]


def encoded(texts, tokens):
    return [token for text in texts for token in (*tokens.encode(text, add_special_tokens=False), tokens.eos_token_id)]


@pytest.mark.parametrize(("workers", "length", "bpe"), [(1, 64, None), (2, 7, None), (1, 100, 300)])
def test_every_token_is_in_one_row_once(jsonl, tmp_path, workers, length, bpe):
    plan = Preparation((str(jsonl),), bpe=bpe, length=length, held_out=0.1, workers=workers)
    manifest = prepare(plan, tmp_path / "d")
    data = open_data(tmp_path / "d")
    apart = np.random.default_rng(0).permutation(len(TEXTS))[:4]
    for part, chosen in ((data.held_out, sorted(apart)), (data.train, sorted({*range(len(TEXTS))} - {*apart}))):
        expected = encoded([TEXTS[i] for i in chosen], data.tokenizer)
        assert tokens_of(part) == expected
        assert data.tokenizer.decode(expected) == "".join(TEXTS[i] + tokenizer.END for i in chosen)
        assert all(len(row["input_ids"]) == length for row in list(part)[:-1])
    assert manifest["train"]["tokens"] == len(tokens_of(data.train))
    assert manifest["train"]["documents"] == 36 and manifest["held_out"]["documents"] == 4
    assert manifest["vocab_size"] == (bpe or 257)


@pytest.mark.parametrize("length", [50, 48])  # the last row is full, and is not
def test_starts_mark_the_first_token_of_documents(length, jsonl, tmp_path):
    prepare(Preparation((str(jsonl),), length=length), tmp_path / "d")
    data = open_data(tmp_path / "d")
    begins = [length * i + start for i, row in enumerate(data.train) for start in row["starts"]]
    tokens, end = np.array(tokens_of(data.train)), data.tokenizer.eos_token_id
    assert begins == [0, *(np.flatnonzero(tokens == end)[:-1] + 1)]


def test_special_tokens_truncation_and_padding_of_a_tokenizer_are_left_out(jsonl, tmp_path):
    framed = tokenizer.byte_level()
    framed.backend_tokenizer.enable_truncation(8)
    framed.backend_tokenizer.enable_padding(length=100)
    frame = TemplateProcessing(single=f"{tokenizer.END} $A {tokenizer.END}", special_tokens=[(tokenizer.END, 256)])
    framed.backend_tokenizer.post_processor = frame
    framed.save_pretrained(tmp_path / "tokenizer")
    for name, path in (("plain", None), ("framed", str(tmp_path / "tokenizer"))):
        prepare(Preparation((str(jsonl),), length=64, tokenizer=path), tmp_path / name)
    plain, framed = (tokens_of(open_data(tmp_path / name).train) for name in ("plain", "framed"))
    assert plain == framed


def test_ids_without_a_token_count(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 70000, "</s>": 9}, "a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"text": "b"}\n' * 40)
    plan = Preparation((str(tmp_path / "texts.jsonl"),), str(tmp_path / "tokenizer.json"), length=2, held_out=0.1)
    assert prepare(plan, tmp_path / "d")["vocab_size"] == 70001
    assert tokens_of(open_data(tmp_path / "d").held_out) == [70000, 9] * 4


@pytest.mark.parametrize("kind", ["bytes", "trained", "a file without an end token"])
def test_tokenizer_pads_left_with_the_end_token(kind, tmp_path):
    made = {"bytes": tokenizer.byte_level, "trained": lambda: tokenizer.train_bpe(["It was it"], 260)}
    tokens = made.get(kind, tokenizer.byte_level)()
    tokens.save_pretrained(tmp_path / "tokenizer")
    name = "tokenizer/tokenizer.json" if kind not in made else "tokenizer"
    for result in (tokens, tokenizer.load(str(tmp_path / name))):
        assert result.pad_token_id == result.eos_token_id is not None
        batch = result(["It", "It was"], padding=True, return_tensors="pt")
        assert batch.input_ids[0, 0] == result.eos_token_id and batch.attention_mask[0].tolist()[0] == 0
        assert result.decode(batch.input_ids[0], skip_special_tokens=True) == "It"


def test_own_padding_token_is_kept(tmp_path):
    own = tokenizer.byte_level()
    own.pad_token, own.padding_side = "A", "right"
    own.save_pretrained(tmp_path)
    result = tokenizer.load(str(tmp_path))
    assert (result.pad_token, result.padding_side) == ("A", "right")


def test_code_in_a_data_folder_is_not_run(jsonl, tmp_path):
    prepare(Preparation((str(jsonl),), length=64), tmp_path / "d")
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    config = tmp_path / "d" / "tokenizer" / "tokenizer_config.json"
    auto = {"auto_map": {"AutoTokenizer": [None, "code.Tokens"]}, "tokenizer_class": "Tokens"}
    config.write_text(json.dumps(json.loads(config.read_text()) | auto))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (config.parent / "code.py").write_text(code + "from transformers import PreTrainedTokenizerFast as Tokens\n")
    for read in (lambda: open_data(tmp_path / "d"), lambda: tokenizer.load(str(config.parent))):
        with pytest.raises(InputError, match="contains custom code which must be executed"):
            read()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("count", "window"), [(1, 1 << 20), (2, 1 << 20), (1, 5000)])
def test_of_few_documents_pieces_drawn_over_the_text_are_held_out(count, window, tmp_path, monkeypatch):
    """window: characters that come in a row, so that pieces are in one row or several."""
    monkeypatch.setattr("headrace.data.sources.WINDOW", window)
    paragraphs = [f"{i} à la carte. " * (5 + i % 9) + "\n\n" for i in range(2000)]
    for i in range(count):
        (tmp_path / f"{i}.txt").write_text("".join(paragraphs[i::count]), "utf-8")
    sources = tuple(str(tmp_path / f"{i}.txt") for i in range(count))
    manifest = prepare(Preparation(sources, length=16, held_out=0.1), tmp_path / "d")
    data = open_data(tmp_path / "d")
    whole = sum(len(paragraph.encode()) for paragraph in paragraphs)
    pieces = manifest["held_out_pieces"]
    assert manifest["held_out"]["bytes"] == pytest.approx(0.1 * whole, rel=0.05)
    assert manifest["held_out"]["bytes"] + manifest["train"]["bytes"] == whole
    assert manifest["held_out"]["documents"] == pieces == round(0.1 * whole) // PIECE
    end = f"{data.tokenizer.eos_token}"
    trained, held = (data.tokenizer.decode(tokens_of(part)).split(end)[:-1] for part in (data.train, data.held_out))
    assert all(piece.endswith("\n\n") for piece in (*trained, *held)), "paragraphs are whole"
    read = [paragraph for piece in (*trained, *held) for paragraph in piece.split("\n\n")[:-1]]
    assert sorted(read) == sorted(paragraph.strip("\n") for paragraph in paragraphs)
    numbers = sorted(int(piece.partition(" ")[0]) for piece in held)
    gaps = np.diff(np.array([0, *numbers, 2000])) / 2000 * (pieces if count == 1 else pieces / 2)
    assert gaps.max() < 3, "over all of the text"


def test_a_text_without_paragraphs_is_cut_between_characters(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 500, "utf-8")
    manifest = prepare(Preparation((str(tmp_path / "a.txt"),), length=16, held_out=0.021), tmp_path / "d")
    data = open_data(tmp_path / "d")
    assert set(data.tokenizer.decode(tokens_of(data.held_out)[:-1])) == {"é"}
    assert manifest["held_out"]["bytes"] in (20, 22) and manifest["held_out_pieces"] == 1


@pytest.mark.parametrize(("count", "held_out", "expected"), [(3, 0.9, 2), (2, 0.9, 1), (4, 0.5, 2)])
def test_at_least_one_document_is_left_for_training(count, held_out, expected):
    rows = [Row("a", i, "a", 1) for i in range(count)]
    choice = choose(lambda: rows, held_out, 0)
    assert [held for _, held in choice.split(rows)].count(True) == expected


def test_all_of_a_text_but_one_byte_can_be_held_out():
    rows = [Row("a", 1, "a" * 12_293, 12_293)]
    split = choose(lambda: rows, 0.99992, 0).split(rows)
    assert sum(row.size for row, held in split if held) == 12_292


MISTAKES = {
    "a missing file": (("nowhere.txt",), {}, "source 'nowhere.txt' is not a file; expected text"),
    "a column that is not there": (None, {"column": "body"}, "row 1, with .*text.*n.* is without a column 'body'"),
    "a column of text": (("a.txt",), {"column": "body"}, "--column 'body' with 'a.txt', a text without columns"),
    "an unknown kind": (("texts.xls",), {}, "has an unknown suffix"),
    "no tokenizer": (None, {"tokenizer": "nowhere.json"}, "--tokenizer 'nowhere.json' cannot be read"),
    "another file": (None, {"tokenizer": "texts.xls"}, "--tokenizer 'texts.xls' cannot be read"),
    "no name of a repository": (None, {"tokenizer": "./nowhere"}, "'./nowhere' is no file, folder or name on the Hub"),
    "a vocabulary smaller than the bytes": (None, {"bpe": 100}, "--train-bpe 100"),
    "an empty vocabulary": (None, {"bpe": 0}, "--train-bpe 0; expected more than"),
    "too short": (None, {"length": 1}, "--length 1; expected at least 2"),
    "everything held out": (None, {"held_out": 1.0}, "--held-out 1.0; expected a fraction"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_user_errors_are_refused(jsonl, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("texts.xls", "a.txt"):
        (tmp_path / name).write_text("x")
    sources, changes, message = MISTAKES[mistake]
    with pytest.raises(InputError, match=message):
        prepare(Preparation(sources or (str(jsonl),), **changes), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_the_tokenizer_of_our_model_is_read_without_a_warning(tmp_path):
    """Of transformers, about a config.json whose class is not imported."""
    tiny.saved(tiny.build("gla"), tmp_path)
    code = f"from headrace.data import tokenizer; print(len(tokenizer.load({str(tmp_path)!r})))"
    done = fresh.run(code, before=fresh.TRANSFORMERS)
    assert done.stdout == "257\n" and "model of type" not in done.stderr


def test_bytes_are_a_tokenizer(jsonl, tmp_path):
    for name in (None, "bytes"):
        prepare(Preparation((str(jsonl),), length=64, tokenizer=name), tmp_path / str(name))
    for file in ("train.npy", "held_out.npy", "tokenizer/tokenizer.json"):
        assert (tmp_path / "bytes" / file).read_bytes() == (tmp_path / "None" / file).read_bytes()
    (plan,) = study("text", tokenizer="bytes").plans
    assert plan.task.tokenizer is None


def test_collator_joins_or_separates_documents(jsonl, tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4], "starts": [2]}, {"input_ids": [5, 6, 7], "starts": [1]}]
    joined = Collator(pad=0)(rows)
    assert joined["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert joined["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, -100]]
    apart = Collator(pad=0, separate_documents=True)(rows)
    assert apart["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]] and apart["cu_seqlens"].tolist() == [0, 2, 4, 5, 7]
    assert apart["labels"].tolist() == [[-100, 2, -100, 4, -100, -100, 7]] and apart["labels"].dtype == torch.long


def test_unigram_loss_is_the_entropy_of_the_tokens():
    """Of 8 tokens, or 8 labels that count, 4 are a 7, 2 a 1, and 2 occur once: 1.75 bits."""
    text = [{"input_ids": [7, 7, 1, 2]}, {"input_ids": [1, 7, 9, 7]}]
    task = [{"input_ids": [0] * 6, "shift_labels": [7, 7, IGNORED, 1, 2, IGNORED]}, {"shift_labels": [1, 7, 9, 7]}]
    for rows in (text, task):
        assert unigram_loss(rows) == pytest.approx(1.75 * math.log(2))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="it reads such a tokenizer")
def test_tokenizer_model_alone_names_the_package_that_it_needs(tmp_path, capfd):
    """As Mistral 7B v0.1 had first."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    for read in (lambda: tokenizer.load(str(tmp_path)), lambda: read_tokenizer(tmp_path)):
        with pytest.raises(InputError, match=r"tokenizer.model needs sentencepiece: pip install sentencepiece$"):
            read()
    assert not capfd.readouterr().err


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3_next"])
def test_a_model_without_a_tokenizer_has_none(kind, tmp_path):
    """transformers makes up one without a token for the first and the last kind."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for read in (lambda: tokenizer.load(str(tmp_path)), lambda: read_tokenizer(str(tmp_path))):
        with pytest.raises(InputError, match=r"the folder has no files of a tokenizer$"):
            read()


def test_files_of_no_known_tokenizer_are_not_said_to_need_a_package(tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")  # OpenAI's name of what transformers calls merges.txt
    with pytest.raises(InputError, match=r"its files are not of a known kind of tokenizer$"):
        tokenizer.load(str(tmp_path))


def test_a_vocabulary_of_special_tokens_is_refused(tmp_path):
    empty = Tokenizer(models.BPE({}, []))
    empty.add_special_tokens([tokenizer.END])
    empty.save(str(tmp_path / "a.json"))
    with pytest.raises(InputError, match="has no tokens of text"):
        tokenizer.load(str(tmp_path / "a.json"))
