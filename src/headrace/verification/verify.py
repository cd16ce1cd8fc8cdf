"""Verifies mixers on this machine: every way of running a mixer is compared with the literal loop in float64.

A way is a function of (mixer, x), and all ways must give the same y. `verify` runs the ways on a given device and
dtype. The reference is the same layer on the CPU in float64, with the loop of ops/reference.py in place of the op, or
run token by token for a layer without the op.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import layers, zoo
from ..files.devices import on_device
from ..layers.blocks.block import Block, Sizes
from ..layers.blocks.stack import Backbone
from ..ops.attention import linear_attention
from ..ops.dispatch import BACKENDS, set_backend, unavailable
from ..ops.reference import literal
from ..spec.stack import Decoder
from ..utils.errors import InputError, require_each
from .errors import TOLERANCE, Row, device_failed, law_of, relative, rows_of_check, worst
from .op import OP, op_laws

BATCH, TOKENS, HIDDEN, HEADS = 2, 67, 64, 4  # TOKENS: a chunk of 64 and a part of the next
WIDE = 256  # hidden size on a GPU, where matrix products have at least 16 channels per head


def verify(
    names: Iterable[str] | None = None, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0,
    backends: Iterable[str] | None = None,
) -> list[Row]:  # fmt: skip
    """Compares every way of running a mixer, and its gradients, with the literal loop in float64.

    Args:
        names: names or expressions of mixers, or "linear_attention" for the op by itself at the sizes of large models;
            a text may have several, separated by commas; None: all of the zoo and, on a GPU, the op.
        device, dtype: where the mixers run, and in which precision: float64, float32 or bfloat16. On a CPU a backend
            that does not take the dtype runs in float32, or else in bfloat16; on a GPU each runs in both, because their
            kernels differ.
        seed: seed of parameters and inputs.
        backends: names of the backends to check one by one, as `names`; None: all that are available here.

    Returns:
        A row for each mixer and check. A check that raised an error has an infinite one. An error after which a GPU
        computes nothing any more ends the checks.

    Raises:
        InputError: an unknown mixer, a device or dtype that cannot be used, or a backend that is unknown or not
            available here.
    """
    names = zoo.several(names) if isinstance(names, str) else names
    require_each(lambda x: x is None or isinstance(x, Iterable), "names in a list", names=names, backends=backends)
    require_each(lambda x: type(x) is int and 0 <= x < 2**63, "an integer of at least 0", seed=seed)
    chosen, device = available(backends), on_device(device, float64=dtype == torch.float64)
    require_each(lambda x: x in list(TOLERANCE), f"one of {', '.join(map(str, TOLERANCE))}", dtype=dtype)
    rows: list[Row] = []
    for name in subjects(device) if names is None else names:
        for row in laws(name, device, dtype, seed, chosen):
            rows.append(row)
            if device_failed(device, [row]):
                return rows
    return rows


def subjects(device: str) -> list[str]:
    """Returns what is verified on a device by default: the zoo and, on a GPU, the op."""
    return [*zoo.names(), *[OP] * (device != "cpu")]


def available(backends: Iterable[str] | None = None) -> list[str]:
    """Returns these backends, or all that are available here. InputError for one that is unknown or not available."""
    if backends is None:
        return [name for name, backend in BACKENDS.items() if backend.missing() is None]
    chosen = list(zoo.split(backends) if isinstance(backends, str) else backends)
    for name in chosen or [""]:
        if (reason := unavailable(name, "linear_attention")) is not None:
            raise InputError(f"backend={name!r} cannot run here: {reason}")
    return chosen


class Exact(NamedTuple):
    """A mixer, or a block with it, in float64 on the CPU, an input, and what the literal loop makes of it."""

    mixer: nn.Module
    x: Tensor
    y: Tensor
    gradients: list[Tensor]


def exact(name: str, seed: int, hidden: int = HIDDEN, in_block: bool = False) -> Exact:
    mixer, x = specimen(name, seed, hidden, in_block)
    reference: Any = copy.deepcopy(mixer)
    truth: Way = by_steps
    inner = reference.block.mixer if in_block else reference
    if isinstance(inner, layers.LinearMixer):
        inner.op, truth = literal_op, at_once
    return Exact(mixer, x, *differentiated(truth, reference, x))


def laws(name: str, device: str, dtype: torch.dtype, seed: int, backends: Sequence[str] | None = None) -> Iterator[Row]:
    chosen = available() if backends is None else backends
    if name == OP:
        yield from op_laws(device, seed, chosen)
        return
    truth, tolerance = exact(name, seed), TOLERANCE[dtype]
    tested, x = copy.deepcopy(truth.mixer).to(device, dtype), truth.x.to(device, dtype)
    linear = isinstance(tested, layers.LinearMixer)
    for law, way in (FORMS | WAYS if linear else WAYS).items():
        yield from rows_of_check(Row(name, law, 0.0, tolerance), partial(forward_error, way, tested, x, truth.y))
    yield from rows_of_check(
        Row(name, "gradients", 0.0, 10 * tolerance),
        lambda: [worst(differentiated(at_once, tested, x)[1], truth.gradients)],
    )
    if linear:
        yield from backend_laws(name, device, dtype, seed, chosen)


def forward_error(way: "Way", mixer: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    with torch.no_grad():
        return [relative(way(mixer, x), y)]


def backend_laws(name: str, device: str, dtype: torch.dtype, seed: int, backends: Sequence[str]) -> Iterator[Row]:
    """Three rows, outputs, gradients and decoding, for each backend that takes a block with the linear mixer on the
    device."""
    truth = exact(name, seed, HIDDEN if device == "cpu" else WIDE, in_block=True)
    for backend in backends:
        for precision in dict.fromkeys((dtype, torch.float32, torch.bfloat16)):
            block = copy.deepcopy(truth.mixer).to(device, precision)
            set_backend(block, backend)
            row = Row(name, law_of(backend, precision), 0.0, TOLERANCE[precision])
            rows = rows_of_check(row, partial(block_errors, block, truth), [", gradients", ", decoding"])
            yield from rows
            if rows and device == "cpu":
                break


def block_errors(block: nn.Module, truth: Exact) -> list[float]:
    """Returns the errors of a block's outputs, gradients and decoding."""
    x = truth.x.to(next(block.parameters()))
    with torch.no_grad():
        out, tokens = at_once(block, x), decoded(block, x)
    _, computed = differentiated(at_once, block, x)
    return [relative(out, truth.y), worst(computed, truth.gradients), relative(tokens, truth.y)]


