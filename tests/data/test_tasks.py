"""Tasks: what a row asks can be answered from the row, rows depend on nothing but the seed, bad text is refused."""

import contextlib
import itertools
import json
import math
from collections import Counter
from datetime import datetime
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from headrace import InputError, data, zoo
from headrace.comparison.plan import Arm
from headrace.data.rows import order
from headrace.data.tokenizer import END as END_OF_TEXT
from headrace.data.tokenizer import byte_level
from headrace.spec import to_json
from headrace.tasks import (
    IGNORED,
    TASKS,
    Answers,
    Copy,
    Dates,
    Digits,
    Induction,
    KeyValue,
    Masked,
    Mqar,
    Needle,
    Pair,
    Reverse,
    SelectiveCopy,
    Spans,
    Text,
    base,
    dates,
)  # fmt: skip
from headrace.tasks.base import generator
from headrace.tasks.sequences import END, FIRST, START
from spans import put_together

SYNTHETIC = (
    Pair(), Pair(keys=9, pairs=7, queries=3), Pair(clusters=4), KeyValue(), KeyValue(keys=12, pairs=5, length=23),
    Mqar(), Mqar(vocabulary=33, pairs=8, length=32), Reverse(), Dates(), Copy(), SelectiveCopy(), Induction(),
)  # fmt: skip


def nats(loss):
    """The answer to one token."""
    token = torch.ones(1, 1, dtype=torch.long)
    return Answers({"input_ids": token, "shift_labels": token}, torch.full((1, 1), loss), token > 0)


def rows_of(task, count=32):
    batch = task.sample(torch.Generator().manual_seed(3), count)
    assert batch["input_ids"].shape[:2] == batch["shift_labels"].shape == (count, task.length)
    assert int(batch["input_ids"].max()) < task.vocab_size
    return zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True)


@pytest.mark.parametrize("task", [Pair(), Pair(keys=9, pairs=7, queries=3)], ids=repr)
def test_pair_labels_are_the_values_of_the_keys(task):
    for ids, labels in rows_of(task):
        stored = dict(ids[: task.pairs])
        assert len(stored) == task.pairs and labels[: task.pairs] == [IGNORED] * task.pairs
        assert [stored[key] for key, _ in ids[task.pairs :]] == labels[task.pairs :]
        assert {nothing for _, nothing in ids[task.pairs :]} == {-1}


def test_pair_number_of_stored_pairs_can_vary():
    task, numbers = Pair(keys=9, pairs=7, least=3), Counter()
    for ids, labels in rows_of(task, 500):
        stored = [tuple(pair) for pair in ids[:7] if pair != [-1, -1]]
        queries = [(key, label) for (key, _), label in zip(ids[7:], labels[7:], strict=True) if label != IGNORED]
        assert sorted(queries) == sorted(stored) and len(dict(stored)) == len(stored)
        assert ids[: 7 - len(stored)] + ids[7 + len(stored) :] == [[-1, -1]] * 2 * (7 - len(stored))
        numbers[len(stored)] += 1
    assert numbers.keys() == {3, 4, 5, 6, 7} and min(numbers.values()) > 60, "100 of 500 each, ± 9"
    tested = task.by_length(4)
    assert list(tested) == [6, 8, 10, 12, 14] and Pair().by_length(4) == {}
    for length, rows in tested.items():
        assert rows["input_ids"].shape == (4, length, 2) and (rows["shift_labels"] != IGNORED).sum() == 4 * length / 2


def test_pair_keys_are_cluster_and_position():
    task, seen = Pair(keys=12, pairs=7, least=3, clusters=3), set()
    for ids, labels in rows_of(task, 200):
        stored = {(cluster, place): value for cluster, place, value in ids[:7] if value >= 0}
        queries = [(tuple(key), x) for (*key, _), x in zip(ids[7:], labels[7:], strict=True) if x != IGNORED]
        assert dict(queries) == stored and len(queries) == len(stored) and min(stored.values()) >= 12
        seen |= stored.keys()
    assert seen == {(cluster, 3 + place) for cluster in range(3) for place in range(4)}


