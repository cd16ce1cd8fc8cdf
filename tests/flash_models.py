"""flash-linear-attention's models written out, after its public source: (config.json, tensors, ids) -> logits. The
recurrences are its own references, or equations token by token; what its kernels fuse around them is here in PyTorch
and transformers.

Dimensions: B batch, T tokens, H heads, K key, V value dimension per head.
"""

import math

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

    def own(self, *names):
        """Parameters that are not weights of a module."""
        return [self.tensors[f"{self.prefix}.{name}"] for name in names]

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
    rates = F.linear(F.linear(x, w["gk_proj.0"]), w["gk_proj.1"], *w.own("gk_proj.1.bias"))
    log_decay = (F.logsigmoid(rates) / 16).unflatten(-1, (c["num_heads"], -1))
    out, _ = load("fla:gla/naive:naive_recurrent_gla")(q, k, v, log_decay)
    return rms(out, w["g_norm_swish_gate"], c) * F.silu(gate)


def strength(c, w, x):
    return F.linear(x, w["b_proj"]).sigmoid() * (2 if c["allow_neg_eigval"] else 1)


def delta_net(c, w, x):
    H = c["num_heads"]
    q, k, v = (convolved(w, x, name, H).transpose(1, 2) for name in "qkv")
    beta = strength(c, w, x).mT
    out, _ = load("fla:delta_rule/naive:delta_rule_recurrence")(l2norm(q), l2norm(k), v, beta)
    out = rms(out.transpose(1, 2), w["o_norm"], c)
    return out * F.silu(*w.project(x, "g", H)) if c["use_gate"] else out


