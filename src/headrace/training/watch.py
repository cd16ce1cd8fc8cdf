"""Callbacks that stop a run early and print warnings during training."""

import signal
import sys

import torch
from transformers import TrainerCallback

from ..utils.processes import Terminated
from .gate_statistics import failures
from .trainer import HeadraceTrainer, batches_without_labels

PATIENCE = 5  # number of consecutive skipped updates after which a run stops


class Watch(TrainerCallback):
    """Stops the run after PATIENCE consecutive non-finite gradients, prints once for each gate that has
    collapsed, after the last step how many batches had no label, and after the last evaluation which gates are
    uniform: as all are when training begins, that says nothing earlier."""

    def __init__(self, trainer: HeadraceTrainer, warmup_steps: int):
        self.trainer, self.warmup_steps = trainer, warmup_steps
        self.broken = False
        self.named: set[tuple[int, str]] = set()

    def on_step_end(self, args, state, control, **kwargs):
        optimizer = self.trainer.inner_optimizer()
        if optimizer.in_a_row == 1:
            warn(state, f"step {state.global_step}: the gradient is not finite; the update is skipped")
        if optimizer.in_a_row >= PATIENCE:
            warn(state, f"step {state.global_step}: {PATIENCE} consecutive gradients were not finite; the run stops")
            self.broken = control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        if number := batches_without_labels(state.log_history):
            warn(state, f"batches without any label: {number:,}; their loss and gradients were 0")

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step <= self.warmup_steps:
            return
        for gate in self.trainer.gates:
            key = (gate["layer"], gate["gate"])
            head = failures(gate["entropy"], gate["load"]).collapsed
            if head is not None and key not in self.named:
                self.named.add(key)
                warn(
                    state,
                    f"step {state.global_step}: the {gate['gate']} gate of layer {gate['layer']} has collapsed: the "
                    f"mean share of head {head} is {gate['load'][head]:.1%} of the held-out tokens",
                )
        if "final_loss" in kwargs["metrics"]:
            for kind in ("write", "read"):
                own = [gate for gate in self.trainer.gates if gate["gate"] == kind]
                if even := [gate for gate in own if failures(gate["entropy"], gate["load"]).uniform]:
                    where = ", ".join(str(gate["layer"]) for gate in even)
                    warn(
                        state,
                        f"the {kind} gates of these layers are uniform after training: {where}. They weigh all heads "
                        "alike for every held-out token, so that the competition there has no effect",
                    )


class Stop(TrainerCallback):
    """On SIGTERM or Ctrl-C, ends the run after the current step with a checkpoint; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.heard = 0  # the number of the signal that reached this process; 0: none
        self.stopped = 0  # of the signal by which all processes stop

    def on_signal(self, number: int, frame: object) -> None:
        if self.heard == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def on_step_end(self, args, state, control, **kwargs):
        heard = torch.tensor(self.heard, device=args.device)
        if torch.distributed.is_initialized():  # a signal reaches the processes at different steps, or one alone
            torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX)
        if heard:
            self.stopped = int(heard)
            # Without a log here, measurements since the last log would be lost.
            control.should_log = control.should_save = control.should_training_stop = True

    def end(self) -> None:
        """Raises KeyboardInterrupt or Terminated if a signal stopped the run."""
        if self.stopped:
            raise KeyboardInterrupt if self.stopped == signal.SIGINT else Terminated


def warn(state, sentence: str) -> None:
    if state.is_world_process_zero:
        print(sentence, file=sys.stderr)