def test_pair_can_store_keys_twice():
    task = Pair(keys=9, pairs=7, least=3, overwritten=True)
    for ids, labels in rows_of(task, 100):
        first, second = (dict(part) for part in (ids[:7], ids[7:14]))
        queries = {key: label for (key, _), label in zip(ids[14:], labels[14:], strict=True) if label != IGNORED}
        assert first.keys() == second.keys() and queries == {key: x for key, x in second.items() if key >= 0}
        assert all(first[key] != value and 9 <= first[key] < 18 for key, value in queries.items())
    assert Pair(overwritten=True).resized(12).pairs == 4
    assert Pair(least=4).resized(40) == Pair(pairs=20, least=4) and Pair(queries=4).resized(20) == Pair(32, 16, 4)
    assert {length: rows["input_ids"].shape[1] for length, rows in task.by_length(2).items()} == {
        length: length for length in (9, 12, 15, 18, 21)
    }


def test_pair_distractors_are_never_queried():
    task, first, places = Pair(keys=9, pairs=4, least=2, distractors=2), Counter(), Counter()
    for ids, labels in rows_of(task, 300):
        here = [pair for pair in ids[:12] if pair != [-1, -1]]
        stored = [pair for pair in here if pair[0] < 9]
        n = len(stored)
        assert len(here) == 3 * n and ids[12 - 3 * n : 12] == here and min(value for _, value in here) >= 9
        assert all(18 <= key < 27 for key, _ in here if key >= 9)
        queries = [[key, label] for (key, _), label in zip(ids[12:], labels[12:], strict=True) if label != IGNORED]
        assert sorted(queries) == sorted(stored) and set(labels[:12]) == {IGNORED}
        if n == 4:
            first[next(i for i, (key, _) in enumerate(here) if key < 9)] += 1
            places.update(i for i, (key, _) in enumerate(here) if key >= 18)
    assert places.keys() == set(range(12)) and min(places.values()) > 40, "800 in 12 places, 67 ± 5 each"
    assert first[0] < 60, "a third of about 100 rows, ± 5"
    assert list(task.by_length(2)) == [8, 12, 16] and task.resized(12).pairs == 3


@pytest.mark.parametrize("task", [KeyValue(), KeyValue(keys=12, pairs=5, length=23)], ids=repr)
def test_key_value_queries_every_pair_once(task):
    for ids, labels in rows_of(task):
        stored = dict(zip(ids[: 2 * task.pairs : 2], ids[1 : 2 * task.pairs : 2], strict=True))
        queries = {ids[t]: label for t, label in enumerate(labels) if label != IGNORED}
        assert queries == stored and len(stored) == task.pairs
        assert all(i >= task.keys for i, label in zip(ids, labels, strict=True) if label == IGNORED and i not in stored)


def test_key_value_queries_are_more_often_early():
    labels = KeyValue(length=128).sample(torch.Generator().manual_seed(0), 500)["shift_labels"]
    queries = (labels != IGNORED).sum(0)
    assert queries[16:48].sum() > 2 * queries[96:].sum() > 0


SMALL_MQAR = Mqar(vocabulary=40, pairs=3, length=24, power_a=0.3)


@pytest.mark.parametrize("task", [Mqar(), Mqar(vocabulary=33, pairs=8, length=32), SMALL_MQAR], ids=repr)
def test_mqar_queries_every_key_once_at_an_even_distance(task):
    half, context = task.vocabulary // 2, 2 * task.pairs
    for ids, labels in rows_of(task, 200):
        keys, values = ids[:context:2], ids[1:context:2]
        assert len(set(keys)) == len(set(values)) == task.pairs
        assert min(keys) >= 1 and max(keys) < half <= min(values) and max(values) < task.vocabulary
        queries = [t for t, label in enumerate(labels) if label != IGNORED]
        assert sorted((ids[t], labels[t]) for t in queries) == sorted(zip(keys, values, strict=True))
        assert all(t >= context and t % 2 == 0 for t in queries)
    assert task.chance == 1 / len(range(half, task.vocabulary)) and task.vocab_size == task.vocabulary


def mqar_literally(task, rng):
    """One row of Zoology's law: tokens, and the gap of each pair's query."""
    half, space = task.vocabulary // 2, (task.length - 2 * task.pairs) // 2
    keys = rng.choice(np.arange(1, half), task.pairs, replace=False)
    values = rng.choice(np.arange(half, task.vocabulary), task.pairs, replace=False)
    law = task.power_a * np.arange(1, space + 1) ** (task.power_a - 1)
    gaps = rng.choice(space, task.pairs, replace=False, p=law / law.sum())
    row = [token for pair in zip(keys, values, strict=True) for token in pair]
    for place in range(task.length - len(row)):
        queries = [key for key, gap in zip(keys, gaps, strict=True) if place == 2 * gap]
        row.append(queries[0] if queries else rng.integers(task.vocabulary))
    return row, gaps


