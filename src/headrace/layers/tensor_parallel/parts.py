"""The layers of `tensor_parallel`: a process's part of a LinearMixer, of softmax attention and of an MLP.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.call import accumulator
from ...ops.checks import require
from ...ops.parallel.tensor import Ranks
from ...ops.sequences import Sequences
from ...utils.errors import GateWarning
from ..attention.attention import SoftmaxAttention
from ..blocks.block import MLP
from ..linear.competition import HeadCompetition
from ..linear.mixer import LinearMixer
from .cuts import ATTENTION, PERCEPTRON, Cut, Shares, linear_cuts, named_cuts


class PartLinear(LinearMixer):
    """A process's heads of a LinearMixer. Competition and the joint norm alone need the other heads."""

    def __init__(self, whole: LinearMixer, ranks: Ranks):
        shares = Shares(whole.H, whole.Hq, ranks.size, ("num_heads", "heads.qk_groups"))
        D, H = whole.in_proj.in_features, shares.heads
        heads = replace(whole.spec.heads, expand_v=whole.V * H / D, qk_groups=shares.groups, count=H, key_dim=whole.K)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", GateWarning)  # one head of a process still competes
            sizes: Any = {"hidden_size": D, "num_heads": H, "norm_eps": whole.norm_eps, "rope_theta": whole.rope_theta}
            super().__init__(replace(whole.spec, heads=heads), **sizes)
        self.hidden_size, self.op, self.backend, self.ranks = D, whole.op, whole.backend, ranks
        self.o_proj = RowParallelLinear(self.o_proj, ranks)
        for name in ("read_competition", "write_competition"):
            if (gate := getattr(self, name)) is not None:
                setattr(self, name, PartCompetition(gate, shares, ranks))
        whole_groups = whole.Hq % ranks.size == 0 or self.spec.read.norm != "rms-groups"
        require(whole_groups, "read.norm='rms-groups' over more processes than groups; expected at most one for each")
        if self.decay is not None:
            self.decay.first, self.decay.total = ranks.rank * H, whole.H
        self.cuts = adopt(self, whole, partial(linear_cuts, whole, shares), ranks)

    def run(self, x: Tensor, state, sequences: Sequences, in_place: bool = False):
        return super().run(self.ranks.enter(x), state, sequences, in_place)

    def _normalize(self, x: Tensor) -> Tensor:
        if self.spec.read.norm != "rms-joint":
            return super()._normalize(x)
        wide = x.to(accumulator(x))
        mean = self.ranks.sum(wide.square().mean((-2, -1), keepdim=True)) / self.ranks.size
        weight = self.norm_weight.to(wide.dtype).view(wide.shape[-2:])
        return (wide * torch.rsqrt(mean + self.norm_eps) * weight).to(x.dtype)


