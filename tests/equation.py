"""Arguments of the op at random, and a call of it held against the literal loop."""

import itertools
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from headrace import backends, linear_attention
from headrace.ops.reference import literal
from headrace.ops.torch import tiles
from headrace.studies.verify import relative

B, T, H, K, V = 2, 13, 4, 6, 5  # all different, so that no transposed axis passes
DECAYS = ["none", "fixed", "scalar", "vector"]


class Way(NamedTuple):
    """How the op is called, in which precision, over how many tokens, and how near it and its gradients must come."""

    settings: dict[str, Any]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    gradient_tolerance: float = 1e-10
    tokens: int = T


# Two ways of summing in one precision make errors of one size, not one error: over seeds and instruction sets one was
# at most 3.5 times the other.
LUCK = 10
CHUNKWISE = Way({"backend": "torch", "chunk_size": 5})
# Four times the worst over seeds, shapes and instruction sets: 7.5e-7, and 6.4e-6 in the gradient of a fixed decay, a
# sum over all tokens.
NATIVE = Way({"backend": "native", "chunk_size": 16}, torch.float32, 3e-6, 3e-5, 37)
WAYS = {
    "chunkwise": CHUNKWISE,
    "batched": CHUNKWISE,
    "recurrent": Way({"form": "recurrent"}),
    "parallel": Way({"backend": "torch", "form": "parallel"}),
    "native": NATIVE,
}


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
    decay=None, *, rows=B, tokens=T, heads=H, groups=None, key=K, value=V, gates=True, bonus=False, normalise=False,
    state=True, n=None,
):  # fmt: skip
    """Arguments of the op by name, in float64, with gradients. groups: heads of q and k."""
    groups = groups or heads
    draw = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    signed = (lambda x: x.abs()) if normalise else (lambda x: x)
    shapes = {"none": None, "fixed": (heads,), "scalar": (rows, tokens, heads), "vector": (rows, tokens, heads, key)}
    shape = shapes[decay or "none"]
    found = {
        "q": signed(torch.randn(rows, tokens, groups, key).double()),
        "k": signed(F.normalize(torch.randn(rows, tokens, groups, key).double(), dim=-1)),
        "v": torch.randn(rows, tokens, heads, value).double(),
        "log_decay": None if shape is None else -draw(*shape),
        **{name: draw(rows, tokens, heads) if gates else None for name in ("beta", "read_gate", "write_gate")},
        "bonus": torch.randn(heads, key).double() if bonus else None,
        "initial_state": draw(n or rows, heads, key, value + normalise) if state else None,
    }
    return {name: x if x is None else x.requires_grad_() for name, x in found.items()}


def by_literal(arguments, cu_seqlens=None, **settings):
    """literal, with grouped heads repeated and packed sequences one by one."""
    heads = arguments["v"].shape[2]
    arguments = arguments | {n: arguments[n].repeat_interleave(heads // arguments[n].shape[2], 2) for n in ("q", "k")}
    if cu_seqlens is None:
        return literal(**arguments, **settings)
    outs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        own = {name: x[:, start:end] if x is not None and x.dim() > 2 else x for name, x in arguments.items()}
        own["initial_state"] = arguments["initial_state"][n : n + 1]
        own["bonus"] = arguments["bonus"]
        out, state = literal(**own, **settings) if end > start else (own["v"], own["initial_state"])
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


def assert_same(arguments, way=CHUNKWISE, cu_seqlens=None, check=True, **settings):
    """Outputs, final states and every gradient of linear_attention against the literal loop."""
    rounded = {name: x if x is None else x.to(way.dtype) for name, x in arguments.items()}
    found = linear_attention(**rounded, cu_seqlens=cu_seqlens, check=check, **way.settings, **settings)
    exact = {name: x if x is None else x.double() for name, x in rounded.items()}
    expected = by_literal(exact, cu_seqlens, **settings)
    weights = [torch.randn_like(x) for x in expected]
    given = [x for x in arguments.values() if x is not None]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), given)
        for pair in (found, expected)
    ]
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) <= way.tolerance
    floor = 1e-6 * max(g.norm().item() for g in gradients[1])
    names = [name for name, x in arguments.items() if x is not None]
    for name, g, e in zip(names, *gradients, strict=True):
        assert relative(g, e, floor) <= way.gradient_tolerance, name
