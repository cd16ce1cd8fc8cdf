"""The native kernels' products in bfloat16. Their error is at most twice that of the loop in float64 in which q, k, v,
the output, and the gradients to q, k and v are rounded to bfloat16."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from equation import DECAYS, detached, inputs, skip_if_missing, weighted_gradients
from headrace import linear_attention
from headrace.ops.backends.native import library as native
from headrace.ops.reference import literal
from headrace.verification.verify import relative

ROUNDED = ("q", "k", "v")
FEW = 16  # numbers, as in the gradient to a fixed decay, of which one may outweigh the others: its error is chance


def factor(kind, rule, decay, y):
    """How many times the error of rounding the kernels may have. Where the delta rule replaces what it wrote under one
    key, large terms cancel, and vector decays round each of them by itself."""
    return 4 if y.numel() <= FEW or (kind, rule, decay) == ("repeated", "delta", "vector") else 2


@pytest.fixture(autouse=True)
def _here():
    skip_if_missing("native")
    if native.instructions != "avx512bf16":
        pytest.skip(f"products of bfloat16 are computed in float32 by {native.instructions}")


def computed(op, arguments, rule):
    """Output, state, and gradients of a weighted sum of both, by name."""
    arguments = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    pair = op(**arguments, rule=rule)
    gradients = weighted_gradients(pair, list(arguments.values()), torch.bfloat16)
    return dict(zip(("out", "state", *arguments), (*pair, *gradients), strict=True))


FACTORS = {  # by which arguments are multiplied
    "weak decay": {"log_decay": 1 / 200}, "strong decay": {"log_decay": 40}, "repeated": {"log_decay": 1 / 200},
    "large": dict.fromkeys(("v", "initial_state"), 1e30), "small": dict.fromkeys(("v", "initial_state"), 1e-30),
}  # fmt: skip


def difficult(kind, x):
    """The arguments, made into what is hard to compute."""
    x |= {name: factor * x[name] for name, factor in FACTORS.get(kind, {}).items() if name in x}
    if kind == "correlated":
        x["k"] = F.normalize(x["k"] + 2 * x["k"][:, :1], dim=-1)
    if kind == "repeated":
        x["k"] = x["k"][:, :1].expand_as(x["k"])
    return x


RULES = "add", "delta"
CASES = [*itertools.product(DECAYS, RULES, ("correlated", "repeated"))]
CASES += itertools.product(DECAYS[1:], RULES, ("weak decay", "strong decay"))
CASES += [("scalar", "delta", "large"), ("vector", "add", "large")]
CASES += [("scalar", "add", "small"), ("vector", "delta", "small")]


@pytest.mark.parametrize(("decay", "rule", "kind"), CASES)
def test_error_is_at_most_twice_that_of_rounding(decay, rule, kind):
    drawn = inputs(decay, rows=1, tokens=150, heads=8, groups=4, key=48, value=40)
    drawn = difficult(kind, detached(detached(drawn), torch.float64))  # exact in float32
    repeated = lambda x: {n: y.repeat_interleave(2, 2) if n in ("q", "k") else y for n, y in x.items()}  # noqa: E731
    rounded = {name: x.bfloat16() if name in ROUNDED else x.float() for name, x in drawn.items()}
    exact = computed(literal, repeated(drawn), rule)
    nearest = computed(literal, {name: x.double() for name, x in repeated(rounded).items()}, rule)
    actual = computed(partial(linear_attention, backend="native"), rounded, rule)
    for x in (exact, nearest):
        x |= {name: x[name].unflatten(2, (-1, 2)).sum(3) for name in ("q", "k")}
    best = {name: relative(nearest[name].to(y.dtype).double(), exact[name]) for name, y in actual.items()}
    best |= {name: max(best.values()) for name, y in actual.items() if y.numel() <= FEW}
    for name, y in actual.items():
        assert relative(y.double(), exact[name]) <= factor(kind, rule, decay, y) * best[name], name
