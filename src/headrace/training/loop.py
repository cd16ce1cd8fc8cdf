"""The training loop. `Batches` are the rows of each step; `Updates` computes a step, with accumulation, precision,
clipping and schedule; `Loop` is a run of `headrace train`, which also logs, evaluates, saves and resumes. An arm of
`compare` is a loop of its own over `Updates`.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.rows import by_step
from ..files.checks import read_json
from ..files.devices import note_speed
from ..ops.loss import IGNORED
from ..utils.integrity import write_json
from . import checkpoints
from .distillation import divergence
from .gate_statistics import GateWatch
from .history import History, Measures
from .optimization import Optimization
from .parameters import optimizer, schedule
from .processes import Processes, errors_in_all, timed_steps
from .recipes import Recipe
from .sharding import is_sharded, load_weights, whole, whole_weights
from .watch import Stop, first_not_finite, gate_warnings, logged_statistics

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch, Tensor], Tensor]
LOG_EVERY = 10  # steps between logs if save_every is a multiple, else their greatest common divisor
WITHOUT_LABELS = "batches_without_labels"  # logged name
PATIENCE = 5  # consecutive gradients that are not finite after which a run stops


# --- the batches of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batches:
    """The batches of each step, which follow from the number of the step: a run resumes where it was."""

    rows: Any  # a data set
    order: Callable[[int], Iterable[int]]  # the numbers of the rows in an epoch
    collate: Callable[[list[Any]], Batch]
    recipe: Recipe
    processes: Processes

    def epoch(self, step: int) -> float:
        """The number of epochs that have passed after a step."""
        steps = len(self.rows) // self.recipe.rows  # of an epoch
        before, within = divmod(step - 1, steps)
        return before + (within + 1) / steps

    def after(self, step: int) -> Iterator[list[Batch]]:
        """The batches of this process in each step that follows step number `step`, without an end."""
        return map(self.share, by_step(self.order, len(self.rows), self.recipe.rows, step))

    def share(self, numbers: list[int]) -> list[Batch]:
        """This process's batches of the rows of a step: every n-th, where n processes have rows of their own."""
        size, _ = self.recipe.share(self.processes.count)
        batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        own = batches[self.processes.reader :: self.processes.readers]
        return [self.batch([self.rows[i] for i in batch]) for batch in own]

    def once(self, rows: Any) -> Iterator[Batch]:
        """The batches of this process of an evaluation: each row is in one batch of one process, or of those that share
        it. A batch without rows has no label."""
        for numbers in shares(len(rows), self.recipe.micro_batch, self.processes.reader, self.processes.readers):
            batch = self.batch([rows[i] for i in numbers or [0]])
            if not numbers:
                for name in {"labels", "shift_labels"} & batch.keys():
                    batch[name] = torch.full_like(batch[name], IGNORED)
            yield batch

    def batch(self, rows: list[Any]) -> Batch:
        return self.processes.part(self.processes.put(self.collate(rows)), self.recipe.length)


