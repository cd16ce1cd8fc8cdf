"""No held-out row of any task is a training row: by the rule that parts the rows, and in many rows that are drawn."""

import itertools
import random
import string

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from headrace.comparison.defaults import CAPACITY, DEFAULTS
from headrace.tasks import IGNORED, TASKS, Copy, Dates, Digits, Induction, Needle, Pair, Reverse, Spans, Text
from headrace.tasks.base import BLOCK, PARTS, SplitByContent, generator, row_hashes
from headrace.utils.errors import InputError
from spans import put_together

# Tasks whose rows are cut from data of fixed parts; the rows of all others are drawn and parted by their content.
OF_DATA = {
    "text": lambda book: Text((book,), length=9), "masked": lambda book: TASKS["masked"]((book,), length=12),
    "spans": lambda book: Spans((book,), length=12), "digits": lambda book: Digits(),
}  # fmt: skip
OTHERS = (
    *(Reverse(length=4), CAPACITY.task, Copy(symbols=4, length=6), Induction(symbols=9, length=5)),
    *(Pair(keys=3, pairs=2, least=1), Pair(clusters=4, least=20), Pair(overwritten=True), Pair(distractors=1)),
)  # fmt: skip
DRAWN = (*(plan.task for name, plan in DEFAULTS.items() if name not in (*OF_DATA, "needle")), *OTHERS)


def parts(task, rows):
    """The rows of each part; of training the first of four seeds, and of those held out those of all lengths."""
    training = [task.sample(generator("training", seed, 0), rows) for seed in range(4)]
    longer = [batch for length, batch in task.by_length(64).items() if length != task.length]
    tuning = [task.held_out(rows, "tuning")]
    return {"training": training, "tuning": tuning, "held-out": [task.held_out(rows), *longer]}


def contents(batch):
    """What a model is asked in each row, without padding: the same tuple for the same row at any length."""
    mask = batch.get("attention_mask", torch.ones(batch["input_ids"].shape[:2], dtype=torch.bool))
    ids = batch["input_ids"].where(mask if batch["input_ids"].dim() == 2 else mask[..., None], -1)
    return [tuple(i for i in row if i >= 0) for row in ids.flatten(1).tolist()]


