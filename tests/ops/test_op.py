"""The op against the literal loop: every argument, every form, every backend."""

import itertools
from functools import partial

import pytest
import torch

from equation import (
    CHUNKWISE,
    DECAYS,
    KINDS,
    LAYOUTS,
    WAYS,
    B,
    H,
    K,
    T,
    V,
    assert_same,
    assert_strides_do_not_matter,
    by_literal,
    detached,
    inputs,
    leaves,
    of_kind,
    prepare,
)
from headrace import InputError, linear_attention, step
from headrace.ops.backends.native import library as native
from headrace.ops.backends.torch.tiles import grid
from headrace.ops.call import Call
from headrace.ops.checks import INTEGERS
from headrace.ops.parallel import context
from headrace.verification.verify import relative


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    prepare(request.param, monkeypatch)
    return WAYS[request.param]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
def test_every_form_equals_the_reference(way, decay, rule, gates):
    for groups, state in ((H, False), (2, True), (1, True)):
        arguments = inputs(decay, tokens=way.tokens, groups=groups, gates=gates, state=state)
        assert_same(arguments, way, rule=rule, scale=0.7)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("extra", ["bonus", "normalize"])
def test_bonus_and_normalizer_equal_the_reference(way, decay, extra):
    for gates in (False, True):
        arguments = inputs(decay, tokens=way.tokens, gates=gates, groups=2, **{extra: True})
        assert_same(arguments, way, normalize=extra == "normalize")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_the_reference(way, decay, kind):
    ends = torch.tensor([0, 3, 4, 4, way.tokens])  # one of a single token, one empty
    options, settings = of_kind(kind)
    assert_same(inputs(decay, rows=1, tokens=way.tokens, n=4, **options), way, ends, **settings)


# A kind of rule, a decay, and the number of states. Not one state with one decay: its gradient is a single number, of
# which the literal loop in float32 has few digits too.
GROUPED = [("add", "none", 1), ("add", "fixed", 2), ("delta", "scalar", 1), ("delta", "vector", 2),
           ("normalize", "scalar", 2), ("bonus", "vector", 2)]  # fmt: skip


@pytest.mark.parametrize(("kind", "decay", "heads"), GROUPED)
def test_grouped_queries_equal_the_reference(way, kind, decay, heads):
    """Three queries read each of the states, of rows and of packed sequences."""
    options, settings = of_kind(kind)
    options |= {"heads": heads, "queries": 3, "tokens": way.tokens}
    assert_same(inputs(decay, **options), way, **settings)
    ends = torch.tensor([0, 3, 4, 4, way.tokens])
    assert_same(inputs(decay, rows=1, n=4, **options), way, ends, **settings)


def test_grouped_queries_keep_one_state_for_each_group():
    """As a model with 9 query heads and 3 key/value heads of 64 channels has them."""
    q, (k, v) = torch.randn(1, 70, 9, 64), torch.randn(2, 1, 70, 3, 64)
    out, state = linear_attention(q, k, v)
    assert out.shape == q.shape and state.shape == (1, 3, 64, 64) and state.untyped_storage().nbytes() == state.nbytes
    assert step(q[:, 0], k[:, 0], v[:, 0], state)[1].shape == state.shape
    each = linear_attention(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))
    assert relative(out, each[0].double()) < 1e-6 and each[1].numel() == 3 * state.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(way, layout):
    check = partial(assert_strides_do_not_matter, way=way, layout=layout)
    check(inputs("fixed", tokens=way.tokens, normalize=True), normalize=True)
    check(inputs("scalar", tokens=way.tokens, groups=2), rule="delta")
    check(inputs("vector", tokens=way.tokens, bonus=True))
    check(inputs("scalar", tokens=way.tokens, heads=2, queries=2), rule="delta")
    check(inputs("vector", tokens=1), rule="delta")
    check(inputs("scalar", rows=1, tokens=way.tokens, n=3), cu_seqlens=torch.tensor([0, 4, 4, way.tokens]))


@pytest.mark.parametrize("kind", ["add", "bonus"])
def test_bounds_may_have_any_integer_dtype(way, kind):
    """127 tokens, so that the next number overflows int8: the bonus adds a token to every sequence."""
    arguments = detached(inputs("scalar", rows=1, tokens=127, n=4, bonus=kind == "bonus"), way.dtype)
    ends = torch.tensor([0, 100, 101, 101, 127])
    expected = linear_attention(**arguments, cu_seqlens=ends, **way.settings)
    for dtype in INTEGERS:
        actual = linear_attention(**arguments, cu_seqlens=ends.to(dtype), **way.settings)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def of_chunk(way, chunk_size):
    return way._replace(settings=way.settings | {"chunk_size": chunk_size})


