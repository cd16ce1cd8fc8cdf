"""The base of modules that compute the recurrence of a linear mixer, for a stage that is a `ModuleRecur`.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..layers.base import Recurrence, SelfInitialized
from ..ops.call import accumulator, gated
from ..ops.sequences import Sequences
from ..utils.device import without_autocast


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
