"""What mixers with a recurrent state have in common: padding is taken out before them and put back after them.

Dimensions: B batch, T tokens, D hidden size, N sequences; E channels, S numbers that each of them carries.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..gates import SelfInitialised
from ..packing import without_padding


class ScanState(NamedTuple):
    """What a sequence carries on; None where the mixer has no such part."""

    memory: Tensor  # [N, S, E]
    conv: Tensor | None = None  # [N, width − 1, E]
    shift: Tensor | None = None  # [N, 1, D]


class Mixer(SelfInitialised):
    """A layer that only has to say what it does to tokens, at least one and none of them padding, in `run`."""

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """x [B, T, D] -> (y [B, T, D], state). mask [B, T]: False is padding; cu_seqlens [N + 1]: x is a pack.

        Where there is no token, or padding alone, the state is the one given."""
        if mask is not None:
            return without_padding(self._run, x, state, mask)
        return self._run(x, state, cu_seqlens)

    def _run(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        return self.run(x, state, cu_seqlens) if x.shape[1] else (x, state)

    def run(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        raise TypeError(f"{type(self).__name__} does not say what it computes")
