"""The order of rows: each row once, in an order of its own for each epoch and seed."""

import json
from functools import partial

import pytest
import torch

from headrace.files.checks import read_json
from headrace.training.loop import Batches
from headrace.training.processes import Processes
from headrace.training.run import begin, order
from headrace.utils.errors import InputError
from trained import recipe


def test_order_depends_on_epoch_and_seed_alone():
    orders = {(seed, epoch): tuple(order(range(1000), seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9 and all(sorted(own) == [*range(1000)] for own in orders.values())
    assert all(tuple(order(range(1000), *key)) == own for key, own in orders.items())


ROWS, STEP, STEPS, SEED = 27, 8, 9, 3  # 3 steps in an epoch; 3 rows are left to another


def rows_by_step(processes, micro, first):
    """The rows of each step from step `first` on, at which all processes begin."""
    data = [{"row": row} for row in range(ROWS)]
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


def test_resumed_processes_take_the_rows_of_an_uninterrupted_run():
    """Of 1, 2 and 4 processes, from every step of three epochs on."""
    whole = rows_by_step(1, STEP, 0)
    epochs = [whole[first] + whole[first + 1] + whole[first + 2] for first in (0, 3, 6)]
    assert all(len(set(rows)) == 3 * STEP for rows in epochs) and len({tuple(rows) for rows in epochs}) == 3
    for processes in (1, 2, 4):
        for first in range(STEPS):
            later = {step: rows for step, rows in whole.items() if step >= first}
            assert rows_by_step(processes, 2, first) == later, (processes, first)


def test_a_run_does_not_go_on_in_another_order(data, tmp_path):
    """That of earlier versions, whose record says nothing of it."""
    begin(tmp_path / "run", recipe()[0], data)
    record = tmp_path / "run" / "run.json"
    record.write_text(json.dumps({name: value for name, value in read_json(record).items() if name != "order"}))
    with pytest.raises(InputError, match="order is missing there"):
        begin(tmp_path / "run", recipe()[0], data)
