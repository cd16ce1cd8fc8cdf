"""The recurrence as a loop over tokens. Tests compare every backend with this file, which shares no code with them.

    S' = e^{g_t} S_{t-1}                       decay: g is log_decay, per head or per row (key channel) of S
    add:    S_t = S' + β_t k_tᵀ (w_t v_t)      write: w is the write gate
    delta:  S_t = S' + β_t k_tᵀ (w_t v_t − k_t S')
    o_t = scale · r_t · q_t S_t                read: r is the read gate
    bonus:      o_t = scale · r_t · q_t (S_{t-1} + diag(u) β_t k_tᵀ (w_t v_t))
    normalize:  o_t = r_t · (scale · q_t S_t) / (scale · q_t · z_t + ε), z the same recurrence with v = 1

Shapes: k [B, T, H, K], v [B, T, H, V], log_decay [H], [B, T, H] or [B, T, H, K], w and beta [B, T, H], bonus [H, K],
state [B, H, K, V] (V + 1 columns with normalize: the last is z). q [B, T, Hq, K], r [B, T, Hq] and out [B, T, Hq, V]
have Hq / H consecutive heads for each state.
"""

import torch


def literal(
    q, k, v, *, log_decay=None, beta=None, rule="add", read_gate=None, write_gate=None,
    bonus=None, normalize=False, scale=None, initial_state=None, eps=1e-6,
):  # fmt: skip
    """Returns (out [B, T, Hq, V], final state). Every batch row is one sequence; the dtype is that of the inputs."""
    (B, T, H, K), ones = k.shape, torch.ones_like(v[..., :1])
    g = 0.0 * ones if log_decay is None else log_decay
    g = g.expand(B, T, H)[..., None] if g.dim() < 4 else g
    beta, w = (ones if x is None else x[..., None] for x in (beta, write_gate))
    r = torch.ones_like(q[..., :1]) if read_gate is None else read_gate[..., None]
    v = torch.cat([v, ones], -1) if normalize else v
    scale = K**-0.5 if scale is None else scale
    S, out = k.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state, []
    tokens = zip(*(x.unbind(1) for x in (q, k, v, g, beta, w, r)), strict=True)  # the gradient of x[:, t] is all of x
    for q, k, v, g, beta, w, r in tokens:
        before, S = S, g[..., None].exp() * S
        target = w * v
        if rule == "delta":
            target = target - (k[:, :, None] @ S).squeeze(-2)
        write = (beta * k)[..., None] * target[..., None, :]
        S = S + write
        seen = S if bonus is None else before + bonus[:, :, None] * write
        seen = seen.repeat_interleave(q.shape[1] // H, 1)
        o = scale * (q[:, :, None] @ seen).squeeze(-2)
        out.append(r * (o[..., :-1] / (o[..., -1:] + eps) if normalize else o))
    return torch.stack(out, 1), S
