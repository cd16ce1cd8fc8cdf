"""What `step` and the op are given: refused in the same words whatever would compute it, and rounded alike."""

import pytest
import torch

from equation import skip_if_missing
from headrace import InputError, linear_attention, step
from headrace.studies.verify import relative

B, H, K, V = 4, 4, 6, 5  # as many rows as heads: a gate per row would pass for one per head
# By what computes it: native kernels take float32, everything else is PyTorch's.
ROUTES = {
    "native": (torch.float32, {}), "torch": (torch.float64, {}), "half": (torch.float16, {}),
    "native, normalised": (torch.float32, {"normalise": True}),
    "torch, normalised": (torch.float64, {"normalise": True}),
    "bonus": (torch.float32, {"bonus": torch.randn(H, K)}),
}  # fmt: skip
WRONG = {
    r"beta has shape \[4\]; expected \[4, 4\]": {"beta": torch.rand(B)},
    r"beta has shape \[4, 1\]; expected \[4, 4\]": {"beta": torch.rand(B, 1)},
    r"read_gate has shape \[4, 4, 1\]; expected \[4, 4\]": {"read_gate": torch.rand(B, H, 1)},
    r"write_gate has shape \[1, 4\]; expected \[4, 4\]": {"write_gate": torch.rand(1, H)},
    r"log_decay has shape \[5\]; expected \[4\] or \[4, 4\] or \[4, 4, 6\]": {"log_decay": -torch.rand(5)},
    r"log_decay has shape \[4, 4, 5\]; expected": {"log_decay": -torch.rand(B, H, V)},
    r"log_decay has shape \[1, 4, 6\]; expected": {"log_decay": -torch.rand(1, H, K)},
    r"log_decay has shape \[\]; expected": {"log_decay": torch.tensor(-1.0)},
    r"log_decay has dtype torch.int64; expected a floating": {"log_decay": -torch.ones(H, dtype=torch.long)},
    r"beta has dtype torch.bool; expected a floating-point dtype": {"beta": torch.ones(B, H, dtype=torch.bool)},
    r"beta is on meta and q is on cpu; expected the same device": {"beta": torch.rand(B, H, device="meta")},
    r"state is on meta and q is on cpu; expected the same device": {
        "state": torch.rand(B, H, K, V, device="meta"), "normalise": False,
    },
    r"state has shape \[4, 4, 9, 6\]; expected \[4, 4, 6, ": {"state": torch.zeros(B, H, 9, K)},
    r"state has shape \[1, 4, 6, 9\]; expected \[4, 4, 6, ": {"state": torch.zeros(1, H, K, 9)},
    r"q has shape \[4, 6\]; expected three dimensions, \[B, heads, ·\]": {"q": torch.randn(B, K)},
    r"v has shape \[4, 1, 4, 5\]; expected three dimensions": {"v": torch.randn(B, 1, H, V)},
    r"q has shape \[4, 4, 7\]; expected the shape of k, \[4, 4, 6\]": {"q": torch.randn(B, H, K + 1)},
    r"k has shape \[3, 4, 6\]; expected \[B\] = \[4\], as in v": dict.fromkeys("qk", torch.randn(3, H, K)),
    r"q and k have 3 heads; expected a divisor of the 4 heads of v": dict.fromkeys("qk", torch.randn(B, 3, K)),
    r"k has dtype torch.bfloat16 and q has": {"k": torch.randn(B, H, K).bfloat16()},
    r"q has dtype torch.int64; expected a floating-point": {"q": torch.ones(B, H, K, dtype=torch.long)},
    r"k is on meta and q is on cpu; expected the same device": {"k": torch.randn(B, H, K, device="meta")},
    r"v has shape \[4, 0, 5\]; expected every dimension except B to be at least 1": {"v": torch.randn(B, 0, V)},
    r"q has shape \[4, 4, 0\]; expected every dimension except B to be at least 1": dict.fromkeys(
        "qk", torch.randn(B, H, 0)
    ),
    r"v has shape \[4, 4, 0\]; expected every dimension except B to be at least 1": {"v": torch.randn(B, H, 0)},
    r"rule='dleta' is unknown; expected 'add' or 'delta'": {"rule": "dleta"},
    r"bonus has shape \[4, 5\]; expected \[4, 6\]": {"bonus": torch.randn(H, V), "normalise": False},
    r"rule='delta' has no bonus and no normaliser": {"rule": "delta", "normalise": True, "bonus": None},
    r"rule='delta' has no bonus and no normaliser; expected ": {"rule": "delta", "bonus": torch.randn(H, K)},
    r"bonus with normalise=True is not defined": {"bonus": torch.randn(H, K), "normalise": True},
}  # fmt: skip


def good(dtype):
    return {
        "q": torch.randn(B, H, K).to(dtype),
        "k": torch.randn(B, H, K).to(dtype),
        "v": torch.randn(B, H, V).to(dtype),
    }


def of(dtype, change):
    """Tensors in the route's precision, unless it is their precision that is wrong."""
    return {n: x.to(dtype) if getattr(x, "dtype", None) is torch.float32 else x for n, x in change.items()}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("sentence", WRONG)
def test_every_step_route_refuses_the_same_inputs(sentence, route):
    skip_if_missing("native" if "native" in route else "torch")
    dtype, settings = ROUTES[route]
    with pytest.raises(InputError, match=sentence):
        step(**(good(dtype) | settings | of(dtype, WRONG[sentence])))


@pytest.mark.parametrize("route", ROUTES)
def test_mixed_precision_inputs_do_not_change_the_state_dtype(route):
    """Gates, decay and state in another precision: out in v's, the state in its own, as the op has it for one token."""
    skip_if_missing("native" if "native" in route else "torch")
    dtype, settings = ROUTES[route]
    x, per_token = good(dtype), {n: torch.rand(B, H).double() for n in ("beta", "read_gate", "write_gate")}
    x = {n: y.abs() for n, y in x.items()}
    per_token["log_decay"] = -torch.rand(B, H, K).bfloat16()
    state = torch.rand(B, H, K, V + settings.get("normalise", False)).double()
    out, after = step(**x, **per_token, state=state, **settings)
    assert out.dtype is dtype and after.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    tokens = {n: y[:, None] for n, y in (x | per_token).items()}
    expected, final = linear_attention(**tokens, initial_state=state, **settings)
    assert relative(after.double(), final.double()) < 1e-6  # sums of at most K terms in float32
    assert relative(out.double(), expected[:, 0].double()) < 3 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("form", ["chunkwise", "recurrent", "parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((2, 3, 0, K, V), r"v has shape \[2, 3, 0, 5\]; expected every dimension except B to be at least 1"),
        ((2, 0, H, K, V), r"shape \[2, 0, .*; expected every dimension except B to be at least 1"),
        ((2, 3, H, 0, V), r"shape \[2, 3, 4, 0\]; expected every dimension except B to be at least 1"),
        ((2, 3, H, K, 0), r"v has shape \[2, 3, 4, 0\]; expected every dimension except B to be at least 1"),
    ],
)
def test_zero_sized_dimensions_are_refused(sizes, sentence, dtype, form):
    B, T, H, K, V = sizes
    q, v = torch.randn(B, T, H or 1, K, dtype=dtype), torch.randn(B, T, H, V, dtype=dtype)
    with pytest.raises(InputError, match=sentence):
        linear_attention(q, q, v, form=form)
