"""The native short convolution against PyTorch's, in float64."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from equation import weighted_gradients
from headrace.layers.linear.convolution import convolve
from headrace.ops.backends.native import convolution
from headrace.ops.backends.triton import limits
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative

pytestmark = pytest.mark.usefixtures("native")


def given(channels, tokens, rows=2, width=4, bias=True, dtype=torch.float64):
    """A convolution, tokens side by side with others', and what came before them."""
    torch.manual_seed(0)
    conv = nn.Conv1d(channels, channels, width, groups=channels, bias=bias).to(dtype)
    wide = torch.randn(rows, tokens, channels + 5, dtype=torch.float64).to(dtype)
    history = torch.randn(rows, width - 1, channels, dtype=torch.float64).to(dtype)
    return conv, wide.requires_grad_(), history.requires_grad_()


def called(conv, wide, history, ends=None):
    """Results and gradients of convolving all channels of `wide` but the last five."""
    x = wide[..., :-5]
    found = convolve(conv, x, history, Sequences(x, ends))
    return *found, *weighted_gradients(found, [wide, history, *conv.parameters()])


def agree(conv, wide, history, ends=None, tolerance=1e-6):
    """That float32, or the narrower dtype of what is given, is float64's."""
    own = torch.promote_types(torch.bfloat16, wide.dtype) if wide.dtype != torch.float64 else torch.float32
    narrow = [x.detach().to(own).requires_grad_() for x in (wide, history)]
    exact = called(conv.double(), *(x.detach().double().requires_grad_() for x in narrow), ends)
    conv = conv.to(own)
    assert convolution.unsupported_reason(conv, narrow[0]) is None
    for ours, theirs in zip(called(conv, *narrow, ends), exact, strict=True):
        assert ours.dtype == own and ours.shape == theirs.shape and relative(ours.double(), theirs) <= tolerance


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "tokens", "width"), [(1, 1, 2), (33, 2, 4), (48, 700, 4), (300, 5, 7)])
def test_convolution_equals_pytorch(channels, tokens, width, bias):
    agree(*given(channels, tokens, width=width, bias=bias))


@pytest.mark.parametrize("bias", [True, False])
def test_float64_convolution_equals_the_module(bias):
    """A hook has the module called."""
    conv, wide, history = given(33, 20, bias=bias)
    ours = called(conv, wide, history)
    conv.register_forward_hook(lambda *_: None)
    for found, expected in zip(ours, called(conv, wide, history), strict=True):
        assert found.shape == expected.shape and relative(found, expected) <= 1e-14


def test_packed_sequences_do_not_mix():
    conv, wide, _ = given(20, 50, rows=1)
    history = given(20, 1, rows=5)[2]
    agree(conv, wide, history, torch.tensor([0, 1, 1, 3, 40, 50]))


def test_bfloat16_is_rounded_once():
    """Of results; gradients twice, as they come and as they go, each time by 2^-9 at most."""
    agree(*given(40, 30, dtype=torch.bfloat16), tolerance=4e-3)


def test_thread_count_does_not_change_results():
    conv, wide, history = given(200, 6000, dtype=torch.float32)  # 2 · 2 · 6000 · 200 products: work for four threads
    torch.set_num_threads(1)
    one = called(conv, wide, history)
    torch.set_num_threads(3)
    several = called(conv, wide, history)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def test_unsupported_calls_use_pytorch():
    """Its structs hold up to 65,536 channels; x is a view of one number to keep the test small."""
    conv, x = nn.Conv1d(2**16 + 1, 2**16 + 1, 2, groups=2**16 + 1), torch.ones(1).expand(1, 3, 2**16 + 1)
    assert "65536 channels, and they are 2 and 65537" in convolution.unsupported_reason(conv, x)
    found, expected = convolve(conv, x, None, Sequences(x, None))[0], conv(x.mT)
    assert torch.allclose(found[:, 1:], torch.nn.functional.silu(expected).mT)
    assert "torch.float64" in convolution.unsupported_reason(conv, x.double())


def passes_opcheck(operator, given):
    return set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


# PyTorch 2.15 reads the gradient of an input that is not a leaf, for which it warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operator_passes_opcheck():
    conv, wide, history = given(9, 6, dtype=torch.float32)
    parameters = conv.weight.detach().requires_grad_(), conv.bias.detach().requires_grad_()
    forward, backward = torch.ops.headrace.convolve.default, torch.ops.headrace.convolve_backward.default
    assert passes_opcheck(forward, (wide, torch.randn(14, 1, 4), None, history.new_zeros(2, 3, 14), None))
    ends = torch.tensor([0, 2, 6])
    x = wide[:1, :, :9].detach().requires_grad_()
    assert passes_opcheck(forward, (x, *parameters, history, ends))
    constant = x.detach(), *(y.detach() for y in parameters), history.detach(), ends
    assert passes_opcheck(backward, (torch.randn(1, 6, 9), *constant))


def test_a_fake_tensor_of_a_gpu_needs_none(monkeypatch):
    monkeypatch.setattr(limits, "missing", lambda: "it runs on a GPU, and PyTorch finds none")
    with FakeTensorMode():
        assert not limits.chosen("auto", torch.empty(1, 2, 3, device="cuda"))
