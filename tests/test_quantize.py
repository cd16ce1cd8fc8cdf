"""Eight-bit weights: each product against the same integers in float64, the model against the one it was made from."""

import pytest
import torch
from torch import nn

import tiny
from headrace import InputError, quantize
from headrace.backends import native
from headrace.quantized import FEW, Int8Linear


def exact(layer, x):
    return x.double() @ (layer.integers.double() * layer.scale.double()[:, None]).T + layer.bias.double()


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 65), (130, 67)])
@torch.no_grad()
def test_a_layer_is_the_product_with_its_integers(sizes, rows, kernel, monkeypatch):
    if kernel == "torch":
        monkeypatch.setattr(native, "missing", "left out for a test")
    layer, x = Int8Linear(nn.Linear(*sizes)), torch.randn(rows, sizes[0])
    assert (layer(x) - exact(layer, x)).norm() / exact(layer, x).norm() < 1e-6


@torch.no_grad()
def test_an_integer_is_wrong_by_half_a_step_at_most():
    linear = nn.Linear(64, 48)
    linear.weight[3] = 0
    layer = Int8Linear(linear)
    assert layer.integers.abs().max() == 127
    assert ((layer.weight - linear.weight).abs() <= layer.scale[:, None] * 0.501).all()
    assert (layer.weight[3] == 0).all()


@torch.no_grad()
def test_strides_and_dtypes_of_the_input():
    layer = Int8Linear(nn.Linear(32, 16))
    x = torch.randn(32, 2, 3).permute(1, 2, 0)
    assert torch.allclose(layer(x), exact(layer, x).float(), atol=1e-6)
    half = Int8Linear(nn.Linear(32, 16).bfloat16())
    assert half(x.bfloat16()).dtype is half.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("mixer", ["gla", "softmax-gla", "gated-deltanet", "rwkv6", "transformer"])
@torch.no_grad()
def test_a_quantised_model_decodes_what_it_says_in_full(mixer):
    model = quantize(tiny.build(mixer).float())
    assert not any(type(module) is nn.Linear for module in model.modules())
    ids = torch.randint(29, (2, 12))
    full, cache = model(ids).logits, None
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        assert (out.logits[:, 0] - full[:, t]).norm() / full[:, t].norm() < 1e-5


def test_training_and_other_kinds_are_refused():
    with pytest.raises(InputError, match="kind='int4' is unknown"):
        quantize(nn.Linear(2, 2), "int4")
    with pytest.raises(InputError, match="requires a gradient"):
        Int8Linear(nn.Linear(4, 4))(torch.randn(1, 4, requires_grad=True))
