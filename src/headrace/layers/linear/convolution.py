"""The short convolution of a mixer.

Dimensions: B batch, T tokens, C channels, N sequences.
"""

from torch import Tensor, nn

from ...ops.dispatch import choose
from ...ops.sequences import Sequences


def convolve(
    conv: nn.Conv1d, x: Tensor, history: Tensor | None, sequences: Sequences, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Computes the SiLU of a causal depthwise convolution.

    Args:
        conv: the weights; its padding is not used.
        x: [B, T, C].
        history: [N, width − 1, C], the tokens before x; None: zeros.
        sequences: the sequences of x.
        backend: "auto", or a name from `backends()`.

    Returns:
        (y [B, T, C], the next history).

    Raises:
        InputError: for a backend that cannot compute the convolution.
    """
    history = sequences.before(x, history, conv.kernel_size[0] - 1)
    y = choose("convolution", backend, conv, x, history, sequences).run(conv, x, history, sequences)
    return y, sequences.last(x, history)
