"""Several steps of the delta rule per token (write.steps), as in DeltaProduct (arXiv 2502.10297, section 3). With n
keys k_i, values v_i and write strengths β_i per token:

    S ← e^g S        S ← S + β_i k_iᵀ (w v_i − k_i S)  for i = 1, …, n        out = q S

This is `linear_attention` of n tokens for each token, where the first one decays the memory and the last one is read.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, n steps per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from ..layers.linear.recur import Recur
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..spec.linear import RULES, MixerSpec, Write
from ..zoo.mixers import DELTANET, GATED_DELTANET
from .registration import register_mixer


def as_tokens(x: dict[str, Any], n: int) -> dict[str, Any]:
    """Converts the arguments of T tokens to those of T n tokens of `linear_attention`.

    Args:
        x: k [B, T, Hq n, K], v [B, T, H, n V] and beta [B, T, H, n] with the steps of a head side by side, and the
            other arguments per token; None for those that the layer does not have.
        n: number of steps.
    """
    by_step = {"k": x["k"].unflatten(2, (-1, n)), "v": x["v"].unflatten(3, (n, -1)), "beta": x["beta"]}
    spread = {name: y if y is None else y.transpose(2, 3).flatten(1, 2) for name, y in by_step.items()}
    if (g := x["log_decay"]) is not None:
        g = (g.expand(x["v"].shape[:3]) if g.dim() == 1 else g).unsqueeze(2)
        spread["log_decay"] = F.pad(g, [0, 0] * (g.dim() - 3) + [0, n - 1]).flatten(1, 2)
    repeated = ((name, x[name]) for name in x.keys() - {*spread, "log_decay"})
    return x | spread | {name: y if y is None else y.repeat_interleave(n, 1) for name, y in repeated}


class Keys(Stage):
    """Divides the keys of a token, [B, T, Hq, n K] -> [B, T, Hq n, K]."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.k = t.k.unflatten(-1, (mixer.spec.write.steps, -1)).flatten(2, 3)


class RecurInSteps(Recur):
    """The recurrence of n steps per token."""

    native = Stage.native

    def mixed(self, mixer: Any, mix: Callable[..., tuple[Any, ...]], t: Tokens) -> tuple[Any, ...]:
        """Returns mix(v), which has no map: a token has several values."""
        return mix(t.v)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        n = mixer.spec.write.steps
        t.out, t.after["memory"] = self.recur(mixer, t, as_tokens(self.tensors(t), n), n)


def rules(spec: MixerSpec) -> Iterator[tuple[bool, str]]:
    """Objections to several steps per token."""
    write = spec.write
    yield (
        write.rule != "delta" or write.beta == "dt" or write.residual_chunk is not None or spec.read.skip,
        f"write.steps={write.steps} makes several updates by the delta rule, each with a β and a v of its own; "
        "expected write.rule='delta', write.beta='one', 'sigmoid' or 'sigmoid-2', write.residual_chunk=None and "
        "read.skip=False",
    )


RULES["write.steps"] = rules


STAGES.update({"keys-of-steps": Keys, "steps": RecurInSteps})
register_mixer(
    "deltaproduct",
    replace(DELTANET, write=Write("delta", "sigmoid-2", steps=2)),
    about="Two steps of the delta rule per token, each with a key, a value and a write strength up to 2.",
    paper="https://arxiv.org/abs/2502.10297",
)
register_mixer(
    "gated-deltaproduct",
    replace(GATED_DELTANET, write=Write("delta", "sigmoid-2", steps=2)),
    about="DeltaProduct with the decay and the output gate of Gated DeltaNet.",
    paper="https://arxiv.org/abs/2502.10297",
)
