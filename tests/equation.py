"""Arguments of the op at random, and a call of it held against the literal loop."""

import itertools
import math
import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from headrace import backends, linear_attention
from headrace.extra.selective_scan import Operands, selective_step
from headrace.ops.backends.torch import tiles
from headrace.ops.reference import literal
from headrace.verification.verify import relative

B, T, H, K, V = 2, 13, 4, 6, 5  # all different, so that no transposed axis passes
DECAYS = ["none", "fixed", "scalar", "vector"]
KINDS = ["add", "delta", "bonus", "normalize"]


class Way(NamedTuple):
    """How the op is called, in which precision, over how many tokens, and how near it and its gradients must come."""

    settings: dict[str, Any]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    gradient_tolerance: float = 1e-10
    tokens: int = T


# Two ways of summing in one precision make errors of one size, not one error: over seeds and instruction sets one was
# at most 3.5 times the other.
MAX_ERROR_RATIO = 10
CHUNKWISE = Way({"backend": "torch", "chunk_size": 5})
# Four times the worst over seeds, shapes and instruction sets: 7.5e-7, and 6.4e-6 in the gradient of a fixed decay, a
# sum over all tokens.
NATIVE = Way({"backend": "native", "chunk_size": 16}, torch.float32, 3e-6, 3e-5, 37)
WAYS = {
    "chunkwise": CHUNKWISE, "batched": CHUNKWISE, "recurrent": Way({"form": "recurrent"}),
    "parallel": Way({"backend": "torch", "form": "parallel"}), "native": NATIVE,
}  # fmt: skip


def prepare(name: str, monkeypatch) -> None:
    """Prepares a way, form or backend by name. "batched" is the PyTorch backend as on a GPU: all chunks at once."""
    if name == "batched":
        monkeypatch.setattr(tiles, "at_once", lambda device: True)
    elif name == "native":
        skip_if_missing(name)


def skip_if_missing(backend: str) -> None:
    """HEADRACE_NATIVE=required makes the absence of the native library a failure."""
    reason = backends()[backend]["linear_attention"]
    if reason and os.environ.get("HEADRACE_NATIVE") != "required":
        pytest.skip(reason)


def inputs(
    decay=None, *, rows=B, tokens=T, heads=H, groups=None, queries=1, key=K, value=V, gates=True, bonus=False,
    normalize=False, state=True, n=None,
):  # fmt: skip
    """Arguments of the op by name, in float64, with gradients. groups: heads of q and k, or of k alone with several
    queries for each of them."""
    groups = groups or heads
    draw = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    signed = (lambda x: x.abs()) if normalize else (lambda x: x)
    shapes = {"none": None, "fixed": (heads,), "scalar": (rows, tokens, heads), "vector": (rows, tokens, heads, key)}
    shape = shapes[decay or "none"]
    result = {
        "q": signed(torch.randn(rows, tokens, groups * queries, key).double()),
        "k": signed(F.normalize(torch.randn(rows, tokens, groups, key).double(), dim=-1)),
        "v": torch.randn(rows, tokens, heads, value).double(),
    }
    if shape is not None:
        result["log_decay"] = -draw(*shape)
    if gates:
        for name, readers in ("beta", 1), ("read_gate", queries), ("write_gate", 1):
            result[name] = draw(rows, tokens, heads * readers)
    if bonus:
        result["bonus"] = torch.randn(heads, key).double()
    if state:
        result["initial_state"] = draw(n or rows, heads, key, value + normalize)
    return {name: x.requires_grad_() for name, x in result.items()}


def of_kind(kind):
    """(options of `inputs`, settings of the op) of an entry of KINDS."""
    options = {kind: True} if kind in ("bonus", "normalize") else {}
    return options, {"rule": "delta" if kind == "delta" else "add", "normalize": kind == "normalize"}


def detached(arguments, dtype=torch.float32):
    return {name: x.detach().to(dtype) for name, x in arguments.items()}


def leaves(arguments, dtype=torch.float32):
    """Leaves of a graph of their own."""
    return {name: x.requires_grad_() for name, x in detached(arguments, dtype).items()}


