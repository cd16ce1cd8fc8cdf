"""`LinearMixer`, the layer of every MixerSpec: projections, q and k features, the recurrence, and the readout.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import linear_attention, step
from ...ops.backends.torch.tiles import product
from ...ops.call import accumulator
from ...ops.dispatch import choose, has
from ...ops.gated_norm import GatedNorm
from ...ops.parallel.context import current
from ...ops.query_key import QueryKey
from ...ops.sequences import Sequences
from ..base import may_write
from .competition import HeadCompetition
from .convolution import convolve
from .decays import activated
from .feature_maps import FEATURE_MAPS
from .parameters import LinearParameters
from .readout import GROUP_NORM_EPS
from .streams import project
from .token import MixerState


class LinearMixer(LinearParameters):
    """The linear-time mixer of a MixerSpec.

    Args:
        spec: kinds and sizes of the layer's parts.
        hidden_size: D.
        num_heads: H, unless spec.heads.count sets it.
        layer_idx, num_layers: index of the layer and depth of the model, for RWKV-6's initialisation.
        norm_eps: epsilon of the norm after the readout.
        rope_theta: base of the rotary frequencies.
    """

    no_weight_decay = ("bonus",)

    @property
    def splits(self) -> bool:
        return self.residual is None

    def run(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None, in_place: bool = False
    ) -> tuple[Tensor, MixerState]:
        sequences = Sequences(x, cu_seqlens)
        inputs, shift = self._project(x, state, sequences)
        q, k, v, conv = self._convolve(inputs, state, sequences)
        tokens = state.tokens if state is not None else None
        positions = sequences.positions(tokens, x) if self.spec.counts_tokens else None
        choice = None if self.choice is None else self.choice(q)
        q, read = self._gate_and_shape(q, self.read_competition, False, x, positions)
        k, write = self._gate_and_shape(k, self.write_competition, self.write_place == "beta", x, positions)
        gates = read, write, choice
        tensors: dict[str, Any] = {"q": q, "k": k, "v": self._per_memory(v), **self._decay_and_gates(inputs, gates)}
        memory, before = None if state is None else state.memory, None
        if self.residual is not None:
            op = partial(self.op, **self._settings(), backend=self.backend)
            out, memory, before = self.residual(op, tensors, state, sequences)
        elif self.op is linear_attention and x.shape[1] == 1 and cu_seqlens is None and current() is None:
            token: dict[str, Any] = {name: _now(y) for name, y in tensors.items()}
            token |= {"state": memory, "backend": self._backend("step"), "in_place": in_place}
            out, memory = step(**token, **self._settings())
            out = out[:, None]
        else:
            settings = self._settings() | {"initial_state": memory, "cu_seqlens": cu_seqlens}
            out, memory = self.op(**tensors, **settings, backend=self.backend)
        if self.choice is not None:
            out = out.unflatten(2, (self.H, -1)).sum(3)
        y = self._read_out(out, v, inputs.get("gate"), None if self._read_gate_inside() else read)
        if self.spec.counts_tokens:
            tokens = sequences.lengths(x) if tokens is None else tokens + sequences.lengths(x)
        return y, MixerState(memory, conv, shift, tokens, before)

    def run_in_place(self, x: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        weights = self.fused.weights(self) if type(self) is LinearMixer else None
        layer, _ = self.fused.find(self, x, weights)
        if layer is None:
            state = self.checked(x, state, None, None)
            return self.run(x, state, None, in_place=may_write(state))
        state = self.fused.writable(layer, state, self, x)
        if self.shift is None:
            projected = self.in_proj(x)
        else:
            inputs, shift = self._project(x, state, Sequences(x, None))
            projected, state = torch.cat(list(inputs.values()), -1), state._replace(shift=shift)
        return self.o_proj(self.fused.run(layer, weights, projected[:, 0], x, state)[:, None]), state

    def _project(self, x: Tensor, state: MixerState | None, sequences: Sequences):
        """Returns the parts of the input projection, [B, T, size] each, and the next state of the token shift, if any,
        which computes another input for each part."""
        if self.shift is None:
            projected = self.in_proj(x)
            return self._split(projected, -1) if self.conv is None else self._together(projected), None
        before, history = sequences.shift(x, None if state is None else state.shift)
        streams = self.shift(x, before)
        found = project(self.in_proj, [streams.get(name, x) for name in self.parts], list(self.parts.values()))
        return dict(zip(self.parts, found, strict=True)), history

    def _together(self, projected: Tensor) -> dict[str, Tensor]:
        """Returns the parts of the input projection, with q, k and v in one, "qkv", so that nothing copies them."""
        names, sizes = list(self.parts), list(self.parts.values())
        found = projected.split([sum(sizes[:3]), *sizes[3:]], -1)
        return dict(zip(["qkv", *names[3:]], found, strict=True))

    def _convolve(self, inputs: dict[str, Tensor], state: MixerState | None, sequences: Sequences):
        """Returns q, k [B, T, Hq, K], v [B, T, H, V] and the next state of the short convolution, if any."""
        conv = None
        if self.conv is None:
            q, k, v = (inputs[name] for name in "qkv")
        else:
            history = None if state is None else state.conv
            qkv = inputs["qkv"] if self.shift is None else torch.cat([inputs[name] for name in "qkv"], -1)
            qkv, conv = convolve(self.conv, qkv, history, sequences, self._backend("convolution"))
            q, k, v = qkv.split(list(self.parts.values())[:3], -1)
        return (
            q.unflatten(-1, (self.Hq, self.K)),
            k.unflatten(-1, (self.Hq, self.K)),
            v.unflatten(-1, (self.H, -1)),
            conv,
        )

    def _per_memory(self, x: Tensor | None) -> Any:
        """Repeats a per-head tensor [H, ·] or [B, T, H, ·] once per memory of the head."""
        return (
            x
            if x is None or self.choice is None
            else x.repeat_interleave(self.spec.memories_per_head, 2 if x.dim() > 2 else 0)
        )

    def _gate_and_shape(
        self, heads: Tensor, competition: HeadCompetition | None, log: bool, x: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the q or k of the recurrence, and the gates [B, T, H] of its competition, if any, or their logarithm.

        A backend computes both at once if the gates need no more than the competition's weights."""
        fused = None if competition is None else competition.in_query_key(log)
        y, gates = self._shape(heads, positions if self.spec.inputs.rotary else None, fused or {})
        if competition is not None and fused is None:
            log_gates = competition(heads, x, positions, self._backend("query_key"))
            gates = log_gates if log else log_gates.exp()
        return y, gates

    def _shape(
        self, heads: Tensor, positions: Tensor | None, competition: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the q or k of the recurrence, and gates. Taylor features are of rotated heads, a norm is rotated."""
        inputs = self.spec.inputs
        if self.features is not None:
            y, gates = self._query_key(heads, positions, "none", competition)
            return self._query_key(self.features(y * self._scale() ** 0.5), None, inputs.qk_norm, {})[0], gates
        if inputs.feature_map == "identity":
            return self._query_key(heads, positions, inputs.qk_norm, competition)
        gates = self._query_key(heads, None, "none", competition)[1]
        return self._query_key(FEATURE_MAPS[inputs.feature_map](heads), positions, inputs.qk_norm, {})[0], gates

    def _query_key(self, heads: Tensor, positions: Tensor | None, norm: str, competition: dict[str, Any]):
        call = QueryKey(heads, positions, norm=norm, theta=self.rope_theta, **competition)
        if not (call.changes_x or competition):
            return heads, None
        return choose("query_key", self._backend("query_key"), call).run(call)

    def _backend(self, operation: str) -> str:
        """Returns the name of the backend that computes an operation of the layer."""
        return self.backend if self.backend == "auto" or has(self.backend, operation) else "torch"

    def _scale(self) -> float:
        """The scale of the logits."""
        return 1.0 if self.spec.read.scale == "one" else self.K**-0.5

    def _settings(self) -> dict[str, Any]:
        """The arguments of `linear_attention` and `step` that do not depend on the tokens."""
        scale = self._scale() if self.features is None else 1.0
        normalise = self.spec.read.norm == "sum"
        return {
            "rule": self.spec.write.rule, "bonus": self._per_memory(self.bonus), "normalise": normalise, "scale": scale,
        }  # fmt: skip

    def _decay_and_gates(self, inputs: dict[str, Tensor], gates: tuple) -> dict[str, Tensor | None]:
        """The arguments of `linear_attention` per token, except q, k and v."""
        read, write, choice = gates
        log_decay, beta = self._decay_and_beta(inputs, write)
        return {
            "log_decay": log_decay,
            "beta": beta,
            "write_gate": write if self.write_place == "value" else None,
            "read_gate": product(self._per_memory(read) if self._read_gate_inside() else None, choice),
        }

    def _decay_and_beta(self, inputs: dict[str, Tensor], write: Tensor | None):
        """Returns log_decay and β, or β's logit if β also depends on the memory (write.residual_chunk)."""
        if self.spec.write.beta == "dt":
            return tuple(self._per_memory(y) for y in self.decay(inputs["decay"], steps=True))
        log_decay = None
        if self.decay is not None:
            log_decay = self._per_memory(self.decay(inputs["decay"], self._backend("control")))
        if "beta" not in inputs:
            return log_decay, None
        logits = self._per_memory(inputs["beta"])
        if self.residual is not None or self.write_place == "beta":
            logits = logits.to(accumulator(logits))
        if write is not None and self.write_place == "beta":
            logits = logits + write
        if self.residual is not None:
            return log_decay, logits
        return log_decay, activated(self._backend("control"), logits, None, None, "beta")

    def _read_gate_inside(self) -> bool:
        """Whether `linear_attention` applies the read gate: if the spec puts the gate on q, or if neither norm nor skip
        follows. Otherwise `_read_out` applies the gate after the norm, which would cancel it."""
        read = self.spec.read
        return self.read_place == "query" or (read.norm in ("none", "sum") and not read.skip)

    def _read_out(self, out: Tensor, v: Tensor, gate_input: Tensor | None, strength: Tensor | None) -> Tensor:
        read = self.spec.read
        if self.skip is not None:
            out = out + self.skip[:, None] * v
        if strength is not None and read.norm not in ("rms", "group"):
            out, strength = out * strength[..., None].to(out.dtype), None
        eps = GROUP_NORM_EPS if read.norm == "group" else self.norm_eps
        logits, activation = (None, "none") if self.gate is None else (self.gate(gate_input), self.gate.activation)
        norm = GatedNorm(
            out, logits, strength, self.norm_weight, self.norm_bias, read.norm, activation, read.order, eps
        )
        return self.o_proj(self._normalise(norm).flatten(-2))

    def _normalise(self, call: GatedNorm) -> Tensor:
        return choose("gated_norm", self._backend("gated_norm"), call).run(call)


def _now(x: Tensor | None) -> Tensor | None:
    """Removes the token dimension of [B, 1, ·]; a fixed decay [H] has none."""
    return x if x is None or x.dim() == 1 else x[:, 0]
