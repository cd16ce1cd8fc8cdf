"""RWKV-4 (arXiv 2305.13048): a weighted mean of the past values in every channel. The weights e^{k} decay at a learned
rate per channel. There are no queries; a gate multiplies the mean.

Dimensions: B batch, T tokens, D hidden size, E channels (expand · D), N sequences.
"""

import math

import torch
from torch import Tensor, nn

from ...extra.rwkv import mixed
from ...extra.scan import NAME, Pack, ScanState, Tile, packed_scan, scan_packed_, tropical_
from ...extra.specs.scan import ScanSpec
from ...layers.base import Mixer
from ...layers.linear.decays import finite_exp
from ...ops.call import accumulator
from ...ops.derivatives import refuse_transforms
from ...ops.sequences import Sequences


class RWKV4(Mixer):
    """RWKV-4's time mixing: token shift, WKV, gate, projection."""

    state_kind = ScanState
    no_weight_decay = ("mix",)

    def __init__(self, spec: ScanSpec, *, hidden_size: int, layer_idx: int = 0, num_layers: int = 1, **unused):
        super().__init__()
        D, E = hidden_size, spec.head_dims(hidden_size, 1)[1]
        self.state_shapes = spec.state_shapes(D, 1)
        self.depth, self.height = layer_idx / max(num_layers - 1, 1), 1 - layer_idx / num_layers
        self.mix = nn.Parameter(torch.empty(3, D))  # weights of the current token in the inputs of r, k, v
        self.log_rate = nn.Parameter(torch.empty(E))
        self.bonus = nn.Parameter(torch.empty(E))
        self.r_proj = nn.Linear(D, E, bias=False)
        self.k_proj = nn.Linear(D, E, bias=False)
        self.v_proj = nn.Linear(D, E, bias=False)
        self.o_proj = nn.Linear(E, D, bias=False)
        self.reset_parameters()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"mix": {"r": 1, "k": 1, "v": 1}}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial decay rates are from e^−5 to e^3 over the channels, and lower in deeper layers."""
        i = torch.arange(self.bonus.numel())
        place = i / max(len(i) - 1, 1)
        self.log_rate.copy_(-5 + 8 * place ** (0.7 + 1.3 * self.depth))
        self.bonus.copy_(math.log(0.3) + 0.5 * ((i + 1) % 3 - 1))
        keep = torch.arange(self.mix.shape[1]) / self.mix.shape[1]
        power = keep**self.height
        self.mix.copy_(torch.stack([keep ** (self.height / 2), power, power + 0.3 * self.depth]))

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        before, shift = sequences.shift(x, None if state is None else state.shift)
        streams = mixed(before, x, self.mix, ("r", "k", "v"))
        r, k, v = (sequences.tokenwise(getattr(self, f"{name}_proj"), y) for name, y in streams.items())
        acc = accumulator(x)
        k, v, bonus, rate = k.to(acc), v.to(acc), self.bonus.to(acc), finite_exp(self.log_rate.to(acc))
        memory = empty_memory(k, sequences.count) if state is None else state.memory
        lengths = None if x.shape[1] == 1 and not sequences.packed else sequences.counts()
        out, memory = wkv(k.flatten(0, 1), v.flatten(0, 1), rate, bonus, memory, lengths)
        y = torch.sigmoid(r) * out.view_as(k).to(x.dtype)
        return sequences.tokenwise(self.o_proj, y), ScanState(memory, shift=shift)


def empty_memory(k: Tensor, count: int) -> Tensor:
    """Returns the memory of `count` sequences before their first token: sums of 0 with the exponent m = −∞."""
    empty = k.new_zeros(count, 1, k.shape[-1])
    return torch.cat([empty, empty, empty - torch.inf], 1)


def wkv(
    k: Tensor, v: Tensor, rate: Tensor, bonus: Tensor, memory: Tensor, lengths: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Computes the WKV operator for packed sequences, or for one token of each sequence.

    The memory is the sums Σ e^{k − m} v and Σ e^{k − m} of decayed weights, and their largest exponent m. The factor
    e^{−m} cancels, so that autograd treats m as a constant; it keeps every exponential in 0..1.

    Args:
        k, v: [T, D], all in one precision.
        rate, bonus: w ≥ 0 and u, [D].
        memory: [n, 3, D], Σ e^{k − m} v, Σ e^{k − m} and m.
        lengths: lengths of the packed sequences; None: one token of each sequence.

    Returns:
        (the weighted mean of v [T, D], the memory of each sequence after its last token).
    """
    sums, m = memory.split([2, 1], 1)
    whole = None if lengths is None else Pack(lengths, k.device).tile(0, len(k))
    m = m[:, 0].detach()
    if whole is None:
        m_before, m = m, torch.maximum(m - rate, k).detach()
    else:
        refuse_transforms(NAME)
        m_before, m = running_maximum(k, rate, m, whole)
    weight = torch.exp(k - m)
    fade, new = torch.exp(m_before - rate - m)[:, None], torch.stack([weight * v, weight], 1)
    if whole is None:
        before, sums = sums, fade * sums + new
    else:
        before, sums = packed_scan(fade.expand_as(new), new, sums, whole)
    after = torch.cat([sums, m[:, None]], 1)
    if whole is not None:
        after = memory.index_copy(0, whole.ended, after[whole.last])
    return read(before, m_before, k + bonus, v), after


def read(sums: Tensor, m: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the weighted mean of the past values in memory and of the current value v, whose weight is e^k."""
    top = torch.maximum(m, k).detach()
    past, present = torch.exp(m - top), torch.exp(k - top)
    total, weight = sums.unbind(1)
    return (past * total + present * v) / (past * weight + present)


@torch.no_grad()
def running_maximum(k: Tensor, rate: Tensor, initial: Tensor, whole: Tile) -> tuple[Tensor, Tensor]:
    """Returns (m_{t−1}, m_t) of m_t = max(m_{t−1} − rate, k_t), with shapes as in `packed_scan` and no gradient."""
    begun = initial[whole.begun]
    m = k.index_copy(0, whole.first, torch.maximum(k[whole.first], begun - rate))
    scan_packed_(-rate.expand_as(k).index_fill(0, whole.first, torch.inf), m, tropical_)
    return m.roll(1, 0).index_copy(0, whole.first, begun), m
