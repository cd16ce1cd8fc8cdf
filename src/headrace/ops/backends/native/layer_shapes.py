"""Shapes of what one token of a whole layer takes (see `LayerStep` in ../base.py).

kinds: the kind of each of the layer's parts, by name. sizes: (D, H, Hq, K, V, width of the short convolution or 0, and
the sizes of the parts of the input projection that the decay and the output gate get).

Dimensions: D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

from collections.abc import Sequence

Shape = tuple[int, ...]


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


def token_shapes(kind: dict[str, str], sizes: Sequence[int], rotary: bool, rows: int) -> dict[str, Shape]:
    """Returns the shapes of a call's inputs for one token and of the state."""
    D, H, Hq, K, V, width, decay_reads, gate_reads = sizes
    parts = 2 * Hq * K + H * V + decay_reads + gate_reads + H * (kind["beta"] == "sigmoid")
    shapes: dict[str, Shape] = {"projected": (rows, parts), "memory": (rows, H, K, V + (kind["norm"] == "sum"))}
    if kind["source"] == "hidden" and {kind["read"], kind["write"]} != {"none"}:
        shapes["hidden"] = (rows, D)
    if width:
        shapes["conv"] = (rows, width - 1, 2 * Hq * K + H * V)
    return shapes | ({"tokens": (rows,)} if rotary else {})
