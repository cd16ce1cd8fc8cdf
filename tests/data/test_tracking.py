"""State tracking: every answer is that of a literal automaton, and no held-out row begins like a training row."""

import itertools
from functools import reduce

import pytest
import torch

from headrace.tasks import IGNORED, S3, S5, Dyck, FlipFlop, ModularCounting, Parity
from headrace.tasks.base import BLOCK, generator
from headrace.tasks.check import description
from headrace.tasks.tracking import PREFIX
from headrace.utils.errors import InputError

TRACKING = (
    *(Parity(), ModularCounting(), ModularCounting(modulus=7, length=20), S3(), S3(moved=2, length=17), S5()),
    *(S5(moved=2), S5(moved=3), FlipFlop(), FlipFlop(length=40, ignored=0.1), Dyck(), Dyck(kinds=3, length=30)),
)  # fmt: skip


def permutation_answers(task, row):
    """Every point goes through all the permutations so far, one after another."""
    group = list(itertools.permutations(range(task.points)))
    moving = [g for g in group if len([i for i, j in enumerate(g) if i != j]) <= task.moved]
    return [
        group.index(tuple(reduce(lambda point, token: moving[token][point], row[: t + 1], i) for i in group[0]))
        for t in range(len(row))
    ]


def flip_flop_answers(task, row):
    answers, bit = [], None
    for instruction, operand in zip(row[::2], row[1::2], strict=True):
        bit = operand if instruction == 2 else bit
        answers += [bit if instruction == 4 else IGNORED, IGNORED]
        assert instruction in (2, 3, 4) and operand == bit * (instruction == 4) + operand * (instruction != 4)
    assert (row[0], row[-2]) == (2, 4)
    return answers


def dyck_answers(task, row):
    answers, stack = [], []
    for token in row:
        if token < task.kinds:
            stack.append(token)
            answers.append(IGNORED)
        else:
            assert stack.pop() == token - task.kinds, "what closes is what is open"
            answers.append(task.kinds + (stack[-1] if stack else task.kinds))
    return answers


ANSWERS = {
    "parity": lambda task, row: [row[: t + 1].count(1) % 2 for t in range(len(row))],
    "modular-counting": lambda task, row: [total % task.modulus for total in itertools.accumulate(row)],
    "s3": permutation_answers, "s5": permutation_answers, "flip-flop": flip_flop_answers, "dyck": dyck_answers,
}  # fmt: skip


@pytest.mark.parametrize("task", TRACKING, ids=repr)
def test_answers_are_those_of_a_literal_automaton(task):
    for rows in (task.sample(torch.Generator().manual_seed(0), 50), task.by_length(8)[4 * task.length]):
        for row, labels in zip(rows["input_ids"].tolist(), rows["shift_labels"].tolist(), strict=True):
            assert labels == ANSWERS[task.name](task, row) and set(labels) != {IGNORED}


SYMBOLS = {"parity": "01", "modular-counting": "01234", "flip-flop": "01wir", "dyck": "([)]."}


@pytest.mark.parametrize("task", [Parity(), ModularCounting(), S3(), S5(), FlipFlop(), Dyck()], ids=lambda t: t.name)
def test_example_rows_of_the_docstrings(task):
    if (symbols := SYMBOLS.get(task.name)) is None:
        symbols = ["".join(map(str, g)) for g in itertools.permutations(range(task.points))]
    row, answers = (line[len("answer     ") :] for line in description(task)[1].splitlines())
    step = len(symbols[0]) + 2
    places = range(0, len(row.partition("     ")[0]), step)  # what is behind explains
    row, answers = ([part[t : t + step].strip() for t in places] for part in (row, answers))
    expected = [symbols.index(word) if word else IGNORED for word in answers]
    assert ANSWERS[task.name](task, list(map(symbols.index, row))) == expected


@pytest.mark.parametrize("task", TRACKING, ids=repr)
def test_every_token_and_state_occurs_and_chance_is_that_of_the_states(task):
    rows = task.sample(torch.Generator().manual_seed(0), 2000)
    answers = set(rows["shift_labels"].unique().tolist()) - {IGNORED}
    assert len(answers) == round(1 / task.chance) and len(rows["input_ids"].unique()) >= 2
    assert set(rows["input_ids"].unique().tolist()) | answers == set(range(task.vocab_size))


@pytest.mark.parametrize("task", TRACKING, ids=repr)
def test_no_longer_row_begins_like_a_training_row(task):
    beginnings = lambda rows: set(map(tuple, rows["input_ids"][:, :PREFIX].tolist()))  # noqa: E731
    training = set.union(*(beginnings(task.sample(generator("training", seed, 0), BLOCK)) for seed in range(4)))
    for rows in task.by_length(256).values():
        assert len(beginnings(rows)) == 256 and not training & beginnings(rows)


def test_a_stack_of_brackets_grows_with_the_length_of_a_row():
    depths = [
        torch.where(rows["input_ids"] < 2, 1, -1).cumsum(1).max(1).values.float().mean()
        for rows in Dyck(length=64).by_length(64).values()
    ]
    assert depths == sorted(depths) and depths[-1] > 2 * depths[0]


def test_flip_flop_draws_as_many_writes_as_reads():
    """Of 2,000 · 30 instructions between the first and the last; six standard errors are 0.01."""
    rows = FlipFlop(ignored=0.6).sample(torch.Generator().manual_seed(0), 2000)["input_ids"][:, 2:-2:2]
    shares = [(rows == instruction).float().mean() for instruction in (2, 3, 4)]
    assert torch.stack(shares).tolist() == pytest.approx([0.2, 0.6, 0.2], abs=0.012)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Parity(length=0), lambda: ModularCounting(modulus=1), lambda: S3(moved=4), lambda: S5(moved=1),
        lambda: FlipFlop(length=9), lambda: FlipFlop(ignored=1.1), lambda: Dyck(kinds=0), lambda: Dyck(length=1),
    ],
)  # fmt: skip
def test_impossible_rows_are_refused(make):
    with pytest.raises(InputError, match="expected"):
        make()