def gated_deltanet(c, w, x):
    H, values = c["num_heads"], c["num_v_heads"] or c["num_heads"]
    q, k = (l2norm(convolved(w, x, name, H)).repeat_interleave(values // H, 2) for name in "qk")
    beta = strength(c, w, x)
    A_log, dt_bias = w.own("A_log", "dt_bias")
    log_decay = -A_log.exp() * F.softplus(F.linear(x, w["a_proj"]) + dt_bias)
    recurrence = load("fla:gated_delta_rule/naive:naive_recurrent_gated_delta_rule")
    out, _ = recurrence(q, k, convolved(w, x, "v", values), beta, log_decay)
    return rms(out, w["o_norm"], c) * F.silu(*w.project(x, "g", values))


def recurrence(q, k, v, log_decay, beta=None):
    """S ← diag(e^g) S + kᵀ v, or + β kᵀ (v − k S), and q S K^−1/2, token by token. log_decay [B, T, H, K or 1]."""
    out, memory = [], torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
    for t in range(q.shape[1]):
        key, memory = k[:, t, :, None], log_decay[:, t].exp()[..., None] * memory
        value = v[:, t, :, None] if beta is None else beta[:, t, :, None, None] * (v[:, t, :, None] - key @ memory)
        memory = memory + key.mT @ value
        out.append((q[:, t, :, None] @ memory)[..., 0, :] * q.shape[-1] ** -0.5)
    return torch.stack(out, 1)


def kda(c, w, x):
    H, values = c["num_heads"], c["num_v_heads"] or c["num_heads"]
    q, k = (l2norm(convolved(w, x, name, H)).repeat_interleave(values // H, 2) for name in "qk")
    A_log, dt_bias = w.own("A_log", "dt_bias")
    rate = A_log.exp()[:, None]
    z = (F.linear(F.linear(x, w["f_proj.0"]), w["f_proj.1"]) + dt_bias).unflatten(-1, (values, -1))
    log_decay = c["lower_bound"] * torch.sigmoid(rate * z) if c["safe_gate"] else -rate * F.softplus(z)
    out = recurrence(q, k, convolved(w, x, "v", values), log_decay, strength(c, w, x))
    gate = F.linear(F.linear(x, w["g_proj.0"]), w["g_proj.1"], *w.own("g_proj.1.bias"))
    return rms(out, w["o_norm"], c) * gate.unflatten(-1, (values, -1)).sigmoid()


def hgrn2(c, w, x):
    heads = c["num_heads"] if c["expand_ratio"] is None else c["hidden_size"] // c["expand_ratio"]
    q, logits, v = w.project(x, "qfi", heads)
    out = recurrence(F.silu(q), torch.sigmoid(-logits), v, F.logsigmoid(logits)).flatten(-2)
    return F.rms_norm(out, out.shape[-1:], w["g_norm"], 1e-5)[..., None, :]


def linear_attn(c, w, x):
    phi = {"elu": lambda y: F.elu(y) + 1, "relu": F.relu, "identity": lambda y: y}[c["feature_map"]]
    q, k, v = w.project(x, "qkv", c["num_heads"])
    return rms(recurrence(phi(q), phi(k), v, torch.zeros_like(k)), w["norm"], c)


def gated_deltaproduct(c, w, x):
    """The tokens of the recurrence are the steps, of which the first decays and the last reads."""
    H, n, B, T = c["num_heads"], c["num_householder"], *x.shape[:2]
    q = l2norm(convolved(w, x, "q", H)).repeat_interleave(n, 1)
    k, v = (convolved(w, x, name, n * H).unflatten(2, (n, H)).flatten(1, 2) for name in "kv")
    beta = strength(c, w, x).unflatten(2, (n, H)).flatten(1, 2)
    log_decay = torch.zeros(B, T, n, H, 1, dtype=x.dtype)
    if c["use_forget_gate"]:
        A_log, dt_bias = w.own("A_log", "dt_bias")
        log_decay[:, :, 0, :, 0] = -A_log.exp() * F.softplus(F.linear(x, w["a_proj"]) + dt_bias)
    out = recurrence(q, l2norm(k), v, log_decay.flatten(1, 2), beta)[:, n - 1 :: n]
    out = rms(out, w["o_norm"], c)
    return out * F.silu(*w.project(x, "g", H)) if c["use_output_gate"] else out


def delta(x):
    """The token before minus the token."""
    return F.pad(x, (0, 0, 1, -1)) - x


def rwkv6(c, w, x):
    H, (mu, bias, first) = c["num_heads"], w.own("x_proj.0.mu", "x_bias", "bonus")
    low = F.linear(x + delta(x) * mu, w["x_proj.0.linear"]).tanh().unflatten(-1, (5, -1))
    weights = torch.einsum("btsr,dsr->btsd", low, w["x_proj.2"].unflatten(-1, (5, -1))) + bias
    r, decay, k, v, gate = (x[:, :, None] + delta(x)[:, :, None] * weights).unbind(2)
    r, k, v = (
        F.linear(y, w[f"{name}_proj.linear"]).unflatten(-1, (H, -1)) for name, y in (("r", r), ("k", k), ("v", v))
    )
    decay = F.linear(
        F.linear(decay, w["w_proj.linear.lora.0"]).tanh(),
        w["w_proj.linear.lora.2"],
        *w.own("w_proj.linear.lora.2.bias"),
    )
    decay = torch.exp(-decay.exp()).unflatten(-1, (H, -1))
    out, memory = [], torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
    for t in range(x.shape[1]):
        pair = k[:, t, :, :, None] * v[:, t, :, None]
        out.append((r[:, t, :, None] @ (memory + first[..., None] * pair))[..., 0, :])
        memory = decay[:, t, ..., None] * memory + pair
    out = F.layer_norm(torch.stack(out, 1), v.shape[-1:], eps=c["norm_eps"]).flatten(-2)
    out = out * w["g_norm"] + w.own("g_norm.bias")[0]
    return (out * F.silu(F.linear(gate, w["g_proj.linear"])))[..., None, :]


def channel_mixing(w, x):
    key, receptance = (
        F.linear(x + delta(x) * w.own(f"{name}.mu")[0], w[f"{name}.linear"]) for name in ("key", "receptance")
    )
    return receptance.sigmoid() * F.linear(F.relu(key).square(), w["value"])


def mamba3_sizes(c):
    """The number of heads and of angles, and the widths of z, x, B, C, dt, A, λ and the angles."""
    H, K, V = c["expand"] * c["hidden_size"] // c["head_dim"], c["state_size"], c["head_dim"]
    angles, shared = int(c["rope_fraction"] * K) // 2, c["n_groups"] * K
    return H, angles, [H * V, H * V, shared, shared, H, H, H, angles]


def mamba3(c, w, x):
    H, angles, sizes = mamba3_sizes(c)
    biases = w.own("in_proj.bias") if c["use_bias"] else []
    z, v, B, C, dt, rate, share, turns = F.linear(x, w["in_proj"], *biases).split(sizes, -1)
    z, v = (y.unflatten(-1, (H, -1)) for y in (z, v))
    dt_bias, skip, C_bias, B_bias = w.own("dt_bias", "D", "C_bias", "B_bias")
    dt, share = F.softplus(dt + dt_bias), share.sigmoid()
    decay = torch.exp(-dt * F.softplus(rate).clamp(min=1e-4))
    total = (math.pi * turns.tanh()[:, :, None] * dt[..., None]).cumsum(1)

    def turned(y, norm, bias):
        """Channels 2i and 2i + 1 are a complex number."""
        y = rms(y.unflatten(-1, (c["n_groups"], -1)), norm, c).repeat_interleave(H // c["n_groups"], 2) + bias[:, 0]
        pairs, rest = y.split([2 * angles, y.shape[-1] - 2 * angles], -1)
        pairs = torch.view_as_complex(pairs.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(total), total)
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)

    q, k, out = turned(C, w["C_norm"], C_bias), turned(B, w["B_norm"], B_bias), []
    pairs = k[..., None] * v[..., None, :]
    memory, before = torch.zeros_like(pairs[:, 0]), torch.zeros_like(pairs[:, 0])
    for t in range(x.shape[1]):
        weight, alpha = share[:, t] * dt[:, t], decay[:, t, :, None, None]
        memory = (
            alpha * (memory + (dt[:, t] - weight)[..., None, None] * before) + weight[..., None, None] * pairs[:, t]
        )
        out.append((q[:, t, :, None] @ memory)[..., 0, :])
        before = pairs[:, t]
    out = torch.stack(out, 1) + skip[:, None] * v
    if c["is_outproj_norm"]:
        out = F.rms_norm(out, out.shape[-1:], None, c["norm_eps"]) * w["norm"].view(H, -1)
    return out * F.silu(z)


def softmax(q, k, v, bias):
    """q, k and v [B, T, heads, d]; bias [T, T] or [B, heads, T, T]: what the logits get."""
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))
    out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=bias)
    return out.transpose(1, 2)


def attention_inputs(c, w, x):
    """q, k and v [B, T, heads, d], and a mask [T, T] of later tokens and of those before the window."""
    biases = w.own(*(f"{name}_proj.bias" for name in "qkv")) if c["qkv_bias"] else [None] * 3
    d = c["hidden_size"] // c["num_heads"]
    maps = zip("qkv", biases, strict=True)
    heads = [F.linear(x, w[f"{name}_proj"], bias).unflatten(-1, (-1, d)) for name, bias in maps]
    place = torch.arange(x.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (c["window_size"] or len(place)))
    return heads, torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -torch.inf)


