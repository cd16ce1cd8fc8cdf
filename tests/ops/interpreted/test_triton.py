"""The backend "triton" against the literal loop in float64: outputs, final states and all gradients."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from equation import (
    DECAYS,
    Way,
    assert_gradients_keep_their_digits,
    assert_same,
    assert_strides_do_not_matter,
    detached,
    inputs,
    leaves,
    of_decay,
)
from headrace import InputError, Mixer, linear_attention, step
from headrace.ops.backends.triton import block_sizes, launch
from headrace.ops.backends.triton import step as step_kernels
from headrace.ops.backends.triton.launch import one_stride, strides
from headrace.ops.call import TOKENWISE, Call
from headrace.verification.verify import relative

T, H, K, V = 37, 2, 16, 24  # two chunks of 16 tokens and a part of the next
SHORT = 21  # a chunk and a part of the next
RULES = ["add", "delta"]
# Each decay under one rule and each rule with two decays, for what does not depend on the other.
PAIRS = list(zip(DECAYS, itertools.cycle(RULES)))
TRITON = Way({"backend": "triton", "chunk_size": 16}, torch.float32, 2e-6, 1e-5, T)
WIDE = TRITON._replace(settings={"backend": "triton"})  # chunks of 64 tokens
# bfloat16 keeps 8 digits: each product's operands are rounded once, and gradients pass through at most eight products.
HALF = WIDE._replace(dtype=torch.bfloat16, tolerance=8 * 2**-8, gradient_tolerance=16 * 2**-8)
# float16 is multiplied in TF32, which has its 11 digits.
FLOAT16 = HALF._replace(dtype=torch.float16, tolerance=8 * 2**-11, gradient_tolerance=16 * 2**-11)
PACKED = torch.tensor([0, 5, 5, 30, 37])  # the second sequence is empty


def arguments(decay, **options):
    return inputs(decay, **{"rows": 1, "tokens": T, "heads": H, "key": K, "value": V} | options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", DECAYS)
def test_equation(decay, rule):
    assert_same(arguments(decay, tokens=SHORT), TRITON, rule=rule)


DELTA, OF_70 = {"rule": "delta"}, {"tokens": 70, "heads": 1, "key": 32, "value": 32}
CALLS = {  # the decay, other options of `arguments`, the way, and settings of the op
    "several rows": ("fixed", {"rows": 2, "tokens": SHORT}, TRITON, {}),
    "several rows, delta": ("vector", {"rows": 2, "tokens": SHORT}, TRITON, DELTA),
    "packed": ("vector", {"n": 4}, TRITON, {"cu_seqlens": PACKED}),
    "packed, delta": ("fixed", {"n": 4}, TRITON, {"cu_seqlens": PACKED} | DELTA),
    "shared keys": ("vector", {"tokens": 18, "heads": 4, "groups": 2}, TRITON, {}),
    "shared keys, delta": ("vector", {"tokens": 18, "heads": 4, "groups": 2}, TRITON, DELTA),
    "grouped queries": ("scalar", {"tokens": 18, "heads": 1, "queries": 2}, TRITON, DELTA),
    "bfloat16": ("scalar", OF_70, HALF, {}),
    "bfloat16, delta": ("vector", OF_70, HALF, DELTA),
    "float16, delta": ("scalar", OF_70, FLOAT16, DELTA),
    "bonus": ("vector", {"tokens": SHORT, "bonus": True}, TRITON, {}),
    "bonus in bfloat16": ("vector", {"tokens": SHORT, "bonus": True}, HALF, {}),
    "normalizer": ("none", {"tokens": SHORT, "normalize": True}, TRITON, {"normalize": True}),
    "normalizer in bfloat16": ("none", {"tokens": SHORT, "normalize": True}, HALF, {"normalize": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    decay, options, way, settings = CALLS[name]
    assert_same(arguments(decay, **options), way, **settings)


@pytest.mark.parametrize(("decay", "rule"), PAIRS)
def test_without_gates_and_state(decay, rule):
    assert_same(arguments(decay, tokens=SHORT, heads=1, gates=False, state=False), TRITON, rule=rule)


@pytest.mark.parametrize(("decay", "rule"), PAIRS[2:])
def test_whole_chunks_and_odd_sizes(decay, rule):
    """Chunks of 64 tokens; K and V that are no powers of two, with V in two blocks."""
    assert_same(arguments(decay, tokens=70, heads=1, key=40, value=72), WIDE, rule=rule)


@pytest.mark.parametrize(("value", "rule"), [(-16.0, "delta"), (-50.0, "add")])
def test_a_gradient_keeps_its_digits_however_small_it_is(value, rule):
    drawn = of_decay(arguments("vector", tokens=SHORT, heads=1), value)
    assert_gradients_keep_their_digits(drawn, TRITON.settings, rule=rule)


@pytest.mark.parametrize(
    ("layout", "decay", "rule", "tokens"),
    [("one row for all rows of all", "scalar", "add", 2), ("part of more rows", "fixed", "delta", 2),
     ("last two dimensions swapped", "vector", "add", 2),
     # PyTorch leaves the stride of the one token as it is in what it calls contiguous.
     ("first two dimensions swapped", "vector", "delta", 1),
     ("every other number", "fixed", "add", 1)],
)  # fmt: skip
def test_strides_do_not_matter(layout, decay, rule, tokens):
    assert_strides_do_not_matter(arguments(decay, rows=2, tokens=tokens), TRITON, layout, rule=rule)


def test_strides_of_bounds_do_not_matter():
    ends = torch.tensor([0, 2, 3], dtype=torch.int32)
    assert_strides_do_not_matter(arguments("none", tokens=3, n=2), TRITON, "every other number", ends)


@pytest.fixture
def as_in_16_bits(monkeypatch):
    """The tiles of `scan` and `reverse_scan` that Hopper has in 16 bits."""
    sizes = launch.block_sizes

    def found(kernel, K, V, delta, vector, *of):
        first, second = block_sizes.tiles(K)
        tiles = {"BK": first, "BK2": second, "KEEP": not vector}
        return sizes(kernel, K, V, delta, vector, *of) | (tiles if kernel in ("scan", "states") else {})

    monkeypatch.setattr(launch, "block_sizes", found)


@pytest.mark.parametrize(
    ("decay", "rule", "key"), [*((*pair, 40) for pair in PAIRS), *((*pair, 16) for pair in PAIRS[2:])]
)
def test_a_state_in_two_tiles(decay, rule, key, as_in_16_bits):
    """40 keys are a tile of 32 and one of 16. Without a decay per channel the delta rule loads keys once."""
    assert_same(arguments(decay, tokens=SHORT, heads=1, key=key), TRITON, rule=rule)


def test_the_tiles_of_a_state():
    """Powers of two that hold all keys, and never more together than one tile would need."""
    for K in range(1, 257):
        first, second = block_sizes.tiles(K)
        assert all(size & (size - 1) == 0 for size in (first, second)) and first >= 16
        assert K <= first + second <= max(16, 1 << (K - 1).bit_length())


@pytest.mark.parametrize(("decay", "rule"), PAIRS[2:])
def test_steep_decays(decay, rule):
    """Decays of up to e^-60 per token, beside some of nearly 1."""
    given = arguments(decay, tokens=34, heads=1)
    with torch.no_grad():
        given["log_decay"].mul_(60).masked_fill_(torch.rand_like(given["log_decay"]) < 0.3, -1e-3)
    assert_same(given, TRITON, rule=rule)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_a_decay_that_is_not_a_number(decay):
    """Every output from its token on is NaN, and none before."""
    plain = detached(arguments(decay, gates=False, heads=1))
    plain["log_decay"][:, 20] = torch.nan
    out, state = linear_attention(**plain, backend="triton", chunk_size=16)
    assert out[:, :16].isfinite().all() and out[:, 20:].isnan().all() and state.isnan().all()


def test_a_decay_to_nothing():
    """−∞ starts a new sequence."""
    plain = detached(arguments("vector", state=False))
    plain["log_decay"][:, 20] = -torch.inf
    cut = {n: x[:, 20:] for n, x in plain.items()}
    whole, _ = linear_attention(**plain, backend="triton", chunk_size=16)
    rest, _ = linear_attention(**cut, backend="torch")
    torch.testing.assert_close(whole[:, 20:], rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "allowed", "precision"),
    [(torch.bfloat16, "highest", "tf32"), (torch.float16, "highest", "tf32"), (torch.float32, "high", "tf32"),
     (torch.float32, "highest", "tf32x3")],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"normalize": True}])
def test_digits_of_products(monkeypatch, dtype, allowed, precision, options):
    """float32 keeps its digits unless PyTorch is told otherwise; a normalizer does not add digits to the others."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    built, found = launch.Launcher.__init__, []
    monkeypatch.setattr(launch.Launcher, "__init__", lambda run, call: built(run, call) or found.append(run))
    x = torch.rand(1, 2, 1, 16, dtype=dtype)
    linear_attention(x, x, x, backend="triton", **options)
    assert [run.common["PRECISION"] for run in found] == [precision]


