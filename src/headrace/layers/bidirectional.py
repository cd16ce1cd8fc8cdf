"""A bidirectional layer made of two causal mixers, which process the sequence in opposite directions."""

from torch import Tensor, nn

from ..ops.checks import require
from ..ops.parallel.context import refuse_parts
from ..ops.sequences import Sequences


class BothWays(nn.Module):
    """The sum of a causal mixer's output on the sequence and another one's on the reversed sequence.

    Both include the current token. Padding is reversed with the tokens, and each mixer removes it."""

    def __init__(self, forwards: nn.Module, backwards: nn.Module):
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(
        self, x: Tensor, state: None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None, in_place: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """x [B, T, D] -> (y [B, T, D], None). Raises InputError for a state: an encoder needs whole sequences."""
        refuse_parts(self)
        require(state is None, "state is given to an encoder, which has none; expected state=None")
        if cu_seqlens is not None:
            cu_seqlens = Sequences.of(x, cu_seqlens).bounds
        y, _ = self.forwards(x, mask=mask, cu_seqlens=cu_seqlens)
        mask = None if mask is None else mask.flip(1)
        cu_seqlens = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
        reverse, _ = self.backwards(x.flip(1), mask=mask, cu_seqlens=cu_seqlens)
        return y + reverse.flip(1), None
