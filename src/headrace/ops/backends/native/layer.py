"""The arguments of one token of a linear layer between its projections (hr_layer in native/headrace.h).

kinds: the kind of each of the layer's parts, by name. sizes: (D, H, Hq, K, V, width of the short convolution or 0, and
the sizes of the parts of the input projection that the decay and the output gate get). numbers: scale, epsilons of the
norm, the group norm and the normalizer, temperature, base of the rotary frequencies or 0.

Dimensions: D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

from collections.abc import Sequence

import torch

from . import library as native

Shape = tuple[int, ...]

OPTIONAL = ("conv_bias", "bonus", "skip")
STATE_DTYPES = {"memory": (torch.float32,), "tokens": (torch.int64,)}  # others: that of the weights
KINDS = native.names("hr_kinds")  # those that a program supports, by part


def numbered(names: dict[str, str]) -> tuple[list[int], str | None]:
    """Returns (the library's numbers of the kinds, None), or ([], why the library does not support one of them)."""
    for kind, known in KINDS.items():
        if names[kind] not in known:
            return [], f"it does not support {kind}={names[kind]!r}"
    return [known.index(names[kind]) for kind, known in KINDS.items()], None


def weight_shapes(kind: dict[str, str], sizes: Sequence[int]) -> dict[str, Shape]:
    """Returns the shapes of the weights of a layer with these kinds, including the OPTIONAL weights."""
    D, H, Hq, K, V, width, decay_reads, gate_reads = sizes
    shapes: dict[str, Shape] = {"bonus": (H, K), "skip": (H,)}
    if width:
        channels = 2 * Hq * K + H * V
        shapes |= {"conv_weight": (channels, 1, width), "conv_bias": (channels,)}
    up = {"sigmoid": (H * K, decay_reads), "softplus-vector": (H * K, decay_reads), "exp": (decay_reads, H * K)}
    if kind["decay"] in up:
        shapes |= {"decay_up": up[kind["decay"]], "decay_bias": (H * K,)}
    if kind["decay"] == "softplus":
        shapes["decay_bias"] = (H,)
    if kind["decay"].startswith("softplus"):
        shapes["decay_log"] = (H,)
    scores = {"head": (H, K), "diag": (K, H), "query": (H, Hq * K), "hidden": (H, D)}[kind["source"]]
    shapes |= {f"{gate}_scores": scores for gate in ("read", "write") if kind[gate] != "none"}
    if kind["gate"] == "sigmoid-low-rank":
        shapes |= {"gate_up": (H * V, gate_reads), "gate_bias": (H * V,)}
    norms = {"rms": (V,), "group": (H * V,), "rms-joint": (H * V,)}
    if kind["norm"] in norms:
        shapes["norm_weight"] = norms[kind["norm"]]
    return shapes | ({"norm_bias": (H * V,)} if kind["norm"] == "group" else {})


def state_shapes(kind: dict[str, str], sizes: Sequence[int], rotary: bool) -> dict[str, Shape]:
    """Returns the shapes of the state of one sequence."""
    _, H, Hq, K, V, width, _, _ = sizes
    shapes: dict[str, Shape] = {"memory": (H, K, V + (kind["norm"] == "sum"))}
    if width:
        shapes["conv"] = (width - 1, 2 * Hq * K + H * V)
    return shapes | ({"tokens": ()} if rotary else {})
