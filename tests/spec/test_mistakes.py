"""What a user can get wrong in a recipe, in texts and in names, in one sentence each."""

import json
import time

import pytest

pytest.importorskip("datasets", reason="the extra [train] is not installed")

from headrace import InputError, zoo
from headrace.comparison.run import RESULT
from headrace.data import Preparation, open_data, prepare, tokenizer
from headrace.files import engine
from headrace.tasks import Text
from trained import recipe


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": -1}, "seed=-1; expected 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296; expected 0 to 4294967295"),
        ({"heads": 0}, "heads=0; expected at least 1"),
        ({"layers": 0}, "layers=0; expected at least 1"),
        ({"hidden_size": -16}, "hidden_size=-16; expected at least 1"),
        ({"vocab_size": 0}, "vocab_size=0; expected at least 1"),
        ({"lr": float("inf")}, "lr=inf is not allowed; expected finite float"),
        ({"weight_decay": float("nan")}, "weight_decay=nan is not allowed; expected finite float"),
        ({"warmup": -1.0}, "warmup=-1; expected at least 0"),
        ({"tokens": 40.0, "warmup": 0.0}, "tokens=40; expected more than half of a step, which is batch_tokens=128"),
    ],
)
def test_impossible_numbers_are_refused(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        recipe(**changes)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1, 2, 3], "no documents: texts.jsonl row 1 is of type int, not text; expected at least 1"),
        ([None, None], "no documents: texts.jsonl row 1 is null; expected at least 1"),
        ([["a"], ["b"]], "no documents: texts.jsonl row 1 is of type list, not text; expected at least 1"),
    ],
)
def test_empty_rows_are_refused(tmp_path, values, sentence):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    with pytest.raises(InputError, match=sentence):
        prepare(Preparation((str(tmp_path / "texts.jsonl"),), length=16), tmp_path / "d")


def test_invalid_seed_is_refused():
    with pytest.raises(InputError, match="--seed -1; expected at least 0"):
        Preparation(("a.txt",), seed=-1)


def test_end_token_in_a_text_is_not_the_end(tmp_path):
    texts = [f"before {tokenizer.END} after, {i}" for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for workers in (1, 2):
        folder = tmp_path / f"d{workers}"
        prepare(Preparation((str(tmp_path / "texts.jsonl"),), length=16, workers=workers, held_out=0.05), folder)
        data = open_data(folder)
        tokens = [token for row in data.train for token in row["input_ids"]]
        assert tokens.count(data.tokenizer.eos_token_id) == 19
        assert data.tokenizer.decode(tokens).count(tokenizer.END) == 2 * 19


def test_text_task_does_not_parse_the_end_token(tmp_path):
    tokens = tokenizer.byte_level()
    tokens.backend_tokenizer.save(str(tmp_path / "tokens.json"))
    (tmp_path / "text.txt").write_text(f"before {tokenizer.END} after\n" * 40)
    text = Text((str(tmp_path / "text.txt"),), str(tmp_path / "tokens.json"), length=8).corpus
    read = [text.tokenizer.decode(part.tokens) for part in text.parts.values()]
    ends = sum(len(part.ends) for part in text.parts.values())
    assert sum(part.count(tokenizer.END) for part in read) == 40 + ends
    assert sum(int((part.tokens == 256).sum()) for part in text.parts.values()) == ends


@pytest.mark.parametrize(
    "name", [" " * 150_000 + "x y", "gla" + " " * 150_000 + "x", "gla (" + " " * 150_000, "a" * 150_000]
)
def test_long_names_are_parsed_in_linear_time(name):
    started = time.process_time()
    with pytest.raises(InputError):
        zoo.get(name)
    assert time.process_time() - started < 10  # quadratic: minutes


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"scores": {}}'])
def test_invalid_result_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=r"result.json' .*; delete it and run the command again"):
        engine.read(tmp_path / "result.json", RESULT)