@pytest.mark.parametrize("task", DRAWN, ids=repr)
def test_held_out_and_tuning_rows_are_not_training_rows(task):
    """By the rule: the content of a row decides its part, so that it is never drawn for another. And in the rows
    themselves."""
    assert isinstance(task, SplitByContent), "else its parts have to be parts of its data"
    drawn = parts(task, BLOCK // 4)
    for part, batches in drawn.items():
        hashes = np.concatenate([row_hashes(task.content(rows)) for rows in batches])
        assert len(hashes) and (PARTS[hashes % np.uint64(len(PARTS))] == part).all()
    training, tuning, held_out = ({row for batch in own for row in contents(batch)} for own in drawn.values())
    first = drawn["held-out"][0]["input_ids"]
    assert held_out and tuning and len(training) > len(first) / 4
    assert len(set(contents(drawn["held-out"][0]))) == len(first), "no row twice"
    assert not training & (held_out | tuning) and not tuning & held_out


@pytest.mark.parametrize("task", [Needle(length=700), Needle(3, length=700)], ids=repr)
def test_the_value_of_a_needle_decides_its_part(task):
    own = {part: task.held_out(30, part) for part in ("tuning", "held-out")}
    for part, rows in (own | {"training": task.sample(generator("training", 0, 0), 30)}).items():
        answers = [row[row != IGNORED][:-1] for row in rows["shift_labels"]]  # without the end token
        values = torch.tensor([list(answer.strip().encode()) for answer in task.tokens.batch_decode(answers)])
        assert len(values) == 30 and (PARTS[row_hashes(values) % np.uint64(len(PARTS))] == part).all()


@pytest.mark.parametrize("name", OF_DATA)
def test_text_and_digits_do_not_share_material_between_splits(name, tmp_path):
    """Of text, letters that never repeat."""
    (tmp_path / "letters.txt").write_text("".join(random.Random(0).choices(string.ascii_letters, k=4000)))
    task, seen = OF_DATA[name](str(tmp_path / "letters.txt")), {}
    for part in ("training", "tuning", "held-out"):
        batch = default_collate([*task.training(0, 64)]) if part == "training" else task.held_out(32, part)
        seen[part] = {tuple(row) for row in batch["input_ids"].tolist()}
        assert len(seen[part]) > 9
    assert not any(a & b for a, b in itertools.combinations(seen.values(), 2))


def text_of(task, batch):
    """The window of text of each row: of spans put together again, of pairs those whose second segment follows."""
    if task.name == "spans":
        rows = zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True)
        return [put_together(source, target, task.marks) for source, target in rows]
    if task.name == "masked":
        shown = torch.where(batch["shift_labels"] < 0, batch["input_ids"], batch["shift_labels"])
        return [tuple(i for i in row if i < 257) for row in shown[batch["next_sentence_label"] == 0].tolist()]
    return [tuple(row) for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("name", ["text", "masked", "spans"])
def test_no_held_out_window_occurs_elsewhere_in_a_text_that_repeats_itself(name, tmp_path):
    """Half of the lines of the text occur in all of its parts; windows are compared token by token."""
    lines = ["".join(random.Random(i).choices(string.ascii_letters, k=40)) for i in range(800)]
    text = "".join(line if i % 2 else lines[i % 20] for i, line in enumerate(lines))
    (tmp_path / "lines.txt").write_text(text)
    task = OF_DATA[name](str(tmp_path / "lines.txt"))
    n = task.length - 3 if name == "masked" else task.length
    own = {part: of.tokens.tolist() for part, of in task.corpus.parts.items()}
    windows = {part: [tuple(of[s : s + n]) for s in range(len(of) - n + 1)] for part, of in own.items()}
    for part in ("held-out", "tuning"):
        others = {window for other, theirs in windows.items() if other != part for window in theirs}
        shown = text_of(task, task.held_out(64, part))
        fresh = [window for window in windows[part][::n] if window not in others]
        assert len(shown) > 20 and set(shown) <= set(fresh)
        assert [tuple(row["input_ids"]) for row in task.corpus.fresh(part, n)] == fresh
        assert len(fresh) < 0.8 * len(windows[part][::n])


def test_a_text_whose_held_out_part_occurs_in_its_training_part_is_refused(tmp_path):
    (tmp_path / "same.txt").write_text("abcdefghij" * 100)
    with pytest.raises(InputError, match=r"every row of 9 of the \d+ tokens for held-out occurs in another part"):
        Text((str(tmp_path / "same.txt"),), length=9).held_out(4)


def test_held_out_dates_are_not_trained_in_another_format():
    task = Dates()
    targets = lambda batch: set(map(tuple, batch["shift_labels"].tolist()))  # noqa: E731
    training = [targets(task.sample(generator("training", seed, 0), 512)) for seed in range(2)]
    held_out, tuning = targets(task.held_out(512)), targets(task.held_out(512, "tuning"))
    assert len(held_out) > 400 and not (held_out & tuning or set.union(*training) & (held_out | tuning))


def test_split_shares_are_a_tenth_a_tenth_and_the_rest():
    """Of 20,000 different rows; six standard errors of a share are 0.017 at most."""
    parts = PARTS[row_hashes(torch.arange(20_000)[:, None]) % np.uint64(10)]
    shares = [(parts == part).mean() for part in ("held-out", "tuning", "training")]
    assert shares == pytest.approx([0.1, 0.1, 0.8], abs=0.017)


def test_split_of_a_row_ignores_padding_and_respects_order():
    row, padded = torch.tensor([[3, 1, 4]]), torch.tensor([[-1, 3, 1, -100, 4, -1]])
    hashes = row_hashes(torch.tensor(list(itertools.permutations(range(5)))))
    assert row_hashes(row) == row_hashes(padded) and len(set(hashes.tolist())) == 120
