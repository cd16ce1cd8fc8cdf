"""What tests of layers share, most of them of softmax attention."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from headrace import layers, zoo
from headrace.verification.verify import relative

D, H = 32, 4
d = D // H


def layer(spec, dtype=torch.float64, **settings):
    return layers.build(zoo.get(spec), hidden_size=D, num_heads=H, **settings).to(dtype)


def randomized(module, std=0.3):
    """Nothing may agree because it is still one or zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.eval()


def heads(layer, x, names="qkv"):
    """What the layer's input projection makes of x, each [B, T, H, ·], by these names."""
    return (F.linear(x, layer.part(name)).unflatten(-1, (layer.H, -1)) for name in names)


def agree(ours, theirs, x, tolerance, parameters=()):
    """Outputs, and gradients of the input and of our parameters."""
    x, parameters, results = x.requires_grad_(), list(parameters), []
    for function in (ours, theirs):
        y = function(x)
        results.append((y, *torch.autograd.grad((y * y.detach().sin()).sum(), [x, *parameters])))
    assert all(relative(a, b) <= tolerance for a, b in zip(*results, strict=True))


def plain(spec, q, k, v, o):
    """Our layer without rotation, in float32, with their weights."""
    ours = layer(replace(spec, rotary=False), torch.float32)
    ours.load_state_dict({f"{name}_proj.weight": x.detach() for name, x in zip("qkvo", (q, k, v, o), strict=True)})
    return ours