def test_mqar_has_the_distribution_of_zoology():
    """How often every token stands at every place, and each pair's query at each gap, in as many rows of both."""
    task, rows, rng = SMALL_MQAR, 4000, np.random.default_rng(0)
    batch = task.sample(torch.Generator().manual_seed(0), rows)
    ids, labels = batch["input_ids"].numpy(), batch["shift_labels"].numpy()
    values = ids[:, 1 : 2 * task.pairs : 2]
    gaps = ((labels[:, None] == values[..., None]).argmax(2) - 2 * task.pairs) // 2
    theirs, their_gaps = (np.array(x) for x in zip(*(mqar_literally(task, rng) for _ in range(rows)), strict=True))
    count = lambda x, size: np.stack([np.bincount(column, minlength=size) for column in x.T])  # noqa: E731
    of_ids = count(ids, task.vocabulary), count(theirs, task.vocabulary)
    for ours, other in (of_ids, (count(gaps, 9), count(their_gaps, 9))):
        assert ours.shape == other.shape and ((ours == 0) == (other == 0)).all()
        # Two counts of one law differ by a normal variable of variance at most their sum; 987 of them: 1e-6 beyond 6.
        assert (np.abs(ours - other) <= 6 * np.sqrt(ours + other)).all()


def test_mqar_longer_rows_are_limited_by_the_vocabulary():
    assert list(Mqar(vocabulary=200).by_length(2)) == [64, 128]


@pytest.mark.parametrize("task", [Copy(), Copy(symbols=3, length=6)], ids=repr)
def test_copy_labels_repeat_the_source(task):
    n = task.length // 2
    for ids, labels in rows_of(task):
        assert labels == [IGNORED] * n + ids[:n] and ids[n:] == [task.symbols, *ids[: n - 1]]


@pytest.mark.parametrize("task", [SelectiveCopy(), SelectiveCopy(symbols=3, copied=4, length=9)], ids=repr)
def test_selective_copy_labels_are_the_symbols_in_order(task):
    noise, mark = task.symbols, task.symbols + 1
    for ids, labels in rows_of(task):
        read, queries = ids[: -task.copied], ids[-task.copied :]
        assert labels == [IGNORED] * len(read) + [i for i in read if i != noise] and queries == [mark] * task.copied
    first = task.sample(torch.Generator().manual_seed(3), 200)["input_ids"][:, 0] != noise
    assert 0 < first.float().mean() < 1, "symbols stand anywhere"


@pytest.mark.parametrize("task", [Induction(), Induction(symbols=4, length=3), Induction(length=9)], ids=repr)
def test_induction_label_is_the_token_after_the_special_one(task):
    for ids, labels in rows_of(task):
        place = ids.index(task.symbols)
        assert ids.count(task.symbols) == 2 and ids[-1] == task.symbols
        assert labels == [IGNORED] * (task.length - 1) + [ids[place + 1]]


def test_digits_are_pixels_in_order_and_a_digit():
    datasets = pytest.importorskip("sklearn.datasets", reason="the extra [eval] is not installed")
    known = {tuple(x): digit for x, digit in zip(*datasets.load_digits(return_X_y=True), strict=True)}
    assert next(known[x] for x in known if x[:6] == (0, 0, 5, 13, 9, 1)) == 0, "the one that is drawn in the docstring"
    rows = [(tuple(ids), labels) for ids, labels in rows_of(Digits())]
    assert all(labels == [IGNORED] * 63 + [17 + known[ids]] for ids, labels in rows)
    order = np.random.default_rng(0).permutation(1797)[:359]
    assert (
        Digits().held_out(512)["shift_labels"][:, -1].tolist() == (17 + datasets.load_digits().target[order]).tolist()
    )
    held_out = Digits().held_out(512)["input_ids"]
    assert len(held_out) == 359 and not {ids for ids, _ in rows} & {tuple(ids) for ids in held_out.tolist()}


