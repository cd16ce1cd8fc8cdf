"""transformers' Trainer with an exact held-out loss, training speed and gate statistics."""

import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback

from ..data import Shuffled
from ..hf.threads import Threads
from ..layers.blocks.block import Block
from ..ops.loss import IGNORED
from ..ops.parallel.context import SequenceShard, context_parallel
from .agreement import errors_in_all
from .checkpoints import OPTIMIZER, UNFINISHED, load_optimizer, save_optimizer
from .gate_statistics import GateWatch
from .optimizer import SkipNonFiniteAdamW
from .processes import grid
from .results import finite
from .sharding import is_sharded, load_weights, whole_weights

# Of the Trainer's last log: one counts a row in each process that shares it, the other has the last steps of one alone.
OF_ONE_PROCESS = ("total_flos", "train_loss")
UNITS = (("days", 86400.0), ("hours", 3600.0), ("min", 60.0), ("s", 1.0))
WITHOUT_LABELS = "batches_without_labels"  # logged name
GATE = re.compile(r"_(read|write)_(entropy|specialization|load)_")  # logged names of gate statistics


class HeadraceTrainer(Trainer):
    """A Trainer for language models.

    Args:
        measures: constants by which losses and speeds are converted.
        per_row: number of consecutive processes that share the tokens of a row, by `context_parallel`.
    """

    def __init__(self, *args, measures: "Measures", per_row: int = 1, **kwargs):
        super().__init__(*args, **kwargs)
        self.measures, self.per_row = measures, per_row
        if per_row > 1:
            mesh = grid(self.args, dp_replicate=self.args.world_size // per_row, cp=per_row)
            self.accelerator.state.device_mesh = mesh  # its data loaders give one row to all processes of "cp"
            self.group = mesh["cp"].get_group()
        if is_sharded(self.model):  # autocast and compilation, but no DistributedDataParallel
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.gates: list[dict[str, Any]] = []  # gate statistics of the last evaluation
        self.last_log: tuple[float, int] | None = None
        self.paused = 0.0
        self.broken = False  # whether a loss since the last log was not finite
        self.empty = torch.zeros((), dtype=torch.long, device=self.args.device)  # batches without a label, not logged

    def _get_train_sampler(self, train_dataset=None) -> Sampler:
        """Random order in each epoch, without the last rows of an epoch if they do not fill a step."""
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        readers = self.args.world_size // self.per_row
        step = self.args.train_batch_size * self.args.gradient_accumulation_steps * readers
        return EpochOrder(self, rows, len(rows) // step, step)

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **kwargs)

    # --- rows that several processes share ---------------------------------------------------------------------------

    def get_cp_size(self) -> int:
        return self.per_row

    def _prepare_context_parallel_inputs(self, model, inputs):
        return self._together, self._part(inputs)

    def _together(self) -> Any:
        return context_parallel(self.group) if self.per_row > 1 else nullcontext()

    def _part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process's tokens of a batch, with the labels that follow them. A short row is padded at its end."""
        if self.per_row == 1:
            return batch
        labels = batch.get("shift_labels", F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED))
        missing = -labels.shape[1] % len(self.train_dataset[0]["input_ids"])  # type: ignore[index]
        ids, labels = F.pad(batch["input_ids"], (0, missing)), F.pad(labels, (0, missing), value=IGNORED)
        part = SequenceShard(self.group)
        mine = {"input_ids": part.split(ids), "labels": part.split(labels), "shift_labels": part.split(labels)}
        if "cu_seqlens" in batch:  # the padding follows the last sequence
            mine["cu_seqlens"] = torch.cat([batch["cu_seqlens"][:-1], batch["cu_seqlens"][-1:] + missing])
        return batch | mine

    # --- held-out text -----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss in nats per token over all held-out tokens, perplexity, bits per byte and gate statistics."""
        started, model = time.perf_counter(), self._wrap_model(self.model, training=False)  # type: ignore[arg-type]
        total, gates = self._held_out(model, eval_dataset)
        mean = total[0] / total[1]
        metrics = {
            "loss": mean.item(),
            "perplexity": mean.exp().item(),
            "bits_per_byte": mean.item() / math.log(2) / self.measures.bytes_per_token,
        }
        for gate in gates:
            metrics |= logged_statistics(gate)
        logged = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(logged)
        self.gates = gates  # before the callbacks, which read them
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        self.paused += time.perf_counter() - started
        return logged

    @torch.no_grad()
    def _held_out(self, model: nn.Module, rows: Any) -> tuple[Tensor, list[dict[str, Any]]]:
        """([sum of losses, number of tokens] over all processes, gate statistics of this process)"""
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        shared = self._share(self.eval_dataset if rows is None else rows)
        with evaluating(model), GateWatch().on(model) as watch, self._together():
            for batch in map(self._prepare_inputs, map(self._part, shared)):
                watch.labelled = batch["labels"] != IGNORED
                count = answers(batch).sum()
                with self.compute_loss_context_manager():
                    loss = model(**batch, skip_logits=True, use_cache=False).loss  # a cache would split long rows
                total += torch.stack([loss.double() * count, count.double()])
        return self.accelerator.reduce(total, "sum"), watch.summary()

    def _share(self, rows: Any) -> Iterator[dict[str, Tensor]]:
        """The batches of this process; each row is in one batch of one process, or of those that share it."""
        args, each = self.args, self.per_row
        for chosen in shares(len(rows), args.eval_batch_size, args.process_index // each, args.world_size // each):
            batch = self.data_collator([rows[i] for i in chosen or [0]])  # type: ignore[misc]
            if not chosen:
                for name in {"labels", "shift_labels"} & batch.keys():
                    batch[name] = torch.full_like(batch[name], IGNORED)
            yield batch

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial) -> str:
        """The folder in which `MarkComplete` expects a written checkpoint."""
        return str(Path(str(self.args.output_dir), UNFINISHED))

    def _save_checkpoint(self, model, trial) -> None:
        with errors_in_all():
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = whole_weights(self.model) if is_sharded(self.model) else None
        with errors_in_all():
            if weights is None:
                super().save_model(output_dir, _internal_call)
            elif weights:
                self._save(output_dir, state_dict=weights)

    def _save_rng_state(self, output_dir: str) -> None:
        with errors_in_all():
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(Path(output_dir), self.model, self.inner_optimizer(), self.lr_scheduler)  # type: ignore[arg-type]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, OPTIMIZER).is_dir():
            load_optimizer(Path(checkpoint), self.model, self.inner_optimizer(), self.lr_scheduler)  # type: ignore[arg-type]
        else:  # nothing to load, or the Trainer's own file, which earlier versions wrote
            super()._load_optimizer_and_scheduler(checkpoint)

    # --- what is logged ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self._speed()
            if self.broken:
                logs["loss"], self.broken = math.nan, False
            if skipped := self.inner_optimizer().skipped:
                logs["skipped_updates"] = skipped
        if "loss" in logs or "train_loss" in logs:  # the latter after the last step
            logs |= self._without_labels()
        with errors_in_all():  # process 0 alone writes
            super().log({name: value for name, value in logs.items() if name not in OF_ONE_PROCESS}, start_time)
        self.state.log_history[-1] = finite(self.state.log_history[-1])

    def _without_labels(self) -> dict[str, float]:
        """The number of batches of the run in which no token had a label, if there were any."""
        number = int(self.accelerator.reduce(self.empty.clone(), "sum")) // self.per_row  # type: ignore[arg-type]
        self.empty.zero_()
        number += batches_without_labels(self.state.log_history)
        return {WITHOUT_LABELS: number} if number else {}

    def _speed(self) -> dict[str, float]:
        """Training speed since the last log, without the time of evaluations."""
        now, step = time.perf_counter(), self.state.global_step
        before, self.last_log, paused, self.paused = self.last_log, (now, step), self.paused, 0.0
        if before is None or step == before[1]:
            return {}
        tokens = (step - before[1]) * self.measures.tokens_per_step
        rate = tokens / (now - before[0] - paused)
        speed = {"tokens_per_second": round(rate, 1)}
        if self.measures.peak_flops:
            speed["mfu"] = round(rate * self.measures.flops_per_token / self.measures.peak_flops, 4)
        return speed

    # --- losses that are not finite ----------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> Tensor:
        self.empty += ~answers(inputs).any()
        loss = super().training_step(model, inputs, num_items_in_batch)
        broken = (~loss.isfinite()).int()
        if self.accelerator.reduce(broken, "sum"):  # a sharded model computes in all processes or in none
            self.broken = True
            where = first_not_finite(model, self._prepare_inputs(inputs))
            if broken:
                print(
                    f"step {self.state.global_step + 1}: the loss is {loss.item()}, first in {where}", file=sys.stderr
                )
        return loss.where(loss.isfinite(), 0.0)  # the Trainer's sum of losses would never be finite again

    def inner_optimizer(self) -> SkipNonFiniteAdamW:
        wrapped: Any = self.optimizer  # accelerate may have wrapped it
        return getattr(wrapped, "optimizer", wrapped)