def transformer(c, w, x):
    (q, k, v), mask = attention_inputs(c, w, x)
    if c["qk_norm"]:
        q, k = (F.rms_norm(y, y.shape[-1:], w[f"{name}_norm"], 1e-5) for name, y in (("q", q), ("k", k)))
    frequency = c["rope_theta"] ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angle = (torch.arange(x.shape[1])[:, None] * frequency).repeat(1, 2)[None]
    return softmax(*apply_rotary_pos_emb(q, k, angle.cos(), angle.sin(), unsqueeze_dim=2), v, mask)


def forgetting_transformer(c, w, x):
    (q, k, v), mask = attention_inputs(c | {"window_size": None}, w, x)
    total = F.logsigmoid(F.linear(x, w["f_proj"], *w.own("f_proj.bias"))).cumsum(1).mT
    out = softmax(q, k, v, total[..., None] - total[..., None, :] + mask)
    return out * torch.sigmoid(*w.project(x, "g", c["num_heads"])) if c["use_output_gate"] else out


MIXERS = {
    "retnet": retnet, "gla": gla, "delta_net": delta_net, "gated_deltanet": gated_deltanet, "mamba3": mamba3,
    "transformer": transformer, "kda": kda, "hgrn2": hgrn2, "linear_attn": linear_attn,
    "gated_deltaproduct": gated_deltaproduct, "rwkv6": rwkv6, "forgetting_transformer": forgetting_transformer,
}  # fmt: skip
# The model, its last norm, a layer's norm, its mixer, and the mixer's output projection.
NAMES = {"mamba3": ("backbone", "norm_f", "norm", "mixer", "out_proj")}
USUAL = ("model", "norm", "attn_norm", "attn", "o_proj")


