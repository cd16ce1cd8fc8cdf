"""Weights in eight bits and in bfloat16: each product against the same numbers in float64, the model against the one it
was made from."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import tiny
from equation import MAX_ERROR_RATIO, skip_if_missing
from headrace import InputError, Mixer, quantize
from headrace.layers.linear.token import find_program
from headrace.layers.quantized import FEW, QuantizedLinear
from headrace.ops.backends.native import library as native
from headrace.verification.verify import relative

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = pytest.mark.parametrize("kind", ["int8", "bfloat16"])


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "missing", "left out for a test")


def exact(layer, x):
    return x.double() @ (layer.stored.double() * layer.scale.double()[:, None]).T + layer.bias.double()


def rounding(layer, x):
    """How far from `exact` an output may be: weight, bias and result are rounded to x's precision, n + 2 products and
    sums to that of the accumulator, and x itself, in the kernel of integers, to half of the largest one's 32,767th."""
    u = torch.finfo(x.dtype).eps / 2
    sums = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2 * (x.shape[-1] + 2)
    size = x.double().abs() @ (layer.stored.double().abs() * layer.scale.double()[:, None]).T
    weights = layer.stored.double().abs() @ torch.ones(x.shape[-1], dtype=torch.float64) * layer.scale.double()
    steps = x.double().abs().amax(-1, keepdim=True) * 0.501 / 32767 * weights
    return (3 * u + sums) * (size + layer.bias.double().abs()) + steps * (layer.stored.dtype is torch.int8)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 65), (130, 67)])
@KINDS
@torch.no_grad()
def test_quantized_layer_equals_its_stored_weights_times_scales(kind, sizes, rows):
    layer, x = QuantizedLinear(nn.Linear(*sizes), kind), torch.randn(rows, sizes[0])
    assert ((layer(x).double() - exact(layer, x)).abs() <= rounding(layer, x)).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", [None, *DTYPES], ids=str)
@KINDS
@torch.no_grad()
def test_casting_keeps_stored_weights_and_scales(kind, cast, dtype):
    """Any precision of the model with any of its input, on either side of the few rows that have a kernel."""
    linear = nn.Linear(64, 48)
    layer = QuantizedLinear(linear, kind)
    scale, stored = layer.scale.clone(), layer.stored.clone()
    layer = layer if cast is None else layer.to(cast)
    assert torch.equal(layer.scale, scale) and layer.scale.dtype is torch.float32
    assert torch.equal(layer.stored, stored) and layer.stored.dtype is getattr(torch, kind)
    assert layer.weight.dtype is (cast or torch.float32)
    largest = scale[:, None] * 0.501 if kind == "int8" else linear.weight.abs() * torch.finfo(torch.bfloat16).eps / 2
    for rows in (1, FEW, FEW + 1):
        x = torch.randn(rows, 64).to(dtype)
        y, full = layer(x), nn.functional.linear(x.double(), linear.weight.double(), layer.bias.double())
        assert y.dtype is dtype and ((y.double() - exact(layer, x)).abs() <= rounding(layer, x)).all()
        step = x.double().abs() @ largest.double().expand_as(linear.weight).T  # of errors of half a step of a weight
        assert ((y.double() - full).abs() <= rounding(layer, x) + step).all()


@pytest.mark.parametrize("mixer", ["gla", "softmax-gated-deltanet", "transformer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_half_precision_quantized_model_is_as_accurate_as_its_dequantized_weights(mixer, dtype):
    """Against the model, in float64, whose weights are those integers times their scales: no worse than that model in
    half precision, which rounds these weights too, by more than a factor for what is chance in rounding."""
    model = tiny.build(mixer).float()
    quantized = quantize(deepcopy(model))
    for name, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLinear):
            model.get_submodule(name).weight = nn.Parameter(layer.weight)  # unties the head, which is quantized
    ids = torch.randint(29, (3, FEW))
    expected, half = deepcopy(model).double()(ids).logits, deepcopy(model).to(dtype)(ids).logits
    actual = quantized.to(dtype)(ids).logits
    assert actual.dtype is dtype and relative(actual, expected) <= 2 * relative(half, expected)
    assert relative(quantized(ids[:1, :1]).logits, expected[:1, :1]) <= 2 * relative(half, expected)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_autocast_and_empty_input_as_in_nn_linear():
    linear = nn.Linear(32, 16)
    layer = QuantizedLinear(linear)
    for rows in (0, 1, FEW + 1):
        x = torch.randn(rows, 32)
        assert layer(x).shape == linear(x).shape
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is linear(x).dtype is torch.bfloat16 and layer(x.double()).dtype is torch.float64


@KINDS
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.finfo(torch.float32).max])
def test_weights_that_are_not_finite_are_refused(value, kind):
    """The largest float32 is beyond the range of bfloat16."""
    linear = nn.Linear(4, 4)
    linear.weight.data[1, 2] = value
    taken = kind == "int8" and linear.weight.isfinite().all()
    with nullcontext() if taken else pytest.raises(InputError, match="a weight has a NaN or an infinity"):
        QuantizedLinear(linear, kind)


