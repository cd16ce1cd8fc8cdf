"""Forgetting Transformer: against its equation, against FLA's function, and what it refuses."""

import math

import pytest
import torch

from attention_layers import agree, layer
from headrace import InputError, layers, zoo
from headrace.extra.encoder import BothWays
from headrace.extra.forgetting import forgotten
from headrace.extra.late_norm import LateNormSpec
from headrace.layers import SoftmaxAttention
from headrace.spec.attention import AttentionSpec
from headrace.verification.verify import relative
from peers import load

B, T, D, H = 2, 13, 32, 4


def operands(fox, x):
    """q [B, T, H, d], k and v repeated for the query heads that share them, and the logits of f [B, T, H]."""
    q, k, v = (p(x).unflatten(-1, (-1, D // H)) for p in (fox.q_proj, fox.k_proj, fox.v_proj))
    k, v = (y.repeat_interleave(H // y.shape[2], 2) for y in (k, v))
    return q, k, v, fox.f_proj(x)


def literally(fox, x):
    """One softmax per token: its logit of key j has log f of the tokens j + 1 … t."""
    q, k, v, gate = operands(fox, x)
    rows, log_f = [], gate.sigmoid().log()
    for t in range(T):
        logits = torch.einsum("bhd,bjhd->bjh", q[:, t], k[:, : t + 1]) * (D // H) ** -0.5
        faded = torch.stack([log_f[:, j + 1 : t + 1].sum(1) for j in range(t + 1)], 1)
        rows.append(torch.einsum("bjh,bjhd->bhd", (logits + faded).softmax(1), v[:, : t + 1]).flatten(1))
    return fox.o_proj(torch.stack(rows, 1))


@pytest.mark.parametrize("name", ["fox", "fox(kv_heads=2)"])
def test_layer_equals_its_equation(name):
    """Outputs, and the gradients of the input and of all parameters."""
    fox, x = layer(name), torch.randn(B, T, D, dtype=torch.float64)
    agree(lambda x: fox(x)[0], lambda x: literally(fox, x), x, 1e-12, fox.parameters())


@torch.no_grad()
def test_layer_equals_fla():
    pytest.importorskip("fla")
    fox, x = layer("fox", torch.float32), torch.randn(B, T, D)
    q, k, v, gate = operands(fox, x)
    theirs = load("fla:forgetting_attn/naive:naive_forgetting_attn")(q, k, v, torch.nn.functional.logsigmoid(gate))
    assert relative(fox(x)[0], fox.o_proj(theirs.flatten(2))) <= 2e-6


def test_sums_of_long_sequences_keep_their_digits():
    """After 50,000 tokens, with a sum of −1.5e5: float32 sums would be 2^-7 apart."""
    gate = torch.full((1, 50_000, 1), -3.0) + torch.randn(1, 50_000, 1)
    total = forgotten(gate, None)[0, 0]
    recent = (total[-1] - total[-4:]).float()
    exact = [-sum(math.log1p(math.exp(-g)) for g in gate[0, len(gate[0]) - n :, 0].tolist()) for n in (3, 2, 1, 0)]
    assert torch.allclose(recent, torch.tensor(exact), rtol=1e-6, atol=0)


def test_late_norms_are_of_keys_without_their_gates():
    """Without a rotation, they are those of before."""
    options = {"kv_heads": 2, "rotary": False, "forget": True}
    late, early = layer(LateNormSpec(**options)), layer(AttentionSpec(qk_norm="head", **options))
    late.k_norm.weight.data.uniform_(0.5, 2)
    early.load_state_dict(late.state_dict())
    x = torch.randn(B, T, D).double()
    assert relative(late(x)[0], early(x)[0]) < 1e-12
    assert relative(late(x[:, 5:], late(x[:, :5])[1])[0], early(x)[0][:, 5:]) < 1e-12


def test_an_encoder_forgets_in_both_directions():
    assert isinstance(layers.build(zoo.get("fox"), hidden_size=D, num_heads=H, causal=False), BothWays)


def test_an_encoder_of_one_direction_is_refused():
    with pytest.raises(InputError, match="in an encoder"):
        SoftmaxAttention(zoo.get("fox"), hidden_size=D, num_heads=H, causal=False)


def test_vmap_equals_a_loop():
    """Also with gradients to the gate, which is in the bias of PyTorch's attention."""
    made, x = layer("fox"), torch.randn(3, 2, 70, D, dtype=torch.float64)
    actual, expected = torch.func.vmap(lambda row: made(row)[0])(x), torch.stack([made(row)[0] for row in x])
    torch.testing.assert_close(actual, expected)
    slopes = [torch.autograd.grad(y.square().sum(), made.f_proj.weight)[0] for y in (actual, expected)]
    torch.testing.assert_close(*slopes)
