"""Does what runs here compute the equation? Every way of running a mixer against the literal loop in float64.

A way is a function of (mixer, x): all of them must give the same y. `verify` runs them on the device and in the dtype
asked for; the reference is the same layer on the CPU in float64, with the loop of reference.py in place of the op, or
token by token where the layer does not use the op.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import layers, zoo
from ..layers.stack import Backbone, Sizes
from ..ops.recurrence import linear_attention
from ..ops.reference import literal
from ..spec.stack import Decoder

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}
BATCH, TOKENS, HIDDEN, HEADS = 2, 67, 64, 4  # a whole chunk of 64 and a piece of one


class Row(NamedTuple):
    """One law for one mixer: the relative error found, and the largest that is accepted."""

    mixer: str
    law: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


def verify(
    names: Iterable[str] | None = None, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Row]:
    """Check mixers (names or expressions; None: the whole zoo). Returns a row for each mixer and law."""
    return [row for name in (zoo.names() if names is None else names) for row in laws(name, device, dtype, seed)]


def laws(name: str, device: str, dtype: torch.dtype, seed: int) -> Iterable[Row]:
    reference, x = specimen(name, seed)
    tested, tolerance = copy.deepcopy(reference).to(device, dtype), TOLERANCE[dtype]
    ways, truth = WAYS, by_steps
    if isinstance(reference, layers.LinearMixer):
        reference.op = literal_op
        ways, truth = FORMS | WAYS, at_once
    with torch.no_grad():
        y = truth(reference, x)
        for law, way in ways.items():
            yield Row(name, law, relative(way(tested, x.to(device, dtype)), y), tolerance)
    expected = gradients(truth, reference, x)
    yield Row(name, "gradients", worst(gradients(at_once, tested, x.to(device, dtype)), expected), 10 * tolerance)


def specimen(name: str, seed: int) -> tuple[nn.Module, Tensor]:
    """A float64 mixer with every parameter away from its initial value, and an input."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    mixer = subject(zoo.mixer(name)).double()
    with torch.no_grad():
        for path, parameter in mixer.named_parameters():
            parameter.add_(draw(parameter.shape), alpha=1.0 if "competition" in path else 0.1)
    return mixer, draw(BATCH, TOKENS, HIDDEN)


def subject(spec) -> nn.Module:
    """A mixer as a layer builds it; of a whole decoder its layers, which continue from states as a mixer does."""
    if isinstance(spec, Decoder):
        return Backbone(spec.layers, Sizes(HIDDEN, HEADS, HIDDEN, style=spec.style))
    return layers.build(spec, hidden_size=HIDDEN, num_heads=HEADS, layer_idx=1, num_layers=3)


def literal_op(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, **arguments):
    """`linear_attention` by the literal loop: shared q and k heads repeated, one sequence per batch row."""
    assert cu_seqlens is None
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return literal(q, k, v, **arguments)


def with_op(mixer: nn.Module, x: Tensor, **settings) -> Tensor:
    other = copy.copy(mixer)
    other.op = partial(linear_attention, **settings)  # type: ignore[assignment]
    return other(x)[0]


def at_once(mixer: nn.Module, x: Tensor) -> Tensor:
    return mixer(x)[0]


def by_steps(mixer: nn.Module, x: Tensor) -> Tensor:
    state, out = None, []
    for token in x.split(1, 1):
        y, state = mixer(token, state)
        out.append(y)
    return torch.cat(out, 1)


def split(mixer: nn.Module, x: Tensor) -> Tensor:
    first, state = mixer(x[:, : TOKENS // 3])
    return torch.cat([first, mixer(x[:, TOKENS // 3 :], state)[0]], 1)


def prefix(mixer: nn.Module, x: Tensor) -> Tensor:
    """The future must not matter: the first half alone, then the rest of the whole."""
    half = TOKENS // 2
    return torch.cat([mixer(x[:, :half])[0], mixer(x)[0][:, half:]], 1)


def packed(mixer: nn.Module, x: Tensor) -> Tensor:
    ends = torch.arange(0, BATCH * TOKENS + 1, TOKENS, device=x.device)
    return mixer(x.flatten(0, 1)[None], cu_seqlens=ends)[0].unflatten(1, (BATCH, TOKENS))[0]


def padded(mixer: nn.Module, x: Tensor) -> Tensor:
    """Padding of another length, left, right or in the middle, in each row; what stands there is large."""
    rows = x.new_full((BATCH, TOKENS + 9, HIDDEN), 10.0)
    mask = torch.zeros(BATCH, TOKENS + 9, dtype=torch.bool, device=x.device)
    mask[0, 9:] = True
    mask[1, :20] = mask[1, 27 : TOKENS + 7] = True
    rows[mask] = x.flatten(0, 1)
    return mixer(rows, mask=mask)[0][mask].view_as(x)


def alone(mixer: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([mixer(row)[0] for row in x.split(1)])


Way = Callable[[nn.Module, Tensor], Tensor]
FORMS: dict[str, Way] = {
    "chunkwise": partial(with_op, form="chunkwise"),
    "chunks of 5": partial(with_op, form="chunkwise", chunk_size=5),
    "recurrent": partial(with_op, form="recurrent"),
    "parallel": partial(with_op, form="parallel"),
}
WAYS: dict[str, Way] = {
    "step": by_steps,
    "split with state": split,
    "causal": prefix,
    "packed": packed,
    "padded": padded,
    "rows apart": alone,
}


def semiseparable(log_decay: Tensor) -> Tensor:
    """The mask L [T, T] of a scalar decay [T]: what is left at t of what was written at s, 0 before it was. Its blocks
    below the diagonal have rank 1 (arXiv 2405.21060, section 3)."""
    later = torch.ones(len(log_decay), len(log_decay), dtype=torch.bool, device=log_decay.device).tril()
    total = log_decay.cumsum(0)
    return (total[:, None] - total).masked_fill(~later, -torch.inf).exp()


def masked_matrix(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """L ∘ (q kᵀ): one head of Mamba-2 as a matrix [T, T] that multiplies v (q is the paper's C, k its B)."""
    return semiseparable(log_decay) * (q @ k.mT)


def relative(x: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """|x − reference| / max(|reference|, floor); infinite where x is not finite."""
    x, reference = x.detach().to("cpu", torch.float64), reference.detach().to(torch.float64)
    if not bool(x.isfinite().all()):
        return float("inf")
    size = max(float(reference.norm()), floor)
    return float((x - reference).norm()) / size if size else float((x - reference).norm())


def gradients(way: Way, mixer: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a random weighting of what `way` gives, to the input and all parameters."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad((way(mixer, x) * weight.to(x)).sum(), [x, *mixer.parameters()]))


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, each relative to the larger of its norm and 1e-6 of the largest."""
    floor = 1e-6 * max(float(g.norm()) for g in expected)
    return max(relative(g, e, floor) for g, e in zip(found, expected, strict=True))
