"""The competition of the backend "triton" against the literal formula, in float64."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from headrace import InputError, layers, zoo
from headrace.ops.backends.triton import query_key
from headrace.ops.dispatch import choose
from headrace.ops.query_key import Activation, QueryKey
from headrace.studies.verify import relative, worst

SOFTMAX = Activation("softmax", 0.7, 0.0, False)
ACTIVATIONS = {
    "softmax": SOFTMAX, "null": Activation("null", 1.3, 0.0, False),
    "sigmoid": Activation("sigmoid", 0.7, math.log(4), False),
    "gates of one": Activation("sigmoid", 1.0, -math.inf, False), "divided": SOFTMAX._replace(identity=True),
}  # fmt: skip


def given(heads, key, groups=None, rows=2, tokens=5, dtype=torch.float64):
    """Heads side by side with others' channels, and weights."""
    wide, weight = torch.randn(rows, tokens, (groups or heads) * key + 3), torch.randn(heads, key)
    return [x.to(dtype).double().requires_grad_() for x in (wide, weight)]


def literal(x, weight, activation):
    """[B, T, Hq, K], [H, K] -> [B, T, H], a score ⟨x_h, w_h⟩ at a time."""
    shared = len(weight) // x.shape[2]
    s = torch.stack([x[:, :, h // shared] @ w for h, w in enumerate(weight)], -1) / activation.temperature
    if activation.kind == "sigmoid":
        return F.logsigmoid(s - activation.offset)
    others = s.exp().sum(-1, keepdim=True) + (activation.kind == "null")
    return s - others.log() + (math.log(len(weight)) if activation.identity else 0)


def on(backend, heads, weight, activation):
    call = QueryKey(heads, weight=weight, **activation._asdict())
    return choose("query_key", backend, call).run(call)[1]


def called(compete, wide, weight, activation):
    """Log gate and gradients of all channels of `wide` but the last three."""
    x = wide[..., :-3].unflatten(-1, (-1, weight.shape[1]))
    log_gate = compete(x, weight, activation)
    by = torch.randn(log_gate.shape, generator=torch.Generator().manual_seed(1))
    return log_gate, *torch.autograd.grad((log_gate * by).sum(), [wide, weight])


def agree(wide, weight, activation=SOFTMAX, dtypes=(torch.float32, torch.float32), tolerance=1e-6):
    narrow = [x.detach().to(dtype).requires_grad_() for x, dtype in zip((wide, weight), dtypes, strict=True)]
    found = called(partial(on, "triton"), *narrow, activation)
    for ours, theirs, dtype in zip(
        found, called(literal, wide, weight, activation), (torch.float32, *dtypes), strict=True
    ):
        assert ours.dtype == dtype and relative(ours, theirs, floor=1e-3) <= tolerance


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("heads", "groups", "key"), [(1, 1, 1), (3, 3, 20), (10, 5, 4), (6, 2, 16)])
def test_is_the_formula(heads, groups, key, activation):
    agree(*given(heads, key, groups), ACTIVATIONS[activation])


def test_more_tokens_than_a_program_holds(monkeypatch):
    monkeypatch.setattr(query_key, "SIZE", 4)
    agree(*given(2, 4, tokens=query_key.PARTS + 5))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-11)])
def test_narrow_inputs_are_rounded_once(dtype, tolerance):
    """Only of gradients: by half of eps at most in float16; the interpreter truncates bfloat16, by eps at most."""
    agree(*given(4, 8, dtype=dtype), dtypes=(dtype, torch.float32), tolerance=tolerance)
    agree(*given(4, 8, dtype=dtype), dtypes=(dtype, dtype), tolerance=tolerance)


@pytest.mark.parametrize("kind", ["softmax", "null", "sigmoid"])
def test_a_zero_score_is_a_gate_of_exactly_one(kind):
    activation = Activation(kind, 0.7, math.log(428), True)
    assert torch.equal(on("triton", torch.randn(1, 3, 429, 2), torch.zeros(429, 2), activation), torch.zeros(1, 3, 429))


def test_scores_of_any_size():
    """Of up to some 300, of which float32 has no exponential; they are rounded by 2^-16 at most."""
    wide, weight = given(5, 4)
    wide = (30 * wide.detach()).requires_grad_()
    for activation in ACTIVATIONS.values():
        agree(wide, weight, activation, tolerance=2**-16)


def test_a_layer(monkeypatch):
    """Its gates are the backend's; what else differs are sums in another order."""
    calls, compute = [], query_key.forward
    monkeypatch.setattr(query_key, "forward", lambda *given: calls.append(given) or compute(*given))
    mixer = layers.build(zoo.get("softmax-linear-attention(heads.qk_groups=1)"), hidden_size=8, num_heads=2)
    torch.nn.init.normal_(mixer.read_competition.weight)
    x, by, found = torch.randn(1, 3, 8, requires_grad=True), torch.randn(1, 3, 8), []
    for backend in ("triton", "torch"):
        mixer.backend = backend
        y = mixer(x)[0]
        found.append([y.detach(), *torch.autograd.grad((y * by).sum(), [x, *mixer.parameters()])])
    assert len(calls) == 2 and worst(*found) <= 1e-5


@pytest.mark.parametrize(
    ("heads", "weight", "reason"),
    [
        (torch.ones(1, 2, 3, 4).double(), torch.ones(3, 4), r"x is torch\.float64"),
        (torch.ones(1, 2, 3, 4), torch.ones(3, 4).double(), r"the weight is torch\.float64"),
        (torch.ones(1, 0, 3, 4), torch.ones(3, 4), "x has no tokens"),
        (torch.ones(1, 2, 129, 128), torch.ones(129, 128), "up to 16384 channels together, and these have 16512"),
    ],
)
def test_what_it_cannot_take(heads, weight, reason):
    with pytest.raises(InputError, match=reason):
        on("triton", heads, weight, SOFTMAX)


def test_there_is_no_second_derivative():
    x, weight = torch.randn(1, 2, 3, 4), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(InputError, match="the triton computation of q and k has no second derivative"):
        torch.autograd.grad(on("triton", x, weight, SOFTMAX).sum(), weight, create_graph=True)
    with pytest.raises(InputError, match=r"neither transforms of torch\.func"):
        torch.func.grad(lambda w: on("triton", x, w, SOFTMAX).sum())(weight)
