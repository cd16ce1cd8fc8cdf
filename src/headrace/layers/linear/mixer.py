"""`LinearMixer`, the layer of every MixerSpec: a list of stages from the input projection to the output projection.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.attention import linear_attention
from ...ops.backends.base import HasBackend
from ...ops.backends.native.bound import ProgramOf
from ...ops.dispatch import default_backend
from ...ops.sequences import Sequences
from ...spec.linear import MixerSpec
from ...utils.errors import GateWarning
from ..base import Mixer, may_write
from ..rotary import DEFAULT
from .competition import Compete
from .convolution import Convolve
from .decays import Decays
from .features import FeatureMap, QKNorm, Rotate, RotateFirst
from .project import Heads, Positions, Project, ValueMap
from .readout import GROUP_NORM_EPS, Gate, GateFirst, Norm, Out, ReadGate, ReadGateFirst, Skip, gate_and_norm
from .recur import Recur, StepSize, Strength, WeightSum
from .stage import Plugged, Stage, Tokens
from .token import MixerState, find_program, mixer_program, run_mixer

MEMORIES = "competition.memories_per_head"


class LinearMixer(Mixer, HasBackend):
    """The linear-time mixer of a MixerSpec. Its parameters and modules are None for stages that it does not have.

    Args:
        spec: kinds and sizes of the layer's parts.
        hidden_size, num_heads: D and H, unless spec.heads.count sets H.
        layer_idx, num_layers: index of the layer and depth of the model, for RWKV-6's initialization.
        norm_eps: epsilon of the norm after the readout.
        rope_theta: base of the rotary frequencies.
    """

    # The stages in their order. A mixer has those that apply to its spec, and the first recurrence that does.
    INPUTS: ClassVar[tuple[Any, ...]] = (
        Positions, Plugged("shift", "inputs.shift"), Project, Convolve, Heads, ValueMap, Decays,
        Plugged("complement-key", "inputs.key", ("complement",)), Compete,
        Plugged("keys-of-steps", "write.steps"), RotateFirst, FeatureMap, QKNorm,
        Plugged("biased-norm", "inputs.qk_norm", ("rms-bias",)), Rotate, Plugged("turn", "inputs.turns"),
        Plugged("taylor", "inputs.order"), Plugged("value-gate", "inputs.value_gate"),
        Plugged("gate-of-channels", "write.erase", ("channel",)), Plugged("over-length", "inputs.by_length"),
        Plugged("exponential-gate", "write.beta", ("exp",)), Plugged("memories", MEMORIES),
        Plugged("freeze", "competition.freeze"), Strength, StepSize, Plugged("bonus", "read.bonus"),
    )  # fmt: skip
    VALUES: ClassVar[tuple[Any, ...]] = (WeightSum, Plugged("values-of-memories", MEMORIES))
    RECURRENCES: ClassVar[tuple[Any, ...]] = (
        Plugged("trapezoid", "write.beta", ("trapezoid",)), Plugged("steps", "write.steps"),
        Plugged("residual", "write.residual_chunk"), Plugged("erase", "write.erase"), Recur,
    )  # fmt: skip
    SUMS: ClassVar[tuple[Any, ...]] = (
        Plugged("sum-of-memories", MEMORIES), Plugged("divide-by-weights", "write.beta", ("exp",)),
        Plugged("divide-detached", "read.norm", ("detached",)), Plugged("divide-by-length", "read.by_length"),
    )  # fmt: skip
    READOUT: ClassVar[tuple[Any, ...]] = (Skip, ReadGateFirst, GateFirst, Norm, ReadGate, Gate, Out)

    # The parts of in_proj, and the layer's own parameters and modules, in the order of the weights and of an optimizer.
    PARTS: ClassVar[tuple[str, ...]] = "q", "k", "v", "turns", "value_gate", "decay", "beta", "write", "gate"
    PARAMETERS: ClassVar[tuple[str, ...]] = "power", "bonus", "norm_weight", "norm_bias", "skip"
    MODULES: ClassVar[tuple[str, ...]] = (
        "conv", "shift", "qk_norm", "features", "value_gate", "decay", "general", "residual", "gate", "in_proj",
        "o_proj", "read_competition", "write_competition", "choice",
    )  # fmt: skip

    rope: Any = DEFAULT  # the frequencies of rotary positions
    causal: ClassVar[bool] = True  # whether a token sees no later ones
    no_weight_decay = ("bonus",)
    state_kind = MixerState
    op: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self, spec: MixerSpec, *, hidden_size: int, num_heads: int, layer_idx: int = 0, num_layers: int = 1,
        norm_eps: float = 1e-6, rope_theta: float = 10000.0,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.norm_eps, self.rope_theta = spec, spec.read.eps or norm_eps, rope_theta
        self.group_eps, self.hidden_size = spec.read.eps or GROUP_NORM_EPS, hidden_size
        self.op = linear_attention  # may be set to a partial with a form or chunk size
        self.backend = default_backend()  # may be set; PyTorch computes what a backend given by name does not have
        self.H, (self.K, self.V) = spec.num_heads(hidden_size, num_heads), spec.head_dims(hidden_size, num_heads)
        self.Hq = spec.heads.qk_groups or self.H
        self.logit_scale = 1.0 if spec.read.scale == "one" else self.K**-0.5  # of q · k
        self.scale = self.logit_scale if spec.inputs.order is None else 1.0  # of q in the recurrence
        self.state_shapes = spec.state_shapes(hidden_size, num_heads) | ({"tokens": ()} if spec.counts_tokens else {})
        self.depth, self.height = layer_idx / max(num_layers - 1, 1), 1 - layer_idx / num_layers
        self.share = (layer_idx + 1) / num_layers  # fraction of the layers up to and including this one
        self.inputs = _applying(self.INPUTS, spec)
        self.readout = _applying(self.READOUT, replace(spec, heads=replace(spec.heads, count=self.H)))
        self.recur: Any = _applying(self.RECURRENCES, spec)[0]
        self.memory = *_applying(self.VALUES, spec), self.recur, *_applying(self.SUMS, spec)
        self._build(hidden_size)
        for sentence in spec.idle_gates(hidden_size, num_heads):
            warnings.warn(sentence, GateWarning, stacklevel=3)
        self.program, self.made = ProgramOf(mixer_program), self.stages  # for which alone the program stands
        self.part_classes = {name: type(module) for name, module in self.named_modules()}
        self.reset_parameters()

    def _build(self, hidden_size: int) -> None:
        for name in self.PARAMETERS:
            self.register_parameter(name, None)
        for name in self.MODULES:
            self.register_module(name, None)
        steps = self.spec.write.steps  # those of a head are side by side
        self.parts = {"q": self.Hq * self.K, "k": steps * self.Hq * self.K, "v": steps * self.H * self.V}
        for stage in self.stages:
            stage.build(self)
        self.parts = {name: self.parts[name] for name in (*self.PARTS, *self.parts) if name in self.parts}
        self.in_proj = nn.Linear(hidden_size, sum(self.parts.values()), bias=self.spec.inputs.bias)
        self.o_proj = nn.Linear(self.H * self.V, hidden_size, bias=self.spec.read.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the layer's own parameters; its modules initialize theirs."""
        for stage in self.stages:
            stage.reset(self)

    def run(self, x: Tensor, state: Any, sequences: Sequences, in_place: bool = False) -> tuple[Tensor, MixerState]:
        t = Tokens(x, state, sequences, in_place)
        for stage in self.inputs:
            stage(self, t)

        def mix(v: Tensor, strengths: Tensor | None = None) -> tuple[Any, ...]:
            t.v, t.strengths, t.after = v, strengths, {}
            for stage in self.memory:
                stage(self, t)
            return t.out, t.after

        out, after = self.recur.mixed(self, mix, t)
        t.out = out.to(t.parts["v"].dtype)
        for stage in self.readout[gate_and_norm(self, t) :]:
            stage(self, t)
        return t.out, self.state_kind(**t.next | after)

    def run_in_place(self, x: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        program, _ = find_program(self, x)
        if program is not None and (y := run_mixer(program, self, x, state)) is not None:
            return y, state
        sequences = Sequences(x, None)
        state = self.checked(x, state, sequences)
        return self.run(x, state, sequences, in_place=program is None and may_write(state))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in their order."""
        return *self.inputs, *self.memory, *self.readout

    @property
    def splits(self) -> bool:
        return all(stage.splits for stage in self.stages)

    @property
    def static_shapes(self) -> bool:
        return all(stage.static_shapes for stage in self.stages)

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        mixed = {name: self.parts[name] for name in "qkv" if name in self.parts}
        return {"in_proj.weight": self.parts, "in_proj.bias": self.parts, "conv.weight": mixed, "conv.bias": mixed}

    def part(self, name: str) -> Tensor:
        """Returns the rows of in_proj's weight that project to a part."""
        return dict(zip(self.parts, self.in_proj.weight.split(list(self.parts.values())), strict=True))[name]


def _applying(stages: tuple[Any, ...], spec: MixerSpec) -> tuple[Any, ...]:
    return tuple(stage() for stage in stages if stage.applies(spec))
