"""Mixers of released models: ours against the module of transformers that the model runs, outputs and gradients of the
input in float64."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    FalconH1Config,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    OlmoHybridConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    xLSTMConfig,
)
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from headrace import Mixer
from headrace.studies.verify import relative

D, H, K, T = 24, 4, 6, 37
B = 2
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
PLACE = {"hidden_size": D, "num_heads": H, "layer_idx": 1, "num_layers": 3, "norm_eps": 1e-5}


def stacked(ours, parts: dict[str, Any]) -> torch.Tensor:
    """The rows of our input projection."""
    return torch.cat([parts[name] for name, size in ours.parts.items() if size])


def of_mamba2(theirs, ours) -> dict[str, Any]:
    """in_proj stacks gate, v, k, q and the decay; the convolution v, k and q."""
    wide, narrow = ours.H * ours.V, ours.Hq * ours.K
    named = {
        "decay.A_log": theirs.A_log, "decay.dt_bias": theirs.dt_bias, "skip": theirs.D,
        "o_proj.weight": theirs.out_proj.weight, "o_proj.bias": theirs.out_proj.bias,
        "norm_weight": getattr(theirs.norm, "weight", None),
    }  # fmt: skip
    for name in ("weight", "bias"):
        if (projected := getattr(theirs.in_proj, name)) is not None:
            parts = projected.split([wide, wide, narrow, narrow, ours.H])
            named[f"in_proj.{name}"] = stacked(ours, dict(zip(("gate", "v", "k", "q", "decay"), parts, strict=True)))
        if (filters := getattr(theirs.conv1d, name)) is not None:
            v, k, q = filters.split([wide, narrow, narrow])
            named[f"conv.{name}"] = torch.cat([q, k, v])
    return named


def of_delta(theirs, ours) -> dict[str, Any]:
    """Gated DeltaNet and Kimi Delta Attention with a module for each projection."""
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "beta": "b_proj", "gate": "g_proj", "decay": "a_proj"}
    low_rank = {"gate": "g_a_proj", "decay": "forget_gate.f_a_proj"}
    names |= {part: name for part, name in low_rank.items() if hasattr(theirs, "g_a_proj")}
    if hasattr(theirs, "forget_gate") and not hasattr(theirs, "g_a_proj"):
        names["decay"] = "forget_gate.f_proj"
    decay = getattr(theirs, "forget_gate", theirs)
    named = {
        "in_proj.weight": stacked(ours, {part: theirs.get_submodule(name).weight for part, name in names.items()}),
        "conv.weight": theirs.conv1d.weight, "decay.A_log": decay.A_log, "decay.dt_bias": decay.dt_bias,
        "norm_weight": theirs.o_norm.weight, "o_proj.weight": theirs.o_proj.weight,
    }  # fmt: skip
    if "g_a_proj" in names.values():
        named |= {"decay.up.weight": decay.f_b_proj.weight, "gate.up.weight": theirs.g_b_proj.weight}
    return named


def of_minimax(theirs, ours) -> dict[str, Any]:
    """qkv_proj stacks q, k and v of a head."""
    q, k, v = theirs.qkv_proj.weight.unflatten(0, (H, 3, K)).unbind(1)
    parts = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1), "gate": theirs.output_gate.weight}
    return {
        "in_proj.weight": stacked(ours, parts), "norm_weight": theirs.norm.weight,
        "o_proj.weight": theirs.out_proj.weight,
    }  # fmt: skip


def of_mamba(theirs, ours) -> dict[str, Any]:
    norms = [getattr(theirs, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
    return {
        "in_proj.weight": theirs.in_proj.weight, "in_proj.bias": theirs.in_proj.bias, "skip": theirs.D,
        "conv.weight": theirs.conv1d.weight, "conv.bias": theirs.conv1d.bias, "A_log": theirs.A_log.T,
        "x_proj.weight": theirs.x_proj.weight, "dt_weight": theirs.dt_proj.weight, "dt_bias": theirs.dt_proj.bias,
        "norm_weight": None if norms[0] is None else torch.cat([norm.weight for norm in norms]),
        "out_proj.weight": theirs.out_proj.weight, "out_proj.bias": theirs.out_proj.bias,
    }  # fmt: skip


def of_rg_lru(theirs, ours) -> dict[str, Any]:
    unit, named = theirs.rg_lru, {}
    for name in ("weight", "bias"):
        named[f"in_proj.{name}"] = torch.cat([getattr(theirs.linear_x, name), getattr(theirs.linear_y, name)])
        named[f"conv.{name}"], named[f"out_proj.{name}"] = (
            getattr(module, name) for module in (theirs.conv_1d, theirs.linear_out)
        )
        gates = [getattr(unit, f"{gate}_gate_{name}") for gate in ("input", "recurrent")]
        named[f"gate_{name}"] = torch.cat(gates)
    return named | {"rate": unit.recurrent_param}


def of_rwkv(theirs, ours) -> dict[str, Any]:
    return {
        "mix": torch.cat([theirs.time_mix_receptance, theirs.time_mix_key, theirs.time_mix_value]),
        "log_rate": theirs.time_decay, "bonus": theirs.time_first, "r_proj.weight": theirs.receptance.weight,
        "k_proj.weight": theirs.key.weight, "v_proj.weight": theirs.value.weight, "o_proj.weight": theirs.output.weight,
    }  # fmt: skip


def of_mlstm(theirs, ours) -> dict[str, Any]:
    named = {
        "decay.bias": theirs.fgate_preact.bias, "norm_weight": theirs.multihead_norm.weight,
        "norm_bias": theirs.multihead_norm.bias,
    }  # fmt: skip
    names = {"q": "q", "k": "k", "v": "v", "decay": "fgate_preact", "beta": "igate_preact", "gate": "ogate_preact"}
    for kind in ("weight", "bias"):
        parts = {part: getattr(theirs.get_submodule(name), kind) for part, name in names.items()}
        parts["decay"] = parts["decay"] if kind == "weight" else torch.zeros(H)  # the decay has its own
        named |= {f"in_proj.{kind}": stacked(ours, parts), f"o_proj.{kind}": getattr(theirs.out_proj, kind)}
    return named


def mlstm():
    """Without the term that it adds to its denominator, with a cap that no gate reaches, and with states in float64."""
    config = xLSTMConfig(
        hidden_size=D, num_heads=H, qk_dim_factor=1.0, use_bias=True, gate_soft_cap=1e9, eps=0.0, chunk_size=8
    )
    with mock.patch.object(torch, "float32", torch.float64):
        return xLSTMLayer(config)


def mamba2(**settings):
    config = Mamba2Config(hidden_size=D, num_heads=H, head_dim=12, state_size=K, n_groups=2, chunk_size=8, **settings)
    return Mamba2Mixer(config, 0)


def falcon_h1(**settings):
    config = FalconH1Config(
        hidden_size=D, mamba_n_heads=H, mamba_d_head=12, mamba_d_state=K, mamba_d_ssm=48, mamba_n_groups=2,
        mamba_chunk_size=8, **settings,
    )  # fmt: skip
    mixer = FalconH1Mixer(config, 0)
    mixer.mup_vector = 1.0  # which the model sets: factors that a conversion multiplies into the weights
    return mixer


def of_linear(kind, config, **settings):
    heads = {"linear_head_dim": K, "linear_num_heads": H}
    return kind(config(hidden_size=D, **heads, **LAYERS, **settings), 1)


def minimax():
    """The decays are buffers, which float32 rounds."""
    config = MiniMaxConfig(hidden_size=D, num_attention_heads=H, block_size=8, **LAYERS)
    with mock.patch.object(torch, "arange", lambda *a, _arange=torch.arange, **k: _arange(*a, **k).double()):
        return MiniMaxLightningAttention(config, 1)


RATE = 1 - 1 / (2 + 1e-5) + 1e-5  # of layer 1 of 3
MAMBA2 = "mamba2(heads.key_dim=6, heads.qk_groups=2, read.norm=rms-groups"
DELTA = "gated-deltanet(heads.key_dim=6, heads.expand_v=2, heads.qk_groups=2, read.eps=1e-5, write.beta="
# Our mixer, their module, and how its weights are ours.
MIXERS: dict[str, tuple[str, Any, Any]] = {
    "mamba2": (MAMBA2 + ")", mamba2, of_mamba2),
    "mamba2, bounded steps": (
        MAMBA2 + ", inputs.bias=true, read.bias=true, inputs.conv_bias=false, decay.dt_floor=0.4, decay.dt_ceiling=1)",
        lambda: mamba2(use_bias=True, use_conv_bias=False, time_step_limit=(0.4, 1.0)), of_mamba2,
    ),
    "falcon_h1": (
        "mamba2(heads.key_dim=6, heads.qk_groups=2, read.norm=none, inputs.bias=true)",
        lambda: falcon_h1(mamba_proj_bias=True), of_mamba2,
    ),
    "falcon_h1, norm before gate": (
        MAMBA2 + ", read.order=norm-gate, read.bias=true)",
        lambda: falcon_h1(mamba_rms_norm=True, projectors_bias=True), of_mamba2,
    ),
    "kimi_linear": (
        "kda(read.gate_bias=false)", lambda: of_linear(KimiLinearDeltaAttention, KimiLinearConfig), of_delta
    ),
    "glm5_next": (
        "kda(read.gate_bias=false, decay.lower_bound=-5.0)",
        lambda: of_linear(Glm5NextTextLinearAttention, Glm5NextTextConfig), of_delta,
    ),
    "bailing_hybrid": (
        "kda(read.gate=sigmoid, decay.rank=full, decay.lower_bound=-3.0)",
        lambda: of_linear(BailingHybridDeltaAttention, BailingHybridConfig, kda_lower_bound=-3.0, rms_norm_eps=1e-5),
        of_delta,
    ),
    **{
        f"olmo_hybrid, {beta}": (
            DELTA + beta + ")",
            lambda beta=beta: OlmoHybridGatedDeltaNet(
                OlmoHybridConfig(
                    hidden_size=D, linear_num_key_heads=2, linear_num_value_heads=H, linear_key_head_dim=K,
                    linear_value_head_dim=12, linear_allow_neg_eigval=beta == "sigmoid-2",
                    num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"],
                ), 1,
            ), of_delta,
        ) for beta in ("sigmoid", "sigmoid-2")
    },
    "minimax": (
        f"lightning-attention(decay.rate={RATE}, read.eps=1e-6)", minimax, of_minimax,
    ),
    "mamba": (
        "mamba(bias=true, conv_bias=false, rank=5)",
        lambda: MambaMixer(
            MambaConfig(hidden_size=D, use_bias=True, use_conv_bias=False, time_step_rank=5, num_hidden_layers=1), 0
        ), of_mamba,
    ),
    "jamba": (
        "mamba(norm=true, rank=5)",
        lambda: JambaMambaMixer(JambaConfig(hidden_size=D, mamba_dt_rank=5, rms_norm_eps=1e-5), 0), of_mamba,
    ),
    "recurrent_gemma": (
        "rg-lru(expand=2)",
        lambda: RecurrentGemmaRecurrentBlock(
            RecurrentGemmaConfig(hidden_size=D, num_attention_heads=H, lru_width=2 * D, num_hidden_layers=3), 0
        ), of_rg_lru,
    ),
    "lfm2": (
        "short-conv(bias=true, conv_bias=true)",
        lambda: Lfm2ShortConv(
            Lfm2Config(hidden_size=D, conv_L_cache=3, conv_bias=True, num_hidden_layers=1, layer_types=["conv"]), 0
        ), lambda theirs, ours: dict(theirs.named_parameters()),
    ),
    "xlstm": ("mlstm(heads.expand_k=1, inputs.bias=true, read.bias=true)", mlstm, of_mlstm),
    "rwkv": (
        "rwkv4(expand=2)",
        lambda: RwkvSelfAttention(RwkvConfig(hidden_size=D, attention_hidden_size=2 * D, num_hidden_layers=3), 1),
        of_rwkv,
    ),
}  # fmt: skip


def foreign_output(theirs, x):
    """In float64 throughout: transformers computes norms and recurrences in what it calls float32."""
    given = {}
    if isinstance(theirs, RecurrentGemmaRecurrentBlock):
        given = {"position_ids": torch.arange(T).expand(B, T), "attention_mask": None, "use_cache": False}
        theirs.rg_lru._rnn_scan = partial(theirs.rg_lru._rnn_scan, acc_dtype=torch.float64)
    if isinstance(theirs, MiniMaxLightningAttention):
        given = {"position_embeddings": None, "attention_mask": None}
    wide = mock.patch.object(torch, "float32", torch.float64)
    with wide, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        y = theirs(x, **given)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_equals_transformers(name):
    expression, make, weights_of = MIXERS[name]
    theirs, ours = make().double(), Mixer(expression, **PLACE).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    theirs.requires_grad_(False)
    named = {key: x for key, x in weights_of(theirs, ours).items() if x is not None}
    shapes = {key: parameter.shape for key, parameter in ours.state_dict().items()}
    ours.load_state_dict({key: x.reshape(shapes[key]) for key, x in named.items()})
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    outputs, weight = (ours(x)[0], foreign_output(theirs, x)), torch.randn(B, T, D, dtype=torch.float64)
    assert relative(*outputs) <= 1e-12
    assert relative(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in outputs)) <= 1e-11