@pytest.mark.parametrize("task", [KeyValue(), Mqar(), Copy(), SelectiveCopy(), Induction()], ids=repr)
def test_tasks_are_evaluated_at_other_lengths(task):
    parts = task.by_length(5)
    assert list(parts) == [task.length * times for times in (1, 2, 4, 8)]
    for length, rows in parts.items():
        assert rows["input_ids"].shape == (5, length) and int(rows["input_ids"].max()) < task.vocab_size


@pytest.mark.parametrize("task", SYNTHETIC, ids=repr)
def test_rows_depend_only_on_the_seed(task, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", BLOCK := 64)
    rows, again, other = (task.training(*given) for given in ((1, 2 * BLOCK), (1, BLOCK + 9), (2, 2 * BLOCK)))
    for i in (BLOCK + 5, 3):
        assert torch.equal(rows[i]["input_ids"], again[i]["input_ids"])
        assert not torch.equal(rows[i]["input_ids"], other[i]["input_ids"])
    assert not torch.equal(rows[3]["input_ids"], rows[BLOCK + 3]["input_ids"]) and len(list(task.training(1, 3))) == 3
    for outside in (-1, 2 * BLOCK):
        with pytest.raises(IndexError, match=f"row {outside} of {2 * BLOCK}"):
            rows[outside]
    assert torch.equal(task.held_out(40)["input_ids"], task.held_out(40)["input_ids"])


def documents(task, part):
    """The texts of the documents of a part, or of what is there of them."""
    corpus = task.corpus
    tokens, ends, _ = corpus.parts[part]
    return [corpus.tokenizer.decode(own[:-1]) for own in np.split(tokens, ends)[:-1]]


def test_few_files_have_pieces_from_all_over_the_text_held_out_and_many_have_files(tmp_path):
    paragraphs = [f"Paragraph {i}.\n" + "It goes on.\n" * 9 + "\n" for i in range(2500)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    task = Text((str(tmp_path / "book.txt"),))
    own = {part: "".join(documents(task, part)).split("\n\n")[:-1] for part in ("training", "tuning", "held-out")}
    assert sorted(chain(*own.values())) == sorted(each[:-2] for each in paragraphs), "no paragraph is divided"
    for part in ("tuning", "held-out"):
        places = [int(each.split(".")[0].split()[1]) for each in own[part]]
        assert len(places) == pytest.approx(250, abs=10)
        assert all(any(500 * i <= place < 500 * (i + 1) for place in places) for i in range(5))
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in paragraphs[:40]))
    many = Text((str(tmp_path / "many.jsonl"),))
    held_out, tuning, training = (documents(many, part) for part in ("held-out", "tuning", "training"))
    assert (len(held_out), len(tuning), len(training)) == (4, 4, 32)
    assert sorted(held_out + tuning + training) == sorted(paragraphs[:40])