class EpochOrder(Sampler[int]):
    """The numbers of the rows of the trainer's present epoch, in random order.

    The epoch follows from the trainer's step. `set_epoch` would not do: of several processes that resume, accelerate
    wraps the sampler so deep that its `set_epoch` does not reach it.

    Args:
        rows: the data set.
        steps: number of steps in an epoch.
        step: number of rows in a step.
    """

    def __init__(self, trainer: Trainer, rows: Any, steps: int, step: int):
        self.trainer, self.rows, self.steps, self.step = trainer, rows, steps, step

    def __len__(self) -> int:
        return self.steps * self.step

    def __iter__(self) -> Iterator[int]:
        epoch, seed = self.trainer.state.global_step // self.steps, self.trainer.args.data_seed
        if isinstance(self.rows, Dataset):  # of a task, or of older versions, in the order of accelerate's sampler
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch + seed))  # type: ignore[operator]
            return iter(order[: len(self)].tolist())
        shuffled = Shuffled(len(self.rows), len(self), seed)  # type: ignore[arg-type]
        shuffled.set_epoch(epoch)
        return iter(shuffled)


@dataclass(frozen=True)
class Measures:
    """Constants of a run by which losses and speeds are converted."""

    tokens_per_step: int
    bytes_per_token: float  # of the held-out text
    flops_per_token: int  # of training
    peak_flops: float | None  # of all devices together, per second; None: not known


