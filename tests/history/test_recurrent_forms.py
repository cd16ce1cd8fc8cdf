"""The recurrent form of every softmax RNN that has one equals its T×T form."""

import copy
import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from headrace import GateWarning, InputError, layers, zoo
from headrace.history.specs.softmax_rnn import NORMS, SoftmaxRNNSpec
from headrace.layers.linear.features import l2_norm
from headrace.spec.serialize import from_json, to_json
from headrace.verification.verify import by_steps, relative

D, H = 12, 2
NUMERATORS, ORDERS = ("exp", "relu", "elu+1", "cosine"), (None, 0, 1, 2, 3, 4)
DENOMINATORS = ("sum", "detached", "none", "input-length", *NORMS)
GATES = ["output", "input", "both"]


def readouts(denominator):
    """The fields of a spec that have no part in the weights: whether the norm has parameters, and the length."""
    affine = (False, True) if denominator in NORMS else (False,)
    lengths = (False,) if denominator == "sum" else (False, True)
    return [{"affine": a, "by_length": b} for a, b in itertools.product(affine, lengths)]


def ungated(denominator):
    """Every numerator with two orders, others under the next denominator, so that any two values meet; one readout
    after the other. Not sums that can vanish, which no layer has."""
    first = DENOMINATORS.index(denominator)
    weights = [(x, ORDERS[(first + i + j) % 6]) for i, x in enumerate(NUMERATORS) for j in (0, 2)]
    for (numerator, order), more in zip(weights, itertools.cycle(readouts(denominator))):
        signed = numerator == "cosine" if order is None else order % 2 and numerator in ("exp", "cosine")
        if not (signed and denominator in ("sum", "detached")):
            yield SoftmaxRNNSpec(numerator, order, denominator=denominator, **more)


def gated(denominator):
    """Every gate at every place with two readouts."""
    places = ("norm-gate", "gate-norm") if denominator in NORMS else ("norm-gate",)
    gates = [(gate, place) for gate in GATES for place in places if place == "norm-gate" or gate != "input"]
    for (gate, place), more in zip(gates * 2, itertools.cycle(readouts(denominator))):
        yield SoftmaxRNNSpec("relu", 2, None, denominator, gate, place, **more)


def both_forms(spec, causal=True):
    """The T×T layer with weights that do not vanish, and its recurrent form, in float64."""
    layer = layers.build(spec, hidden_size=D, num_heads=H, causal=causal).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.3 if "norm" in name else 0.5)
    return layer, layer.recurrent()


def gradients(direct, recurrent, x):
    """Yields (the recurrent form's, the T×T form's): outputs, gradients to x, and gradients to all parameters."""
    weights, found = torch.randn_like(x), []
    for layer in (recurrent, direct):
        y = layer(x)[0]
        found.append([y, *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()], materialize_grads=True)])
    moved = copy.deepcopy(direct)  # with the gradients as its weights: its recurrent form has them in their places
    for p, gradient in zip(moved.parameters(), found[1][2:], strict=True):
        p.data = gradient
    expected = [*found[1][:2], parameters_to_vector(moved.recurrent().parameters())]
    yield from zip([*found[0][:2], parameters_to_vector(found[0][2:])], expected, strict=True)


def outputs(layer, x):
    """In one call, token by token, with padding on the left, and packed."""
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[1, :3] = False
    bounds = torch.tensor([0, 2, 2, x.shape[1]])
    return [layer(x)[0], by_steps(layer, x), layer(x, mask=mask)[0], layer(x[:1], cu_seqlens=bounds)[0]]