def logits(c, tensors, ids):
    model, last, norm, mixer, out = NAMES.get(c["model_type"], USUAL)
    whole = Weights(tensors, model)
    rwkv = c["model_type"] == "rwkv6"

    def normed(x, w, name):
        if not rwkv:
            return rms(x, w[name], c)
        return F.layer_norm(x, x.shape[-1:], w[name], *w.own(*[f"{name}.bias"] * c["norm_bias"]), eps=c["norm_eps"])

    x = whole["embeddings"][ids]
    x = normed(x, whole, "layers.0.pre_norm") if rwkv else x
    for i in range(c["num_hidden_layers"]):
        layer = whole.within(f"layers.{i}")
        w = layer.within(mixer)
        biases = w.own(f"{out}.bias") if c.get("use_bias") else []
        x = x + F.linear(MIXERS[c["model_type"]](c, w, normed(x, layer, norm)).flatten(-2), w[out], *biases)
        if rwkv:
            x = x + channel_mixing(layer.within("ffn"), normed(x, layer, "ffn_norm"))
        elif mixer == "attn":
            mlp, y = layer.within("mlp"), normed(x, layer, "mlp_norm")
            x = x + F.linear(F.silu(F.linear(y, mlp["gate_proj"])) * F.linear(y, mlp["up_proj"]), mlp["down_proj"])
    head = whole["embeddings"] if c["tie_word_embeddings"] else tensors["lm_head.weight"]
    return F.linear(normed(x, whole, last), head)


def shapes(c):
    """Those of every tensor, by its name."""
    D, kind = c["hidden_size"], c["model_type"]
    model, last, *_ = NAMES.get(kind, USUAL)
    layer = {"mamba3": mamba3_shapes, "rwkv6": rwkv6_shapes}.get(kind, block_shapes)(c)
    result = {f"{model}.embeddings.weight": (c["vocab_size"], D), f"{model}.{last}.weight": (D,)}
    result |= {} if c["tie_word_embeddings"] else {"lm_head.weight": (c["vocab_size"], D)}
    if kind == "rwkv6":
        kinds = ["weight", *["bias"] * c["norm_bias"]]
        result |= {f"{model}.{name}.{each}": (D,) for name in ("norm", "layers.0.pre_norm") for each in kinds}
    for i in range(c["num_hidden_layers"]):
        result |= {f"{model}.layers.{i}.{name}": shape for name, shape in layer.items()}
    return result