@pytest.mark.parametrize("kind", ["a book", "documents"])
def test_rows_of_text_are_those_of_prepare(kind, book, tmp_path):
    """The same held-out rows, and the rest in rows of its own; every training row once in an epoch, in the order of
    `headrace train`."""
    if kind == "documents":
        lines = book.read_text("utf-8").splitlines()
        book = tmp_path / "lines.jsonl"
        book.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data.prepare(data.Preparation((str(book),), length=16, held_out=0.1), tmp_path / "data")
    prepared, task = data.open_data(tmp_path / "data"), Text((str(book),), length=16)
    corpus = task.corpus
    assert [*corpus.rows("held-out", 16)] == [*prepared.held_out][: len(prepared.held_out.tokens) // 16]
    assert corpus.bytes_per_token == prepared.manifest["held_out"]["bytes"] / prepared.manifest["held_out"]["tokens"]
    rest = [corpus.parts[part] for part in ("training", "tuning")]
    assert sum(part.size for part in rest) == prepared.manifest["train"]["bytes"]
    assert kind == "a book" or sum(len(part.ends) for part in rest) == prepared.manifest["train"]["documents"]
    rows, size = corpus.rows("training", 16), base.BLOCK + 9
    expected = [rows[i]["input_ids"] for epoch in range(size // len(rows) + 1) for i in order(rows, 3, epoch)]
    got = task.training(3, size)
    assert [row["input_ids"].tolist() for row in got] == expected[:size] and len(rows) < base.BLOCK
    labels = torch.stack([row["shift_labels"] for row in got])
    assert labels[:, :-1].tolist() == [row[1:] for row in expected[:size]] and (labels[:, -1] == IGNORED).all()


def test_seeds_padded_with_zeros_differ():
    keys = [("training",), ("training", 0), ("training", 0, 0), ("training", 2**32), ("held-out",), ("training", 1, 0)]
    firsts = [float(torch.rand((), generator=generator(*key))) for key in [*keys, ("training", 0, 1)]]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize("task", [Copy(symbols=2, length=2), Reverse(symbols=1, length=1)], ids=repr)
def test_task_with_too_few_distinct_rows_is_refused(task):
    with pytest.raises(InputError, match="too few different rows to hold some out: of 5120 that were drawn, none is"):
        task.held_out(512)


def test_reverse_skips_lengths_with_few_sources():
    assert list(Reverse(length=4).by_length(4)) == [2, 3, 4, 5, 6, 7, 8] and Reverse(symbols=1).by_length(4) == {}
    for symbols, length in ((8, 2), (9, 2), (4, 3), (3, 4), (2, 6)):  # those with 50 to 99 sources
        parts = [Reverse(symbols, length, length).held_out(2, part)["input_ids"] for part in ("held-out", "tuning")]
        assert [len(rows) for rows in parts] == [2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pair(keys=4, pairs=5), lambda: Pair(least=25), lambda: Pair(least=4, queries=8),
        lambda: Pair(clusters=1), lambda: Pair(clusters=5), lambda: Pair(clusters=32),
        lambda: Pair(keys=1, pairs=1, overwritten=True), lambda: Pair(clusters=4, distractors=3),
        lambda: Pair(distractors=-1), lambda: Pair().resized(7), lambda: Pair(distractors=5).resized(13),
        lambda: KeyValue(pairs=8, length=20), lambda: Mqar(pairs=8, length=30), lambda: Mqar(pairs=8, length=33),
        lambda: Mqar(pairs=0), lambda: Mqar(vocabulary=64), lambda: Mqar(power_a=0.0), lambda: Mqar(power_a=math.nan),
        lambda: Copy(length=7), lambda: SelectiveCopy(copied=5, length=9), lambda: Induction(length=2),
        lambda: Digits().resized(63), lambda: Reverse(length=3, shortest=4), lambda: Dates().resized(9),
        lambda: Needle(length=-5), lambda: Text(length=1), lambda: Masked(longest=8), lambda: Spans(longest=8),
        lambda: Pair(least=4).resized(6), lambda: Pair(queries=4).resized(4),
    ],
)  # fmt: skip
def test_impossible_rows_are_refused(make):
    with pytest.raises(InputError, match="expected"):
        make()


@pytest.mark.parametrize(
    ("name", "length"), [("pair", 10), ("pair", 100), ("key-value", 12), ("mqar", 12), ("text", 9), ("reverse", 13)]
)
def test_task_can_be_built_at_another_length(name, length):
    task = TASKS[name]().resized(length)
    assert task.length == length and type(task) is TASKS[name]


# --- from sequence to sequence --------------------------------------------------------------------------------
@pytest.mark.parametrize("task", [Reverse(), Reverse(symbols=3, length=5, shortest=2), Dates()], ids=repr)
def test_source_target_pairs_become_rows(task):
    batch = task.draw(torch.Generator().manual_seed(3), 50)
    pairs = list(task.pairs(torch.Generator().manual_seed(3), 50))
    assert batch["input_ids"].shape == (50, task.length) == batch["attention_mask"].shape
    assert batch["shift_labels"].shape == (50, task.written + 1) and int(batch["input_ids"].max()) < task.vocab_size
    for i, (source, target) in enumerate(pairs):
        assert task.text(batch["input_ids"][i]) == list(source)
        assert task.text(batch["shift_labels"][i]) == [*target, "end"]
        assert batch["attention_mask"][i].tolist() == [True] * len(source) + [False] * (task.length - len(source))
        assert (batch["shift_labels"][i] == IGNORED).sum() == task.written - len(target)


def test_reverse_reverses_at_every_length():
    task = Reverse(length=8, shortest=2)
    pairs = list(task.pairs(torch.Generator().manual_seed(0), 400))
    assert all(target == source[::-1] for source, target in pairs)
    assert {len(source) for source, _ in pairs} == set(range(2, 9))
    assert {c for source, _ in pairs for c in source} == set(task.alphabet)
    assert list(task.by_length(4)) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert task.by_length(4)[10]["attention_mask"].all() and task.by_length(4)[10]["input_ids"].shape == (4, 10)


FORMATS = ("%A, the %d of %B %Y", "%B %d, %Y", "%d %B %Y", "%a %d %b %Y", "%d %b %y", "%d.%m.%Y", "%m/%d/%y")


def test_dates_include_the_first_and_last_day(monkeypatch):
    monkeypatch.setattr(dates, "FIRST_DAY", dates.LAST_DAY - 1)
    written = {target for _, target in Dates().pairs(torch.Generator().manual_seed(0), 50)}
    assert written == {"2049-12-30", "2049-12-31"}


def test_dates_parse_to_their_labels():
    """Read back by Python's own parser, whose pivot year is 1969: only a century may differ."""
    formats = Counter()
    for source, target in Dates().pairs(torch.Generator().manual_seed(0), 2000):
        day = int(target[-2:])
        suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        plain = source.replace(f"{suffix} of", " of")
        for form in FORMATS:
            with contextlib.suppress(ValueError):
                read = datetime.strptime(plain, form)
                assert f"{read:%Y-%m-%d}"[2:] == target[2:] and ("%y" in form or str(read.year) == target[:4])
                assert "%a" not in form.lower() or f"{read:%A}".startswith(source[:3])
                formats[form] += 1
        assert 1950 <= int(target[:4]) < 2050 and len(source) <= Dates().length
    assert formats.keys() == set(FORMATS) and formats.total() == 2000


def test_causal_rows_hold_source_and_target():
    from headrace.comparison.defaults import REVERSE
    from headrace.comparison.model import model_inputs

    whole, causal = (Arm(REVERSE, name, to_json(zoo.get(name)), None, 0) for name in ("bahdanau", "gla"))
    rows = Reverse(symbols=3, length=3).sample(torch.Generator().manual_seed(0), 4)
    assert model_inputs(whole, rows) is rows
    row = model_inputs(causal, rows)
    ids, mask, labels = rows["input_ids"], rows["attention_mask"], rows["shift_labels"]
    assert torch.equal(row["input_ids"][:, :3], ids) and torch.equal(row["attention_mask"][:, :3], mask)
    assert torch.equal(row["attention_mask"][:, 3:], labels != IGNORED) and not row["input_ids"][:, 3].any()
    assert torch.equal(row["input_ids"][:, 4:], labels[:, :-1].clamp(min=0))
    assert torch.equal(row["shift_labels"][:, 3:], labels) and (row["shift_labels"][:, :3] == IGNORED).all()


# --- text ----------------------------------------------------------------------------------------------------
@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {i} of a book, näher.\n" for i in range(200)), encoding="utf-8")
    return path


def test_spans_render_as_characters_and_sentinels(book):
    task = Spans((str(book),), length=16)
    mark, (letter,) = FIRST + 257, task.corpus.tokenizer("A").input_ids
    assert task.text(torch.tensor([FIRST + letter, mark, mark + 1, END, START])) == ["A", "<0>", "<1>", "end"]


def test_span_tokens_are_in_the_vocabulary(book):
    task = Spans((str(book),), length=64)
    rows = task.held_out(64)
    most = max(int(rows[name].max()) for name in ("input_ids", "shift_labels"))
    assert most == task.vocab_size - 1 and task.spans == 3


@pytest.mark.parametrize("task", [Text, Masked, Spans, Needle])
def test_the_ids_of_a_tokenizer_may_have_gaps(task, book, tmp_path):
    """The end of a document is token 300 of 257."""
    form = json.loads(byte_level().backend_tokenizer.to_str())
    form["model"]["vocab"][END_OF_TEXT] = form["added_tokens"][0]["id"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    own = {"length": 800} if task is Needle else {"files": (str(book),), "length": 64}
    task = task(tokenizer=str(tmp_path / "tokenizer.json"), **own)
    rows = task.held_out(8)
    most = max(int(rows[name].max()) for name in ("input_ids", "shift_labels"))
    assert 300 < task.vocab_size > most


def test_text_scores_are_bits_and_perplexity(book):
    """A token is a byte, or the end of a document."""
    task = Text((str(book),))
    texts = documents(task, "held-out")
    scores = task.scores(nats(math.log(2)))
    bits = 1 + len(texts) / len("".join(texts).encode())
    assert scores == pytest.approx({"loss": math.log(2), "bits per byte": bits, "perplexity": 2})


def test_text_repeats_are_rare_repeated_bigrams(book):
    """a b twice, then x y twice, of which the training text has none; b a is common there."""
    task = Text((str(book),))
    train = task.corpus.parts["training"].tokens.tolist()
    common = {*itertools.pairwise(train)}
    a, b, c = [n for n in range(257) if n not in train][:3]
    e, space = task.corpus.tokenizer("e ").input_ids
    assert (e, space) in common
    ids = torch.tensor([[a, b, a, b, e, space, e, space, c, a, b]])
    rows = {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}
    expected = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 0, 1]]) > 0
    assert torch.equal(task.repeats(rows), expected)
    losses = torch.arange(10.0)[None]
    assert task.scores(Answers(rows, losses, losses > 0))["loss on repeats"] == (2 + 9) / 2


