"""`LinearParameters`, the submodules and parameters of a LinearMixer and their initialization.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.attention import linear_attention
from ...ops.backends.base import HasBackend
from ...ops.backends.native.program import ProgramOf
from ...ops.dispatch import default_backend
from ...spec.linear import MixerSpec
from ...utils.errors import GateWarning
from ..base import Mixer
from .competition import HeadCompetition
from .decays import DECAYS
from .general import GeneralDelta
from .joint import MemoryChoice
from .levels import LogLinear
from .mamba3 import BiasedNorm
from .readout import GROUP_NORM_EPS, GateLogits, weight_size
from .residual import ResidualDelta
from .ridge import RidgeRead
from .taylor import TaylorFeatures
from .token import MixerState, mixer_program
from .token_shift import SHIFTS


class LinearParameters(Mixer, HasBackend):
    """The parameters of a `LinearMixer`, from its arguments, and their initialization."""

    state_kind = MixerState
    op: Callable[..., tuple[Tensor, Tensor]]
    # Parts are None if the spec does not have them.
    conv: Any
    shift: Any
    features: Any
    qk_norm: Any
    value_gate: Any
    power: Any
    decay: Any
    bonus: Any
    residual: Any
    general: Any
    levels: Any
    ridge: Any
    choice: Any
    norm_weight: Any
    norm_bias: Any
    skip: Any
    gate: Any

    def __init__(
        self, spec: MixerSpec, *, hidden_size: int, num_heads: int, layer_idx: int = 0, num_layers: int = 1,
        norm_eps: float = 1e-6, rope_theta: float = 10000.0,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.norm_eps, self.rope_theta = spec, spec.read.eps or norm_eps, rope_theta
        self.group_eps = spec.read.eps or GROUP_NORM_EPS
        self.op = linear_attention  # may be set to a partial with a form or chunk size
        self.backend = default_backend()  # may be set; PyTorch computes what a backend given by name does not have
        self.H, (self.K, self.V) = spec.num_heads(hidden_size, num_heads), spec.head_dims(hidden_size, num_heads)
        self.Hq = spec.heads.qk_groups or self.H
        self.state_shapes = spec.state_shapes(hidden_size, num_heads) | ({"tokens": ()} if spec.counts_tokens else {})
        steps = spec.write.steps  # those of a head are side by side
        self.parts = {"q": self.Hq * self.K, "k": steps * self.Hq * self.K, "v": steps * self.H * self.V}  # of in_proj
        if spec.inputs.key == "complement":
            del self.parts["k"]
        self.depth, self.height = layer_idx / max(num_layers - 1, 1), 1 - layer_idx / num_layers
        self.share = (layer_idx + 1) / num_layers  # fraction of the layers up to and including this one
        self._build_inputs(hidden_size)
        self._build_memory()
        self._build_readout()
        self.in_proj = nn.Linear(hidden_size, sum(self.parts.values()), bias=spec.inputs.bias)
        self.o_proj = nn.Linear(self.H * self.V, hidden_size, bias=spec.read.bias)
        self._build_competition(hidden_size)
        for sentence in spec.idle_gates(hidden_size, num_heads):
            warnings.warn(sentence, GateWarning, stacklevel=3)
        self.program = ProgramOf(mixer_program)
        self.part_classes = {name: type(module) for name, module in self.named_modules()}
        self.reset_parameters()

    def _build_inputs(self, hidden_size: int) -> None:
        self.conv = self.shift = self.features = self.qk_norm = self.value_gate = None
        if width := self.spec.inputs.conv:
            channels = sum(self.parts.values())
            self.conv = nn.Conv1d(channels, channels, width, groups=channels, bias=self.spec.inputs.conv_bias)
        if (kind := self.spec.inputs.shift) != "none":
            self.shift = SHIFTS[kind](hidden_size, self.depth, self.height)
        if self.spec.inputs.qk_norm == "rms-bias":
            self.qk_norm = BiasedNorm(self.H, self.spec.features(self.K))
        if angles := self.spec.angles(self.K):
            self.parts["turns"] = angles
        if (order := self.spec.inputs.order) is not None:
            self.features = TaylorFeatures(self.spec.features(self.K), order)
        if self.spec.inputs.value_gate:
            self.value_gate = GateLogits("sigmoid-head", self.H, self.V)
            self.parts["value_gate"] = self.value_gate.in_features
        self.power = nn.Parameter(torch.empty(self.H)) if self.spec.inputs.by_length else None  # c of n^σ(c)

    def _build_memory(self) -> None:
        spec, rows = self.spec, self.spec.memory_rows(self.K)
        self.decay = self.bonus = self.residual = self.general = self.levels = self.ridge = None
        if spec.decay.kind != "none":
            self.decay = DECAYS[spec.decay.kind](spec.decay, self.H, rows, self.depth)
            self.parts["decay"] = self.decay.in_features
        if spec.write.sigmoid or spec.write.beta in ("exp", "trapezoid"):
            self.parts["beta"] = self.H * (rows if spec.write.erase == "channel" else spec.write.steps)
        if spec.write.erase == "channel":
            self.parts["write"] = self.H * self.V
        if spec.write.erase != "beta":
            self.general = GeneralDelta(spec.write.erase, self.H, self.scale)
        if spec.write.residual_chunk is not None:
            self.residual = ResidualDelta(spec.write.residual_chunk, self.H * spec.memories_per_head)
        if spec.read.levels is not None:
            self.levels = LogLinear(spec.read.levels, self.H * spec.memories_per_head)
            self.parts["levels"] = self.H * spec.read.levels
        if spec.read.ridge_steps is not None:
            self.ridge = RidgeRead(spec.read.ridge_steps, self.H * spec.memories_per_head, rows)
        if spec.read.bonus:
            self.bonus = nn.Parameter(torch.empty(self.H, rows))

    def _build_readout(self) -> None:
        read = self.spec.read
        size = weight_size(read, self.H, self.V)
        self.norm_weight = None if size is None else nn.Parameter(torch.empty(size))
        biased = size if read.norm in ("group", "layer") else None
        self.norm_bias = None if biased is None else nn.Parameter(torch.empty(biased))
        self.skip = nn.Parameter(torch.empty(self.H)) if read.skip else None
        self.gate = None
        if read.gate != "none":
            self.gate = GateLogits(read.gate, self.H, self.V, read.gate_bias)
            self.parts["gate"] = self.gate.in_features

    def _build_competition(self, hidden_size: int) -> None:
        spec, sizes, steps = self.spec.competition, (hidden_size, self.H, self.Hq), self.spec.write.steps
        self.read_place, self.write_place = (spec.read, spec.write) if spec else ("none", "none")
        self.freezes = spec is not None and spec.freeze
        self.read_competition = HeadCompetition(spec, *sizes, self.K) if spec and spec.read != "none" else None
        rank = self.spec.memories_per_head
        written = *sizes, steps * self.K, rank
        self.write_competition = HeadCompetition(spec, *written) if spec and spec.write != "none" else None
        self.choice = MemoryChoice(rank, self.H, self.K) if rank > 1 else None

    @property
    def logit_scale(self) -> float:
        """The factor of the logits q · k."""
        return 1.0 if self.spec.read.scale == "one" else self.K**-0.5

    @property
    def scale(self) -> float:
        """The factor of q in the recurrence: 1 for Taylor features, which have that of the logits."""
        return self.logit_scale if self.features is None else 1.0

    @property
    def recurrence(self) -> nn.Module | None:
        """The module that computes the recurrence, by calls of `linear_attention` or not; None: one call of it."""
        return next((m for m in (self.residual, self.general, self.levels, self.ridge) if m is not None), None)

    @property
    def static_shapes(self) -> bool:
        """Not with parts that are laid out by the lengths of the sequences, except for an operator of a graph."""
        return self.residual is None and (self.general is None or torch.compiler.is_compiling())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the layer's own parameters; its parts initialize theirs."""
        for ones in (self.norm_weight, self.skip):
            if ones is not None:
                ones.fill_(1)
        if self.spec.read.norm == "group" and self.bonus is not None:  # RWKV's initialization
            self.norm_weight.fill_(self.share**0.7)
        if self.norm_bias is not None:
            self.norm_bias.zero_()
        if self.power is not None:
            self.power.fill_(0.5)
        if self.decay is not None and self.decay.starts_fixed:
            self.part("decay").zero_()
        if self.in_proj.bias is not None:
            self.in_proj.bias.zero_()
        if self.bonus is not None:
            n = self.bonus.numel()
            i = torch.arange(n)
            zigzag = 0.1 * ((i + 1) % 3 - 1)
            self.bonus.copy_((self.depth * (1 - i / max(n - 1, 1)) + zigzag).view_as(self.bonus))

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        mixed = {name: self.parts[name] for name in "qkv" if name in self.parts}
        return {"in_proj.weight": self.parts, "in_proj.bias": self.parts, "conv.weight": mixed, "conv.bias": mixed}

    def part(self, name: str) -> Tensor:
        """Returns the rows of in_proj's weight that project to q, k, v, value_gate, decay, beta, write or gate."""
        return self._split(self.in_proj.weight, 0)[name]

    def _split(self, x: Tensor, dim: int) -> dict[str, Tensor]:
        return dict(zip(self.parts, x.split(list(self.parts.values()), dim), strict=True))
