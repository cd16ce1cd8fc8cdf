"""flash-linear-attention's models written out, after its public source: (config.json, tensors, ids) -> logits. The
recurrences are its own references, or equations token by token; what its kernels fuse around them is here in PyTorch
and transformers.

Dimensions: B batch, T tokens, D hidden size, H heads, K key, V value dimension per head.
"""

import math

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from peers import load


class Drawn(dict):
    """Tensors that are drawn when a model asks for them."""


class Weights:
    """Tensors by their names after a prefix."""

    def __init__(self, tensors, prefix):
        self.tensors, self.prefix = tensors, prefix

    def __call__(self, name, *shape):
        name = f"{self.prefix}.{name}"
        if isinstance(self.tensors, Drawn) and name not in self.tensors:
            self.tensors[name] = 0.3 * torch.randn(shape, dtype=torch.float64)
        assert self.tensors[name].shape == shape, name
        return self.tensors[name]

    def within(self, name):
        return Weights(self.tensors, f"{self.prefix}.{name}")

    def linear(self, x, name, width, bias=False):
        """x [B, T, ·] -> [B, T, width]."""
        return F.linear(x, self(f"{name}.weight", width, x.shape[-1]), self(f"{name}.bias", width) if bias else None)

    def heads(self, x, name, width, H, bias=False):
        """x [B, T, ·] -> [B, T, H, ·]. width: of all heads."""
        return self.linear(x, f"{name}_proj", width, bias).unflatten(-1, (H, -1))

    def rms(self, x, name, eps):
        return F.rms_norm(x, x.shape[-1:], self(f"{name}.weight", x.shape[-1]), eps)

    def convolved(self, c, x, name, width, H):
        """A projection, the causal convolution of each of its channels, SiLU: [B, T, H, ·]."""
        kernel = self(f"{name}_conv1d.weight", width, 1, c["conv_size"])
        padded = F.pad(self.linear(x, f"{name}_proj", width).mT, (kernel.shape[-1] - 1, 0))
        mixed = F.conv1d(padded, kernel, groups=width)
        return F.silu(mixed).mT.unflatten(-1, (H, -1))


def expanded(c):
    """The key and value dimensions of all heads."""
    return int(c["hidden_size"] * c["expand_k"]), int(c["hidden_size"] * c["expand_v"])


def retnet(c, w, x):
    (q, v), H = expanded(c), c["num_heads"]
    gate = w.heads(x, "g", v, H)
    q, k, v = (w.heads(x, name, width, H).transpose(1, 2) for name, width in (("q", q), ("k", q), ("v", v)))
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=q.shape[-1] * H, num_attention_heads=H))
    q, k = apply_rotary_pos_emb(q, k, *rope(x, torch.arange(x.shape[1])[None]))
    out = load("fla:retention/naive:naive_retention")(q, k, v).transpose(1, 2)
    return w.rms(out, "g_norm_swish_gate", c["norm_eps"]) * F.silu(gate)


def gla(c, w, x):
    (q, v), H = expanded(c), c["num_heads"]
    gate, rates = w.heads(x, "g", v, H), w.linear(w.linear(x, "gk_proj.0", 16), "gk_proj.1", q, bias=True)
    q, k, v = (w.heads(x, name, width, H) for name, width in (("q", q), ("k", q), ("v", v)))
    log_decay = (F.logsigmoid(rates) / 16).unflatten(-1, (H, -1))
    out, _ = load("fla:gla/naive:naive_recurrent_gla")(q, k, v, log_decay)
    return w.rms(out, "g_norm_swish_gate", c["norm_eps"]) * F.silu(gate)


def strength(c, w, x, H):
    return w.linear(x, "b_proj", H).sigmoid() * (2 if c["allow_neg_eigval"] else 1)


def gated(c, w, x, out, gate=True):
    """The norm of a head and its gate."""
    H, V = out.shape[2:]
    out = w.rms(out, "o_norm", c["norm_eps"])
    return out * F.silu(w.heads(x, "g", H * V, H)) if gate else out