def test_text_by_length_has_equal_tokens_per_length(book):
    rows = Text((str(book),), length=4, longest=70).by_length(16)
    assert {n: tuple(batch["input_ids"].shape) for n, batch in rows.items()} == {4: (16, 4), 16: (4, 16), 64: (1, 64)}
    assert Text((str(book),), length=4).by_length(16) == {}
    assert Text((str(book),), length=8, longest=70).resized(4).longest == 70
    with pytest.raises(InputError, match="longest=3; expected 0 or at least length=4"):
        Text((str(book),), length=4, longest=3)


def test_default_text_is_the_standard_library():
    task = Text()
    assert len(task.corpus.parts["training"].tokens) > 1_000_000 and task.vocab_size == 257


def test_text_takes_a_tokenizer_file(book, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["?", "Line", "of", "a", "book", "näher", ",", ".", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    task = Text((str(book),), str(path), length=8)
    assert task.vocab_size == len(words)
    assert max(int(row["input_ids"].max()) for row in task.training(0, 4)) < len(words)
    ratio = task.corpus.bytes_per_token
    assert ratio == pytest.approx(4, abs=1)
    assert task.scores(nats(math.log(2)))["bits per byte"] == pytest.approx(1 / ratio)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist; expected text, jsonl or Parquet files, or a folder"),
        (b"", "the sources hold no documents: text.txt row 1 is empty"),
        (b" \n\t\n", "too few for length=16"),
        (b"abc \xff\xfe def", "cannot be read: 'utf-8' codec can't decode byte 0xff in position 4"),
        (b"a", "1 byte of text, of which 0.1 is to be held out; expected more text"),
        (b"too short for this", "too few for length=16; expected about 160"),
    ],
)
def test_bad_text_is_refused(tmp_path, content, sentence):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        assert Text((str(path),), length=16).corpus


