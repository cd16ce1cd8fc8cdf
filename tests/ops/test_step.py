"""What `step` and the op are given: refused in the same words whatever would compute it, and rounded alike."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from equation import skip_if_missing
from headrace import InputError, Mixer, linear_attention, step
from headrace.ops.call import accumulator
from headrace.verification.verify import relative

B, H, K, V = 4, 4, 6, 5  # as many rows as heads: a gate per row would pass for one per head
# By what computes it: native kernels take float32, everything else is PyTorch's.
ROUTES = {
    "native": (torch.float32, {}), "torch": (torch.float64, {}), "half": (torch.float16, {}),
    "native, normalized": (torch.float32, {"normalize": True}),
    "torch, normalized": (torch.float64, {"normalize": True}),
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
        "state": torch.rand(B, H, K, V, device="meta"), "normalize": False,
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
    r"rule='dleta' is unknown; expected one of add, delta": {"rule": "dleta"},
    r"normalize='no'; expected True or False": {"normalize": "no"},
    r"in_place='no'; expected True or False": {"in_place": "no"},
    r"bonus has shape \[4, 5\]; expected \[4, 6\]": {"bonus": torch.randn(H, V), "normalize": False},
    r"rule='delta' has no bonus and no normalizer": {"rule": "delta", "normalize": True, "bonus": None},
    r"rule='delta' has no bonus and no normalizer; expected ": {"rule": "delta", "bonus": torch.randn(H, K)},
    r"bonus with normalize=True is not defined": {"bonus": torch.randn(H, K), "normalize": True},
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
    state = torch.rand(B, H, K, V + settings.get("normalize", False)).double()
    out, after = step(**x, **per_token, state=state, **settings)
    assert out.dtype is dtype and after.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    tokens = {n: y[:, None] for n, y in (x | per_token).items()}
    expected, final = linear_attention(**tokens, initial_state=state, **settings)
    assert relative(after.double(), final.double()) < 1e-6  # sums of at most K terms in float32
    assert relative(out.double(), expected[:, 0].double()) < 3 * torch.finfo(dtype).eps + 1e-6


def call(dtype, **settings):
    """A call of `step` with all that the rule takes."""
    state = torch.rand(B, H, K, V + settings.get("normalize", False)).to(accumulator(torch.zeros((), dtype=dtype)))
    gates = {name: torch.rand(B, H) for name in ("beta", "read_gate", "write_gate")}
    return {n: x.abs() for n, x in good(dtype).items()} | gates | {"state": state} | settings


@pytest.mark.parametrize("decay", [(), (H,), (B, H), (B, H, K)], ids=str)
@pytest.mark.parametrize(
    ("route", "rule"), [*((route, "add") for route in ROUTES), *((route, "delta") for route in list(ROUTES)[:3])]
)
def test_step_in_place_writes_into_the_tensors_given(route, rule, decay):
    """The same storage, with the numbers that a new tensor has, whatever computes it; autograd is told."""
    skip_if_missing("native" if "native" in route else "torch")
    dtype, settings = ROUTES[route]
    given = call(dtype, rule=rule, log_decay=-torch.rand(decay) if decay else None, **settings)
    state, before = given.pop("state"), given["q"].clone()
    expected, after = step(**given, state=state)
    out, carried = torch.empty_like(given["v"]), state.clone()
    for _ in range(2):  # the second time as remembered
        carried.copy_(state)
        versions = out._version, carried._version
        found = step(**given, state=carried, in_place=True, out=out)
        assert found[0] is out and found[1] is carried and out._version > versions[0] and carried._version > versions[1]
        assert torch.equal(out, expected) and torch.equal(carried, after) and torch.equal(given["q"], before)
    new, first = step(**given, in_place=True), step(**given)
    assert all(torch.equal(x, y) for x, y in zip(new, first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["add", "delta"])
@torch.no_grad()
def test_native_step_in_place_allocates_nothing(rule, dtype):
    """Of tokens that lie apart, as those of a prompt."""
    skip_if_missing("native")
    given = call(dtype, rule=rule, log_decay=-torch.rand(B, H), in_place=True, out=torch.empty(B, H, V, dtype=dtype))
    given |= {n: torch.stack([given[n]] * 2, 1)[:, 1] for n in ("q", "k", "v", "beta", "read_gate", "log_decay")}
    step(**given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(**given)
    assert not [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]


@pytest.mark.parametrize("extra", ["add", "delta", "bonus", "normalize"])
@pytest.mark.parametrize("decay", [(), (H,), (B, H), (B, H, K)], ids=str)
def test_native_step_of_grouped_queries(decay, extra):
    """Three queries read each state, of more columns than the kernel has at a time, in the first call, remembered, in
    place, in bfloat16 and with gradients."""
    skip_if_missing("native")
    wide = 75
    settings = {"bonus": {"bonus": torch.randn(H, K)}, "normalize": {"normalize": True}}.get(extra, {})
    given = call(torch.float32, rule="delta" if extra == "delta" else "add", **settings)
    given |= {"v": torch.rand(B, H, wide), "state": torch.rand(B, H, K, wide + (extra == "normalize"))}
    given |= {"q": torch.rand(B, 3 * H, K), "read_gate": torch.rand(B, 3 * H)}
    given |= {"k": 0.3 * given["k"], "log_decay": -torch.rand(decay) if decay else None}
    double = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in given.items()}
    exact = step(**double, backend="torch")
    for _ in range(2):
        written = {"out": torch.empty(B, 3 * H, wide), "state": given["state"].clone(), "in_place": True}
        for found in (step(**given, backend="native"), step(**given | written, backend="native")):
            assert all(relative(x, y) < 1e-6 for x, y in zip(found, exact, strict=True))
    leaf = given["q"].clone().requires_grad_()
    step(**given | {"q": leaf}, backend="native")[0].sum().backward()
    expected = given["q"].double().requires_grad_()
    step(**double | {"q": expected}, backend="torch")[0].sum().backward()
    assert relative(leaf.grad, expected.grad) < 1e-6
    half = {n: given[n].bfloat16() for n in "qkv"}
    rounded = step(**double | {n: x.double() for n, x in half.items()}, backend="torch")
    assert relative(step(**given | half, backend="native")[0].double(), rounded[0]) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
def test_tensors_that_cannot_be_written_are_refused(dtype):
    def refused(sentence, **change):
        with pytest.raises(InputError, match=sentence):
            step(**(given | {"in_place": True} | change))

    given = call(dtype)
    state, v = given["state"], given["v"]
    both = torch.zeros(state.numel() + 2, dtype=dtype)
    for in_place in (True, False):
        step(**given, in_place=in_place, out=torch.empty_like(v))
    refused("state has dtype torch.bfloat16; expected torch.float", state=state.bfloat16())
    refused("state has strides .*; expected to be contiguous", state=state.mT.contiguous().mT)
    refused(r"out has shape \[4, 5\]; expected \[4, 4, 5\]", out=v[:, 0])
    refused("out has dtype torch.float16; expected torch.float", out=v.half())
    refused("out is on meta and v is on cpu; expected the same device", out=v.to("meta"))
    refused("out=1; expected a tensor", out=1)
    refused("out shares memory with v; expected memory of its own", out=v)
    refused("out shares memory with state; ", out=state.flatten()[: v.numel()].view_as(v), in_place=False)
    refused("state shares memory with out; ", state=both[2:].view_as(state), out=both[: v.numel()].view_as(v))
    q = both[-given["q"].numel() :].view_as(v.new_empty(B, H, K))
    refused("state shares memory with q; ", q=q, state=both[: state.numel()].view_as(state))
    k = given["k"].clone().requires_grad_()
    refused("k requires a gradient, which in_place and out lack; expected torch.no_grad", k=k)
    with torch.inference_mode():
        made = state.clone()
        step(**(given | {"state": made}), in_place=True)
    refused("an inference tensor; expected torch.inference_mode", state=made)


def test_remembered_calls_are_those_of_the_same_signature():
    """Nothing that a check depends on is left out of what is remembered."""
    skip_if_missing("native")
    given = call(torch.float32, scale=1.0)
    expected, _ = step(**given, backend="torch")
    assert relative(step(**given)[0], expected.double()) < 1e-6
    for change in ({"scale": True}, {"scale": "1.0"}, {"rule": ["add"]}, {"rule": "Add"}, {"backend": "Auto"}):
        with pytest.raises(InputError, match="expected"):
            step(**(given | change))
    apart = {n: torch.stack([x, x], -1)[..., 0] for n, x in given.items() if n != "scale"}
    assert relative(step(**apart, scale=1.0)[0], expected.double()) < 1e-6
    negated = torch.complex(torch.zeros(B, H), -given["beta"]).conj().imag
    assert negated.is_neg() and relative(step(**(given | {"beta": negated}))[0], expected.double()) < 1e-6
    q = given["q"].clone().requires_grad_()
    step(**(given | {"q": q}))[0].sum().backward()
    assert q.grad is not None
    mapped = torch.func.vmap(lambda q: step(**(given | {"q": q}))[0])(given["q"][None])
    assert relative(mapped[0], expected.double()) < 1e-6


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


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
@pytest.mark.parametrize("mixer", ["gla", "transformer"])
def test_a_trace_of_a_token_computes_other_tokens(mixer):
    """Also where memory is read by address, which a trace would not see."""
    layer = Mixer(mixer, hidden_size=32, num_heads=2).eval().requires_grad_(False)
    (first, token), state = torch.randn(2, 1, 1, 32), layer(torch.randn(1, 5, 32))[1]
    traced = torch.jit.trace(lambda x: layer(x, state)[0], first)
    torch.testing.assert_close(traced(token), layer(token, state)[0])
    (first, token), memory = torch.randn(2, 1, 2, 8), torch.randn(1, 2, 8, 8)
    traced = torch.jit.trace(lambda q: step(q, q, q, state=memory)[0], first)
    torch.testing.assert_close(traced(token), step(token, token, token, state=memory)[0])
