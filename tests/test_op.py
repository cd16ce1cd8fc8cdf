"""The op against the literal loop in float64: every argument, every form, ordinary and hostile values."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from headrace import InputError, backends, linear_attention, step
from headrace.laws import relative
from headrace.literal import literal

B, T, H, K, V = 2, 13, 4, 6, 5  # all different, so that no transposed axis passes
NAMES = ("q", "k", "v", "log_decay", "beta", "read_gate", "write_gate", "bonus", "initial_state")


def inputs(decay=None, *, rows=B, tokens=T, groups=H, gates=True, bonus=False, normalise=False, state=True, n=None):
    """Arguments of the op by name, in float64, with gradients."""
    draw = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    signed = (lambda x: x.abs()) if normalise else (lambda x: x)
    shapes = {"none": None, "fixed": (H,), "scalar": (rows, tokens, H), "vector": (rows, tokens, H, K)}
    shape = shapes[decay or "none"]
    found = {
        "q": signed(torch.randn(rows, tokens, groups, K).double()),
        "k": signed(F.normalize(torch.randn(rows, tokens, groups, K).double(), dim=-1)),
        "v": torch.randn(rows, tokens, H, V).double(),
        "log_decay": None if shape is None else -draw(*shape),
        **{name: draw(rows, tokens, H) if gates else None for name in ("beta", "read_gate", "write_gate")},
        "bonus": torch.randn(H, K).double() if bonus else None,
        "initial_state": draw(n or rows, H, K, V + normalise) if state else None,
    }
    return {name: x if x is None else x.requires_grad_() for name, x in found.items()}


def by_literal(arguments, cu_seqlens=None, **settings):
    """literal, with grouped heads repeated and packed sequences one by one."""
    heads = {name: arguments[name].repeat_interleave(H // arguments[name].shape[2], 2) for name in ("q", "k")}
    arguments = arguments | heads
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


def assert_same(arguments, tolerance=1e-10, form="chunkwise", chunk_size=5, cu_seqlens=None, **settings):
    """Outputs, final states and every gradient of linear_attention against the literal loop."""
    found = linear_attention(
        **arguments, **settings, form=form, chunk_size=chunk_size, cu_seqlens=cu_seqlens, check=True
    )
    expected = by_literal(arguments, cu_seqlens, **settings)
    weights = [torch.randn_like(x) for x in expected]
    given = [x for x in arguments.values() if x is not None]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), given)
        for pair in (found, expected)
    ]
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) <= tolerance
    floor = 1e-6 * max(g.norm().item() for g in gradients[1])
    names = [name for name, x in arguments.items() if x is not None]
    for name, g, e in zip(names, *gradients, strict=True):
        assert relative(g, e, floor) <= tolerance, name


FORMS = ["chunkwise", "recurrent", "parallel"]
DECAYS = ["none", "fixed", "scalar", "vector"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
def test_forms(form, decay, rule, gates):
    for groups, state in itertools.product((H, 2, 1), (False, True)):
        assert_same(inputs(decay, groups=groups, gates=gates, state=state), form=form, rule=rule, scale=0.7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("extra", ["bonus", "normalise"])
def test_bonus_and_normaliser(form, decay, extra):
    for gates in (False, True):
        arguments = inputs(decay, gates=gates, groups=2, **{extra: True})
        assert_same(arguments, form=form, normalise=extra == "normalise")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", ["add", "delta", "bonus", "normalise"])
def test_packed_sequences(form, decay, kind):
    ends = torch.tensor([0, 3, 4, 4, 13])  # one of a single token, one empty
    options = {kind: True} if kind in ("bonus", "normalise") else {}
    arguments = inputs(decay, rows=1, n=4, **options)
    settings = {"rule": kind if kind == "delta" else "add", "normalise": kind == "normalise"}
    assert_same(arguments, form=form, cu_seqlens=ends, **settings)


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 63, 64, 65, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_any_length_and_chunk_size(tokens, chunk_size):
    for decay, rule in itertools.product(("scalar", "vector"), ("add", "delta")):
        assert_same(inputs(decay, rows=1, tokens=tokens), chunk_size=chunk_size, rule=rule)


def test_states_kept_at_a_stride():
    """With K V large against the chunk, states are kept at some chunks only and recomputed between."""
    from headrace.backends.tiles import kept_stride

    assert kept_stride(K, V, 1) > 1
    assert kept_stride(256, 512, 64) == 2
    for rule, decay in itertools.product(("add", "delta"), DECAYS):
        assert_same(inputs(decay), chunk_size=1, rule=rule)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", ["add", "delta", "bonus", "normalise"])
def test_step_is_one_token(decay, kind):
    options = {kind: True} if kind in ("bonus", "normalise") else {}
    arguments = inputs(decay, **options)
    settings = {"rule": kind if kind == "delta" else "add", "normalise": kind == "normalise"}
    expected, final = by_literal(arguments, **settings)
    state = arguments.pop("initial_state")
    for t in range(T):
        now = {n: x if x is None or n == "bonus" or x.dim() == 1 else x[:, t] for n, x in arguments.items()}
        out, state = step(**now, state=state, **settings)
        assert relative(out, expected[:, t]) < 1e-12
    assert relative(state, final) < 1e-12


# --- precision -------------------------------------------------------------------------------------------------------


def errors_in_float32(arguments, rule="add", **settings):
    """(worst of output and state, worst gradient) of the float32 op against the literal loop in float64."""
    arguments = {name: x.float().double() for name, x in arguments.items()}
    results = []
    for dtype, op in ((torch.float64, literal), (torch.float32, linear_attention)):
        given = {n: x.detach().to(dtype).requires_grad_() for n, x in arguments.items() if x is not None}
        pair = op(**given, rule=rule, **settings)
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype) for x in pair]
        loss = sum((x * w).sum() for x, w in zip(pair, weights, strict=True))
        results.append((pair, torch.autograd.grad(loss, list(given.values()))))
    (expected, expected_gradients), (found, gradients) = results
    floor = 1e-6 * max(g.norm().item() for g in expected_gradients)
    forward = max(relative(x, y) for x, y in zip(found, expected, strict=True))
    return forward, max(relative(g, e, floor) for g, e in zip(gradients, expected_gradients, strict=True))


def long_inputs(tokens=2048, heads=2, key=32, value=16, beta=1.0):
    q, k = torch.randn(2, 1, tokens, heads, key).double()
    return {
        "q": q,
        "k": F.normalize(k, dim=-1),
        "v": torch.randn(1, tokens, heads, value).double(),
        "beta": beta * torch.rand(1, tokens, heads).double(),
        "log_decay": -0.1 * torch.rand(1, tokens, heads).double(),
    }


@pytest.mark.parametrize(("rule", "beta", "bound"), [("add", 1.0, 2e-6), ("delta", 1.0, 2e-6), ("delta", 1.9, 1e-5)])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_float32_over_2048_tokens(rule, beta, bound, decay):
    arguments = long_inputs(beta=beta)
    if decay == "none":
        del arguments["log_decay"]
    elif decay == "vector":
        arguments["log_decay"] = -0.1 * torch.rand(1, 2048, 2, 32).double()
    forward, backward = errors_in_float32(arguments, rule)
    assert forward <= bound
    assert backward <= 10 * bound


def hostile_decays():
    """For long_inputs(tokens=256): [1, 256, 2, 32] and [1, 256, 2]."""
    quiet, sudden = torch.zeros(1, 256, 2, 32).double(), torch.where(torch.arange(256) % 49 < 48, -50.0, -0.01).double()
    channels = quiet.clone()
    channels[..., ::3], channels[..., 1::3] = -50, -300
    alternating = quiet.clone()
    alternating[:, :, :, 0] = sudden[None, :, None]
    per_head = quiet[..., 0].clone()
    per_head[..., 0] = -300
    return {
        "channels": channels,
        "alternating": alternating,
        "heads": per_head,
        "alternating heads": sudden[None, :, None].expand(1, 256, 2),
    }


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("kind", hostile_decays())
def test_hostile_decays(rule, kind):
    arguments = long_inputs(tokens=256) | {"log_decay": hostile_decays()[kind]}
    forward, backward = errors_in_float32(arguments, rule)
    assert forward <= 2e-6
    assert backward <= 1e-4


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("shape", [(1, 128, 2, 32), (1, 128, 2)], ids=["vector", "scalar"])
def test_the_gradient_through_a_steep_decay(rule, shape):
    """With log_decay g = −e^z (RWKV-6), what rounding leaves in the gradient to g, where
    the decay lets nothing pass, is multiplied by a large g on the way to z."""
    arguments = {name: x for name, x in long_inputs(tokens=128).items() if name not in ("log_decay", "beta")}
    z = 2.5 * torch.randn(shape, dtype=torch.float64)
    found = []
    for dtype, op in ((torch.float64, literal), (torch.float32, linear_attention)):
        leaf = z.to(dtype).requires_grad_()
        out, _ = op(**{name: x.to(dtype) for name, x in arguments.items()}, log_decay=-leaf.exp(), rule=rule)
        found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert relative(found[1], found[0]) < 2e-6


def test_one_key_repeated():
    arguments = long_inputs(tokens=128) | {"beta": torch.ones(1, 128, 2).double()}
    arguments["k"] = arguments["k"][:, :1].expand(-1, 128, -1, -1)
    del arguments["log_decay"]  # nothing old is left to decay: its gradient is zero
    forward, backward = errors_in_float32(arguments, "delta")
    assert forward <= 2e-6
    assert backward <= 1e-5


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_vanishing_beta_and_closed_gates(rule):
    arguments = long_inputs(tokens=130)
    zero_one = (torch.arange(130) % 2).double()[None, :, None].expand(1, 130, 2)
    arguments |= {"read_gate": zero_one, "write_gate": 1 - zero_one, "beta": torch.full((1, 130, 2), 1e-12).double()}
    forward, backward = errors_in_float32(arguments, rule)
    assert forward <= 1e-4
    assert backward <= 1e-4


def test_70001_tokens_in_one_go_and_in_two():
    tokens, generator = 70_001, torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, tokens, 2, *shape, generator=generator)  # noqa: E731
    q, k, v, g = draw(8), F.normalize(draw(8), dim=-1), draw(4), -0.01 * draw().abs()
    whole, final = linear_attention(q, k, v, log_decay=g, rule="delta")
    first, state = linear_attention(q[:, :30_000], k[:, :30_000], v[:, :30_000], log_decay=g[:, :30_000], rule="delta")
    rest = {name: x[:, 30_000:] for name, x in {"q": q, "k": k, "v": v, "log_decay": g}.items()}
    second, last = linear_attention(**rest, rule="delta", initial_state=state)
    assert relative(torch.cat([first, second], 1), whole.double()) < 1e-6
    assert relative(last, final.double()) < 1e-6
    tail = {name: x[:, -500:].double() for name, x in {"q": q, "k": k, "v": v, "log_decay": g}.items()}
    _, before = linear_attention(q[:, :-500], k[:, :-500], v[:, :-500], log_decay=g[:, :-500], rule="delta")
    assert relative(whole[:, -500:], literal(**tail, rule="delta", initial_state=before.double())[0]) < 2e-6


# --- as an operator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "decay"), [("add", "none"), ("add", "vector"), ("delta", "scalar")])
def test_opcheck(rule, decay):
    x = inputs(decay)
    x.pop("bonus")
    tensors = [*(x[n] for n in ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate", "initial_state")), None]
    linear_attention(*(x[n].detach() for n in ("q", "k", "v")), backend="torch")  # registers the operator
    torch.library.opcheck(torch.ops.headrace.chunkwise.default, (*tensors, rule == "delta", 0.5, 5, True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(packed):
    arguments = inputs("vector", rows=1 if packed else B, n=3 if packed else None)
    ends = torch.tensor([0, 3, 9, T]) if packed else None

    def run(q, v):
        out, state = linear_attention(**{**arguments, "q": q, "v": v}, rule="delta", cu_seqlens=ends)
        return out.sum() + state.square().sum()

    q, v = arguments["q"], arguments["v"]
    expected = torch.autograd.grad(run(q, v), [q, v])
    found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(q, v), [q, v])
    assert all(relative(x, y) < 1e-12 for x, y in zip(found, expected, strict=True))


def test_bfloat16_keeps_its_state_in_float32():
    x = {name: None if y is None else y.detach().bfloat16() for name, y in inputs("scalar").items()}
    out, state = linear_attention(**x)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    exact = linear_attention(**{name: None if y is None else y.float() for name, y in x.items()})
    assert relative(out, exact[0].double()) < 4e-3
    assert relative(state, exact[1].double()) < 1e-6


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_autocast_does_not_reach_inside(rule):
    x = {
        name: y.detach().float().requires_grad_()
        for name, y in inputs("scalar", normalise=False).items()
        if y is not None
    }
    out, state = linear_attention(**x, rule=rule)
    expected = torch.autograd.grad(out.sum() + state.sum(), list(x.values()))
    with torch.autocast("cpu", torch.bfloat16):
        cast_out, cast_state = linear_attention(**x, rule=rule)
        found = torch.autograd.grad(cast_out.sum() + cast_state.sum(), list(x.values()))
        now = {name: y if name == "initial_state" else y[:, 0] for name, y in x.items()}
        stepped, _ = step(**{{"initial_state": "state"}.get(name, name): y for name, y in now.items()}, rule=rule)
    assert torch.equal(out, cast_out)
    assert torch.equal(state, cast_state)
    assert all(torch.equal(g, e) for g, e in zip(found, expected, strict=True))
    assert relative(stepped, out[:, 0].double()) < 1e-6


def test_bytes_kept_for_the_backward():
    q, k = torch.randn(2, 1, 1024, 2, 64)
    v, g = torch.randn(1, 1024, 2, 128), -torch.rand(1, 1024, 2)
    given = [x.requires_grad_() for x in (q, k, v, g)]
    for rule, limit in (("add", 2), ("delta", 3)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            linear_attention(q, k, v, log_decay=g, rule=rule)
        distinct = {x.data_ptr(): x.nbytes for x in kept}
        assert len(distinct) >= len(given)
        assert sum(distinct.values()) <= limit * sum(x.nbytes for x in given)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"beta": torch.rand(B, T)}, r"beta has shape \[2, 13\]; expected \[2, 13, 4\]"),
        ({"read_gate": torch.rand(B, T, H, 1)}, "read_gate has shape"),
        (
            {"log_decay": torch.rand(T)},
            r"log_decay has shape \[13\]; expected \[4\] or \[2, 13, 4\] or \[2, 13, 4, 6\]",
        ),
        ({"q": torch.randn(B, T, H, K + 1)}, "q has shape"),
        ({"q": torch.randn(B, T, H, K).double()}, "k has dtype"),
        ({"q": torch.ones(B, T, H, K, dtype=torch.long)}, "q has dtype torch.int64"),
        ({"q": torch.randn(B, T, 3, K), "k": torch.randn(B, T, 3, K)}, "q and k have 3 heads"),
        ({"initial_state": torch.zeros(B, H, V, K)}, "initial_state has shape"),
        ({"cu_seqlens": torch.tensor([0, T])}, "expected B=1"),
        ({"rule": "dleta"}, "rule='dleta'"),
        ({"form": "parallell"}, "form='parallell'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
        ({"rule": "delta", "normalise": True}, "rule='delta' has no bonus"),
        ({"log_decay": torch.full((H,), 0.1), "check": True}, "log_decay reaches 0.1; expected values ≤ 0"),
        ({"log_decay": torch.full((H,), -torch.inf), "check": True}, "log_decay contains an infinity"),
        ({"v": torch.full((B, T, H, V), torch.nan), "check": True}, "v contains NaN"),
        ({"beta": torch.full((B, T, H), -1.0), "check": True}, "beta reaches -1"),
        ({"rule": "delta", "k": torch.full((B, T, H, K), 1.0), "check": True}, "reaches 6; expected ≤ 2"),
        ({"normalise": True, "check": True}, "expected values ≥ 0"),
    ],
)
def test_bad_input_is_named(change, sentence):
    good = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, H, V)}
    with pytest.raises(InputError, match=sentence):
        linear_attention(**(good | change))


def test_the_parallel_form_has_a_limit():
    x = torch.zeros(1, 70_001, 1, 1)
    with pytest.raises(InputError, match="use form='chunkwise'"):
        linear_attention(x, x, x, form="parallel")


def test_which_backend_runs():
    assert backends()["torch"] is None
    x = torch.randn(1, 3, 1, 2)
    assert backends(x, x, x, rule="delta") in backends()
