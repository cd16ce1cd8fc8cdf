"""`LinearMixer`, the layer of every MixerSpec: inputs, gates, features, the recurrence, and the readout.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention import linear_attention, step
from ...ops.backends.native.library import DTYPES
from ...ops.backends.native.program import Program
from ...ops.call import accumulator, product
from ...ops.derivatives import has_address
from ...ops.dispatch import has
from ...ops.modules import is_plain
from ...ops.parallel.context import current
from ...ops.sequences import Sequences
from ...spec.decay import STEPPED
from ...spec.linear import HEAD_NORMS, SUMS
from ...utils.device import interpreted
from ..base import may_write
from ..maps import mixed, wanted
from ..rotary import Angles, rotary, rotate
from .convolution import convolve
from .features import FEATURE_MAPS, QK_NORMS, divided_by_length
from .input_gate import Stabilized, stabilized
from .mamba3 import trapezoid, turned
from .parameters import LinearParameters
from .readout import GATES, NORM_FLOORS, affine, normalized
from .steps import as_tokens
from .token import MixerState, run_mixer
from .token_shift import project

ALIGNED = 16  # numbers; a GPU's matrix products are fast for widths that are a multiple of it


class Gates(NamedTuple):
    """What head competition computes for each token and head, [B, T, H]; None for what the spec does not have."""

    read: Tensor | None  # the share of what a head reads
    write: Tensor | None  # the share of what a head writes, or its logarithm for competition.write="beta"
    choice: Tensor | None  # [B, T, H · R], the share of each of a head's R memories in what the head reads


class LinearMixer(LinearParameters):
    """The linear-time mixer of a MixerSpec.

    Args:
        spec: kinds and sizes of the layer's parts.
        hidden_size: D.
        num_heads: H, unless spec.heads.count sets it.
        layer_idx, num_layers: index of the layer and depth of the model, for RWKV-6's initialization.
        norm_eps: epsilon of the norm after the readout.
        rope_theta: base of the rotary frequencies.
    """

    no_weight_decay = ("bonus",)

    @property
    def splits(self) -> bool:
        return self.recurrence is None and self.spec.write.beta != "exp" and not self.spec.inputs.turns

    def run(
        self, x: Tensor, state: MixerState | None, sequences: Sequences, in_place: bool = False
    ) -> tuple[Tensor, MixerState]:
        inputs, conv, shift = self._inputs(x, state, sequences)
        tokens = None if state is None else state.tokens
        positions = sequences.positions(tokens, x) if self.spec.counts_tokens else None
        gates = self._gates(inputs, x, positions)
        turns, angles = self._turns(inputs, state, sequences)
        q, k = self._features(inputs["q"], 0, positions, turns), inputs["k"]
        if "k" in self.parts:
            k = self._features(self._keys(k), 1, positions, turns)
        v = self._values(inputs, positions, sequences)
        stable = self._stabilized(inputs, state, sequences)
        if self._sums_outside():
            q, k = q.to(accumulator(q)), k.to(accumulator(k))
        tensors = {"q": q, "k": k, **self._updates(inputs, gates)}
        if self.levels is not None:
            tensors["levels"] = self._per_memory(inputs["levels"].unflatten(-1, (self.H, -1)))
        trapezoidal = self.spec.write.beta == "trapezoid"
        recur = partial(self._recur_trapezoidally, inputs) if trapezoidal else self._recur

        def mix(v: Tensor, **known: Any) -> tuple[Any, ...]:
            if self._sums_outside():  # one more column is the sum of weights, in the accumulator's precision
                v = F.pad(v, (0, 1), value=1.0).to(accumulator(v))
            out, *after = recur(tensors | {"v": self._per_memory(v)}, state, sequences, in_place, **known)
            return self._divided(out, positions, stable), *after

        out, memory, before, *history = self._mixed(mix, v, tensors, state, sequences)
        y = self._read_out(out.to(inputs["v"].dtype), inputs, gates, sequences)
        peak, shift = None if stable is None else stable.last, next(iter(history), shift)
        return y, MixerState(memory, conv, shift, self._count(tokens, x, sequences), before, peak, angles)

    def _mixed(
        self,
        mix: Callable[..., Any],
        v: Tensor,
        tensors: dict[str, Any],
        state: MixerState | None,
        sequences: Sequences,
    ) -> tuple[Any, ...]:
        """Calls mix(v), which has a map if a token has one value, of the β of v if they depend on the values."""
        if self.spec.write.steps > 1:
            return mix(v)
        if self.residual is None or wanted() is None:
            return mixed(mix, v)
        op, given = partial(self.op, **self._settings(), backend=self.backend), tensors | {"v": self._per_memory(v)}
        return mixed(mix, v, linear=partial(mix, beta=self.residual.strengths(op, given, state, sequences)))

    def run_in_place(self, x: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        program, _ = self.token_program(x)
        if program is not None:
            return run_mixer(program, self, x, state)
        sequences = Sequences(x, None)
        state = self.checked(x, state, sequences)
        return self.run(x, state, sequences, in_place=may_write(state))

    def token_program(self, x: Tensor) -> tuple[Program | None, str | None]:
        """Returns (the native program that computes x [B, T, D] in place, None), or (None, why there is none)."""
        if torch.compiler.is_compiling():
            return None, "a graph is traced"
        if x.dim() != 3 or x.shape[1] != 1 or x.shape[2] != self.in_proj.in_features:
            return None, "it takes one token of each sequence"
        if type(self) is not LinearMixer:
            return None, f"the mixer is a {type(self).__name__}"
        if not (x.is_cpu and has_address(x)) or x.dtype not in DTYPES:
            return (
                None,
                f"it runs on the CPU, in float32 and bfloat16; x is a {type(x).__name__} of {x.dtype} on {x.device}",
            )
        program, reason = self.program.find(self)
        if program is not None and not program.has_dtype(x.dtype):
            return None, f"the weights have another dtype than x, {x.dtype}"
        return program, reason

    # --- inputs ------------------------------------------------------------------------------------------------------

    def _inputs(self, x: Tensor, state: MixerState | None, sequences: Sequences):
        """Returns q, k [B, T, Hq, K], v [B, T, H, V] after the short convolution, and the inputs [B, T, ·] of decay, β
        and output gate, by name; and the next states of convolution and token shift, if any. With n steps per token, K
        of k and V of v are n times as large."""
        parts, shift = self._project(x, state, sequences)
        conv = None
        if self.conv is not None:
            qkv = parts.pop("qkv") if "qkv" in parts else torch.cat([parts[name] for name in "qkv"], -1)
            qkv, conv = convolve(self.conv, qkv, None if state is None else state.conv, sequences, self.backend)
            parts |= dict(zip("qkv", qkv.split(list(self.parts.values())[:3], -1), strict=True))
        for name, heads in (("q", self.Hq), ("k", self.Hq), ("v", self.H)):
            if name in parts:
                parts[name] = parts[name].unflatten(-1, (heads, -1))
        if self.decay is not None and self.spec.decay.kind in STEPPED:
            parts["log_decay"], parts["dt"] = sequences.tokenwise(self.decay, parts["decay"], step_size=True)
        elif self.decay is not None:
            parts["log_decay"] = sequences.tokenwise(self.decay, parts["decay"])
        if "k" not in parts:
            parts["k"] = -torch.expm1(parts["log_decay"]).to(parts["q"].dtype)
        parts["v"] = FEATURE_MAPS[self.spec.inputs.value_map](parts["v"])
        return parts, conv, shift

    def _project(self, x: Tensor, state: MixerState | None, sequences: Sequences):
        """Returns the parts of the input projection, [B, T, size] each, and the next state of the token shift, if any,
        which computes another input for each part. Without it, q, k and v of a convolution are one part, "qkv", so that
        nothing copies them."""
        names, sizes = list(self.parts), list(self.parts.values())
        if self.shift is not None:
            before, history = sequences.shift(x, None if state is None else state.shift)
            streams = self.shift(x, before)
            parts = project(self.in_proj, sequences, [streams.get(name, x) for name in names], sizes)
            return dict(zip(names, parts, strict=True)), history
        if self.conv is not None:
            names, sizes = ["qkv", *names[3:]], [sum(sizes[:3]), *sizes[3:]]
        return dict(zip(names, self._projected(x, sizes, sequences), strict=True)), None

    def _projected(self, x: Tensor, sizes: list[int], sequences: Sequences) -> Sequence[Tensor]:
        """Returns the parts of in_proj(x), [B, T, size] each.

        In training on a GPU, the input of a convolution is a product of its own, whose gradient need not be copied to
        those of the other parts, and their width is rounded up, because products of odd widths are slow there."""
        first, rest = sizes[0], sum(sizes[1:])
        on_gpu = (x.is_cuda or interpreted()) and torch.is_grad_enabled()
        if not (self.conv is not None and rest and on_gpu and is_plain(self.in_proj, nn.Linear)):
            return sequences.tokenwise(self.in_proj, x).split(sizes, -1)
        more, bias = -rest % ALIGNED, self.in_proj.bias
        weights = self.in_proj.weight.split([first, rest])
        biases = (None, None) if bias is None else (bias[:first], F.pad(bias[first:], (0, more)))
        others = F.linear(x, F.pad(weights[1], (0, 0, 0, more)) if more else weights[1], biases[1])
        return F.linear(x, weights[0], biases[0]), *others.split([*sizes[1:], more], -1)[:-1]

    # --- gates and features ------------------------------------------------------------------------------------------

    def _gates(self, inputs: dict[str, Tensor], x: Tensor, positions: Tensor | None) -> Gates:
        q, k, read, write = inputs["q"], inputs["k"], None, None
        if self.read_competition is not None:
            read = self.read_competition.gate(q, x, positions)
        if (writing := self.write_competition) is not None:
            write = (writing if self.write_place == "beta" else writing.gate)(k, x, positions)
        return Gates(read, write, None if self.choice is None else self.choice(q))

    def _turns(self, inputs: dict[str, Tensor], state: MixerState | None, sequences: Sequences):
        """Returns the rotation of inputs.turns and the next angles; None without it."""
        if "turns" not in inputs:
            return None, None
        return turned(inputs["turns"], inputs["dt"], None if state is None else state.angles, sequences)

    def _keys(self, k: Tensor) -> Tensor:
        """[B, T, Hq, n K] -> [B, T, Hq n, K], for n steps per token."""
        return k if (n := self.spec.write.steps) == 1 else k.unflatten(-1, (n, -1)).flatten(2, 3)

    def _features(self, heads: Tensor, which: int, positions: Tensor | None, turns: Angles | None) -> Tensor:
        """Returns the q (which=0) or k (1) of the recurrence, [B, T, Hq, rows of the memory]; of H heads if they have
        biases."""
        inputs = self.spec.inputs
        if inputs.rotary_first:
            heads = self._rotated(heads, positions)
        heads = FEATURE_MAPS[inputs.feature_map](heads)
        heads = QK_NORMS[inputs.qk_norm](heads) if self.qk_norm is None else self.qk_norm(heads, which)
        if inputs.rotary and not inputs.rotary_first:
            heads = self._rotated(heads, positions)
        heads = heads if turns is None else rotate(heads, turns)
        return heads if self.features is None else self.features(heads * self.logit_scale**0.5)

    def _rotated(self, heads: Tensor, positions: Tensor | None) -> Tensor:
        assert positions is not None
        return rotary(heads, positions, self.rope_theta)

    def _values(self, inputs: dict[str, Tensor], positions: Tensor | None, sequences: Sequences) -> Tensor:
        """Returns v [B, T, H, V] with the gate of the spec, over its power of the length."""
        v = inputs["v"]
        if self.value_gate is not None:
            v = v * torch.sigmoid(sequences.tokenwise(self.value_gate, inputs["value_gate"]))
        if "write" in inputs:
            v = v * torch.sigmoid(inputs["write"].view_as(v))
        if self.power is not None:
            assert positions is not None
            v = divided_by_length(v, positions + 1, self.power)
        return v

    def _per_memory(self, x: Tensor | None) -> Any:
        """Repeats a per-head tensor [H, ·] or [B, T, H, ·] once per memory of the head."""
        if x is None or self.choice is None:
            return x
        return x.repeat_interleave(self.spec.memories_per_head, 2 if x.dim() > 2 else 0)

    # --- the recurrence ----------------------------------------------------------------------------------------------

    def _recur(
        self, tensors: dict[str, Any], state: MixerState | None, sequences: Sequences, in_place: bool,
        beta: Tensor | None = None,
    ):  # fmt: skip
        """Returns what each head reads [B, T, H, V], the next memory, and the next `before` (residual.py). beta: β of
        write.residual_chunk, if it is known."""
        memory, before, settings = None if state is None else state.memory, None, self._settings()
        tensors = tensors if beta is None else tensors | {"beta": beta}
        if (n := self.spec.write.steps) > 1:
            tensors = as_tokens(tensors, n)
        op = partial(self.op, **settings, backend=self.backend)
        if self.recurrence is not None and beta is None:
            out, memory, before = self.recurrence(op, tensors, state, sequences)
        elif self.op is linear_attention and sequences.T == 1 and not sequences.packed and current() is None:
            backend = self.backend if self.backend == "auto" or has(self.backend, "step") else "torch"
            in_place = in_place and memory is not None and memory.is_contiguous()
            for i in range(n):
                token = {name: _at(y, i) for name, y in tensors.items()}
                out, memory = step(**token, **settings, state=memory, backend=backend, in_place=in_place)
            out = out[:, None]
        else:
            bounds = sequences.bounds if n == 1 or sequences.bounds is None else n * sequences.bounds
            where = {"initial_state": memory, "cu_seqlens": bounds}
            out, memory = self.op(**tensors, **settings, **where, backend=self.backend)
            out = out if n == 1 else out[:, n - 1 :: n]
        return self._over_memories(out), memory, before

    def _over_memories(self, out: Tensor) -> Tensor:
        """Sums what the memories of a head give."""
        return out if self.choice is None else out.unflatten(2, (self.H, -1)).sum(3)

    def _recur_trapezoidally(
        self, inputs: dict[str, Tensor], tensors: dict[str, Any], state: MixerState | None, sequences: Sequences,
        in_place: bool,
    ):  # fmt: skip
        """Computes `_recur` for the trapezoidal update, and the next history of the token before."""
        q, k, v, log_decay = (tensors[name] for name in ("q", "k", "v", "log_decay"))
        history = None if state is None else state.shift
        if (gate := tensors["write_gate"]) is not None:
            v = (v * gate[..., None]).to(v.dtype)
        share, dt = tensors["beta"], self._per_memory(inputs["dt"])
        now, writes, history = trapezoid(share, dt, log_decay, k, v, history, sequences)
        out, memory, before = self._recur(tensors | writes | {"write_gate": None}, state, sequences, in_place)
        weight = (q * k).sum(-1).to(now).repeat_interleave(now.shape[2] // q.shape[2], 2) * now * self.scale
        weight = product(weight, tensors["read_gate"])
        return out + self._over_memories(weight[..., None] * v), memory, before, history

    def _settings(self) -> dict[str, Any]:
        """The arguments of `linear_attention` and `step` that do not depend on the tokens."""
        return {
            "rule": self.spec.write.rule, "bonus": self._per_memory(self.bonus), "scale": self.scale,
            "normalize": self.spec.read.norm == "sum",
        }  # fmt: skip

    def _updates(self, inputs: dict[str, Tensor], gates: Gates) -> dict[str, Tensor | None]:
        """The arguments of `linear_attention` per token, except q, k and v."""
        in_beta = self.write_place == "beta"
        log_decay, beta = self._decay_and_beta(inputs, gates.write if in_beta else None)
        write = None if in_beta else gates.write
        if gates.write is not None and log_decay is not None and self.freezes:
            written = gates.write > (-math.inf if in_beta else 0)
            log_decay = torch.where(written if log_decay.dim() < 4 else written[..., None], log_decay, 0)
        read = self._per_memory(gates.read) if self._read_gate_inside() else None
        return {"log_decay": log_decay, "beta": beta, "write_gate": write, "read_gate": product(read, gates.choice)}

    def _stabilized(
        self, inputs: dict[str, Tensor], state: MixerState | None, sequences: Sequences
    ) -> Stabilized | None:
        """Replaces β's part of an exponential gate by log_decay and β. Returns them with the gate's running maximum;
        None for another β."""
        if self.spec.write.beta != "exp":
            return None
        peak = None if state is None else state.peak
        stable = stabilized(inputs["beta"], inputs.get("log_decay"), peak, sequences)
        inputs |= {"log_decay": stable.log_decay, "beta": stable.beta}
        return stable

    def _decay_and_beta(self, inputs: dict[str, Tensor], log_write: Tensor | None):
        """Returns log_decay and β, or β's logit if β also depends on the memory (write.residual_chunk).
        With n steps per token, β is [B, T, H, n], and with write.erase="channel" [B, T, H, rows of the memory]."""
        log_decay, kind = self._per_memory(inputs.get("log_decay")), self.spec.write.beta
        if kind == "dt":
            return log_decay, self._per_memory(inputs["dt"])
        if "beta" not in inputs:
            return log_decay, None
        several = self.spec.write.steps > 1 or self.spec.write.erase == "channel"
        logits = self._per_memory(inputs["beta"].unflatten(-1, (self.H, -1)) if several else inputs["beta"])
        if kind in ("exp", "trapezoid"):
            return log_decay, logits
        logits = logits.to(accumulator(logits))
        if log_write is not None:
            logits = logits + (log_write[..., None] if several else log_write)
        if self.residual is not None:
            return log_decay, logits
        return log_decay, logits.sigmoid() * (2 if kind == "sigmoid-2" else 1)

    def _count(self, tokens: Tensor | None, x: Tensor, sequences: Sequences) -> Tensor | None:
        """Returns the number of tokens of each sequence up to the end of x, if the layer needs it."""
        if not self.spec.counts_tokens:
            return tokens
        return sequences.lengths(x) if tokens is None else tokens + sequences.lengths(x)

    # --- the readout -------------------------------------------------------------------------------------------------

    def _read_gate_inside(self) -> bool:
        """Whether `linear_attention` applies the read gate: if the spec puts the gate on q, or if neither norm nor skip
        follows. Otherwise `_read_out` applies the gate after the norm, which would cancel it."""
        read = self.spec.read
        inside = self.read_place == "query" and not self._sums_outside()  # whose sum of weights q would gate as well
        return inside or (read.norm in ("none", "sum") and not read.skip and not self._sums_outside())

    def _sums_outside(self) -> bool:
        """Whether the layer, and not `linear_attention`, divides by the sum of weights."""
        return self.spec.sums and self.spec.read.norm != "sum"

    def _divided(self, out: Tensor, positions: Tensor | None, stable: Stabilized | None) -> Tensor:
        """Divides what is read by the sum of weights and by the length, if the spec says so."""
        if stable is not None:
            out = stable.divided(out)
        elif self.spec.read.norm == "detached":
            out = out[..., :-1] / out[..., -1:].clamp(min=1).detach()
        if self.spec.read.by_length:
            assert positions is not None
            out = out.to(accumulator(out)) / (positions + 1)[..., None, None]
        return out

    def _read_out(self, out: Tensor, inputs: dict[str, Tensor], gates: Gates, sequences: Sequences) -> Tensor:
        """Skip, norm, read gate, output gate and output projection: [B, T, H, V] -> [B, T, D]."""
        read, read_gate = self.spec.read, None
        if gates.read is not None and not self._read_gate_inside():
            read_gate = gates.read[..., None]
        if self.skip is not None:
            out = out + self.skip[:, None] * inputs["v"]
        if read_gate is not None and read.norm not in HEAD_NORMS:  # a joint norm does not cancel it
            out, read_gate = out * read_gate.to(out.dtype), None
        output_gate = None
        if self.gate is not None:
            output_gate = GATES[self.gate.activation](sequences.tokenwise(self.gate, inputs["gate"]))
        if output_gate is not None and read.order == "gate-norm":
            out, output_gate = out * output_gate, None
        out = self._normalize(out)
        out = out if read_gate is None else out * read_gate.to(out.dtype)
        out = out if output_gate is None else out * output_gate
        return sequences.tokenwise(self.o_proj, out.flatten(-2))

    def _normalize(self, x: Tensor) -> Tensor:
        """Applies the norm to x [B, T, H, V], in the accumulator's precision."""
        if (kind := self.spec.read.norm) in ("none", *SUMS):
            return x
        weight = self.norm_weight
        narrow = kind in ("rms", "rms-joint") and (weight is None or weight.dtype == x.dtype)
        wide = x if narrow else x.to(accumulator(x))  # PyTorch's RMSNorm has that precision inside
        if kind in NORM_FLOORS:
            return affine(normalized(wide, kind, NORM_FLOORS[kind]), weight, self.norm_bias).to(x.dtype)
        if kind == "group":
            centred = F.layer_norm(wide, x.shape[-1:], eps=self.group_eps)
            return (centred * weight.view(x.shape[-2:]) + self.norm_bias.view(x.shape[-2:])).to(x.dtype)
        weight = None if weight is None else weight.to(wide.dtype)
        if kind == "rms-groups":
            groups = wide.unflatten(-2, (self.Hq, -1)).flatten(-2)
            normal = F.rms_norm(groups, groups.shape[-1:], None, self.norm_eps).view_as(x)
            return (normal * self.norm_weight.to(wide.dtype).view(x.shape[-2:])).to(x.dtype)
        wide = wide.flatten(-2) if kind == "rms-joint" else wide
        return F.rms_norm(wide, wide.shape[-1:], weight, self.norm_eps).view_as(x).to(x.dtype)


def _at(x: Tensor | None, i: int) -> Any:
    """Selects a token of [B, T, ·]; a fixed decay [H] has no tokens."""
    return x if x is None or x.dim() == 1 else x[:, i]