def specimen(name: str, seed: int, hidden: int = HIDDEN, in_block: bool = False) -> tuple[nn.Module, Tensor]:
    """(a float64 mixer, or a block with it, with randomly perturbed parameters; an input). `laws` names each backend in
    turn, whatever HEADRACE_BACKEND says."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    spec, sizes = zoo.mixer(name), Sizes(hidden, HEADS, hidden)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        mixer = (Alone(Block(spec, sizes, 1, 3)) if in_block else subject(spec, hidden)).double()
    set_backend(mixer, "auto")
    with torch.no_grad():
        for path, parameter in mixer.named_parameters():
            parameter.add_(draw(parameter.shape), alpha=1.0 if "competition" in path else 0.1)
    return mixer, draw(BATCH, TOKENS, hidden)


class Alone(nn.Module):
    """A block with the interface of a mixer."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, state: Any = None, in_place: bool = False) -> tuple[Tensor, list[Any]]:
        after: list[Any] = []
        return self.block(x, state, in_place=in_place, next_states=after), after


def subject(spec, hidden: int) -> nn.Module:
    """The module of a mixer; for a decoder, its stack of layers, which has the interface of a mixer."""
    if isinstance(spec, Decoder):
        return Backbone(spec.layers, Sizes(hidden, HEADS, hidden, style=spec.style))
    return layers.build(spec, hidden_size=hidden, num_heads=HEADS, layer_idx=1, num_layers=3)


def literal_op(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, backend: str = "auto", **arguments
):
    """`linear_attention` by the literal loop: shared q and k heads repeated, and no packed sequences."""
    assert backend == "auto" and cu_seqlens is None
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return literal(q, k, v, **arguments)


def with_op(mixer: nn.Module, x: Tensor, **settings) -> Tensor:
    other = copy.copy(mixer)
    other.op = partial(linear_attention, **settings)  # type: ignore[assignment]
    return other(x)[0]


def at_once(mixer: nn.Module, x: Tensor) -> Tensor:
    return mixer(x)[0]


def by_steps(mixer: nn.Module, x: Tensor, state: Any = None, in_place: bool = False) -> Tensor:
    out = []
    for token in x.split(1, 1):
        y, state = mixer(token, state, in_place=in_place)
        out.append(y)
    return torch.cat(out, 1)


def decoded(mixer: nn.Module, x: Tensor) -> Tensor:
    """The outputs of some tokens at once, followed by those of the others one by one, with the state in place."""
    first, state = mixer(x[:, : TOKENS // 3])
    return torch.cat([first, by_steps(mixer, x[:, TOKENS // 3 :], state, in_place=True)], 1)


def split(mixer: nn.Module, x: Tensor) -> Tensor:
    first, state = mixer(x[:, : TOKENS // 3])
    return torch.cat([first, mixer(x[:, TOKENS // 3 :], state)[0]], 1)


def prefix(mixer: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the first half of the input by itself, followed by those of the rest from the whole input. They
    equal the outputs of the whole input for a causal mixer."""
    half = TOKENS // 2
    return torch.cat([mixer(x[:, :half])[0], mixer(x)[0][:, half:]], 1)


def packed(mixer: nn.Module, x: Tensor) -> Tensor:
    ends = torch.arange(0, BATCH * TOKENS + 1, TOKENS, device=x.device)
    return mixer(x.flatten(0, 1)[None], cu_seqlens=ends)[0].unflatten(1, (BATCH, TOKENS))[0]


def padded(mixer: nn.Module, x: Tensor) -> Tensor:
    """The outputs for rows with padding of different lengths on the left, on the right or inside, with large values at
    padded positions."""
    rows = x.new_full((BATCH, TOKENS + 9, HIDDEN), 10.0)
    mask = torch.zeros(BATCH, TOKENS + 9, dtype=torch.bool, device=x.device)
    mask[0, 9:] = True
    mask[1, :20] = mask[1, 27 : TOKENS + 7] = True
    rows[mask] = x.flatten(0, 1)
    return mixer(rows, mask=mask)[0][mask].view_as(x)


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
    "rows apart": lambda mixer, x: torch.cat([mixer(row)[0] for row in x.split(1)]),
}


def differentiated(way: Way, mixer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(outputs of `way`, gradients of a random weighted sum of them for the input and all parameters)"""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.clone().requires_grad_()
    y = way(mixer, x)
    return y.detach(), list(torch.autograd.grad((y * weight.to(x)).sum(), [x, *mixer.parameters()]))