def by_literal(arguments, cu_seqlens=None, **settings):
    """literal, with grouped heads repeated and packed sequences one by one."""
    heads = arguments["v"].shape[2]
    shared = {n: x for n in ("q", "k") if (x := arguments[n]).shape[2] < heads}
    arguments = arguments | {n: x.repeat_interleave(heads // x.shape[2], 2) for n, x in shared.items()}
    if cu_seqlens is None:
        return literal(**arguments, **settings)
    outs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        own = {name: x[:, start:end] if x.dim() > 2 else x for name, x in arguments.items()}
        own["initial_state"] = arguments["initial_state"][n : n + 1]
        out, state = literal(**own, **settings) if end > start else (outs[0][:, :0], own["initial_state"])
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


def weighted_gradients(results, given, dtype=torch.float32):
    """The gradients to what is given of all numbers of the results, each times a random weight. The weights are the
    same at every call, and have no more digits than `dtype`: results in this and in wider precisions have the same."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=draw, dtype=torch.float64).to(dtype).to(y) for y in results]
    return torch.autograd.grad(results, given, weights)


def assert_same(arguments, way=CHUNKWISE, cu_seqlens=None, check=True, **settings):
    """Outputs, final states and every gradient of linear_attention against the literal loop."""
    rounded = {name: x.to(way.dtype) for name, x in arguments.items()}
    actual = linear_attention(**rounded, cu_seqlens=cu_seqlens, check=check, **way.settings, **settings)
    expected = by_literal({name: x.double() for name, x in rounded.items()}, cu_seqlens, **settings)
    gradients = [weighted_gradients(pair, list(arguments.values())) for pair in (actual, expected)]
    for x, y in zip(actual, expected, strict=True):
        assert relative(x, y) <= way.tolerance
    for name, g, e in zip(arguments, *gradients, strict=True):
        assert relative(g, e) <= way.gradient_tolerance, name


def of_decay(arguments, decay):
    """The arguments with decays of 0.75 to 1.25 times a number."""
    drawn = arguments["log_decay"].detach()
    return arguments | {"log_decay": (decay * (0.75 - 0.5 * drawn)).requires_grad_()}


def columns(name, x):
    """A gradient as columns: one for each head, and each channel of what has tokens."""
    if name == "initial_state":
        return x.movedim(1, -1).flatten(0, -2)
    return x[None] if x.dim() == 1 else x.flatten(0, 1).flatten(1)


def assert_gradients_keep_their_digits(arguments, settings, **options):
    """Every gradient in float32, each head and channel relative to its own norm, is as near that of the loop in float64
    as the loop in float32 is: by the same conditioning, however small a decay makes a gradient.

    The floor is what differences of sums lose under −4 a token (`block_of` in extra/dplr.py)."""
    given, results = detached(arguments), []
    for op, dtype in (
        (by_literal, torch.float64), (by_literal, torch.float32), (partial(linear_attention, **settings), torch.float32)
    ):  # fmt: skip
        x = leaves(given, dtype)
        pair = op(x, **options) if op is by_literal else op(**x, **options)
        results.append(weighted_gradients(pair, list(x.values())))
    for name, *grads in zip(given, *results, strict=True):
        exact, *others = (columns(name, x) for x in grads)
        kept, lost = (((x - exact).norm(dim=0) / exact.norm(dim=0)).max().item() for x in others)
        assert lost <= MAX_ERROR_RATIO * max(kept, math.exp(4) * 2**-24), name


def swapped(x, *dims):
    """x with two dimensions in the other order in memory."""
    return x.transpose(*dims).clone(memory_format=torch.contiguous_format).transpose(*dims)


def inside(x, dim):
    """x as a part of a larger tensor, whose other numbers are NaN, or the largest integer."""
    other = torch.full_like(x, torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
    return torch.cat([x, other], dim).narrow(dim, 0, x.shape[dim])


# The same shape with other strides.
LAYOUTS = {
    "first two dimensions swapped": lambda x: swapped(x, 0, 1) if x.dim() > 1 else x,
    "last two dimensions swapped": lambda x: swapped(x, -2, -1) if x.dim() > 1 else x,
    "part of longer rows": lambda x: inside(x, -1),
    "part of more rows": lambda x: inside(x, -2) if x.dim() > 1 else x,
    "every other number": lambda x: inside(x[..., None], -1)[..., 0],
    "one row for all": lambda x: x[:1].expand_as(x),
    "one row for all rows of all": lambda x: x[:1, :1].expand_as(x) if x.dim() > 1 else x,
    "one number for all": lambda x: x.flatten()[0].expand_as(x),
}


def assert_strides_do_not_matter(arguments, way, layout, cu_seqlens=None, **settings):
    """All tensors in a layout, with gradients to the results in it, against contiguous copies of them."""
    make, results = LAYOUTS[layout], []
    shorter = arguments | {"k": 0.4 * arguments["k"]}  # of one number for all, a delta rule diverges from ‖k‖² = 2
    given = {n: make(x) for n, x in detached(shorter, way.dtype).items()}
    bounds = None if cu_seqlens is None else inside(cu_seqlens[:, None], 1)[:, 0]
    for laid_out in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        x = {n: laid_out(y).detach().requires_grad_() for n, y in given.items()}
        ends = None if bounds is None else laid_out(bounds)
        pair = linear_attention(**x, cu_seqlens=ends, **way.settings, **settings)
        generator = torch.Generator().manual_seed(0)
        weights = [laid_out(make(torch.randn(y.shape, generator=generator).to(y.dtype))) for y in pair]
        results.append([*pair, *torch.autograd.grad(pair, list(x.values()), weights)])
    for name, x, y in zip(("out", "state", *given), *results, strict=True):
        assert relative(x, y) <= way.tolerance, name


def selective_literally(x, lengths):
    """Mamba's selective scan token by token: (out [T, D], last states [N, S, D]) of packed sequences."""
    out, final = [], []
    for n, tokens in enumerate(torch.arange(sum(lengths)).split(lengths)):
        h = x.initial[n : n + 1]
        for t in tokens:
            y, h = selective_step(Operands(x.u[t, None], x.dt[t, None], x.A, x.B[t, None], x.C[t, None], h))
            out.append(y)
        final.append(h)
    return torch.cat(out), torch.cat(final)