# A token, chunks of one, a chunk that is not full, chunks and a part of one, one full chunk, and far less than one.
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 64), (9, 1), (63, 64), (65, 7), (65, 64), (65, 65), (65, 1000)])
@pytest.mark.parametrize("form", ["chunkwise", "batched"])
def test_any_length_and_chunk_size_equals_the_reference(tokens, chunk_size, form, monkeypatch):
    prepare(form, monkeypatch)
    for decay, rule in itertools.product(("scalar", "vector"), ("add", "delta")):
        assert_same(inputs(decay, rows=1, tokens=tokens), of_chunk(CHUNKWISE, chunk_size), rule=rule)


@pytest.mark.parametrize("form", ["chunkwise", "batched"])
def test_large_states_are_recomputed_in_the_backward(form, monkeypatch):
    """With K V large against the chunk, the backward computes them again."""
    prepare(form, monkeypatch)
    call = Call(**inputs("scalar"))
    assert not grid(call._replace(chunk_size=1)).keeps and grid(call._replace(chunk_size=2)).keeps
    for rule, decay in itertools.product(("add", "delta"), DECAYS):
        assert_same(inputs(decay), of_chunk(CHUNKWISE, 1), rule=rule)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3])
def test_step_equals_one_token_of_the_reference(decay, kind, queries):
    options, settings = of_kind(kind)
    arguments = inputs(decay, queries=queries, **options)
    expected, final = by_literal(arguments, **settings)
    state = arguments.pop("initial_state")
    for t in range(T):
        now = {n: x if n == "bonus" or x.dim() == 1 else x[:, t] for n, x in arguments.items()}
        out, state = step(**now, state=state, **settings)
        assert relative(out, expected[:, t]) < 1e-12
    assert relative(state, final) < 1e-12


# --- as an operator --------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_its_state_in_float32(backend):
    x = detached(inputs("scalar"), torch.bfloat16)
    out, state = linear_attention(**x, backend=backend)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact = linear_attention(**detached(x))
    assert relative(out, exact[0].double()) < 4e-3
    products = 2**-8 if backend == "native" and native.instructions == "avx512bf16" else 1e-6
    assert relative(state, exact[1].double()) < products


@pytest.mark.parametrize("form", ["chunkwise", "recurrent", "parallel"])
def test_state_of_an_empty_sequence_has_the_dtype_of_the_others(form):
    x = torch.randn(1, 4, 2, 3)
    given = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    _, state = linear_attention(x, x, x, initial_state=given, cu_seqlens=torch.tensor([0, 2, 2, 4]), form=form)
    assert state.dtype == torch.float32 and torch.equal(state[1], given[1].float())


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_autocast_does_not_change_the_op(backend, rule):
    x = leaves(inputs("scalar"))
    op = partial(linear_attention, rule=rule, backend=backend)
    out, state = op(**x)
    expected = torch.autograd.grad(out.sum() + state.sum(), list(x.values()))
    with torch.autocast("cpu", torch.bfloat16):
        cast_out, cast_state = op(**x)
        actual = torch.autograd.grad(cast_out.sum() + cast_state.sum(), list(x.values()))
        now = {name: y if name == "initial_state" else y[:, 0] for name, y in x.items()}
        stepped, _ = step(**{{"initial_state": "state"}.get(name, name): y for name, y in now.items()}, rule=rule)
    assert torch.equal(out, cast_out) and torch.equal(state, cast_state)
    assert all(torch.equal(g, e) for g, e in zip(actual, expected, strict=True))
    assert relative(stepped, out[:, 0].double()) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_autocast_does_not_change_what_processes_exchange(rule, packed, monkeypatch):
    """In the second of two processes, which gets what it sends from the first."""
    monkeypatch.setattr(context.SequenceShard, "gather", lambda part, x: [x, x])
    part = object.__new__(context.SequenceShard)
    part.rank, part.size, part._T, part._lengths = 1, 2, T, None
    x, ends = inputs("scalar", rows=1, n=3 if packed else None), torch.tensor([0, 3, T + 2, 2 * T])
    op = partial(linear_attention, **detached(x), rule=rule, cu_seqlens=ends if packed else None)
    with context.within(part):
        expected = op()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, op(), expected))


