"""What has failed, in words: gates that decide nothing or nothing any more, heads that nothing passes. Every sentence
follows from what was recorded of this text by a rule.

Dimensions: T tokens, H heads.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .recorder import Recorded

UNIFORM = 0.999  # entropy as a part of the largest, mean over tokens
COLLAPSED = 0.95  # a head's mean share
DEAD = 0.01  # of an even share: what no token exceeds
ALONE = 0.99  # share of what a head reads that is the present token's
CLOSED = 0.01  # β that no token exceeds
RULES = (
    f"A gate is uniform above {UNIFORM} of the largest entropy (mean over tokens) and collapsed where one head's mean "
    f"share is above {COLLAPSED:.0%}; a head is dead where no token gives it {DEAD:.0%} of an even share, where β "
    f"stays below {CLOSED}, where all it reads is zero, or where {ALONE:.0%} of that is the present token's."
)


def entropy(gate: Tensor) -> Tensor:
    """Of the heads' shares [T, H] of a gate, as a part of the largest, [T]."""
    shares = gate / gate.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1) / math.log(max(gate.shape[-1], 2))


def words(name: str, recorded: Recorded, A: Tensor | None) -> list[str]:
    """Sentences on one layer; none: nothing has failed."""
    found = [sentence for gate, g in recorded.gates.items() for sentence in of_gate(gate, g)]
    found += of_beta(recorded.beta) if recorded.beta is not None else ()
    found += of_weights(A) if A is not None else ()
    return [f"{name}: {sentence}" for sentence in found]


def of_gate(gate: str, g: Tensor) -> Iterator[str]:
    H = g.shape[-1]
    if H == 1:
        return
    shares = g / g.sum(-1, keepdim=True)
    load, even = shares.mean(0), float(entropy(g).mean())
    if even > UNIFORM:
        yield f"the {gate} gate is uniform, its entropy {even:.4f} of the largest: no head is chosen"
    if float(load.max()) > COLLAPSED:
        yield f"the {gate} gate has collapsed: head {int(load.argmax())} has {float(load.max()):.1%} of it"
    for head in (shares.amax(0) * H < DEAD).nonzero().flatten().tolist():
        yield f"head {head} is dead: no token gives it more than {float(shares[:, head].max()):.1g} of the {gate} gate"


def of_beta(beta: Tensor) -> Iterator[str]:
    for head in (beta.amax(0) < CLOSED).nonzero().flatten().tolist():
        yield f"head {head} is dead: β is {float(beta[:, head].max()):.1g} at most, and nothing is written"


def of_weights(A: Tensor) -> Iterator[str]:
    total = A.abs().sum(-1)
    own = A.diagonal(dim1=1, dim2=2).abs() / total.clamp(min=torch.finfo(A.dtype).tiny)
    for head, (most, present) in enumerate(zip(total.amax(1).tolist(), own[:, 1:].mean(1).tolist(), strict=True)):
        if most == 0:
            yield f"head {head} is dead: it reads nothing at any token"
        elif present > ALONE:
            yield f"head {head} is dead as a memory: {present:.1%} of what it reads is the present token"
