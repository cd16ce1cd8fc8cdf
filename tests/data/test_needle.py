"""Needles: the harness's own words, its own tokens, rows that ask for the answer alone."""

import random
import re
import sys
import warnings
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
import wonderwords

from headrace.data import open_data, tokenizer
from headrace.tasks import IGNORED, Needle
from headrace.tasks.needle import DEPTHS, NOISE, vocabulary
from headrace.tasks.prepared import prepare
from headrace.utils.errors import InputError
from headrace.utils.plugins import LOADED, Plugin

WORDS = wonderwords.RandomWord()._categories
vocabulary()  # while wonderwords is whole
PROSE = "One day, a man went out. Was it late? It was! He saw no one; he came home again and slept. " * 9


@pytest.fixture(scope="module")
def harness():
    """lm-evaluation-harness's module that writes S-NIAH, without what it would download."""
    import nltk

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(nltk.data, "find", lambda name: name)
        few = {"nouns": ["cat"], "adjectives": ["lazy"], "verbs": ["eat"]}  # six million pairs take half a minute
        patch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=few))
        for name in ("niah_utils", "prepare_niah"):
            patch.delitem(sys.modules, f"lm_eval.tasks.ruler.{name}", raising=False)
        from lm_eval.tasks.ruler import niah_utils, prepare_niah

        patch.setattr(prepare_niah, "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?])\s+", text))
        yield prepare_niah, niah_utils.TEMPLATE