def batches_without_labels(history: list[dict[str, Any]]) -> int:
    """The number of training batches in which no token had a label, as last logged."""
    return next((int(point[WITHOUT_LABELS]) for point in reversed(history) if WITHOUT_LABELS in point), 0)


def answers(batch: dict[str, Tensor]) -> Tensor:
    """Mask of the positions of a batch that have a label."""
    return batch.get("shift_labels", batch["labels"][:, 1:]) != IGNORED


def shares(rows: int, size: int, process: int, processes: int) -> list[range]:
    """The rows in each batch of a process. All processes have equally many batches, as the processes of a sharded model
    synchronize in each forward pass; the last batch of a process may be empty."""
    chosen, most = range(process, rows, processes), -(-rows // processes)
    return [chosen[i : i + size] for i in range(0, most, size)]


def logged_statistics(gate: dict[str, Any]) -> dict[str, float]:
    """The statistics of a gate by logged name: write_entropy_<layer>, write_specialization_<layer>,
    write_load_<layer>_<head>, and the same for read gates. See `GateStatistics.summary`."""
    kind, layer = gate["gate"], gate["layer"]
    loads = {f"{kind}_load_{layer}_{head}": load for head, load in enumerate(gate["load"])}
    return {f"{kind}_{what}_{layer}": gate[what] for what in ("entropy", "specialization")} | loads


class Progress(ProgressCallback):
    """The progress bar of the Trainer without gate statistics, which are in history.json and in the trackers. Tells the
    time of the run after the first steps."""

    TIMED = 5  # steps that are timed, after one that warms up

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []  # the times of the ends of the first steps

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if len(self.seconds) > self.TIMED or not state.is_world_process_zero:
            return
        self.seconds.append(time.perf_counter())
        if len(self.seconds) > self.TIMED and self.training_bar is not None:
            each = (self.seconds[-1] - self.seconds[0]) / self.TIMED
            left = state.max_steps - state.global_step
            self.training_bar.write(
                f"{each:.3g} s per step: about {duration(each * left)} for {left:,} more steps, without evaluations"
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: value for name, value in (logs or {}).items() if not GATE.search(name)}
        super().on_log(args, state, control, shown, **kwargs)


class TimedSteps(TrainerCallback):
    """Takes the number of threads with which steps are fastest, or `number`."""

    def __init__(self, number: int | None):
        self.threads = Threads(number, lambda line: tqdm.write(f"threads: {line}"))

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.threads.took(time.perf_counter() - self.started)

    def on_train_end(self, args, state, control, **kwargs):
        self.threads.restore()


def duration(seconds: float) -> str:
    """A time in the unit in which it is a number of 1 to 3 digits."""
    unit, size = next((each for each in UNITS if seconds >= 2 * each[1]), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def first_not_finite(model: nn.Module, batch: dict[str, Any]) -> str:
    """The name of the first block whose output is not finite on this batch."""
    layers: list[int] = []

    def check_output(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if not bool(output.isfinite().all()):
            layers.append(index)

    with ExitStack() as hooks, torch.no_grad():
        for i, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
            hooks.enter_context(block.register_forward_hook(partial(check_output, i)))
        model(**batch, skip_logits=True)
    return f"layer {min(layers)}" if layers else "the output"
