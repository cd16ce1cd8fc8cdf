"""flash-linear-attention's models written out, after its public source: (config.json, tensors, ids) -> logits. The
recurrences are its own references; what its kernels fuse around them is here in PyTorch and transformers.

Dimensions: B batch, T tokens, H heads.
"""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from peers import load


class Weights:
    """Tensors by their names after a prefix."""

    def __init__(self, tensors, prefix):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name):
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def within(self, name):
        return Weights(self.tensors, f"{self.prefix}.{name}")

    def project(self, x, names, H):
        """x [B, T, ·] -> [B, T, H, ·] by each of the matrices."""
        return [F.linear(x, self[f"{name}_proj"]).unflatten(-1, (H, -1)) for name in names]


def rms(x, weight, c):
    return F.rms_norm(x, weight.shape, weight, c["norm_eps"])


def convolved(w, x, name, H):
    """A projection, the causal convolution of each of its channels, SiLU: [B, T, H, ·]."""
    projected, kernel = F.linear(x, w[f"{name}_proj"]).mT, w[f"{name}_conv1d"]
    mixed = F.conv1d(F.pad(projected, (kernel.shape[-1] - 1, 0)), kernel, groups=len(kernel))
    return F.silu(mixed).mT.unflatten(-1, (H, -1))


def retnet(c, w, x):
    q, k, v, gate = w.project(x, "qkvg", c["num_heads"])
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=q.shape[-1] * len(q[0]), num_attention_heads=len(q[0])))
    q, k = apply_rotary_pos_emb(q, k, *rope(x, torch.arange(x.shape[1])[None]))
    out = load("fla:retention/naive:naive_retention")(q, k, v).transpose(1, 2)
    return rms(out, w["g_norm_swish_gate"], c) * F.silu(gate)


def gla(c, w, x):
    q, k, v, gate = w.project(x, "qkvg", c["num_heads"])
    rates = F.linear(F.linear(x, w["gk_proj.0"]), w["gk_proj.1"], w.tensors[f"{w.prefix}.gk_proj.1.bias"])
    log_decay = (F.logsigmoid(rates) / 16).unflatten(-1, (c["num_heads"], -1))
    out, _ = load("fla:gla/naive:naive_recurrent_gla")(q, k, v, log_decay)
    return rms(out, w["g_norm_swish_gate"], c) * F.silu(gate)


def delta_net(c, w, x):
    H = c["num_heads"]
    q, k, v = (convolved(w, x, name, H).transpose(1, 2) for name in "qkv")
    beta = F.linear(x, w["b_proj"]).sigmoid().mT
    out, _ = load("fla:delta_rule/naive:delta_rule_recurrence")(l2norm(q), l2norm(k), v, beta)
    out = rms(out.transpose(1, 2), w["o_norm"], c)
    return out * F.silu(*w.project(x, "g", H)) if c["use_gate"] else out


def gated_deltanet(c, w, x):
    H, values = c["num_heads"], c["num_v_heads"] or c["num_heads"]
    q, k = (l2norm(convolved(w, x, name, H)).repeat_interleave(values // H, 2) for name in "qk")
    beta = F.linear(x, w["b_proj"]).sigmoid()
    A_log, dt_bias = (w.tensors[f"{w.prefix}.{name}"] for name in ("A_log", "dt_bias"))
    log_decay = -A_log.exp() * F.softplus(F.linear(x, w["a_proj"]) + dt_bias)
    recurrence = load("fla:gated_delta_rule/naive:naive_recurrent_gated_delta_rule")
    out, _ = recurrence(q, k, convolved(w, x, "v", values), beta, log_decay)
    return rms(out, w["o_norm"], c) * F.silu(*w.project(x, "g", values))


MIXERS = {"retnet": retnet, "gla": gla, "delta_net": delta_net, "gated_deltanet": gated_deltanet}


def logits(c, tensors, ids):
    whole = Weights(tensors, "model")
    x = whole["embeddings"][ids]
    for i in range(c["num_hidden_layers"]):
        layer = whole.within(f"layers.{i}")
        w, mlp = layer.within("attn"), layer.within("mlp")
        x = x + F.linear(MIXERS[c["model_type"]](c, w, rms(x, layer["attn_norm"], c)).flatten(-2), w["o_proj"])
        y = rms(x, layer["mlp_norm"], c)
        x = x + F.linear(F.silu(F.linear(y, mlp["gate_proj"])) * F.linear(y, mlp["up_proj"]), mlp["down_proj"])
    head = whole["embeddings"] if c["tie_word_embeddings"] else tensors["lm_head.weight"]
    return F.linear(rms(x, whole["norm"], c), head)


def shapes(c):
    """Those of every tensor, by its name."""
    D, H, kind = c["hidden_size"], c["num_heads"], c["model_type"]
    if kind == "gated_deltanet":
        H = c["num_v_heads"] or H
        q, v = c["num_heads"] * c["head_dim"], int(H * c["head_dim"] * c["expand_v"])
    else:
        q, v = int(D * c["expand_k"]), int(D * c["expand_v"])
    inner = c["intermediate_size"] or 256 * -(-int(D * (c["hidden_ratio"] or 4) * 2 / 3) // 256)
    attn = {"q_proj": (q, D), "k_proj": (q, D), "v_proj": (v, D), "o_proj": (D, v)}
    if kind != "delta_net" or c["use_gate"]:
        attn["g_proj"] = (v, D)
    attn["g_norm_swish_gate" if kind in ("retnet", "gla") else "o_norm"] = (v // H,)
    if kind == "gla":
        attn |= {"gk_proj.0": (16, D), "gk_proj.1": (q, 16)}
    if kind in ("delta_net", "gated_deltanet"):
        attn |= {f"{name}_conv1d": (width, 1, c["conv_size"]) for name, width in (("q", q), ("k", q), ("v", v))}
        attn["b_proj"] = (H, D)
    if kind == "gated_deltanet":
        attn["a_proj"] = (H, D)
    layer = {f"attn.{name}": shape for name, shape in attn.items()} | {"attn_norm": (D,), "mlp_norm": (D,)}
    layer |= {"mlp.gate_proj": (inner, D), "mlp.up_proj": (inner, D), "mlp.down_proj": (D, inner)}
    result = {"model.embeddings.weight": (c["vocab_size"], D), "model.norm.weight": (D,)}
    result |= {} if c["tie_word_embeddings"] else {"lm_head.weight": (c["vocab_size"], D)}
    for i in range(c["num_hidden_layers"]):
        result |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        result |= {f"model.layers.{i}.attn.gk_proj.1.bias": (q,)} if kind == "gla" else {}
        if kind == "gated_deltanet":
            result |= {f"model.layers.{i}.attn.{name}": (H,) for name in ("A_log", "dt_bias")}
    return result
