"""A training run of a second, for tests."""

import json
import os
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.training import card, recipes, run
from headrace.training.loop import Batches

# Small first weights and steps: with the default ones two orders of a sum differ by 1e-2 after 20 such steps,
# so that no tolerance of a comparison could be derived.
TINY = {
    "initializer_range": 0.02, "lr": 3e-3,
    "hidden_size": 16, "layers": 2, "heads": 2, "vocab_size": 257, "length": 32, "batch_tokens": 128,
    "tokens": 128 * 24, "warmup": 1 / 24, "micro_batch": 2, "save_every": 5, "evaluate_every": 10,
    "evaluate_rows": 8,
}  # fmt: skip


def recipe(**changes):
    return recipes.load("laptop-1m", TINY | changes)


@patch.object(card, "draw_curves")  # a third of a second, in which nothing is trained
def train(data, folder, drawing, **changes):
    return run.train(*recipe(**changes), data, folder, trackers="none")


def history(folder):
    """What a run has logged."""
    return json.loads((folder / "model" / "history.json").read_text("utf-8"))


def signalled(at, number):
    """A patch by which this process sends itself a signal before a step."""
    after = Batches.after

    def with_signal(self, step):
        for i, batches in enumerate(after(self, step), step):
            if i == at:
                os.kill(os.getpid(), number)
            yield batches

    return patch.object(Batches, "after", with_signal)


def plain_loss(model, rows):
    """Nats per token, row by row."""
    total = count = 0
    with torch.no_grad():
        for row in (row["input_ids"] for row in rows):
            logits = model(torch.tensor([row])).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
            count += len(row) - 1
    return total / count


def arguments(data, folder, **changes):
    """Of the command that trains the same."""
    settings = [f"{name}={value}" for name, value in (TINY | changes).items()]
    return ["train", "laptop-1m", *settings, "--data", str(data), "--output", str(folder), "--trackers", "none"]


def peak_of(step, models, optimizer):
    """The largest number of bytes that PyTorch holds in a step, those of the weights and moments included."""
    held = sum(p.nbytes for model in models for p in model.parameters())
    held += sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    now = peak = held
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