class PartCompetition(HeadCompetition):
    """The gates of a process's heads, which compete with those of all processes.

    Scores of the source "hidden" need no communication, because every process computes all of them; those of "diag" are
    of a head's own q. For "head", the scores [B, T, H] are gathered; for "query", they are summed."""

    def __init__(self, part: HeadCompetition, shares: Shares, ranks: Ranks):
        nn.Module.__init__(self)
        known = not (part.spec.shuffle and part.spec.source == "diag")  # a process has its own heads' gates alone
        require(known, "competition.shuffle with source='diag' under tensor_parallel; expected another source")
        self.spec, self.memories, self.repeats, self.ranks = part.spec, part.memories, part.repeats, ranks
        self.num_heads, n = part.num_heads * ranks.size, part.num_heads
        self.own = slice(ranks.rank * n, (ranks.rank + 1) * n)
        self.copies = max(ranks.size // shares.G, 1)  # number of processes with the same q
        self.weight = part.weight

    def scores(self, heads: Tensor, x: Tensor) -> Tensor:
        scores = super().scores(heads, x)
        if self.spec.source == "head":
            return self.ranks.join(scores)
        if self.spec.source == "query":
            return self.ranks.sum(scores.to(accumulator(scores)) / self.copies)
        if self.spec.source == "diag":  # only the diagonal of [H, H] is read, and only in these rows
            return F.pad(scores, (0, 0, self.own.start, self.num_heads - self.own.stop))
        return scores

    def forward(self, heads: Tensor, x: Tensor, positions: Tensor | None = None, chosen_only: bool = True) -> Tensor:
        return super().forward(heads, x, positions, chosen_only)[..., self.own]


class PartAttention(SoftmaxAttention):
    """A process's heads of softmax attention."""

    def __init__(self, whole: SoftmaxAttention, ranks: Ranks):
        require(whole.causal, "tensor_parallel has no encoders; expected attention with causal=True")
        require(whole.spec.qk_norm != "joint", "tensor_parallel has no norm of all heads; expected qk_norm='head'")
        D, d = whole.q_proj.in_features, whole.head_dim
        H, G = whole.q_proj.out_features // d, whole.k_proj.out_features // d
        shares = Shares(H, G, ranks.size, ("num_heads", "kv_heads"))
        with torch.device("meta"):
            super().__init__(
                whole.spec, hidden_size=D, num_heads=H, rope_theta=whole.rope_theta,
                out_size=whole.o_proj.out_features, norm_eps=getattr(whole.q_norm, "eps", 1e-6),
            )  # fmt: skip
        self.ranks = ranks
        fewer_gates = whole.spec.forget * (H // G - shares.heads // shares.groups)
        for name, fewer in (("k", fewer_gates), ("v", 0)):
            kept, _, width = self.state_shapes[name]
            self.state_shapes[name] = (kept, shares.groups, width - fewer)
        self.o_proj = RowParallelLinear(self.o_proj, ranks)
        self.cuts = adopt(self, whole, partial(named_cuts, whole, ATTENTION, shares), ranks)

    def forward(self, x: Tensor, state=None, **where):
        return super().forward(self.ranks.enter(x), state, **where)


class PartMLP(MLP):
    """A process's share of an MLP's width."""

    def __init__(self, whole: MLP, ranks: Ranks):
        nn.Module.__init__(self)
        width = whole.up_proj.out_features
        shares = Shares(width, width, ranks.size, ("intermediate_size", "intermediate_size"))
        self.activation, self.ranks = whole.activation, ranks
        linears = {name: getattr(whole, name) for name in ("gate_proj", "up_proj", "down_proj")}
        for name, linear in linears.items():
            setattr(self, name, None if linear is None else _empty(linear))
        self.down_proj = RowParallelLinear(self.down_proj, ranks)
        self.cuts = adopt(self, whole, partial(named_cuts, whole, PERCEPTRON, shares), ranks)

    def forward(self, x: Tensor, adapter: nn.Module | None = None) -> Tensor:
        return super().forward(self.ranks.enter(x), adapter)


class RowParallelLinear(nn.Linear):
    """The end of a region: a linear layer of a process's inputs, summed over processes."""

    def __init__(self, linear: nn.Linear, ranks: Ranks):
        nn.Module.__init__(self)
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias * (self.ranks.rank == 0)  # all processes have it; one adds it
        return self.ranks.leave(F.linear(x, self.weight, bias))


def _empty(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")


def adopt(part: nn.Module, whole: nn.Module, find: Callable[[], dict[str, Cut]], ranks: Ranks) -> dict[str, Cut]:
    """Sets the parameters of a part to this process's cuts of the whole's, and returns the cuts, which `find` finds.

    Raises InputError for a layer whose parameters were changed: int8 weights, adapters."""
    own_names, whole_names = ({name for name, _ in module.named_parameters()} for module in (part, whole))
    require(
        own_names == whole_names,
        f"{type(whole).__name__} has other parameters at {sorted(own_names ^ whole_names)}; expected them plain",
    )
    cuts = find()
    for name, p in whole.named_parameters():
        mine = nn.Parameter(cuts[name].take(p.detach(), ranks.rank))
        _reduce_gradient(mine, cuts[name], ranks)
        _place(part, name, mine.requires_grad_(p.requires_grad))
    for name, x in whole.named_buffers():
        _place(part, name, x)
    for module in part.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    return cuts


def _place(module: nn.Module, path: str, x: Tensor) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, x)


def _reduce_gradient(p: nn.Parameter, cut: Cut, ranks: Ranks) -> None:
    """Sums the gradient of what several processes hold over them, whenever it is computed."""
    shared = (cut.holders > 1).nonzero()[:, 0]
    if not len(shared):
        return
    in_part = torch.isin(cut.parts[ranks.rank], shared).nonzero()[:, 0]  # among the indices of this process
    in_shared = torch.searchsorted(shared, cut.parts[ranks.rank][in_part])  # among all shared indices

    def reduce(grad: Tensor) -> Tensor:
        index, place = in_part.to(grad.device), in_shared.to(grad.device)
        shape = list(grad.shape)
        shape[cut.dim] = len(shared)
        total = grad.new_zeros(shape).index_copy(cut.dim, place, grad.index_select(cut.dim, index))
        return grad.index_copy(cut.dim, index, ranks.reduced(total).index_select(cut.dim, place))

    p.register_hook(reduce)
