"""What ends a run early, and what is wrong with its numbers and gates."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..files.processes import Terminated
from ..layers.blocks.block import Block
from .compiled import uncompiled
from .gate_statistics import failures
from .processes import Processes


class Stop:
    """On SIGTERM or Ctrl-C, ends the run after the current step with a checkpoint; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.heard = 0  # the number of the signal that reached this process; 0: none
        self.stopped = 0  # of the signal by which all processes stop

    def on_signal(self, number: int, frame: object) -> None:
        if self.heard == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def heard_by_any(self, processes: Processes) -> bool:
        """Whether the run stops. A signal reaches the processes at different steps, or one alone."""
        self.stopped = self.heard
        if processes.count > 1:
            heard = torch.tensor(self.heard, device=processes.device)
            dist.all_reduce(heard, dist.ReduceOp.MAX)
            self.stopped = int(heard)
        return self.stopped > 0

    def end(self) -> None:
        """Raises KeyboardInterrupt or Terminated if a signal stopped the run."""
        if self.stopped:
            raise KeyboardInterrupt if self.stopped == signal.SIGINT else Terminated


def gate_warnings(
    gates: list[dict[str, Any]], collapsed: set[tuple[int | str, str]], step: int, ended: bool
) -> Iterator[str]:
    """Sentences about gates that have collapsed, each once, and, when training has ended, about uniform ones.

    gates: their statistics, of `GateStatistics.summary`. collapsed: (layer, gate) that were named before, and now."""
    for gate in gates:
        key = gate["layer"], gate["gate"]
        head = failures(gate["entropy"], gate["load"]).collapsed
        if head is not None and key not in collapsed:
            collapsed.add(key)
            yield (
                f"step {step}: the {gate['gate']} gate of layer {gate['layer']} has collapsed: the mean share of head "
                f"{head} is {gate['load'][head]:.1%} of the held-out tokens"
            )
    for kind in ("write", "read") if ended else ():
        own = [gate for gate in gates if gate["gate"] == kind]
        if even := [gate for gate in own if failures(gate["entropy"], gate["load"]).uniform]:
            where = ", ".join(str(gate["layer"]) for gate in even)
            yield (
                f"the {kind} gates of these layers are uniform after training: {where}. They weigh all heads alike for "
                "every held-out token, so that the competition there has no effect"
            )


def logged_statistics(gate: dict[str, Any]) -> dict[str, float]:
    """The statistics of a gate by logged name: write_entropy_<layer>, write_specialization_<layer>,
    write_load_<layer>_<head>, and the same for read gates. See `GateStatistics.summary`."""
    kind, layer = gate["gate"], gate["layer"]
    loads = {f"{kind}_load_{layer}_{head}": load for head, load in enumerate(gate["load"])}
    return {f"{kind}_{what}_{layer}": gate[what] for what in ("entropy", "specialization")} | loads


@torch.no_grad()
def first_not_finite(model: nn.Module, compute: Callable[[], object]) -> str:
    """The name of the first block of a model whose output is not finite when `compute` calls it."""
    layers: list[int] = []

    def check_output(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if not bool(output.isfinite().all()):
            layers.append(index)

    with ExitStack() as hooks:
        hooks.enter_context(uncompiled(model))
        for i, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
            hooks.enter_context(block.register_forward_hook(partial(check_output, i)))
        compute()
    return f"layer {min(layers)}" if layers else "the output"
