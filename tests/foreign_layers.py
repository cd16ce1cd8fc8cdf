"""A layer of another library, with its weights under our names; and, where no library has a layer that runs without a
GPU, layers composed of other libraries' parts.

Dimensions: D hidden size, H heads, K key, V value dimension per head.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    l2norm,
)

from attention_layers import D, H, heads
from peers import load


def rwkv6():
    """(x [B, T, D] -> y, its weights by our names, in_proj's by its parts) of the author's own package, which runs one
    sequence at a time and contains the norm before the layer."""
    os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    RWKV = pytest.importorskip("rwkv.model").RWKV
    # Importing it turned these on, for whatever is tested after this.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32

    K, mix, rank = D // H, 32, 64
    draw = lambda *shape: 0.3 * torch.randn(shape)  # noqa: E731
    names = ("x_maa", "w_maa", "k_maa", "v_maa", "r_maa", "g_maa")
    own = {name: draw(D) for name in names} | {"tm_w1": draw(D, 5 * mix), "tm_w2": draw(5, mix, D)}
    own |= {"td_w1": draw(D, rank), "td_w2": draw(rank, D), "t_decay": draw(H, K, 1), "t_first": draw(H, K, 1)}
    own |= {name: draw(D, D) for name in ("kw", "vw", "rw", "gw", "ow")} | {"lx_w": draw(D), "lx_b": draw(D)}
    unused = dict.fromkeys(f"{a}{b}" for a in "kvrgo" for b in ("mx", "rx", "my", "ry"))

    def theirs(x):
        start = {"sx": x.new_zeros(D), "s": x.new_zeros(H, K, K), "ln_w": None, "ln_b": None}
        rows = [RWKV.att_seq_v6_0(None, row, **start, **own, **unused)[0] - row for row in x]
        return torch.stack(rows)

    weights = {
        "shift.base": own["x_maa"], "shift.offset": torch.stack([own[f"{i}_maa"] for i in "wkvrg"]),
        "shift.down": own["tm_w1"], "shift.up": own["tm_w2"], "decay.bias": own["t_decay"], "bonus": own["t_first"],
        "in_proj.decay": own["td_w1"].T, "decay.up": own["td_w2"],
        "in_proj.q": own["rw"].T, "in_proj.k": own["kw"].T, "in_proj.v": own["vw"].T,
        "in_proj.gate": own["gw"].T, "o_proj.weight": own["ow"].T,
        "norm_weight": own["lx_w"], "norm_bias": own["lx_b"],
    }  # fmt: skip
    return theirs, weights


# --- composed of foreign parts: (our layer, for its weights; x) -> y -------------------------------------------------


def gated_norm(layer, out, x):
    norm = Qwen3NextRMSNormGated(layer.V, eps=layer.norm_eps)
    norm.weight = layer.norm_weight
    return layer.o_proj(norm(out, *heads(layer, x, ["gate"])).flatten(-2))


def retnet(layer, x):
    q, k, v = (y.transpose(1, 2) for y in heads(layer, x))
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=D, num_attention_heads=H, head_dim=layer.K))
    q, k = apply_rotary_pos_emb(q, k, *rope(x, torch.arange(x.shape[1])[None]))
    out = load("fla:retention/naive:naive_retention")(q, k, v)
    return gated_norm(layer, out.transpose(1, 2), x)


def gla(layer, x):
    log_decay = F.logsigmoid(layer.decay.up(F.linear(x, layer.part("decay")))).unflatten(-1, (H, -1)) / 16
    out, _ = load("fla:gla/naive:naive_recurrent_gla")(*heads(layer, x), log_decay)
    return gated_norm(layer, out, x)


def deltanet(layer, x):
    qkv = F.linear(x, torch.cat([layer.part(name) for name in "qkv"])).mT
    mixed = causal_conv1d_fn(qkv, layer.conv.weight[:, 0], None, activation="silu").mT
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in mixed.split(D, -1))
    beta = F.linear(x, layer.part("beta")).sigmoid().mT
    out, _ = load("fla:delta_rule/naive:delta_rule_recurrence")(l2norm(q), l2norm(k), v, beta)
    norm = LlamaRMSNorm(layer.V, eps=layer.norm_eps)
    norm.weight = layer.norm_weight
    return layer.o_proj(norm(out.transpose(1, 2)).flatten(-2))


def mixed(layer, x):
    """q, k and v [B, T, H, ·] after the convolution, and the log decay."""
    qkv = F.linear(x, torch.cat([layer.part(name) for name in "qkv"])).mT
    y = causal_conv1d_fn(qkv, layer.conv.weight[:, 0], None, activation="silu").mT
    parts = y.split([layer.parts[name] for name in "qkv"], -1)
    return *(y.unflatten(-1, (H, -1)) for y in parts), layer.decay(F.linear(x, layer.part("decay")))


def gated_deltaproduct(layer, x):
    """FLA's recurrence has the steps of a token as tokens of k, v and β."""
    q, *kv, log_decay = mixed(layer, x)
    beta, n = 2 * next(heads(layer, x, ["beta"])).sigmoid(), layer.spec.write.steps
    k, v, beta = (y.unflatten(-1, (n, -1)).transpose(2, 3).flatten(1, 2) for y in (*kv, beta))
    recurrence, scale = load("fla:gated_delta_product/naive:naive_recurrent_gated_delta_product"), layer.K**-0.5
    out, _ = recurrence(l2norm(q), l2norm(k), v, log_decay, beta[..., 0], scale, num_householder=n)
    return gated_norm(layer, out, x)


def sigmoid_gated(layer, out, gate):
    norm = LlamaRMSNorm(layer.V, eps=layer.norm_eps)
    norm.weight = layer.norm_weight
    return layer.o_proj((norm(out) * gate.unflatten(-1, (H, -1)).sigmoid()).flatten(-2))


def comba(layer, x):
    """FLA's chunkwise form and its kernels read the memory before the decay, as the paper does; its recurrent reference
    after it."""
    q, k, v, log_decay = mixed(layer, x)
    q, k, beta = l2norm(q), l2norm(k), F.linear(x, layer.part("beta")).sigmoid()
    share, correction = layer.general.feedback.sigmoid()[:, None], layer.general.correction[:, None]
    theirs = load("fla:comba/naive:naive_chunk_comba")
    out, _ = theirs(q - correction * k, k, v, share * k, log_decay, beta, chunk_size=16)
    return sigmoid_gated(layer, out, F.linear(x, layer.part("gate")))


def gated_deltanet_2(layer, x):
    q, k, v, log_decay = mixed(layer, x)
    b, w = (y.sigmoid() for y in heads(layer, x, ["beta", "write"]))
    out, _ = load("fla:gdn2/naive:naive_recurrent_gdn2")(l2norm(q), l2norm(k), v, log_decay, b, w)
    return sigmoid_gated(layer, out, layer.gate.up(F.linear(x, layer.part("gate"))))


def fast_weights(layer, x):
    """With the feature map as the paper's appendix lists it."""

    def features(y):
        r = F.relu(torch.cat([y, -y], -1))
        turned = torch.cat([r.roll(shifts=j, dims=-1) for j in (1, 2)], -1)
        products = turned * torch.cat([r, r], -1)
        return products / (products.sum(-1, keepdim=True) + 1e-6)

    q, k, v = (y.transpose(1, 2) for y in heads(layer, x))
    beta = F.linear(x, layer.part("beta")).sigmoid().mT
    q, k = features(q), features(k)
    out, _ = load("fla:delta_rule/naive:delta_rule_recurrence")(q * q.shape[-1] ** 0.5, k, v, beta)
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


def linear(layer, x):
    q, k, v = heads(layer, x)
    recurrence = load("fla:linear_attn/naive:naive_recurrent_linear_attn")
    out, _ = recurrence(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)
    return layer.o_proj(out.flatten(-2))


def based(layer, x):
    q, k, v = (y.transpose(1, 2) for y in heads(layer, x))
    return layer.o_proj(load("fla:based/naive:naive_parallel_based")(q, k, v).transpose(1, 2).flatten(-2))


# HGRN2, RWKV-5 and simple GLA have recurrences that test_foreign.py compares as those of the op, and are compared as
# layers with their equations in tests/layers/test_gated_forms.py.
COMPOSED = {
    "retnet": retnet, "gla": gla, "deltanet": deltanet, "linear-attention": linear, "based": based,
    "delta-fast-weights(inputs.feature_map=dpfp-2)": fast_weights,
    "gated-deltaproduct(write.steps=3)": gated_deltaproduct, "comba": comba, "gated-deltanet-2": gated_deltanet_2,
}  # fmt: skip
