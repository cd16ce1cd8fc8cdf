"""The fields of one token of a linear layer between its projections, by their names in hr_layer (native/headrace.h),
which says what they mean: kinds as words, sizes, numbers, and `frequencies`, a tensor or None.

Dimensions: D hidden size, H heads (Hq of q, Hk of k, Hv of v), K key dimension, F features of a key, V value dimension.
"""

from typing import Any

import torch

from . import library as native

Shape = tuple[int, ...]

# The fields of a layer that has no stage for them.
NONE = "head_norm", "qk_norm", "rotary", "decay", "norm", "gate", "read", "write"
ABSENT: dict[str, Any] = dict.fromkeys(NONE, "none") | {
    "feature_map": "identity", "beta": "one", "order": "norm-gate", "source": "head", "activation": "softmax",
    "gate_scale": "identity", "turned": 0, "window": 0, "amplitude": 1.0, "head_eps": 0.0, "frequencies": None,
}  # fmt: skip
OPTIONAL = ("conv_bias", "bonus", "skip")
STATE_DTYPES = {"tokens": torch.int64, "conv": None}  # None: that of the weights; others: float32
KINDS = native.names("hr_kinds")  # those that a program supports, by field


def numbered(fields: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Returns (the fields with the library's numbers of kinds, None), or ({}, why it does not support one of them)."""
    for kind, known in KINDS.items():
        if fields[kind] not in known:
            return {}, f"it does not support {kind}={fields[kind]!r}"
    return fields | {kind: known.index(fields[kind]) for kind, known in KINDS.items()}, None


def weight_shapes(fields: dict[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of the weights of a layer with these fields, including the OPTIONAL weights."""
    D, H, Hq, K, F, V = (fields[name] for name in ("D", "H", "Hq", "K", "F", "V"))
    q, k = (Hq * K, fields["Hk"] * K) if fields["head_norm"] == "joint" else (K, K)
    shapes: dict[str, Shape] = {"bonus": (H, F), "skip": (H,)}
    shapes |= {"q_norm": (q,), "k_norm": (k,)} if fields["head_norm"] != "none" else {}
    if width := fields["conv_width"]:
        shapes |= {"conv_weight": (_channels(fields), 1, width), "conv_bias": (_channels(fields),)}
    if fields["feature_map"].startswith("learned"):
        shapes |= {"map_q": (Hq, K, K), "map_k": (Hq, K, K)}
    shapes |= {"window_factor": (H,)} if fields["window"] else {}
    decay, reads = fields["decay"], fields["decay_reads"]
    up = {"sigmoid": (H * F, reads), "softplus-vector": (H * F, reads), "exp": (reads, H * F)}
    if decay in up:
        shapes |= {"decay_up": up[decay], "decay_bias": (H * F,)}
    shapes |= {"decay_bias": (H,)} if decay in ("softplus", "sigmoid-head") else {}
    if decay.startswith("softplus"):
        shapes["decay_log"] = (H,)
    scores = {"head": (H, K), "diag": (K, H), "query": (H, Hq * K), "hidden": (H, D)}[fields["source"]]
    shapes |= {f"{gate}_scores": scores for gate in ("read", "write") if fields[gate] != "none"}
    if fields["gate"] == "sigmoid-low-rank":
        shapes |= {"gate_up": (H * V, fields["gate_reads"]), "gate_bias": (H * V,)}
    if (norm := fields["norm"]) in ("rms", "group", "rms-joint"):
        shapes["norm_weight"] = (V,) if norm == "rms" else (H * V,)
    return shapes | ({"norm_bias": (H * V,)} if norm == "group" else {})


def state_shapes(fields: dict[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of the state of one sequence. The first word of a name is that of the state's tensor."""
    H, Hk, Hv, K, V, width, w = (fields[n] for n in ("H", "Hk", "Hv", "K", "V", "conv_width", "window"))
    shapes: dict[str, Shape] = {"memory": (H, fields["F"], V + (fields["norm"] == "sum"))}
    if width:
        shapes["conv"] = (width - 1, _channels(fields))
    if w:
        shapes |= {"k_window": (w, Hk, K), "v_window": (w, Hv, V + 1)}
        shapes |= {"decay_window": (w, H)} if fields["decay"] not in ("none", "retnet") else {}
    return shapes | ({"tokens": ()} if w or fields["rotary"] != "none" else {})


def _channels(fields: dict[str, Any]) -> int:
    return (fields["Hq"] + fields["Hk"]) * fields["K"] + fields["Hv"] * fields["V"]
