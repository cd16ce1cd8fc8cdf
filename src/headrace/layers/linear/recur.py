"""The recurrence of a linear mixer, by `headrace.linear_attention` and `headrace.step`, with its write strength β and
what is done to its values.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...ops.attention import linear_attention, step
from ...ops.call import accumulator
from ...ops.dispatch import has
from ...ops.parallel.context import current
from ..maps import mixed
from .stage import Stage, Tokens


class Strength(Stage):
    """β, a sigmoid of its logit or twice that. With competition.write="beta" the logarithm of the write gate is added
    to the logit. With write.residual_chunk β also depends on the memory, and this stage leaves it a logit."""

    field = "write.beta"
    values = ("sigmoid", "sigmoid-2")
    kinds = ("beta",)

    def build(self, mixer: Any) -> None:
        write, rows = mixer.spec.write, mixer.spec.memory_rows(mixer.K)
        mixer.parts["beta"] = mixer.H * (rows if write.erase == "channel" else write.steps)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        spec, t.beta = mixer.spec, t.beta.to(accumulator(t.beta))
        if spec.competition is not None and spec.competition.write == "beta":
            t.beta = t.beta + (t.write[..., None] if t.beta.dim() > 3 else t.write)
            t.write = None
        if spec.write.residual_chunk is None:
            t.beta = t.beta.sigmoid()
            t.beta = 2 * t.beta if spec.write.beta == "sigmoid-2" else t.beta


class StepSize(Stage):
    """β = dt, the step size of the decay."""

    field = "write.beta"
    values = ("dt",)
    kinds = ("beta",)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.beta = t.dt


class Recur(Stage):
    """One call of `linear_attention`, or of `step` for one token."""

    def native(self, mixer: Any) -> dict[str, Any]:
        divides = {"norm": "sum"} if mixer.spec.read.norm == "sum" else {}
        return {"rule": mixer.spec.write.rule, **divides}

    def settings(self, mixer: Any) -> dict[str, Any]:
        """Returns the arguments of `linear_attention` and `step` that do not depend on the tokens."""
        spec, bonus = mixer.spec, mixer.bonus
        if bonus is not None and spec.memories_per_head > 1:
            bonus = bonus.repeat_interleave(spec.memories_per_head, 0)
        norm = spec.read.norm == "sum"
        return {"rule": spec.write.rule, "bonus": bonus, "scale": mixer.scale, "normalize": norm}

    def op(self, mixer: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Returns `linear_attention` with these arguments."""
        return partial(mixer.op, **self.settings(mixer), backend=mixer.backend)

    def tensors(self, t: Tokens) -> dict[str, Any]:
        """Returns the arguments of `linear_attention` and `step` per token."""
        gates = {"write_gate": t.write, "read_gate": t.read_gate}
        return {"q": t.q, "k": t.k, "v": t.v, "log_decay": t.log_decay, "beta": t.beta, **gates}

    def mixed(self, mixer: Any, mix: Callable[..., tuple[Any, ...]], t: Tokens) -> tuple[Any, ...]:
        """Returns mix(v), which has an attention map."""
        return mixed(mix, t.v)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out, memory = self.recur(mixer, t, self.tensors(t))
        t.after["memory"] = memory

    def recur(self, mixer: Any, t: Tokens, tensors: dict[str, Any], n: int = 1) -> tuple[Tensor, Tensor]:
        """Returns what the heads read [B, T, H, V], and the next memory, of n updates per token."""
        memory, bounds = t.before("memory"), t.sequences.bounds
        if mixer.op is linear_attention and t.sequences.T == 1 and not t.sequences.packed and current() is None:
            return self._step(mixer, t.in_place, memory, tensors, n)
        bounds = bounds if n == 1 or bounds is None else n * bounds
        out, memory = self.op(mixer)(**tensors, initial_state=memory, cu_seqlens=bounds)
        return out if n == 1 else out[:, n - 1 :: n], memory

    def _step(self, mixer: Any, in_place: bool, memory: Any, tensors: dict[str, Any], n: int) -> tuple[Tensor, Tensor]:
        backend = mixer.backend if mixer.backend == "auto" or has(mixer.backend, "step") else "torch"
        in_place = in_place and memory is not None and memory.is_contiguous()
        settings = self.settings(mixer)
        for i in range(n):
            token = {name: _at(y, i) for name, y in tensors.items()}
            out, memory = step(**token, **settings, state=memory, backend=backend, in_place=in_place)
        return out[:, None], memory


class WeightSum(Stage):
    """A value of 1, whose column of the memory is the sum of weights, in the accumulator's precision."""

    kinds = ()

    @staticmethod
    def applies(spec: Any) -> bool:
        return spec.sums and spec.read.norm != "sum"

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.q, t.k = t.q.to(accumulator(t.q)), t.k.to(accumulator(t.k))
        t.v = F.pad(t.v, (0, 1), value=1.0).to(accumulator(t.v))


def _at(x: Tensor | None, i: int) -> Any:
    """Selects a token of [B, T, ·]; a fixed decay [H] has no tokens."""
    return x if x is None or x.dim() == 1 else x[:, i]