KINDS = {
    1: {"type_haystack": "repeat", "type_needle_v": "numbers"},
    2: {"type_haystack": "essay", "type_needle_v": "numbers"},
    3: {"type_haystack": "essay", "type_needle_v": "uuids"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_equal_the_harness(kind, harness, monkeypatch):
    module, template = harness
    settings = {"type_needle_k": "words", "num_samples": 1, "template": template, "TOKENIZER": tokenizer.byte_level()}
    hay = NOISE if kind == 1 else PROSE.split()
    (theirs,) = module.generate_samples(
        module.get_haystack("repeat") if kind == 1 else hay, max_seq_length=1500, **KINDS[kind], **settings
    )
    word = re.search("magic [a-z]+ for (.+) mentioned", theirs["gen_prefix"])[1]
    monkeypatch.setattr(module, "generate_random", lambda what: word if what == "words" else theirs["outputs"][0])
    for depth in (0.0, 0.31, DEPTHS[-1] if kind > 1 else 0.9):
        count = 7 if kind == 1 else len(hay)
        at = int(depth * count) if kind == 1 else round(100 * depth)
        monkeypatch.setattr(module.random, "sample", lambda population, k, at=at: [at if len(population) > 1 else 0])
        text, (value,), key = module.generate_input_output(
            count, hay, num_needle_k=1, num_needle_v=1, type_needle_k="words", template=template, **KINDS[kind]
        )
        own = Needle(kind).prompt([NOISE] * count if kind == 1 else hay, key, value, depth)
        assert own == f"{text} {theirs['gen_prefix']}", "the harness puts a space between the two"


def test_words_values_and_depths_equal_the_harness(harness):
    module, _ = harness
    adjectives, nouns, _ = vocabulary()
    assert adjectives == sorted(set(WORDS["adjectives"])) and nouns == sorted(set(WORDS["nouns"]))
    assert module.WORDS == ["lazy-cat"], "an adjective, a hyphen and a noun"
    assert [round(100 * depth) for depth in DEPTHS] == [int(depth) for depth in module.DEPTHS]
    assert module.get_haystack("repeat") == NOISE
    for kind, form in ((2, r" \d{7}"), (3, r" [0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")):
        _, answer = Needle(kind, length=900).row(random.Random(0))
        assert re.fullmatch(form, tokenizer.byte_level().decode(answer[:-1]))


@pytest.mark.parametrize("trained", [False, True], ids=["bytes", "BPE"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_prompt_and_answer_tokens_only(kind, trained, tmp_path):
    path = None
    if trained:
        path = str(tmp_path / "tokenizer.json")
        known = [PROSE, NOISE, "The special magic number is 1234567 or 7654321."]
        tokenizer.train_bpe(known, 300).save_pretrained(tmp_path)
    (tmp_path / "prose.txt").write_text(PROSE)
    task = Needle(kind, length=800, haystack=None if kind == 1 else str(tmp_path / "prose.txt"), tokenizer=path)
    batch, end = task.sample(torch.Generator().manual_seed(3), 4), task.tokens.eos_token_id
    for ids, labels in zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True):
        answered = [t for t, label in enumerate(labels) if label != IGNORED]
        prompt, answer = ids[: answered[0] + 1], [labels[t] for t in answered]
        text, value = task.tokens.decode(prompt), task.tokens.decode(answer[:-1])
        assert text.endswith("mentioned in the provided text is") and answer[-1] == end
        assert task.tokens(text).input_ids == prompt and task.tokens(text + value).input_ids == prompt + answer[:-1]
        assert f" is:{value}." in text and ids[len(prompt) :][: len(answer)] == answer
        assert set(ids[len(prompt) + len(answer) :]) <= {end} and len(prompt) + len(answer) > 0.8 * task.length


def test_a_changed_haystack_is_read_again(tmp_path):
    """Its checksum, which a result records, is of the rows."""
    for words in ("one two", "three four five"):
        (tmp_path / "hay.txt").write_text(words)
        pieces = Needle(2, haystack=str(tmp_path / "hay.txt")).pieces(random.Random(0))
        assert {*islice(pieces, 9)} == {*words.split()}


def test_files_of_a_task_are_part_of_what_its_rows_are(tmp_path, monkeypatch):
    """A comparison went on with another tokenizer of the same name, and a training with other text."""
    found, hay = [], tmp_path / "hay.txt"
    task = Needle(2, haystack=str(hay), length=400, tokenizer=str(tmp_path / "tokenizer.json"))
    for words, size in ((PROSE, 300), (PROSE, 310), (PROSE * 2, 310)):
        hay.write_text(words)
        tokenizer.train_bpe([PROSE, NOISE], size).save_pretrained(tmp_path)
        found.append(task.provenance)
    assert len({*map(str, found)}) == 3 and not Needle().provenance
    monkeypatch.setitem(LOADED, "mine.py", Plugin("mine.py", "a" * 64))
    made = prepare(task, "needle", 2, 0, 1, tmp_path / "rows")
    assert made["sources"] == [{"name": "needle", **found[-1]}] == open_data(tmp_path / "rows").identity["sources"]
    assert made["versions"]["plugin mine.py"] == "sha256 " + "a" * 12, "whose code may draw the rows"


def test_longer_rows_have_more_hay():
    by_length = Needle(length=600).by_length(1)
    assert list(by_length) == [600, 1200, 2400, 4800]
    for n, rows in by_length.items():
        assert rows["input_ids"].shape == (1, n) and (rows["input_ids"] < 256).sum() > 0.8 * n, "others are padding"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Needle(kind=4), "needle.kind=4; expected 1, 2 or 3"),
        (lambda: Needle(haystack="a.txt"), "expected kind=2 or 3"),
        (lambda: Needle(length=300).held_out(1), "length=300 is too short for a prompt"),
        (lambda: Needle(2, haystack="missing.txt").held_out(1), "'missing.txt' is not a file; expected text"),
        (lambda: Needle(tokenizer="missing.json").vocab_size, "'missing.json' cannot be read"),
    ],
)
def test_impossible_needles_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize("name", ["niah_single_2", "niah_single_3"])
def test_local_essays_give_the_rows_of_the_hub_essays(name, harness, tmp_path, monkeypatch):
    from lm_eval.tasks.ruler import niah_utils

    from headrace.evaluation import local_data

    module, _ = harness
    texts, calls = [PROSE, "A  second\nessay."], []
    (tmp_path / "paul_graham_essays").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "paul_graham_essays" / f"{i}.txt").write_text(text)
    tokenizer.byte_level().save_pretrained(tmp_path / "tokenizer")

    def generate_samples(haystack, TOKENIZER, **settings):
        calls.append((haystack, TOKENIZER.get_vocab(), settings))
        yield {"input": "a prompt"}

    for user in (module, niah_utils):
        monkeypatch.setattr(user, "generate_samples", generate_samples)
    monkeypatch.setattr(module, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: {"text": texts}))
    module.get_haystack.cache_clear()
    settings = {"max_seq_lengths": [512, 1024], "tokenizer": str(tmp_path / "tokenizer"), "version": 1.0}
    theirs = getattr(niah_utils, name)(**settings)["test"]
    ours = getattr(local_data, name)(data=str(tmp_path), **settings)["test"]
    module.get_haystack.cache_clear()
    assert len(calls) == 4 and calls[:2] == calls[2:] and ours.to_list() == theirs.to_list()