def delta_net(c, w, x):
    (q, v), H = expanded(c), c["num_heads"]
    q, k, v = (w.convolved(c, x, *of, H).transpose(1, 2) for of in (("q", q), ("k", q), ("v", v)))
    beta = strength(c, w, x, H).mT
    out, _ = load("fla:delta_rule/naive:delta_rule_recurrence")(l2norm(q), l2norm(k), v, beta)
    return gated(c, w, x, out.transpose(1, 2), c["use_gate"])


def grouped(c, w, x):
    """q, k and v of heads of which those of q and k may be fewer."""
    keys, K, V = c["num_heads"], c["head_dim"], int(c["head_dim"] * c["expand_v"])
    H = c["num_v_heads"] or keys
    q, k = (l2norm(w.convolved(c, x, name, keys * K, keys)).repeat_interleave(H // keys, 2) for name in "qk")
    return q, k, w.convolved(c, x, "v", H * V, H)


def step_decay(w, x, H):
    return -w("A_log", H).exp() * F.softplus(w.linear(x, "a_proj", H) + w("dt_bias", H))


def gated_deltanet(c, w, x):
    q, k, v = grouped(c, w, x)
    H = v.shape[2]
    recurrence = load("fla:gated_delta_rule/naive:naive_recurrent_gated_delta_rule")
    return gated(c, w, x, recurrence(q, k, v, strength(c, w, x, H), step_decay(w, x, H))[0])


def recurrence(q, k, v, log_decay, beta=None, bonus=None):
    """S ← diag(e^g) S + kᵀ v, or + β kᵀ (v − k S), token by token, and q S K^−1/2, or with a bonus u [H, K] of the S
    before q (S + (u ⊙ k)ᵀ v). log_decay [B, T, H, K or 1]."""
    out, memory = [], torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
    for t in range(q.shape[1]):
        query, key, value = q[:, t, :, None], k[:, t, :, None], v[:, t, :, None]
        before, memory = memory, log_decay[:, t].exp()[..., None] * memory
        memory = memory + key.mT @ (value if beta is None else beta[:, t, :, None, None] * (value - key @ memory))
        read = memory * q.shape[-1] ** -0.5 if bonus is None else before + (bonus * k[:, t])[..., None] * value
        out.append((query @ read)[..., 0, :])
    return torch.stack(out, 1)


def kda(c, w, x):
    q, k, v = grouped(c, w, x)
    H, K, V = v.shape[2], k.shape[3], v.shape[3]
    rate = w("A_log", H).exp()[:, None]
    z = (w.linear(w.linear(x, "f_proj.0", V), "f_proj.1", H * K) + w("dt_bias", H * K)).unflatten(-1, (H, K))
    log_decay = c["lower_bound"] * torch.sigmoid(rate * z) if c["safe_gate"] else -rate * F.softplus(z)
    out = recurrence(q, k, v, log_decay, strength(c, w, x, H))
    gate = w.linear(w.linear(x, "g_proj.0", V), "g_proj.1", H * V, bias=True)
    return w.rms(out, "o_norm", c["norm_eps"]) * gate.unflatten(-1, (H, V)).sigmoid()


def hgrn2(c, w, x):
    D = c["hidden_size"]
    H = c["num_heads"] if c["expand_ratio"] is None else D // c["expand_ratio"]
    q, logits, v = (w.heads(x, name, D, H) for name in "qfi")
    out = recurrence(F.silu(q), torch.sigmoid(-logits), v, F.logsigmoid(logits)).flatten(-2)
    return w.rms(out, "g_norm", 1e-5)


def gsa(c, w, x):
    """Two recurrences, whose memories have a key and a value for each slot."""
    H, D, wide = c["num_heads"], c["hidden_size"], c["exapnd_k"] if c["expand_k"] is None else c["expand_k"]
    q, slots = int(D * wide), c["num_slots"] or int(D * wide) // H
    q, k, v, z = (w.heads(x, name, width, H) for name, width in (("q", q), ("k", q), ("v", D), ("f", H * slots)))
    log_decay, memories, out = F.logsigmoid(z) / 8, [0.0, 0.0], []
    for t in range(x.shape[1]):
        decay = log_decay[:, t].exp()[..., None]
        memories = [decay * m + (1 - decay) * F.silu(y[:, t, :, None]) for m, y in zip(memories, (k, v), strict=True)]
        weight = (memories[0] @ F.silu(q)[:, t, ..., None]).softmax(2)
        out.append((weight.mT @ memories[1]).flatten(1))
    return w.rms(F.silu(torch.stack(out, 1)), "g_norm", 1e-5)


def linear_attn(c, w, x):
    (q, v), H = expanded(c), c["num_heads"]
    phi = {"elu": lambda y: F.elu(y) + 1, "relu": F.relu, "identity": lambda y: y}[c["feature_map"]]
    q, k, v = (w.heads(x, name, width, H) for name, width in (("q", q), ("k", q), ("v", v)))
    return w.rms(recurrence(phi(q), phi(k), v, torch.zeros_like(k)), "norm", c["norm_eps"])


def gated_deltaproduct(c, w, x):
    """The tokens of the recurrence are the steps, of which the first decays and the last reads."""
    H, n, K, V = c["num_heads"], c["num_householder"], c["head_dim"], int(c["head_dim"] * c["expand_v"])
    q = l2norm(w.convolved(c, x, "q", H * K, H)).repeat_interleave(n, 1)
    k, v = (w.convolved(c, x, name, n * H * width, n * H) for name, width in (("k", K), ("v", V)))
    decay = step_decay(w, x, H) if c["use_forget_gate"] else torch.zeros(*x.shape[:2], H, dtype=x.dtype)
    log_decay = torch.cat([decay, decay.new_zeros(*x.shape[:2], (n - 1) * H)], -1)[..., None]
    k, v, beta, log_decay = (y.unflatten(2, (n, H)).flatten(1, 2) for y in (k, v, strength(c, w, x, n * H), log_decay))
    out = recurrence(q, l2norm(k), v, log_decay, beta)[:, n - 1 :: n]
    return gated(c, w, x, out, c["use_output_gate"])


def delta(x):
    """The token before minus the token."""
    return F.pad(x, (0, 0, 1, -1)) - x


def rwkv6(c, w, x):
    (q, v), H, D, rank = expanded(c), c["num_heads"], c["hidden_size"], c["proj_low_rank_dim"]
    low = w.linear(x + delta(x) * w("x_proj.0.mu", D), "x_proj.0.linear", 5 * rank).tanh().unflatten(-1, (5, rank))
    weights = torch.einsum("btsr,dsr->btsd", low, w("x_proj.2.weight", D, 5 * rank).unflatten(-1, (5, rank)))
    mixes = x[:, :, None] + delta(x)[:, :, None] * (weights + w("x_bias", 5, D))
    r, z, k, v, gate = (
        w.linear(mix, f"{name}_proj.linear{'.lora.0' * (name == 'w')}", width)
        for mix, name, width in zip(mixes.unbind(2), "rwkvg", (q, c["gate_low_rank_dim"], q, v, v), strict=True)
    )
    z = w.linear(z.tanh(), "w_proj.linear.lora.2", q, bias=True)
    r, z, k, v = (y.unflatten(-1, (H, -1)) for y in (r, z, k, v))
    out = recurrence(r, k, v, -z.exp(), bonus=w("bonus", H, q // H))
    out = F.layer_norm(out, out.shape[-1:], eps=c["norm_eps"]).flatten(-2)
    return (out * w("g_norm.weight", gate.shape[-1]) + w("g_norm.bias", gate.shape[-1])) * F.silu(gate)


def channel_mixing(c, w, x):
    D, default = c["hidden_size"], 3.5 if c["model_type"] == "rwkv6" else 4
    inner = c["intermediate_size"] or 32 * -(-int(D * (c["hidden_ratio"] or default)) // 32)
    if c["model_type"] == "rwkv7":
        return w.linear(F.relu(w.linear(x + delta(x) * w("x_k", D), "key", inner)).square(), "value", D)
    key, receptance = (
        w.linear(x + delta(x) * w(f"{name}.mu", D), f"{name}.linear", width)
        for name, width in (("key", inner), ("receptance", D))
    )
    return receptance.sigmoid() * w.linear(F.relu(key).square(), "value", D)


def rwkv7(c, w, x, first):
    """first: a list with the values of the first layer, once it was called."""
    D, K = c["hidden_size"], c["head_dim"]
    r, z, k, v, a, g = (x + delta(x) * w(f"x_{name}", 1, 1, D) for name in "rwkvag")

    def low(x, name, act=lambda y: y, bias=True):
        rank = c[{"w": "decay", "g": "gate"}.get(name, name) + "_low_rank_dim"]
        return w.linear(act(w.linear(x, f"{name}_lora.lora.0", rank)), f"{name}_lora.lora.2", D, bias)

    decay, rate, gate = low(z, "w", torch.tanh), low(a, "a").sigmoid(), low(g, "g", torch.sigmoid, bias=False)
    q, k, values = (w.linear(y, f"{name}_proj", D) for y, name in ((r, "r"), (k, "k"), (v, "v")))
    if first:
        values = values.lerp(first[0], low(v, "v").sigmoid())
    first.append(values)
    read = F.normalize((k * w("k_k", D)).unflatten(-1, (-1, K)), dim=-1)
    k = k * (1 + (rate - 1) * w("k_a", D))
    alpha = torch.exp(-math.exp(-0.5) * decay.sigmoid())
    q, k, values, rate, alpha = (y.unflatten(-1, (-1, K)) for y in (q, k, values, rate, alpha))
    S, out = x.new_zeros(x.shape[0], D // K, K, K), []
    for t in range(x.shape[1]):
        erased = (read[:, t, :, None] @ S) * (read * rate)[:, t, ..., None]
        S = alpha[:, t, ..., None] * S - erased + k[:, t, ..., None] * values[:, t, :, None]
        out.append((q[:, t, :, None] @ S)[..., 0, :])
    out = F.layer_norm(torch.stack(out, 1), (K,), eps=K * c["norm_eps"]).flatten(-2)
    bonus = (q * k * w("r_k", D // K, K)).sum(-1, keepdim=True) * values
    return (out * w("g_norm.weight", D) + w("g_norm.bias", D) + bonus.flatten(2)) * gate


def softmax(q, k, v, bias):
    """q, k and v [B, T, heads, d]; bias [T, T] or [B, H, T, T]: what the logits get."""
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))
    return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=bias).transpose(1, 2)


def attention_inputs(c, w, x, window=None):
    """q, k and v [B, T, heads, d], and a mask [T, T] of later tokens and of those before the window."""
    D, H, G = c["hidden_size"], c["num_heads"], c["num_kv_heads"] or c["num_heads"]
    parts = (("q", D, H), ("k", D // H * G, G), ("v", D // H * G, G))
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (window or x.shape[1]))
    return [w.heads(x, *part, c["qkv_bias"]) for part in parts], torch.where(seen, 0.0, -torch.inf).to(x)


def transformer(c, w, x):
    (q, k, v), mask = attention_inputs(c, w, x, c["window_size"])
    if c["qk_norm"]:
        q, k = w.rms(q, "q_norm", 1e-5), w.rms(k, "k_norm", 1e-5)
    frequency = c["rope_theta"] ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angle = (torch.arange(x.shape[1])[:, None] * frequency).repeat(1, 2)[None]
    return softmax(*apply_rotary_pos_emb(q, k, angle.cos(), angle.sin(), unsqueeze_dim=2), v, mask)


def forgetting_transformer(c, w, x):
    (q, k, v), mask = attention_inputs(c, w, x)
    total = F.logsigmoid(w.linear(x, "f_proj", q.shape[2], bias=True)).cumsum(1).mT
    out = softmax(q, k, v, total[..., None] - total[..., None, :] + mask)
    return out * torch.sigmoid(w.heads(x, "g", x.shape[-1], q.shape[2])) if c["use_output_gate"] else out


def mamba3(c, w, x):
    K, V, G = c["state_size"], c["head_dim"], c["n_groups"]
    H, angles = c["expand"] * c["hidden_size"] // V, int(c["rope_fraction"] * K) // 2
    sizes = [H * V, H * V, G * K, G * K, H, H, H, angles]
    z, v, B, C, dt, rate, share, turns = w.linear(x, "in_proj", sum(sizes), c["use_bias"]).split(sizes, -1)
    z, v = (y.unflatten(-1, (H, V)) for y in (z, v))
    dt, share = F.softplus(dt + w("dt_bias", H)), share.sigmoid()
    decay = torch.exp(-dt * F.softplus(rate).clamp(min=1e-4))
    total = (math.pi * turns.tanh()[:, :, None] * dt[..., None]).cumsum(1)

    def turned(y, name):
        """Channels 2i and 2i + 1 are a complex number."""
        y = w.rms(y.unflatten(-1, (G, K)), f"{name}_norm", c["norm_eps"])
        y = y.repeat_interleave(H // G, 2) + w(f"{name}_bias", H, 1, K)[:, 0]
        pairs, rest = (part.contiguous() for part in y.split([2 * angles, K - 2 * angles], -1))
        pairs = torch.view_as_complex(pairs.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(total), total)
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)

    q, pairs, out = turned(C, "C"), turned(B, "B")[..., None] * v[..., None, :], []
    memory, before = torch.zeros_like(pairs[:, 0]), torch.zeros_like(pairs[:, 0])
    for t in range(x.shape[1]):
        alpha, now = decay[:, t, :, None, None], (share * dt)[:, t, :, None, None]
        memory = alpha * (memory + (dt[:, t, :, None, None] - now) * before) + now * pairs[:, t]
        out, before = [*out, (q[:, t, :, None] @ memory)[..., 0, :]], pairs[:, t]
    out = torch.stack(out, 1) + w("D", H)[:, None] * v
    if c["is_outproj_norm"]:
        out = F.rms_norm(out, (V,), None, c["norm_eps"]) * w("norm.weight", H * V).view(H, V)
    return out * F.silu(z)


def log_linear_mamba2(c, w, x):
    """Level l of token t are tokens s of which t XOR s has l binary digits."""
    K, V, G, T = c["state_size"], c["head_dim"], c["n_groups"], x.shape[1]
    H, L, wide = c["expand"] * c["hidden_size"] // V, 15, c["expand"] * c["hidden_size"]
    sizes, mixed = [wide, wide + 2 * G * K, H, H * L], [wide, G * K, G * K]
    z, vkq, dt, levels = w.linear(x, "in_proj", sum(sizes), c["use_bias"]).split(sizes, -1)
    kernel = w("conv1d.weight", sizes[1], 1, c["conv_kernel"])
    bias = w("conv1d.bias", sizes[1]) if c["use_conv_bias"] else None
    vkq = F.silu(F.conv1d(F.pad(vkq.mT, (c["conv_kernel"] - 1, 0)), kernel, bias, groups=sizes[1])).mT
    v, k, q = (y.unflatten(-1, (n, -1)) for y, n in zip(vkq.split(mixed, -1), (H, G, G), strict=True))
    k, q = (y.repeat_interleave(H // G, 2) for y in (k, q))
    dt = F.softplus(dt + w("dt_bias", H))
    weight = F.softplus(w("L", H, L) * levels.unflatten(-1, (H, L)))
    attend, log_decay = load("fla:log_linear_attn/naive:naive_log_linear_attn"), -w("A_log", H).exp() * dt
    out = v if T == 1 else attend(q, k, v * dt[..., None], log_decay, weight)  # which knows no level of one token
    out, z = (out + w("D", H)[:, None] * v).flatten(2).unflatten(-1, (G, -1)), z.unflatten(-1, (G, -1))
    first = c["norm_before_gate"] and c["rmsnorm"]
    out = out if first else out * F.silu(z)
    if c["rmsnorm"]:
        out = F.rms_norm(out, out.shape[-1:], None, c["norm_eps"]) * w("norm.weight", wide).view(G, -1)
    return (out * F.silu(z) if first else out).flatten(2)


MIXERS = {
    each.__name__: each for each in (
        retnet, gla, delta_net, gated_deltanet, kda, hgrn2, gsa, linear_attn, gated_deltaproduct, rwkv6,
        rwkv7, transformer, forgetting_transformer, mamba3, log_linear_mamba2,
    )
}  # fmt: skip
# The model, its last norm, a layer's norm, its mixer, and the mixer's output projection.
NAMES = {
    "mamba3": ("backbone", "norm_f", "norm", "mixer", "out_proj"),
    "log_linear_mamba2": ("backbone", "norm_f", "mixer_norm", "mixer", "out_proj"),
}
USUAL = ("model", "norm", "attn_norm", "attn", "o_proj")


def attending(c, i):
    """The fields of layer i, if it is softmax attention in a model of another mixer."""
    given = [c["attn"]] if isinstance(c["attn"], dict) else c["attn"] or []
    usual = {"num_kv_heads": None, "qkv_bias": False, "qk_norm": False, "window_size": None, "rope_theta": 10000.0}
    return next((c | usual | own for own in given if i in own["layers"]), None)


def logits(c, tensors, ids):
    kind, D = c["model_type"], c["hidden_size"]
    model, last, norm, mixer, output = NAMES.get(kind, USUAL)
    whole = Weights(tensors, model)

    def normed(x, w, name):
        if not kind.startswith("rwkv"):
            return w.rms(x, name, c["norm_eps"])
        bias = w(f"{name}.bias", D) if c["norm_bias"] else None
        return F.layer_norm(x, (D,), w(f"{name}.weight", D), bias, c["norm_eps"])

    embedding = whole("embeddings.weight", c["vocab_size"], D)
    x, first = embedding[ids], [[]] if kind == "rwkv7" else []
    if kind.startswith("rwkv"):
        x = normed(x, whole, "layers.0.pre_norm")
    for i in range(c["num_hidden_layers"]):
        layer = whole.within(f"layers.{i}")
        w = layer.within(mixer)
        own = attending(c, i)
        out = MIXERS["transformer" if own else kind](own or c, w, normed(x, layer, norm), *first).flatten(2)
        x = x + w.linear(out, output, D, c.get("use_bias"))
        if kind.startswith("rwkv"):
            x = x + channel_mixing(c, layer.within("ffn"), normed(x, layer, "ffn_norm"))
        elif kind != "mamba3":
            mlp, y = layer.within("mlp"), normed(x, layer, "mlp_norm")
            ratio = 4 if kind == "log_linear_mamba2" else c["hidden_ratio"] or 4
            inner = (kind != "log_linear_mamba2" and c["intermediate_size"]) or 256 * -(-int(D * ratio * 2 / 3) // 256)
            y = F.silu(mlp.linear(y, "gate_proj", inner)) * mlp.linear(y, "up_proj", inner)
            x = x + mlp.linear(y, "down_proj", D)
    head = embedding if c["tie_word_embeddings"] else Weights(tensors, "lm_head")("weight", c["vocab_size"], D)
    return F.linear(normed(x, whole, last), head)


def drawn(c):
    """Random tensors of a model, by their names."""
    tensors = Drawn()
    logits(c, tensors, torch.zeros(1, 1, dtype=torch.long))
    return tensors