@pytest.mark.parametrize(("setting", "precision"), [("tf32", "tf32"), ("ieee", "tf32x3")])
def test_the_newer_setting_of_float32_products(setting, precision, monkeypatch):
    """After which `get_float32_matmul_precision` raises."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed_settings)
    call = Call(*[torch.rand(1, 2, 1, 16)] * 3)
    assert launch.Launcher(call).common["PRECISION"] == precision


def mixed_settings():
    raise RuntimeError("PyTorch is checking whether allow_tf32_new is enabled …")


def one_token(given):
    """The arguments of `step` for the first token."""
    token = {n: x[:, 0] if n in TOKENWISE and x.dim() > 1 else x for n, x in given.items()}
    return token | {"state": token.pop("initial_state")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", DECAYS)
def test_step(decay, rule):
    heads = {"heads": 4, "groups": 2} if (decay, rule) in PAIRS else {"heads": 2, "queries": 2}
    given = arguments(decay, rows=2, tokens=1, value=40, bonus=rule == "add" and decay == "vector", **heads)
    token = one_token(given)
    exact = step(**detached(token, torch.float64), rule=rule, backend="torch")
    found = step(**detached(token), rule=rule, backend="triton")
    for x, y in zip(found, exact, strict=True):
        assert relative(x, y) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_a_normalizer(dtype):
    """Rounded once, and the state where it was."""
    q, k, v = torch.rand(2, 2, K), torch.rand(2, 2, K), torch.randn(2, 4, V)
    given = {"q": q, "k": k, "v": v, "read_gate": torch.rand(2, 4), "write_gate": torch.rand(2, 4)}
    given = {name: x.to(dtype) for name, x in given.items()}
    state = torch.rand(2, 4, K, V + 1)
    exact = step(**{n: x.double() for n, x in given.items()}, state=state.double(), normalize=True)
    out, after = step(**given, state=state, normalize=True, backend="triton", in_place=True)
    assert after is state and out.dtype == dtype
    assert relative(out, exact[0]) <= (1e-6 if dtype == torch.float32 else 2**-8) and relative(after, exact[1]) <= 1e-6


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_an_empty_batch_has_gradients(rule):
    given = leaves(arguments("vector", rows=0))
    out, state = linear_attention(**given, rule=rule, backend="triton")
    wanted = list(given.values())
    for x, gradient in zip(wanted, torch.autograd.grad(out.sum() + state.sum(), wanted), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_a_decay_per_head_does_not_narrow_the_loads():
    """Its distance between rows, T · H, is that of no tensor of q or k."""
    q, g = torch.zeros(2, 999, 4, 64), torch.zeros(2, 999, 4)
    assert strides(q=one_stride(q), g=one_stride(g)) == {"ALIGN": 16, "q_stride": 16, "g_stride": 0}


def test_a_step_in_place(monkeypatch):
    """The state keeps its memory; one in another layout is refused. A head takes three programs."""
    monkeypatch.setattr(step_kernels, "PROGRAM", 16)
    token = one_token(detached(arguments("vector", rows=2, tokens=1, heads=2, value=40)))
    state = token.pop("state")
    out, after = step(**token, state=state, rule="delta", backend="triton")
    with pytest.raises(InputError, match=r"state has strides .* expected to be contiguous"):
        step(**token, state=state.clone().mT.contiguous().mT, rule="delta", backend="triton", in_place=True)
    version = state._version
    found, new = step(**token, state=state, rule="delta", backend="triton", in_place=True)
    assert state._version > version and torch.equal(found, out) and torch.equal(new, after) and new is state


@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"rule": "delta"}, {"bonus": torch.rand(H, K)}], ids=str)
@pytest.mark.parametrize("queries", [1, 2])
def test_a_step_has_gradients_by_the_chunked_kernels(options, queries):
    sizes = ((H * queries, K), (H, K), (H, V))
    qkv, state = [torch.rand(1, *size) for size in sizes], torch.rand(1, H, K, V + ("normalize" in options))
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        given = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out, after = step(*leaves, state=state.to(dtype), **given, backend=backend)
        results.append((out, after, *torch.autograd.grad(out.square().sum() + after.sum(), leaves)))
    assert all(relative(x, y) <= TRITON.gradient_tolerance for x, y in zip(*results, strict=True))


def test_a_layer_trains_on_one_token():
    layer = Mixer("softmax-gla", hidden_size=32, num_heads=2)
    layer.backend, x = "triton", torch.randn(1, 1, 32)
    layer(x)[0].sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer.backend = "torch"
    layer(x)[0].sum().backward()
    torch.testing.assert_close(found, [p.grad for p in layer.parameters()], rtol=1e-4, atol=1e-5)


def test_a_step_in_a_transform_is_refused():
    x = torch.randn(2, 1, H, K)
    with pytest.raises(InputError, match="it supports neither transforms"):
        torch.func.vmap(lambda x: step(x, x, x, backend="triton"))(x)


@pytest.mark.parametrize(
    ("key", "dtype", "chunk_size", "reason"),
    [
        (K, torch.float64, None, "it computes in float32, from float32, bfloat16 or float16, and v is torch.float64"),
        (257, torch.float32, None, "it takes K from 1 to 256 and V from 1, and they are 257 and 24"),
        (K, torch.float32, 48, "its chunks have 16, 32 or 64 tokens, and chunk_size is 48"),
    ],
)
def test_refusals(key, dtype, chunk_size, reason):
    q, v = torch.randn(1, 3, H, key, dtype=dtype), torch.randn(1, 3, H, V, dtype=dtype)
    with pytest.raises(InputError, match=f"backend='triton' cannot run here: {reason}"):
        linear_attention(q, q, v, backend="triton", chunk_size=chunk_size)


@pytest.mark.parametrize("bounds", [[0, 5, 36], [0, 30, 20, 37], [1, 37]])
def test_bounds_that_do_not_fit(bounds):
    x = torch.randn(1, T, H, K)
    with pytest.raises(InputError, match="expected 0 = c_0"):
        linear_attention(x, x, x, cu_seqlens=torch.tensor(bounds), backend="triton")
