"""Layers are called and their weights not read past them: hooks, adapters and replacements see every token."""

import pickle

import pytest
import torch
from torch import nn

from headrace import layers, zoo
from headrace.layers.base import Mixer
from headrace.layers.packing import padding_last
from headrace.layers.quantized import QuantizedLinear
from headrace.verification.verify import relative
from tiny import SIZES, build, by_state, close, covering, layer, tokens

D, T = 32, 6
pytestmark = pytest.mark.usefixtures("no_grad")


def layers_of(module):
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Embedding)}


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "hook") for name in covering(zoo.names())),
     *((name, how) for name in by_state(zoo.names()) for how in ("pre-hook", "forward"))],
)  # fmt: skip
def test_changed_submodule_changes_the_mixer(name, how):
    """In float32, which takes every short cut that there is, several tokens at a time and one by one."""
    made, x = layer(name), torch.randn(2, T, D)
    halves = lambda y: (y[:, :-1], y[:, -1:])  # noqa: E731
    plain, result = made(x)[0], layers_of(made)
    assert result
    for where, module in result.items():
        undo = []
        if how == "forward":  # as accelerate does it
            original = module.forward
            module.forward = lambda y, original=original: original(y).sin()
            undo.append(lambda module=module: vars(module).pop("forward"))
        elif how == "hook":
            undo.append(module.register_forward_hook(lambda m, args, y: y.sin()).remove)
        else:
            undo.append(module.register_forward_pre_hook(lambda m, args: (args[0].sin(),)).remove)
        y, state = made(x[:, :-1])
        changed = (y, made(x[:, -1:], state)[0])
        assert all(relative(y, z) > 1e-4 for y, z in zip(changed, halves(plain), strict=True)), where
        undo[0]()
    assert torch.equal(made(x)[0], plain)


@pytest.mark.parametrize("name", covering(zoo.names()))
def test_hooks_see_the_rows_of_a_padded_batch(name):
    """As adapters of PEFT by row do. Rows are also those of the padding that stays as one more sequence."""
    made, x, mask = layer(name).double(), torch.randn(2, T, D).double(), torch.arange(T) >= torch.tensor([[0], [2]])
    ways = [lambda: made(x, mask=mask)[0]]
    if isinstance(made, Mixer) and made.static_shapes:
        ways.append(lambda: padding_last(made.run, x, None, mask)[0])
    plain, seen = made(x, mask=mask)[0], []
    for module in made.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, y: seen.append((*args[0].shape[:2], *y.shape[:2])))
    for way in ways:
        assert relative(way(), plain) < 1e-12
    assert seen and set(seen) == {(2, T, 2, T)}


@pytest.mark.parametrize("name", covering(zoo.names()))
def test_a_layer_can_be_pickled(name):
    made, x = layer(name), torch.randn(2, T, D)
    assert torch.equal(pickle.loads(pickle.dumps(made))(x)[0], made(x)[0])


class Negated(nn.Conv1d):
    """A convolution of another kind, which the native one is not."""

    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize("name", ["gated-deltanet", "mamba"])
def test_replaced_convolution_is_called(name):
    made, x = layer(name), torch.randn(2, T, D)
    plain = made(x)[0]
    made.conv.__class__ = Negated
    assert relative(made(x)[0], plain) > 1e-2
    for parameter in made.conv.parameters():
        parameter.neg_()
    assert relative(made(x)[0], plain) < 1e-5


@pytest.mark.parametrize("how", ["hook", "replaced", "bias"])
@torch.enable_grad()
def test_replaced_lm_head_changes_the_training_loss(how):
    """Which is otherwise found in pieces, from the head's weight."""
    model, ids = build("gla").train(), tokens(2)
    plain = model(ids, labels=ids, skip_logits=True).loss
    if how == "hook":
        model.lm_head.register_forward_hook(lambda m, args, y: 2 * y)
    elif how == "replaced":
        model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
    else:
        model.lm_head.bias = nn.Parameter(torch.randn(SIZES["vocab_size"]).double())
    loss, logits = model(ids, labels=ids)[:2]
    close(model(ids, labels=ids, skip_logits=True).loss, loss)
    assert abs(loss - plain) > 1e-3 and logits is not None


def test_input_projection_can_be_quantized():
    made, x = layer("rwkv6"), torch.randn(2, T, D)
    quantized = QuantizedLinear(made.in_proj)
    made.in_proj.weight.copy_(quantized.weight)
    expected, made.in_proj = made(x)[0], quantized
    assert relative(made(x)[0], expected) < 2**-13  # its kernel rounds inputs to 16 bits, 2^-16 of the largest


@pytest.mark.parametrize("name", ["conv", "decay.up", "gate.up"])
def test_hooks_inside_a_layer_see_every_token(name):
    """Those of a prompt, and those that are decoded one by one."""
    made = layers.build(zoo.get("kda"), hidden_size=32, num_heads=4)
    calls = []
    made.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    _, state = made(torch.randn(2, 5, 32))
    for _ in range(3):
        _, state = made(torch.randn(2, 1, 32), state, in_place=True)
    assert len(calls) == 4
