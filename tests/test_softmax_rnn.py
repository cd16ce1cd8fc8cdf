"""Softmax attention as a sum of recurrent networks, and taken apart."""

import math

import pytest
import torch

from attention_layers import error
from headrace import linear_attention, mixers, zoo
from headrace.errors import InputError
from headrace.hf import HeadraceConfig, HeadraceForCausalLM, load
from headrace.mixers.taylor import TaylorFeatures, truncated_exp

D, H, d = 32, 2, 16


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# --- features --------------------------------------------------------------------------------------------------------


def tensor_power(x, order):
    power = torch.ones(1, dtype=x.dtype)
    for _ in range(order):
        power = torch.kron(power, x)
    return power


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_features_are_the_tensor_powers_with_every_monomial_once(dim, order):
    features, q, k = TaylorFeatures(dim, order), draw(dim), draw(dim)
    assert features(q).shape == (math.comb(dim + order, order),)
    powers = sum(tensor_power(q, m) @ tensor_power(k, m) / math.factorial(m) for m in range(order + 1))
    product = features(q) @ features(k)
    assert abs(product - powers) <= 1e-12 * max(1, features(q).norm() * features(k).norm())
    assert abs(product - truncated_exp(q @ k, order)) <= 1e-12 * max(1, features(q).norm() * features(k).norm())


def test_order_one_is_the_running_sum_and_linear_attention():
    q, k, v, features = draw(2, 40, H, d), draw(2, 40, H, d), draw(2, 40, H, d), TaylorFeatures(d, 1)
    out = linear_attention(features(q), features(k), v, scale=1.0)[0]
    assert error(out, v.cumsum(1) + linear_attention(q, k, v, scale=1.0)[0]) <= 1e-12


def test_the_truncated_exponential_and_its_sign():
    x = torch.linspace(-8, 8, 161, dtype=torch.float64)
    for order in range(11):
        literal = sum(x**m / math.factorial(m) for m in range(order + 1))
        torch.testing.assert_close(truncated_exp(x, order), literal, rtol=1e-12, atol=1e-10)
        assert bool((truncated_exp(x, order) > 0).all()) is (order % 2 == 0)


@pytest.mark.parametrize("order", [1, 3])
def test_a_sum_that_can_vanish_is_refused(order):
    with pytest.raises(InputError, match="even order"):
        zoo.get(f"taylor-softmax(inputs.feature_map=taylor-{order})")
    assert zoo.get(f"taylor-softmax(inputs.feature_map=taylor-{order}, read.norm=rms)").inputs.order == order


def test_the_state_is_small_where_keys_are():
    described = zoo.get("taylor-softmax")
    assert described.state_shapes(1024, 4)["memory"] == (4, 153, 257)
    assert described.flops_per_token(1024, 4) == 4 * 4 * 153 * 257
    with pytest.raises(InputError, match="key_dim"):
        zoo.get("taylor-softmax(heads.key_dim=0)")


def test_a_saved_model_is_the_same_model(tmp_path):
    """Features come from tables that no checkpoint holds."""
    shape = {"hidden_size": D, "num_heads": H, "num_hidden_layers": 2, "vocab_size": 19}
    model, tokens = HeadraceForCausalLM(HeadraceConfig(mixer="taylor-softmax", **shape)).eval(), torch.arange(19)[None]
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(tokens).logits, model(tokens).logits)


def taylor(order, transformer):
    """A recurrent layer with the weights of a softmax attention layer, whose logits it cuts off after this order."""
    norm = "sum" if order % 2 == 0 else "none"
    described = zoo.get(f"taylor-softmax(inputs.feature_map=taylor-{order}, heads.key_dim=none, read.norm={norm})")
    layer = mixers.build(described, hidden_size=D, num_heads=8).double()
    with torch.no_grad():
        for name in ("q", "k", "v"):
            layer.part(name).copy_(getattr(transformer, f"{name}_proj").weight)
        layer.o_proj.weight.copy_(transformer.o_proj.weight)
    return layer


@torch.no_grad()
def test_even_orders_tend_to_the_transformer():
    transformer, x = mixers.build(zoo.get("transformer"), hidden_size=D, num_heads=8).double(), draw(2, 40, D)
    y = transformer(x)[0]
    second, fourth = (error(taylor(order, transformer)(x)[0], y) for order in (2, 4))
    assert fourth < second / 5 < 0.01
