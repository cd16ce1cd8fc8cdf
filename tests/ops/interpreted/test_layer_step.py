"""A token of a linear layer by the kernels of the backend "triton" against the layer's steps in PyTorch, in float64."""

import itertools
import warnings

import pytest
import torch

from headrace import InputError, zoo
from headrace.layers import build
from headrace.ops.backends.triton import layer_step
from headrace.studies.verify import relative

MIXERS = ["linear-attention(read.norm=rms)", "retnet", "gla", "mamba2", "rwkv6", "deltanet", "gated-deltanet", "kda"]
PLACES = [p for p in itertools.product(("none", "query", "norm"), ("none", "value", "beta")) if p != ("none", "none")]
CHANGES = [
    "inputs.feature_map=silu", "inputs.feature_map=relu", "inputs.conv=2", "inputs.rotary=true", "heads.qk_groups=2",
    "heads.expand_k=0.6875", "heads.expand_v=1.375", "read.gate=none", "read.gate=sigmoid", "read.order=gate-norm",
    "read.norm=none", "read.skip=true", "read.norm=none,read.skip=true", "read.bonus=true", "inputs.shift=ddlerp",
    "competition.activation=null", "competition.activation=sigmoid", "competition.scale=one",
]  # fmt: skip


def layer(mixer, width=32, heads=4):
    """With no weight at its first value, many of which are zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gates that cannot act
        made = build(zoo.get(mixer), hidden_size=width, num_heads=heads, layer_idx=1, num_layers=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    made.backend = "triton"
    return made


def refusal(made, x):
    return made.fused.find(made, x, made.fused.weights(made))[1]


@torch.no_grad()
def errors(mixer, backend="triton", dtype=torch.float32, **sizes):
    """Of the outputs and the last state of tokens one by one, after some in float64."""
    torch.manual_seed(0)
    made, x = layer(mixer, **sizes).to(dtype), torch.randn(2, 6, sizes.get("width", 32)).to(dtype)
    exact = layer(mixer, **sizes).double()
    exact.load_state_dict({name: w.double() for name, w in made.state_dict().items()})
    made.backend, exact.backend = backend, "torch"
    expected, final = exact(x.double())
    state = exact(x[:, :3].double())[1]
    narrow = {name: y.to(dtype) for name in ("conv", "shift") if (y := getattr(state, name)) is not None}
    state = state._replace(memory=state.memory.float(), **narrow)
    found, before = [], state.memory
    for token in x[:, 3:].split(1, 1):
        assert backend != "triton" or refusal(made, token) is None
        y, state = made(token, state, in_place=True)
        found.append(y)
    assert backend != "triton" or state.memory is before
    pairs = zip((torch.cat(found, 1), *state), (expected[:, 3:], *final), strict=True)
    return [relative(ours, theirs) for ours, theirs in pairs if theirs is not None]


def agree(mixer, **sizes):
    assert max(errors(mixer, **sizes)) <= 2e-6


@pytest.mark.parametrize("mixer", [f"{prefix}{name}" for name in MIXERS for prefix in ("", "softmax-")])
def test_a_mixer(mixer):
    agree(mixer)


@pytest.mark.parametrize(("read", "write"), PLACES)
def test_places_of_the_gates(read, write):
    agree(f"softmax-gated-deltanet(competition.read={read},competition.write={write},competition.temperature=1.3)")


@pytest.mark.parametrize("change", CHANGES)
def test_a_part(change):
    """On an additive mixer with a decay per channel; sizes that are no powers of two among them."""
    agree(f"softmax-gla({change})", width=64)


@pytest.mark.parametrize("mixer", ["softmax-gated-deltanet", "softmax-gla(competition.read=query)", "rwkv6"])
def test_heads_and_channels_of_many_programs(monkeypatch, mixer):
    monkeypatch.setattr(layer_step, "PROGRAM", 16)
    monkeypatch.setattr(layer_step, "CHANNELS", 16)
    agree(mixer, width=72, heads=2)


def test_bfloat16_is_no_worse_than_in_steps():
    """PyTorch rounds q and k after each step. The interpreter's conversions round as a GPU's."""
    ours, theirs = (errors("softmax-gated-deltanet", way, torch.bfloat16) for way in ("triton", "torch"))
    assert all(x <= 2 * y for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        ("softmax-linear-attention", "it does not support norm='sum'"),
        ("xpos-retnet", "it does not support decay='xpos'"),
        ("softmax-gla(competition.source=query)", "it does not support source='query'"),
        ("softmax-gla(competition.range=4,competition.activation=sigmoid)", "it does not support activation="),
        ("gla(heads.expand_k=40)", "it takes K up to 256"),
    ],
)
def test_what_takes_steps(mixer, reason):
    """In place of the kernels, the layer's steps compute it."""
    made, x = layer(mixer), torch.randn(1, 1, 32)
    with torch.no_grad():
        assert reason in refusal(made, x)


def test_autograd_knows_that_the_state_has_changed():
    made, x = layer("gla"), torch.randn(1, 1, 32)
    with torch.no_grad():
        _, state = made(x)
    scale = torch.ones((), requires_grad=True)
    kept = state.memory * scale  # saves the memory for the gradient to the scale
    with torch.no_grad():
        made(x, state, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_other_weights_are_refused():
    made, x = layer("gla"), torch.randn(1, 1, 32)
    with torch.no_grad():
        assert "is torch.float32 on cpu; expected contiguous torch.bfloat16" in refusal(made, x.bfloat16())
        made.norm_weight = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(InputError, match=r"norm_weight has shape \[3\]; expected \[8\]"):
            refusal(made, x)
