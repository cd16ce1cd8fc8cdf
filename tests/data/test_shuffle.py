"""The order of rows: each row once, in an order of its own for each epoch and seed."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("datasets", reason="the extra [train] is not installed")

from datasets import Dataset

from headrace.data import Shuffled
from headrace.training.loop import Batches, Updates
from headrace.training.processes import Processes
from headrace.training.run import order
from trained import recipe, train


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 13, 64, 65, 1000, 4097, 20_000])
def test_every_row_occurs_once(rows):
    order = Shuffled(rows, rows, seed=1)
    for epoch in range(3):
        order.set_epoch(epoch)
        assert sorted(order) == list(range(rows))


def test_order_depends_on_epoch_and_seed_alone():
    orders = {}
    for seed in range(3):
        for epoch in range(3):
            made = Shuffled(1000, 1000, seed)
            made.set_epoch(epoch)
            orders[seed, epoch] = list(made)
            assert list(made) == orders[seed, epoch]
    assert len(set(map(tuple, orders.values()))) == 9
    assert list(Shuffled(1000, 90, 0)) == orders[0, 0][:90] and len(Shuffled(1000, 90, 0)) == 90


@pytest.mark.parametrize("rows", [7, 100, 5000])
def test_order_is_statistically_random(rows):
    """In 200 orders: how often a place has each row (chi squared), and how row and place, and a row and the next,
    correlate. With fixed seeds the test is no draw; a true permutation fails it in one of 10^6 times."""
    orders = np.array([list(Shuffled(rows, rows, seed)) for seed in range(200)])
    for place in (0, rows // 2, rows - 1):
        bins = np.histogram(orders[:, place], bins=min(rows, 7), range=(0, rows))[0]
        widths = np.histogram(np.arange(rows), bins=min(rows, 7), range=(0, rows))[0]
        assert stats.chisquare(bins, 200 * widths / rows).pvalue > 1e-7
    for a, b in ((orders, np.broadcast_to(np.arange(rows), orders.shape)), (orders[:, 1:], orders[:, :-1])):
        deviation = np.corrcoef(a.ravel(), b.ravel())[0, 1] + (0 if b is not orders[:, :-1] else 1 / (rows - 1))
        assert abs(deviation) < 5.3 / np.sqrt(a.size) + 2 / rows


def test_order_of_very_many_rows_needs_no_memory():
    """15e9 tokens of 512 are 29 million rows; here are 2^40."""
    first = [row for row, _ in zip(Shuffled(2**40, 2**40, 0), range(10_000), strict=False)]
    assert len(set(first)) == 10_000 and stats.kstest(np.array(first) / 2**40, "uniform").pvalue > 1e-6


ROWS, STEP, STEPS, SEED = 27, 8, 9, 3  # 3 steps in an epoch; 3 rows are left to another


def rows_by_step(kind, processes, micro, first):
    """The rows of each step from step `first` on, at which all processes begin."""
    data = Dataset.from_dict({"row": range(ROWS)}) if kind == "task" else [{"row": row} for row in range(ROWS)]
    settings = recipe(length=32, batch_tokens=32 * STEP, micro_batch=micro, seed=SEED)[0]
    collate = lambda rows: {"row": torch.tensor([row["row"] for row in rows])}  # noqa: E731
    result = {step: [] for step in range(first, STEPS)}
    for process in range(processes):
        batches = Batches(
            data, partial(order, data, SEED), collate, settings, Processes(torch.device("cpu"), process, processes)
        )
        for step, own in zip(result, batches.after(first), strict=False):
            assert [len(batch["row"]) for batch in own] == [micro] * (STEP // (processes * micro))
            result[step] += torch.cat([batch["row"] for batch in own]).tolist()
    return {step: sorted(rows) for step, rows in result.items()}


@pytest.mark.parametrize("kind", ["text", "task"])
def test_resumed_processes_take_the_rows_of_an_uninterrupted_run(kind):
    """Of 1, 2 and 4 processes, from every step of three epochs on."""
    whole = rows_by_step(kind, 1, STEP, 0)
    epochs = [whole[first] + whole[first + 1] + whole[first + 2] for first in (0, 3, 6)]
    assert all(len(set(rows)) == 3 * STEP for rows in epochs) and len({tuple(rows) for rows in epochs}) == 3
    for processes in (1, 2, 4):
        for first in range(STEPS):
            later = {step: rows for step, rows in whole.items() if step >= first}
            assert rows_by_step(kind, processes, 2, first) == later, (processes, first)


def test_training_uses_this_order(data, tmp_path, monkeypatch):
    """11 rows are two steps of 4 in each epoch. How a run resumes within an epoch: test_sharding.py."""
    backward, steps = Updates.backward, []

    def note(self, batches):
        steps.append([row for batch in batches for row in batch["input_ids"].tolist()])
        return backward(self, batches)

    monkeypatch.setattr(Updates, "backward", note)
    train(replace(data, train=data.train.select(range(11))), tmp_path / "run", tokens=128 * 9)
    shuffled = Shuffled(11, 8, seed=0)
    for epoch in range(4):
        shuffled.set_epoch(epoch)
        rows = [row for step in steps[2 * epoch : 2 * epoch + 2] for row in step]
        assert rows == [data.train[i]["input_ids"] for i in shuffled]