def check(spec):
    direct, recurrent = both_forms(spec)
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    for ours, theirs in gradients(direct, recurrent, x):
        assert relative(ours, theirs) <= 1e-10, spec
    with torch.no_grad():
        for ours, theirs in zip(outputs(recurrent, x), outputs(direct, x), strict=True):
            assert relative(ours, theirs) <= 1e-10, spec


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_recurrent_form_equals_the_product_form(denominator):
    for spec in ungated(denominator):
        if spec.numerator == "exp" and spec.order is None:
            with pytest.raises(InputError, match="infinitely many powers"):
                spec.recurrent()
        else:
            check(spec)


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_gated_recurrent_form_equals_the_product_form(denominator):
    for spec in gated(denominator):
        check(spec)


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_memory_of_all_tokens_equals_an_encoders_matrix(denominator):
    """Appendix C, for every numerator and order, with padding and in a pack; the layer has one set of weights."""
    x, lengths = torch.randn(2, 9, D, dtype=torch.float64), (9, 5)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    for spec in (*ungated(denominator), *gated(denominator)):
        if spec.numerator == "exp" and spec.order is None:
            continue  # of no finite memory
        layer, recurrent = both_forms(spec, causal=False)
        with torch.no_grad():
            assert relative(recurrent(x)[0], layer(x)[0]) <= 1e-12
            assert relative(recurrent(x, mask=mask)[0][mask], layer(x, mask=mask)[0][mask]) <= 1e-12
            pack, bounds = x[mask][None], torch.tensor([0, 9, 14])
            assert relative(recurrent(pack, cu_seqlens=bounds)[0], layer(pack, cu_seqlens=bounds)[0]) <= 1e-12
        assert sum(p.numel() for p in recurrent.parameters()) == sum(p.numel() for p in layer.parameters())
        with pytest.raises(InputError, match="expected state=None"):
            recurrent(x, layers.build(spec.recurrent(), hidden_size=D, num_heads=H).double()(x)[1])


def test_expression_names_the_recurrent_form():
    spec = zoo.get("recurrent-softmax-rnn-norm(numerator=cosine, denominator=input-length, order=2)")
    assert spec == SoftmaxRNNSpec("cosine", 2, denominator="input-length").recurrent()
    assert from_json(to_json(spec)) == spec and spec.inputs.qk_norm == "l2" and spec.read.scale == "one"
    assert zoo.get("recurrent-softmax-rnn-gate(order=2, clamp=none)").read.gate == "sigmoid-head"


def test_forms_that_no_memory_holds_are_refused():
    for name, sentence in {
        "softmax-rnn-norm": "infinitely many powers", "transformer": "before one of softmax-rnn-norm",
        "softmax-rnn-gate(order=2)": r"clamp=5\.0 has no recurrent form",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            zoo.get(f"recurrent-{name}")
    with pytest.raises(InputError, match=r"inputs.order=10 makes more than 16,777,216 features of 64 per head"):
        SoftmaxRNNSpec("relu", 10).recurrent().state_shapes(128, 2)


@pytest.mark.parametrize("expression", ["softmax-rnn-norm", "recurrent-softmax-rnn-norm"])
def test_norm_cancels_a_gate_before_it(expression):
    """As in the paper's code, whose output gate multiplies what the norm divides: under an L2 norm it does nothing."""
    x = torch.randn(2, 9, D, dtype=torch.float64)
    name = f"{expression}(order=2, gate=output, gate_order={{}})"
    before, after = (zoo.get(name.format(order)) for order in ("gate-norm", "norm-gate"))
    assert before.idle_gates() and not after.idle_gates()
    for spec, cancels in ((before, True), (after, False)):
        with pytest.warns(GateWarning) if cancels and expression.startswith("rec") else nullcontext():
            layer = layers.build(spec, hidden_size=D, num_heads=H).double()
        y = layer(x)[0]
        with torch.no_grad():
            layer.gate.bias.sub_(3)
        assert (relative(layer(x)[0], y) <= 1e-13) is cancels


def test_delta_rule_that_could_diverge_is_refused():
    spec = zoo.get("deltanet(inputs.order=2, read.scale=one)")
    with pytest.raises(InputError, match=r"has β‖k‖² up to 2\.5 and diverges above 2"):
        spec.head_dims(64, 4)
    assert zoo.get("deltanet(inputs.order=3)").state_shapes(64, 4)["memory"] == (4, math.comb(16 + 3, 3), 16)


@pytest.mark.parametrize(("key_dim", "order"), [(3, 1), (3, 8), (4, 8), (64, 2)])
def test_delta_rule_with_features_contracts(key_dim, order):
    """‖φ(k)‖² is at most e^(K^-1/2) for a normalized key, which is below 2 from K = 3 on."""
    spec = zoo.get(f"deltanet(inputs.order={order}, heads.key_dim={key_dim}, inputs.conv=0)")
    layer = layers.build(spec, hidden_size=8, num_heads=1).double()
    k = layer.features(l2_norm(torch.randn(1, 20, 1, key_dim).double()) * layer.logit_scale**0.5)
    assert k.square().sum(-1).max() <= math.exp(key_dim**-0.5) < 2