def mamba3_shapes(c):
    D, K = c["hidden_size"], c["state_size"]
    H, _, sizes = mamba3_sizes(c)
    mixer = {"in_proj.weight": (sum(sizes), D), "out_proj.weight": (D, sizes[0]), "dt_bias": (H,), "D": (H,)}
    mixer |= {"in_proj.bias": (sum(sizes),), "out_proj.bias": (D,)} if c["use_bias"] else {}
    for letter in "BC":
        mixer |= {f"{letter}_norm.weight": (K,), f"{letter}_bias": (H, 1, K)}
    mixer |= {"norm.weight": (sizes[0],)} if c["is_outproj_norm"] else {}
    return {f"mixer.{name}": shape for name, shape in mixer.items()} | {"norm.weight": (D,)}


def block_shapes(c):
    D = c["hidden_size"]
    inner = c["intermediate_size"] or 256 * -(-int(D * (c["hidden_ratio"] or 4) * 2 / 3) // 256)
    layer = {"attn_norm.weight": (D,), "mlp_norm.weight": (D,), "mlp.down_proj.weight": (D, inner)}
    layer |= dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (inner, D))
    mixer = SHAPES[c["model_type"]](c)
    return layer | {f"attn.{name}": shape for name, shape in mixer.items()}


def linear_shapes(c, q, v, more):
    """Those of q, k, v, of more projections, and of the output. more: {name: width}."""
    D = c["hidden_size"]
    widths = {"q": q, "k": q, "v": v} | more
    shapes = {f"{name}_proj.weight": (width, D) for name, width in widths.items()}
    if c["model_type"] not in ("retnet", "gla", "linear_attn"):
        shapes |= {f"{name}_conv1d.weight": (widths[name], 1, c["conv_size"]) for name in "qkv"}
    return shapes | {"o_proj.weight": (D, v)}


def expanded(c):
    return int(c["hidden_size"] * c["expand_k"]), int(c["hidden_size"] * c["expand_v"])


