"""LFM2's gated short convolution (arXiv 2511.23404): a causal depthwise convolution between two gates that are linear
in the token. Its state is its last inputs.

Dimensions: B batch, T tokens, D hidden size, N sequences, W width.
"""

from torch import Tensor, nn

from ..layers.base import Mixer
from ..layers.linear.convolution import convolve
from ..ops.call import accumulator
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Update
from .recurrence import Recurrence
from .registration import register_mixer
from .scan import START, ScanState
from .specs.scan import KINDS, ScanKind, ScanSpec


class ShortConv(Mixer):
    """Computes W_out (C ⊙ conv(B ⊙ u)), where B, C and u are projections of the token. The memory is [N, W − 1, D]."""

    state_kind = ScanState
    static_shapes = True

    def __init__(self, spec: ScanSpec, *, hidden_size: int, **unused):
        super().__init__()
        D = hidden_size
        assert spec.conv is not None
        self.state_shapes = spec.state_shapes(D, 1)
        self.in_proj = nn.Linear(D, 3 * D, bias=spec.bias)
        self.conv = nn.Conv1d(D, D, spec.conv, groups=D, bias=spec.conv_bias)
        self.recurrence = Recurrence()
        self.out_proj = nn.Linear(D, D, bias=spec.bias)

    def reset_parameters(self) -> None:
        """The module has no parameters of its own."""

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        B, C, u = sequences.tokenwise(self.in_proj, x).chunk(3, -1)
        y, memory = self.recurrence(convolve, self.conv, B * u, (state or START).memory, sequences, "torch", False)
        return sequences.tokenwise(self.out_proj, C * y), ScanState(memory.to(accumulator(x)))


KINDS["short-conv"] = ScanKind(
    Facts(
        "headrace.extra.short_conv.ShortConv",
        Update("shift by one token", "B u", "the last inputs"),
        flops=2,  # w x, + it: of the inputs that are remembered
    ),
    ("conv", "conv_bias", "bias"),
)
register_mixer(
    "short-conv",
    ScanSpec("short-conv", conv=3, conv_bias=False),
    about="A causal convolution over the last 3 tokens between two gates that are linear in the token.",
    paper="https://arxiv.org/abs/2511.23404",
)
