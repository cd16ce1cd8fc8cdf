"""Inputs that a caller should not have made: NaN, infinities, growth, empty batches, sequences that end elsewhere."""

import itertools

import pytest
import torch

from equation import DECAYS, KINDS, WAYS, B, H, K, T, V, assert_same, detached, inputs, leaves, of_kind, prepare
from headrace import InputError, Mixer, linear_attention, zoo
from tiny import by_state, covering

FORMS = {name: way.settings for name, way in WAYS.items()}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    prepare(request.param, monkeypatch)
    return FORMS[request.param]


@pytest.mark.parametrize("ends", [[0, 5], [1, T], [0, 9, 4, T], [0, T + 9, T], [0, 5, T + 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_sequence_bounds_are_refused(form, kind, ends):
    options, settings = of_kind(kind)
    x = detached(inputs(rows=1, n=len(ends) - 1, **options))
    sentence = rf"cu_seqlens=\[.*{ends[-1]}\]; expected 0 = c_0 ≤ … ≤ c_N = T = {T}"
    with pytest.raises(ValueError, match=sentence) as error:
        linear_attention(**x, cu_seqlens=torch.tensor(ends), **settings, **form)
    assert isinstance(error.value, InputError) or form.get("backend") == "native"


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch_runs_in_every_form(form, decay, kind):
    options, settings = of_kind(kind)
    x = leaves(inputs(decay, rows=0, **options))
    out, state = linear_attention(**x, **settings, **form, check=True)
    assert out.shape == (0, T, H, V) and state.shape == (0, H, K, V + (kind == "normalize"))
    given = list(x.values())
    for y, gradient in zip(given, torch.autograd.grad(out.sum() + state.sum(), given), strict=True):
        assert torch.equal(gradient, torch.zeros_like(y))


@pytest.mark.parametrize("decay", ["fixed", "scalar", "vector"])
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("name", ["chunkwise", "batched", "native"])
def test_growing_memory_follows_the_equation(name, decay, rule, monkeypatch):
    """log_decay > 0 is no decay, and the equation holds."""
    prepare(name, monkeypatch)
    x = inputs(decay, tokens=WAYS[name].tokens)
    x["log_decay"] = (-x["log_decay"].detach() / 2).requires_grad_()
    assert_same(x, WAYS[name], check=False, rule=rule)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("name", ["chunkwise", "batched", "parallel", "recurrent"])
def test_nonfinite_inputs_do_not_leak(name, decay, rule, bad, monkeypatch):
    """One number in the second chunk of three. Afterwards, but for q and the read gate, it is in the memory."""
    drawn, token = detached(inputs(decay, tokens=64), torch.float64), 37
    prepare(name, monkeypatch)
    settings = FORMS[name] | ({"chunk_size": 24} if name in ("chunkwise", "batched") else {})
    fine, _ = linear_attention(**drawn, rule=rule, **settings)
    for spoilt in [name for name in drawn if name != "initial_state"]:
        x = drawn | {spoilt: drawn[spoilt].clone()}
        x[spoilt][(1, token, 2, 3)[: x[spoilt].dim()]] = bad
        out, state = linear_attention(**x, rule=rule, **settings)
        own = torch.zeros(B, 64, H, dtype=torch.bool)
        own[1, token:, 2] = True
        assert torch.allclose(out[~own], fine[~own], rtol=0, atol=1e-10), spoilt
        if spoilt in ("q", "read_gate"):
            assert not out[1, token, 2].isfinite().any() and out[1, token + 1 :, 2].isfinite().all()
        else:
            assert not out[1, token:, 2, 3].isfinite().any() and not state[1, 2, :, 3].isfinite().all(), spoilt


def test_nan_decay_does_not_crash(form):
    for decay, rule in itertools.product(("fixed", "scalar", "vector"), ("add", "delta")):
        x = detached(inputs(decay))
        x["log_decay"][..., 1] = torch.nan
        out, _ = linear_attention(**x, rule=rule, **form)
        assert out.isnan().any()


MIXERS = [name for name in zoo.names() if type(zoo.get(name)).__name__ != "Decoder"]


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, torch.nan) for name in covering(MIXERS)),
     *((name, bad) for name in by_state(MIXERS) for bad in (torch.inf, 1e30))],
)  # fmt: skip
def test_nonfinite_row_does_not_reach_other_rows(name, bad):
    """Outputs and the gradients to the input, with rows of a batch and with packed sequences."""
    torch.manual_seed(0)
    mixer, x = Mixer(name, hidden_size=16, num_heads=2), torch.randn(3, 20, 16)
    spoilt, others = x.clone(), torch.tensor([0, 2])
    spoilt[1, 7] = bad
    ends = torch.tensor([0, 20, 40, 60])
    for settings, shape in (({}, (3, 20, 16)), ({"cu_seqlens": ends}, (1, 60, 16))):
        results = []
        for given in (x, spoilt):
            given = given.clone().requires_grad_()
            y, _ = mixer(given.view(shape), **settings)
            (slope,) = torch.autograd.grad(y.square().sum(), given)
            results.append((y.view(3, 20, 16)[others], slope[others]))
        for actual, exact in zip(*reversed(results), strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)