def retnet_shapes(c):
    q, v = expanded(c)
    return linear_shapes(c, q, v, {"g": v}) | {"g_norm_swish_gate.weight": (v // c["num_heads"],)}


def gla_shapes(c):
    q, _ = expanded(c)
    decay = {"gk_proj.0.weight": (16, c["hidden_size"]), "gk_proj.1.weight": (q, 16), "gk_proj.1.bias": (q,)}
    return retnet_shapes(c) | decay


def delta_net_shapes(c):
    (q, v), H = expanded(c), c["num_heads"]
    return linear_shapes(c, q, v, {"b": H} | ({"g": v} if c["use_gate"] else {})) | {"o_norm.weight": (v // H,)}


def gated_deltanet_shapes(c):
    H = c["num_v_heads"] or c["num_heads"]
    q, v = c["num_heads"] * c["head_dim"], int(H * c["head_dim"] * c["expand_v"])
    own = {"A_log": (H,), "dt_bias": (H,), "o_norm.weight": (v // H,)}
    return linear_shapes(c, q, v, {"a": H, "b": H, "g": v}) | own


def kda_shapes(c):
    H, D, K, V = c["num_v_heads"] or c["num_heads"], c["hidden_size"], c["head_dim"], int(c["head_dim"] * c["expand_v"])
    shapes = linear_shapes(c, c["num_heads"] * K, H * V, {"b": H}) | {"A_log": (H,), "dt_bias": (H * K,)}
    shapes |= {"f_proj.0.weight": (V, D), "f_proj.1.weight": (H * K, V), "g_proj.0.weight": (V, D)}
    return shapes | {"g_proj.1.weight": (H * V, V), "g_proj.1.bias": (H * V,), "o_norm.weight": (V,)}


def hgrn2_shapes(c):
    D = c["hidden_size"]
    shapes = dict.fromkeys((f"{name}_proj.weight" for name in "qfio"), (D, D))
    return shapes | {"g_norm.weight": (D,)}


def gated_deltaproduct_shapes(c):
    D, H, n = c["hidden_size"], c["num_heads"], c["num_householder"]
    K, V = c["head_dim"], int(c["head_dim"] * c["expand_v"])
    more = {"b": n * H} | ({"g": H * V} if c["use_output_gate"] else {}) | ({"a": H} if c["use_forget_gate"] else {})
    shapes = linear_shapes(c, H * K, H * V, more) | {"o_norm.weight": (V,)}
    for name, width in (("k", n * H * K), ("v", n * H * V)):
        shapes |= {f"{name}_proj.weight": (width, D), f"{name}_conv1d.weight": (width, 1, c["conv_size"])}
    return shapes | ({"A_log": (H,), "dt_bias": (H,)} if c["use_forget_gate"] else {})


def rwkv6_shapes(c):
    (q, v), D, rank = expanded(c), c["hidden_size"], c["gate_low_rank_dim"]
    inner = c["intermediate_size"] or 32 * -(-int(D * (c["hidden_ratio"] or 3.5)) // 32)
    layer = {f"{name}_norm.{kind}": (D,) for name in ("attn", "ffn") for kind in ["weight", *["bias"] * c["norm_bias"]]}
    layer |= {"ffn.key.mu": (D,), "ffn.receptance.mu": (D,), "ffn.key.linear.weight": (inner, D)}
    layer |= {"ffn.receptance.linear.weight": (D, D), "ffn.value.weight": (D, inner)}
    attn = {"x_proj.0.mu": (D,), "x_proj.0.linear.weight": (160, D), "x_proj.2.weight": (D, 160), "x_bias": (5, D)}
    attn |= {f"{name}_proj.linear.weight": (width, D) for name, width in zip("rkvg", (q, q, v, v), strict=True)}
    attn |= {"w_proj.linear.lora.0.weight": (rank, D), "w_proj.linear.lora.2.weight": (q, rank)}
    attn |= {"w_proj.linear.lora.2.bias": (q,), "bonus": (c["num_heads"], q // c["num_heads"])}
    attn |= {"g_norm.weight": (v,), "g_norm.bias": (v,), "o_proj.weight": (D, v)}
    return layer | {f"attn.{name}": shape for name, shape in attn.items()}


def linear_attn_shapes(c):
    q, v = expanded(c)
    return linear_shapes(c, q, v, {}) | {"norm.weight": (v // c["num_heads"],)}


def attention_shapes(c):
    D, d = c["hidden_size"], c["hidden_size"] // c["num_heads"]
    widths = {"q": D, "k": (c["num_kv_heads"] or c["num_heads"]) * d, "v": (c["num_kv_heads"] or c["num_heads"]) * d}
    shapes = {f"{name}_proj.weight": (width, D) for name, width in widths.items()} | {"o_proj.weight": (D, D)}
    shapes |= {f"{name}_proj.bias": (width,) for name, width in widths.items()} if c["qkv_bias"] else {}
    return shapes | ({"q_norm.weight": (d,), "k_norm.weight": (d,)} if c.get("qk_norm") else {})


def forgetting_shapes(c):
    D, H = c["hidden_size"], c["num_heads"]
    gates = {"f_proj.weight": (H, D), "f_proj.bias": (H,)} | ({"g_proj.weight": (D, D)} if c["use_output_gate"] else {})
    return attention_shapes(c) | gates


SHAPES = {
    "retnet": retnet_shapes, "gla": gla_shapes, "delta_net": delta_net_shapes, "gated_deltanet": gated_deltanet_shapes,
    "transformer": attention_shapes, "kda": kda_shapes, "hgrn2": hgrn2_shapes, "linear_attn": linear_attn_shapes,
    "forgetting_transformer": forgetting_shapes, "gated_deltaproduct": gated_deltaproduct_shapes,
}  # fmt: skip
