"""Sentences on failures in a recorded text: uniform gates, collapsed gates and dead heads. Each sentence follows from
the recorded numbers by a fixed rule.

Dimensions: T tokens, H heads.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..training.gate_statistics import FAILURES, failures
from .recorder import Recorded

ALONE = 0.99  # a head is dead as a memory if more than this part of its attention is on the present token
CLOSED = 0.01  # a head is dead if its β is below this at every token
RULES = (
    f"{FAILURES} It is also dead if β is below {CLOSED} at every token, if its output is zero at every token, or if "
    f"more than {ALONE:.0%} of its attention is on the present token."
)


def entropy(gate: Tensor) -> Tensor:
    """Entropy of a gate [T, H] over heads, divided by log(H), [T]. The gate is normalized to shares first."""
    shares = gate / gate.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1) / math.log(max(gate.shape[-1], 2))


def findings(name: str, recorded: Recorded, A: Tensor | None) -> list[str]:
    """Sentences on the failures of one layer; empty if there is none."""
    sentences = [sentence for gate, g in recorded.gates.items() for sentence in of_gate(gate, g)]
    sentences += of_beta(recorded.beta) if recorded.beta is not None else ()
    sentences += of_weights(A) if A is not None else ()
    return [f"{name}: {sentence}" for sentence in sentences]


def of_gate(gate: str, g: Tensor) -> Iterator[str]:
    if g.shape[-1] == 1:
        return
    shares = g / g.sum(-1, keepdim=True)
    load, even = shares.mean(0).tolist(), float(entropy(g).mean())
    found = failures(even, load)
    if found.uniform:
        yield f"the {gate} gate is uniform: its entropy is {even:.4f} of log(heads), so all shares are nearly equal"
    if (head := found.collapsed) is not None:
        yield f"the {gate} gate has collapsed: the mean share of head {head} is {load[head]:.1%}"
    for head in found.dead:
        yield f"head {head} is dead: its mean share of the {gate} gate is {load[head]:.1g}"


def of_beta(beta: Tensor) -> Iterator[str]:
    for head in (beta.amax(0) < CLOSED).nonzero().flatten().tolist():
        yield f"head {head} is dead: β is at most {float(beta[:, head].max()):.1g}, so nothing is written"


def of_weights(A: Tensor) -> Iterator[str]:
    total = A.abs().sum(-1)
    own = A.diagonal(dim1=1, dim2=2).abs() / total.clamp(min=torch.finfo(A.dtype).tiny)
    for head, (most, present) in enumerate(zip(total.amax(1).tolist(), own[:, 1:].mean(1).tolist(), strict=True)):
        if most == 0:
            yield f"head {head} is dead: its output is zero at every token"
        elif present > ALONE:
            yield f"head {head} is dead as a memory: {present:.1%} of its attention is on the present token"
