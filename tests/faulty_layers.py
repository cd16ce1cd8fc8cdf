"""A recurrent layer, and the same with one fault each: adapters of `headrace verify tests/faulty_layers.py:FAULT`."""

from functools import partial

import torch
from torch import nn

D, K = 8, 4


class Memory(nn.Module):
    """y_t = q_t S_t, S_t = 0.9 S_{t−1} + k_tᵀ v_t, a token at a time. The state is float32, or float64."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.q, self.k, self.v, self.out = nn.Linear(D, K), nn.Linear(D, K), nn.Linear(D, K), nn.Linear(K, D)
        self.scale = torch.rand(()) if fault == "unsaved" else 1.0  # neither a parameter nor a buffer
        self.kept = None

    def forward(self, x, state=None, mask=None, cu_seqlens=None):
        if self.fault == "hidden" and state is not None:
            state = self.kept
        if self.fault == "forgets" and state is not None and x.shape[1] > 1:
            state = None
        wide = x.dtype if self.fault == "bfloat16" else torch.promote_types(x.dtype, torch.float32)
        S = x.new_zeros(len(x), K, K, dtype=wide) if state is None else state
        starts = set() if cu_seqlens is None or self.fault == "packing" else set(cu_seqlens.tolist())
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None or self.fault == "padding" else mask.bool()
        if self.fault == "batch":
            x = x + 0.1 * x.roll(1, 0)
        x = torch.where(real[..., None], x, 0)
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = []
        for t in range(x.shape[1]):
            S = torch.zeros_like(S) if t in starts else S
            new = (0.9 * S + (k[:, t, :, None] * v[:, t, None]).to(wide)).to(wide)
            S = torch.where(real[:, t, None, None], new, S)
            rows.append(torch.einsum("bk,bkv->bv", q[:, t].to(wide), S).to(x.dtype))
        y = self.out(torch.stack(rows, 1)) * self.scale
        if self.fault == "future":
            y = y + 0.1 * torch.cat([x[:, 1:], x[:, :1]], 1)
        if self.fault == "gradient" or (self.fault == "float32 gradient" and x.dtype == torch.float32):
            y = y + 0.5 * (y - y.detach())
        if self.fault == "compiled" and torch.compiler.is_compiling():
            y = 1.01 * y
        self.kept = S
        return y, S


def adapter(fault=""):
    def forward(layer, x, state=None, mask=None, cu_seqlens=None):
        if fault == "raises" and cu_seqlens is not None:
            raise RuntimeError("no such kernel")
        return layer(x, state, None if mask is None else mask[:, -x.shape[1] :], cu_seqlens)

    def crop(layer, x, remove):
        return layer(x if fault == "uncropped" else x[:, : x.shape[1] - remove])[1]

    def reorder(state, order):
        return state if fault == "unordered" else state[order]

    return {"module": Memory(fault), "width": D, "forward": forward, "crop": crop, "reorder": reorder}


# The laws that each fault breaks.
CONTINUED = {"pieces = whole", "left-padded in pieces", "copied state", "reordered state", "cropped = recomputed"}
ALONE = {"left-padded = bare", "right-padded = bare", "left-padded in pieces", "left-padded in decoding"}
FAULTS = {
    "packing": {"packed = separate"}, "forgets": CONTINUED,
    "padding": ALONE - {"right-padded = bare"} | {"NaN in padding"},
    "batch": ALONE | {"batch size", "NaN in a row", "NaN in padding"}, "gradient": {"gradients = differences"},
    "float32 gradient": {"gradients = float64"}, "bfloat16": {"state dtype"},
    "hidden": {"copied state", "reordered state"}, "uncropped": {"cropped = recomputed"},
    "unordered": {"reordered state"}, "unsaved": {"saved = loaded"}, "compiled": {"compile = eager"},
}  # fmt: skip
packing, forgets, padding, hidden, raises, bfloat16 = (
    partial(adapter, fault) for fault in ("packing", "forgets", "padding", "hidden", "raises", "bfloat16")
)
