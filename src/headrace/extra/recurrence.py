"""Recurrences that are modules of their own, and the stage of a linear mixer for one, `ModuleRecur`.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.linear.recur import Recur
from ..layers.linear.stage import Stage, Tokens
from ..ops.call import accumulator, gated
from ..ops.sequences import Sequences
from ..utils.device import without_autocast


class Recurrence(nn.Module):
    """Calls the recurrence of a mixer. It is a module so that a counter of operations can leave it out: PyTorch counts
    the matrix products of the form that is computed, and the spec's `flops_per_token` counts the recurrent form."""

    def forward(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)


class ModuleRecur(Recur):
    """A module that computes the recurrence, by calls of `linear_attention` or not."""

    name: ClassVar[str]  # of the module in the mixer
    splits = False
    native = Stage.native

    def module(self, mixer: Any) -> nn.Module:
        return getattr(mixer, self.name)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out, t.after["memory"] = self.module(mixer)(self.op(mixer), self.tensors(t), t.state, t.sequences)


class RecurrenceModule(SelfInitialized, Recurrence):
    """Computes the recurrence in the precision of the memory, float32 or float64. A subclass defines `compute`."""

    def forward(self, op: Callable, x: dict[str, Any], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Computes the output and the next memory.

        Args:
            op: `linear_attention` with the arguments that do not depend on the tokens.
            x: the op's tensors by name: q, k [B, T, Hq, K], v [B, T, H, V], others [B, T, H, ·] or None.
            state: the state of the mixer; None: no tokens yet.
            sequences: the sequences of x.

        Returns:
            (out [B, T, H, V], the next memory).
        """
        with without_autocast(x["v"]):
            acc = accumulator(x["v"])
            x = {name: y.to(acc) for name, y in x.items() if y is not None}
            gate, x["v"] = x.pop("read_gate", None), gated(x["v"], x.pop("write_gate", None))
            out, memory = self.compute(op, x, state, sequences)
        return gated(out, gate), memory

    def compute(self, op: Callable, x: dict[str, Tensor], state: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Computes `forward` without gates, for tensors in the precision of the memory."""
        raise TypeError(f"{type(self).__name__} does not define compute")