def test_model_that_cannot_be_loaded_is_not_saved(tmp_path):
    with pytest.raises(InputError, match="the model is quantized, and its weights could not be loaded"):
        quantize(tiny.build("gla").float()).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_wrong_inputs_are_refused():
    layer = QuantizedLinear(nn.Linear(32, 16))
    with pytest.raises(InputError, match=r"x has shape \[2, 64\]; expected \[\.\.\., 32\]"):
        layer(torch.randn(2, 64))
    for dtype, device in ((torch.int64, "cpu"), (torch.float32, "meta")):
        with pytest.raises(InputError, match=f"x is {dtype} on {device}; expected a floating-point dtype on cpu"):
            layer(torch.ones(2, 32, dtype=dtype, device=device))


def test_a_layer_without_memory_has_the_shape_of_its_output():
    assert QuantizedLinear(nn.Linear(32, 16)).to("meta")(torch.ones(2, 32, device="meta")).shape == (2, 16)


@torch.no_grad()
def test_large_and_infinite_inputs_of_one_block_leave_others_alone():
    skip_if_missing("native")
    layer, x = QuantizedLinear(nn.Linear(2050, 3)), torch.randn(3, 2050)
    x[0, :1024] *= 1e6
    x[1, 5], x[2, 5] = torch.nan, torch.inf
    y = layer(x)
    assert ((y[0].double() - exact(layer, x[:1])[0]).abs() <= rounding(layer, x[:1])).all()
    alone = QuantizedLinear(nn.Linear(1026, 3, bias=False))
    alone.stored, alone.scale = layer.stored[:, 1024:].contiguous(), layer.scale
    assert y[1:].isnan().all() and alone(x[1:, 1024:]).isfinite().all()


@torch.no_grad()
def test_rounding_error_is_at_most_half_a_step():
    linear = nn.Linear(64, 48)
    linear.weight[3] = 0
    layer = QuantizedLinear(linear)
    assert layer.stored.abs().max() == 127
    assert ((layer.weight - linear.weight).abs() <= layer.scale[:, None] * 0.501).all() and (layer.weight[3] == 0).all()


@torch.no_grad()
def test_any_stride_and_dtype_of_the_input():
    layer = QuantizedLinear(nn.Linear(32, 16))
    x = torch.randn(32, 2, 3).permute(1, 2, 0)
    assert ((layer(x).double() - exact(layer, x)).abs() <= rounding(layer, x)).all()
    half = QuantizedLinear(nn.Linear(32, 16).bfloat16())
    assert half(x.bfloat16()).dtype is half.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "mixer", ["gla", "softmax-gla", "gated-deltanet", "rwkv6", "transformer", "qwen3-next", "ling"]
)
@KINDS
@torch.no_grad()
def test_decoding_equals_the_full_forward(kind, mixer):
    """In float64 to rounding; in float32, where a product with few rows rounds its input, as near to that as the full
    forward of so few is: some of these models amplify a rounding a hundred times, whatever computes them."""
    model = quantize(tiny.build(mixer).float(), kind)
    left = {name.split(".")[-2] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert left == ({"decay"} if "gla" in mixer else set())
    ids = torch.randint(29, (2, 11))  # from 24 rows on, inputs are not rounded
    wide = deepcopy(model).double()
    exact = wide(ids).logits
    rounded = max(relative(y, z) for y, z in zip(model(ids).logits.unbind(1), exact.unbind(1), strict=True))
    for each, tolerance in ((wide, 1e-10), (model, MAX_ERROR_RATIO * rounded)):
        cache = None
        for t in range(ids.shape[1]):
            out = each(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert relative(out.logits[:, 0], exact[:, t]) < tolerance


@pytest.mark.parametrize("mixer", ["gla", "kda", "rwkv6"])
@torch.no_grad()
def test_decays_and_gates_are_not_quantized(mixer):
    skip_if_missing("native")
    layer = Mixer(mixer, hidden_size=32, num_heads=4)
    integer = {name for name, module in quantize(layer).named_modules() if isinstance(module, QuantizedLinear)}
    assert integer == {"in_proj", "o_proj"} and find_program(layer, torch.randn(2, 1, 32))[1] is None


@torch.no_grad()
def test_a_row_of_zeros_where_denormals_are_flushed():
    linear = nn.Linear(8, 4)
    linear.weight[1] = 0
    torch.set_flush_denormal(True)
    try:
        layer = QuantizedLinear(linear)
    finally:
        torch.set_flush_denormal(False)
    assert not layer.weight[1].any() and layer.scale.min() >= torch.finfo(torch.float32).tiny


def test_another_kind_is_refused_and_the_same_changes_nothing():
    model = quantize(tiny.build("gla").float(), "bfloat16")
    assert quantize(model, "bfloat16") is model
    with pytest.raises(InputError, match=r"kind='int8' of a model with \{torch.bfloat16}; expected the original model"):
        quantize(model, "int8")
    with pytest.raises(InputError, match="kind='int16' is unknown"):
        QuantizedLinear(nn.Linear(4, 4), "int16")


def test_training_and_unsupported_modules_are_refused():
    with pytest.raises(InputError, match="kind='int4' is unknown"):
        quantize(nn.Linear(2, 2), "int4")
    with pytest.raises(InputError, match=r"model='runs/gla/model'; expected a torch\.nn\.Module"):
        quantize("runs/gla/model")
    with pytest.raises(InputError, match="model is a linear layer itself; expected a module that contains it"):
        quantize(nn.Linear(2, 2))
    with pytest.raises(InputError, match="requires a gradient"):
        QuantizedLinear(nn.Linear(4, 4))(torch.randn(1, 4, requires_grad=True))
