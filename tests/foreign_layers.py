"""A layer of another library, with its weights under our names; and, where no library has a layer that runs without a
GPU, layers composed of other libraries' parts.

Dimensions: D hidden size, H heads, K key, V value dimension per head.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, l2norm

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


def mixed(layer, x):
    """q, k and v [B, T, H, ·] after the convolution, and the log decay."""
    qkv = F.linear(x, torch.cat([layer.part(name) for name in "qkv"])).mT
    y = causal_conv1d_fn(qkv, layer.conv.weight[:, 0], None, activation="silu").mT
    parts = y.split([layer.parts[name] for name in "qkv"], -1)
    return *(y.unflatten(-1, (H, -1)) for y in parts), layer.decay(F.linear(x, layer.part("decay")))


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


# Mixers of models that are converted are compared as whole models: tests/convert. HGRN2, RWKV-5 and simple GLA have
# recurrences that test_foreign.py compares as those of the op, and are compared as layers with their equations in
# tests/layers/test_gated_forms.py.
COMPOSED = {
    "linear-attention": linear, "based": based, "delta-fast-weights(inputs.feature_map=dpfp-2)": fast_weights,
    "comba": comba, "gated-deltanet-2": gated_deltanet_2,
}  # fmt: skip