def test_saved_bytes_are_bounded(backend):
    q, k = torch.randn(2, 1, 1024, 2, 64)
    v, g = torch.randn(1, 1024, 2, 128), -torch.rand(1, 1024, 2)
    given = [x.requires_grad_() for x in (q, k, v, g)]
    limits = {"torch": {"add": 2, "delta": 3}, "native": {"add": 1.12, "delta": 1.12}}
    for rule, limit in limits[backend].items():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            linear_attention(q, k, v, log_decay=g, rule=rule, backend=backend)
        distinct = {x.data_ptr(): x.nbytes for x in kept}
        assert len(distinct) >= len(given) and sum(distinct.values()) <= limit * sum(x.nbytes for x in given)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"beta": torch.rand(B, T)}, r"beta has shape \[2, 13\]; expected \[2, 13, 4\]"),
        ({"read_gate": torch.rand(B, T, H, 1)}, "read_gate has shape"),
        ({"log_decay": torch.rand(T)},
         r"log_decay has shape \[13\]; expected \[4\] or \[2, 13, 4\] or \[2, 13, 4, 6\]"),
        ({"q": torch.randn(B, T, H, K + 1)}, "q has shape"),
        ({"q": torch.randn(B, T, H, K).double()}, "k has dtype"),
        ({"q": torch.ones(B, T, H, K, dtype=torch.long)}, "q has dtype torch.int64"),
        ({"q": torch.randn(B, T, 3, K), "k": torch.randn(B, T, 3, K)}, "q and k have 3 heads"),
        ({"q": torch.randn(B, T, 6, K)},
         r"q has shape \[2, 13, 6, 6\]; expected .* a multiple of the heads of k and v"),
        ({"q": torch.randn(B, T, 8, K), "k": torch.randn(B, T, 2, K)},
         r"expected the shape of k, \[2, 13, 2, 6\], or a multiple of the heads of k and v"),
        ({"q": torch.randn(B, T, 2 * H, K), "read_gate": torch.rand(B, T, H)},
         r"read_gate has shape \[2, 13, 4\]; expected \[2, 13, 8\]"),
        ({"initial_state": torch.zeros(B, H, V, K)}, "initial_state has shape"),
        ({"cu_seqlens": torch.tensor([0, T])}, "expected B=1"),
        ({"cu_seqlens": [0, T]}, r"cu_seqlens=\[0, 13\]; expected a tensor of integers"),
        ({"cu_seqlens": torch.tensor([0.0, T])}, "dtype torch.float32; expected .* an integer dtype"),
        ({"cu_seqlens": torch.tensor([False, True])}, "dtype torch.bool; expected .* an integer dtype"),
        ({"rule": "dleta"}, "rule='dleta'"),
        ({"form": "parallell"}, "form='parallell'"),
        *(({"chunk_size": n}, f"chunk_size={n!r}; expected a positive integer") for n in (0, 16.5, "a", True)),
        *(({"scale": x}, "scale=.*; expected a finite number")
          for x in (torch.nan, torch.inf, True, "a", 10**400, 1e39)),
        *(({name: "no"}, f"{name}='no'; expected True or False") for name in ("normalize", "check")),
        ({"backend": ["torch"]}, r"backend=\['torch'\] is unknown"),
        ({"chunk_size": 10**400}, "chunk_size=1000*…; expected a positive integer"),
        ({"scale": torch.ones((), requires_grad=True)}, r"scale=tensor\(.*\); expected a finite number"),
        ({"beta": 0.5}, "beta=0.5; expected a tensor"),
        ({"log_decay": -0.1}, "log_decay=-0.1; expected a tensor"),
        ({"k": None}, "k=None; expected a tensor"),
        ({"v": [[0.25] * 999]}, r"^v=.{79}…; expected a tensor$"),
        ({"v": torch.randn(B, T, H, V).to(torch.float8_e5m2)}, "v has dtype torch.float8_e5m2; expected a floating"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
        ({"rule": "delta", "normalize": True}, "rule='delta' has no bonus"),
        ({"log_decay": torch.full((H,), 0.1), "check": True}, "log_decay reaches 0.1; expected values ≤ 0"),
        ({"log_decay": torch.full((H,), -torch.inf), "check": True}, "log_decay contains an infinity"),
        ({"v": torch.full((B, T, H, V), torch.nan), "check": True}, "v contains NaN"),
        ({"beta": torch.full((B, T, H), -1.0), "check": True}, "beta reaches -1"),
        ({"rule": "delta", "k": torch.full((B, T, H, K), 1.0), "check": True}, "reaches 6; expected ≤ 2"),
        ({"normalize": True, "check": True}, "expected values ≥ 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, sentence):
    good = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, H, V)}
    with pytest.raises(InputError, match=sentence):
        linear_attention(**(good | change))


def test_the_strength_of_the_delta_rule_is_checked_in_float32():
    """‖k‖² is 80,000, which float16 does not have, and β‖k‖² 0.8."""
    k = torch.full((1, 1, 1, 2), 200.0, dtype=torch.float16)
    linear_attention(k, k, k, beta=torch.full((1, 1, 1), 1e-5), rule="delta", check=True)


def test_parallel_form_has_a_memory_limit():
    """64 chunks of 16 heads have 4 GiB of scores, which all devices but a CPU compute at once."""
    x, bounds = torch.zeros(1, 31 * 1024, 16, 1, device="meta"), torch.arange(32) * 1024
    linear_attention(x, x, x, cu_seqlens=bounds, form="parallel")
    x, bounds = torch.zeros(1, 33 * 1024, 16, 1, device="meta"), torch.arange(34) * 1024
    with pytest.raises(InputError, match=r"would hold 4\.1 GiB of T×T scores for T=1024"):
        linear_attention(x, x, x, cu_seqlens=bounds, form="parallel")
    x = torch.zeros(1, 70_001, 1, 1)
    with pytest.raises(InputError, match="expected at most 4 GiB, or form='chunkwise'"):
        linear_attention(x, x, x, form="parallel")