def shares(rows: int, size: int, process: int, processes: int) -> list[range]:
    """The rows in each batch of a process. All processes have equally many batches, as the processes of a sharded model
    synchronize in each forward pass; the last batch of a process may be empty."""
    chosen, most = range(process, rows, processes), -(-rows // processes)
    return [chosen[i : i + size] for i in range(0, most, size)]


# --- a step ----------------------------------------------------------------------------------------------------------


class Updates:
    """The steps of a model's training. Each is `backward`, `clip`, and `step`.

    Args:
        model: on the device of the processes, which share its gradients by DistributedDataParallel or `fully_shard`.
        recipe: the settings of AdamW and its learning rate.
        loss: a function of the model, a batch and the number of labels in all batches of the step. The gradients of the
            batches are summed, and averaged over the processes.
        precision: "bfloat16": autocast; weights and moments are float32.
    """

    def __init__(self, model: Any, recipe: Optimization, loss: Loss, processes: Processes, precision: str = "float32"):
        self.model, self.loss, self.processes, self.longest = model, loss, processes, recipe.clips or math.inf
        note_speed(processes.device.type, precision)
        self.autocast = partial(torch.autocast, processes.device.type, torch.bfloat16, enabled=precision == "bfloat16")
        self.optimizer = optimizer(model, recipe)
        self.schedule = schedule(self.optimizer, recipe)
        self.unlabelled = torch.zeros((), dtype=torch.long, device=processes.device)  # batches without a label

    def backward(self, batches: list[Batch]) -> list[Tensor]:
        """The losses of the batches of this process, whose gradients the parameters then have. Processes exchange
        gradients once, with the last batch."""
        self.model.train()
        counts = self.processes.sum_in_row(torch.stack([answers(batch).sum() for batch in batches]))
        self.unlabelled += (counts == 0).sum()
        count = self.processes.sum(counts.sum()) / self.processes.per_row
        losses = []
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            alone = self.model.no_sync() if left and hasattr(self.model, "no_sync") else nullcontext()
            with alone, self.processes.sharing_rows():
                with self.autocast():
                    loss = self.loss(self.model, batch, count)
                loss.backward()
            losses.append(loss.detach())
        return losses

    def clip(self) -> Tensor:
        """The norm of the gradient, which is not longer than the recipe's bound afterwards."""
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.longest))

    def drop(self) -> None:
        """Forgets the gradient, so that `step` changes no weight and no moment."""
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Changes the weights, and returns the learning rate by which it did."""
        rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return rate


def answers(batch: Batch) -> Tensor:
    """Mask of the positions of a batch that have a label."""
    return (batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]) != IGNORED


# --- a run -----------------------------------------------------------------------------------------------------------


class Loop:
    """A run of `headrace train`.

    Args:
        model: as it is saved.
        shared: the model, wrapped so that processes share its gradients.
        held_out: the rows of an evaluation.
        folder: where its checkpoints are.
        teacher: the recipe's teacher, on the device; None: the recipe has none.
    """

    def __init__(
        self, model: Any, shared: nn.Module, batches: Batches, held_out: Any, measures: Measures, folder: Path,
        teacher: nn.Module | None = None,
    ):  # fmt: skip
        self.model, self.batches, self.held_out, self.measures = model, batches, held_out, measures
        self.teacher = teacher
        self.folder, self.recipe, self.processes = folder, batches.recipe, batches.processes
        self.history = History(shown=self.processes.rank == 0)
        self.updates = Updates(shared, self.recipe, self.loss, self.processes, self.recipe.precision)
        self.step = 0
        self.skipped = self.in_a_row = 0  # gradients that were not finite, of all and up to now
        self.unlabelled = 0  # batches without a label, before the run was resumed
        self.logged_step = 0
        self.loss_sum = torch.zeros((), device=self.processes.device)  # since then
        self.broken = False  # whether a loss since then was not finite
        self.collapsed: set[tuple[int | str, str]] = set()  # gates of which a warning was printed

    def run(self, stop: Stop) -> None:
        """Trains to the last step, or until `stop` says so. InputError if too many gradients were not finite."""
        started, first, steps = time.perf_counter(), self.step, self.recipe.steps
        log_every = math.gcd(self.recipe.save_every, LOG_EVERY)
        evaluates = {*range(self.recipe.evaluate_every, steps, self.recipe.evaluate_every), steps}
        with self.history.bar(steps, first), timed_steps(self.processes.device, self.recipe.threads) as took:
            evaluated = {p["step"] for p in self.history.points if "eval_loss" in p}
            if first in evaluates - evaluated:  # it was stopped before
                self.evaluate(self.held_out)
            for batches in islice(self.batches.after(first), steps - first):
                begun = time.perf_counter()
                self.count_losses(self.updates.backward(batches), batches)
                norm = self.updates.clip()
                self.check_gradient(norm)
                rate = self.updates.step()
                self.step += 1
                took(time.perf_counter() - begun)
                self.history.tick(steps - self.step)
                stopped = stop.heard_by_any(self.processes)
                # without a log, what was measured since the last would be lost
                if self.step % log_every == 0 or self.step == steps or stopped:
                    self.log_training(norm, rate)
                if self.step in evaluates and not stopped:  # an evaluation may take longer than the time until SIGKILL
                    self.evaluate(self.held_out)
                if self.step % self.recipe.save_every == 0 or self.step == steps or stopped:
                    self.save()
                if stopped:
                    break
        if self.step > first:
            self.log({"train_runtime": round(time.perf_counter() - started, 4)} | self.batches_without_labels())
        if number := self.history.last(WITHOUT_LABELS):
            self.warn(f"batches without any label: {number:,}; their loss and gradients were 0")

    def loss(self, model: nn.Module, batch: Batch, count: Tensor | None = None) -> Tensor:
        """The sum of the losses over `count`, or over the number of the batch's labels."""
        out = model(**batch, num_items_in_batch=count, skip_logits=self.teacher is None, use_cache=False)
        loss, mask = out.loss, answers(batch)
        if self.teacher is not None:
            items = (mask.sum() if count is None else count).clamp(min=1)
            loss = loss + self.recipe.kl * divergence(self.teacher, out.logits, batch, mask) / items
        return loss * self.processes.count  # as gradients are averaged over the processes

    # --- numbers that are not finite ---------------------------------------------------------------------------------

    def count_losses(self, losses: list[Tensor], batches: list[Batch]) -> None:
        """Adds up the losses that are finite, and prints where in the model others come from."""
        for loss in losses:
            self.loss_sum += loss.where(loss.isfinite(), 0.0)
        broken = ~torch.stack(losses).isfinite()
        if self.processes.sum(broken.sum()):  # a sharded model computes in all processes or in none
            self.broken = True
            at = int(self.processes.sum_in_row(broken.int()).argmax())  # one batch in all processes of a row
            with self.processes.sharing_rows(), self.updates.autocast():
                where = first_not_finite(self.model, lambda: self.loss(self.model, batches[at]))
            if broken[at]:
                print(f"step {self.step + 1}: the loss is {losses[at].item()}, first in {where}", file=sys.stderr)

    def check_gradient(self, norm: Tensor) -> None:
        """Drops a gradient that is not finite. InputError after PATIENCE of them."""
        if norm.isfinite():
            self.in_a_row = 0
            return
        self.updates.drop()
        self.in_a_row, self.skipped, step = self.in_a_row + 1, self.skipped + 1, self.step + 1
        if self.in_a_row == 1:
            self.warn(f"step {step}: the gradient is not finite; the update is skipped")
        if self.in_a_row == PATIENCE:
            self.warn(f"step {step}: {PATIENCE} consecutive gradients were not finite; the run stops")
            raise checkpoints.stopped_run(f"training diverged and was stopped at step {step}", self.folder)

    # --- what is logged ----------------------------------------------------------------------------------------------

    def log_training(self, norm: Tensor, rate: float) -> None:
        loss = self.processes.sum(self.loss_sum.clone()).item() / self.processes.count / (self.step - self.logged_step)
        self.loss_sum.zero_()
        self.log(
            {"loss": math.nan if self.broken else loss, "grad_norm": norm.item(), "learning_rate": rate}
            | self.measures.speed(self.step)
            | ({"skipped_updates": self.skipped} if self.skipped else {})
            | self.batches_without_labels()
        )
        self.broken, self.logged_step = False, self.step

    def log(self, numbers: dict[str, Any]) -> None:
        with errors_in_all():  # process 0 alone writes
            self.history.add(self.step, numbers | {"epoch": self.batches.epoch(self.step)})

    def batches_without_labels(self) -> dict[str, int]:
        """The number of batches of the run in which no token had a label, if there were any."""
        number = self.unlabelled + int(self.processes.sum(self.updates.unlabelled.clone())) // self.processes.per_row
        return {WITHOUT_LABELS: number} if number else {}

    def warn(self, sentence: str) -> None:
        if self.processes.rank == 0:
            print(sentence, file=sys.stderr)

    # --- held-out text -----------------------------------------------------------------------------------------------

    def evaluate(self, rows: Any, kind: str = "eval") -> float:
        """Loss in nats per token over all tokens of the rows; logs it, and statistics of the gates."""
        started = time.perf_counter()
        total, gates = self.held_out_loss(rows)
        mean = total[0] / total[1]
        numbers = {
            "loss": mean.item(),
            "perplexity": mean.exp().item(),
            "bits_per_byte": mean.item() / math.log(2) / self.measures.bytes_per_token,
        }
        for gate in gates:
            numbers |= logged_statistics(gate)
        self.log({f"{kind}_{name}": number for name, number in numbers.items()})
        if self.step > self.recipe.warmup_steps:  # all gates are uniform when training begins
            for sentence in gate_warnings(gates, self.collapsed, self.step, ended=kind == "final"):
                self.warn(sentence)
        self.measures.paused += time.perf_counter() - started
        return mean.item()

    @torch.no_grad()
    def held_out_loss(self, rows: Any) -> tuple[Tensor, list[dict[str, Any]]]:
        """([sum of losses, number of tokens] over all processes, gate statistics of this process)"""
        losses, counts = [], []
        self.model.eval()
        is_text = "shift_labels" not in rows[0]
        with GateWatch().on(self.model) as watch, self.processes.sharing_rows():
            for batch in self.batches.once(rows):
                watch.labelled = batch["labels"] != IGNORED
                watch.mask = watch.labelled if is_text and "cu_seqlens" not in batch else None  # padding has no label
                counts.append(answers(batch).sum())
                with self.updates.autocast():  # a cache would split long rows
                    losses.append(self.model(**batch, skip_logits=True, use_cache=False).loss)
        loss, count = (torch.stack(x).cpu().double() for x in (losses, counts))  # Apple's GPUs have no float64
        return self.processes.sum(torch.stack([(loss * count).sum(), count.sum()])), watch.summary()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, which is marked as complete when every process has written its part."""
        written = self.folder / checkpoints.UNFINISHED / checkpoints.name(self.step)
        self.save_model(written)
        checkpoints.save_optimizer(written, self.model, self.updates.optimizer, self.updates.schedule)
        with errors_in_all():
            checkpoints.save_random_state(written, self.processes)
        with errors_in_all():
            if self.processes.rank == 0:
                write_json(written / checkpoints.HISTORY, self.history.points)
                checkpoints.complete(self.folder, written.name)

    def save_model(self, folder: Path) -> None:
        """Writes the model as `save_pretrained` does, in process 0."""
        weights = whole_weights(self.model) if is_sharded(self.model) else None
        with errors_in_all():
            if self.processes.rank == 0:
                self.model.save_pretrained(folder, state_dict=weights)

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a complete checkpoint, of any number of processes."""
        self.history.points = read_json(checkpoint / checkpoints.HISTORY)
        load_weights(self.model, checkpoint)
        checkpoints.load_optimizer(checkpoint, self.model, self.updates.optimizer, self.updates.schedule)
        checkpoints.load_random_state(checkpoint, self.processes)
        self.step = self.logged_step = checkpoints.step(checkpoint)
        self.skipped, self.unlabelled = map(self.history.last, ("skipped_updates", WITHOUT_LABELS))
