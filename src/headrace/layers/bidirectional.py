"""An encoder's layer from mixers that know only the past: one reads a sequence forwards, another backwards."""

from torch import Tensor, nn

from ..ops.checks import require


class BothWays(nn.Module):
    """The sum of what two mixers of one kind, with weights of their own, make of a sequence from either end.

    Both see the token itself. Padding and packs are reversed as they stand, and each mixer takes padding out."""

    def __init__(self, forwards: nn.Module, backwards: nn.Module):
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(
        self,
        x: Tensor,
        state: None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """x [B, T, D] -> (y [B, T, D], None): there is no going on from the middle of a sequence."""
        require(state is None, "an encoder sees a whole sequence at once; expected state=None")
        y, _ = self.forwards(x, mask=mask, cu_seqlens=cu_seqlens)
        mask = None if mask is None else mask.flip(1)
        cu_seqlens = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
        reverse, _ = self.backwards(x.flip(1), mask=mask, cu_seqlens=cu_seqlens)
        return y + reverse.flip(1), None
