"""The mLSTM of xLSTM against the layer of transformers, outputs and gradients of the input in float64. Mixers of the
models that are converted are compared in the whole model: tests/convert/test_families.py."""

from unittest import mock

import torch
from torch import nn
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from headrace import Mixer
from headrace.verification.verify import relative

D, H, T, B = 24, 4, 37, 2


def weights_of(theirs, ours):
    named = {
        "decay.bias": theirs.fgate_preact.bias, "norm_weight": theirs.multihead_norm.weight,
        "norm_bias": theirs.multihead_norm.bias,
    }  # fmt: skip
    names = {"q": "q", "k": "k", "v": "v", "decay": "fgate_preact", "beta": "igate_preact", "gate": "ogate_preact"}
    for kind in ("weight", "bias"):
        parts = {part: getattr(theirs.get_submodule(name), kind) for part, name in names.items()}
        parts["decay"] = parts["decay"] if kind == "weight" else torch.zeros(H)  # the decay has its own
        named |= {
            f"in_proj.{kind}": torch.cat([parts[name] for name, size in ours.parts.items() if size]),
            f"o_proj.{kind}": getattr(theirs.out_proj, kind),
        }
    return named


def mlstm():
    """Without the term that it adds to its denominator, with a cap that no gate reaches, and with states in float64."""
    config = xLSTMConfig(
        hidden_size=D, num_heads=H, qk_dim_factor=1.0, use_bias=True, gate_soft_cap=1e9, eps=0.0, chunk_size=8
    )
    with mock.patch.object(torch, "float32", torch.float64):
        return xLSTMLayer(config)


def test_mixer_equals_transformers():
    theirs = mlstm().double()
    ours = Mixer("mlstm(heads.expand_k=1, inputs.bias=true, read.bias=true)", hidden_size=D, num_heads=H, norm_eps=1e-5)
    ours = ours.double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    theirs.requires_grad_(False)
    shapes = {key: parameter.shape for key, parameter in ours.state_dict().items()}
    ours.load_state_dict({key: x.reshape(shapes[key]) for key, x in weights_of(theirs, ours).items()})
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    # In float64 throughout: transformers computes norms and recurrences in what it calls float32.
    wide = mock.patch.object(torch, "float32", torch.float64)
    with wide, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        outputs = ours(x)[0], theirs(x)[0]
    weight = torch.randn(B, T, D, dtype=torch.float64)
    assert relative(*outputs) <= 1e-12
    assert relative(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in outputs)) <= 1e-11