def test_spans_restore_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog lets it. " * 40)
    drawn = TASKS["spans"]((str(tmp_path / "text.txt"),), length=len("Thank_you_for_coming_to_my_party_tonight"))
    assert (drawn.taken, drawn.spans) == (6, 2), "as in the docstring"
    task = TASKS["spans"]((str(tmp_path / "text.txt"),), length=64)
    rows, marks = default_collate([*task.training(0, 200)]), 2 + 257
    assert rows["input_ids"].shape == (200, 64 - task.taken + task.spans) and task.taken == 10 and task.spans == 3
    whole = task.corpus.parts["training"].tokens.tolist()
    windows = {tuple(whole[i : i + 64]) for i in range(len(whole) - 63)}
    for source, target in zip(rows["input_ids"].tolist(), rows["shift_labels"].tolist(), strict=True):
        assert target[-1] == 1 and target[0] == marks and put_together(source, target, marks) in windows


def test_row_accuracy_needs_all_answers():
    """Two positions of three have a label; of the rows both, one and none are right."""
    labels = torch.tensor([[IGNORED, 1, 2]]).repeat(3, 1)
    right = torch.tensor([[False, True, True], [True, True, False], [True, False, False]])
    answers = Answers({"shift_labels": labels}, torch.tensor([[9.0, 1.0, 2.0]]).repeat(3, 1), right)
    assert (answers.exact, answers.accuracy, answers.loss) == (pytest.approx(1 / 3), 0.5, 1.5)
