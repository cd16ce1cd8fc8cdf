"""A table of every causal mixer: its recurrence S_t = A_t S_{t−1} + k_tᵀ b_t, its place on four axes, and its costs.

Symbols: α is a data-dependent decay, γ a fixed decay, β a write strength, w and r are write and read gates of competing
heads, dt a step size, ∏₂ a product over two steps per token. The state S is [K, V]. Costs are FLOPs (a multiply-add is
two) of the state alone, without projections and convolutions.
"""

import math
from typing import Any

from .. import zoo
from ..extra.specs.latent import LatentSpec
from ..history.specs.softmax_rnn import SoftmaxRNNSpec
from ..spec.decay import DECAYS, DecayShape
from ..spec.linear import Inputs, MixerSpec, Write
from ..spec.mixer import Spec
from ..spec.serialize import to_json
from ..utils.errors import InputError

WIDTH, HEADS, TOKENS, CHUNK = 1024, 4, 2048, 64  # sizes at which costs are counted
COUNTED = (
    f"Costs at width {WIDTH:,} with {HEADS} heads, or as many as the mixer's paper has at this width. Attention has "
    f"read {TOKENS:,} tokens; in training, full attention has read half of them on average, and chunks have {CHUNK} "
    "tokens."
)
UPDATE = ("A_t", "b_t", "features", "can")
AXES = ("memory", "objective", "optimizer", "retention")
COST = ("state", "numbers", "training", "decoding", "grows")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
VIEWS = {"update": UPDATE, "axes": AXES, "cost": COST, "paper": ("about", "paper")}


def describe(name: str) -> dict[str, Any]:
    """The row of a mixer in the table, with what is `cited` and its spec. If a mixer does not fit the table's width and
    heads, its costs are None and `state` is the reason."""
    spec = zoo.get(name)
    outside = _cached if spec.facts.cached else _outside
    row = _linear(spec) if isinstance(spec, MixerSpec) else outside(spec)
    row["can"] = ", ".join(verb[:-1] for verb in ("forgets", "overwrites", "competes") if row[verb]) or "–"
    try:
        cost = _cost(spec, row)
    except InputError as reason:
        cost = dict.fromkeys(COST) | {"state": str(reason)}
    return row | cost | cited(name) | {"spec": to_json(spec)}


def cited(name: str) -> dict[str, str]:
    """The sentence about a mixer or model and its paper, those of X for softmax-X; "–" for what was added without."""
    base = name.partition("(")[0]
    known = [base.removeprefix(prefix) for prefix in ("", "softmax-", zoo.RECURRENT)]
    tables = {"about": zoo.SENTENCES, "paper": zoo.PAPERS}
    return {field: next(filter(None, map(table.get, known)), "–") for field, table in tables.items()}


def _linear(spec: MixerSpec) -> dict[str, Any]:
    (decay, retention), gate, delta = _decay(spec.decay.kind), spec.competition, spec.write.rule == "delta"
    beta = {"one": "", "dt": "dt ", "exp": "eⁱ ", "trapezoid": "λ dt "}.get(spec.write.beta, "β ")
    write = "w " if gate is not None and gate.write != "none" else ""
    channel = spec.write.erase == "channel"
    return {
        "A_t": _transition(spec.write, beta, decay),
        "b_t": f"{'ω ⊙ ' if channel else beta}{write}v",
        "features": " ".join(features(spec.inputs)) or "identity",
        "forgets": bool(decay), "overwrites": delta, "competes": gate is not None,
        "memory": "a matrix per head" if spec.matrices == 1 else f"{spec.matrices} matrices per head",
        "objective": "½‖v − kS‖²" if delta else "−⟨kS, v⟩",
        "optimizer": f"a gradient step of rate {beta.strip() or '1'}",
        "retention": retention,
    }  # fmt: skip


def _transition(write: Write, beta: str, decay: str) -> str:
    if write.erase == "feedback":
        return f"{decay or 'I'} − {beta}b kᵀk"
    removed = {"add": "", "delta": f"(I − {beta}kᵀk)"}[write.rule]
    removed = "(I − kᵀk diag(β))" if write.erase == "channel" else removed
    steps = f"∏{str(write.steps).translate(SUBSCRIPTS)} " if write.steps > 1 else ""
    return f"{steps}{removed} {decay}".strip() or "I"


def features(inputs: Inputs) -> list[str]:
    """What is done to q and k, in a word each."""
    order = "none" if inputs.order is None else f"order {inputs.order}"
    key = "k = 1 − α" if inputs.key == "complement" else "none"
    words = (inputs.feature_map, inputs.qk_norm, "rotary" if inputs.rotary else "none", order, key)
    return [word for word in words if word not in ("identity", "none")]


def _decay(kind: str) -> tuple[str, str]:
    """Returns (the decay's symbol in A_t, its sentence about retention)."""
    if kind == "none":
        return "", "all"
    decay = DECAYS[kind]
    symbol, fixed = ("γ", "fixed ") if decay.fixed else ("α", "")
    if decay.shape is DecayShape.VECTOR:
        return f"diag({symbol})", f"{symbol}, {fixed}per key channel"
    return symbol, f"{symbol}, {fixed}per head"


def _cached(spec: Spec) -> dict[str, Any]:
    pattern, forget = getattr(spec, "pattern", None), getattr(spec, "forget", False)
    everything = "all, faded by α per head" if forget else "all"
    rnn, memory = isinstance(spec, SoftmaxRNNSpec), "latents" if isinstance(spec, LatentSpec) else "keys and values"
    return {
        "A_t": "append", "b_t": "v", "features": "softmax, in parts" if rnn else "softmax",
        "forgets": pattern is not None or forget, "overwrites": False, "competes": False,
        "memory": memory, "objective": "none: all is kept", "optimizer": "none",
        "retention": everything if pattern is None else f"the last {pattern.window}, {pattern.far} before",
    }  # fmt: skip


def _outside(spec: Spec) -> dict[str, Any]:
    """A kind outside the algebra of MixerSpec. Of a module, only its state and cost are known."""
    if spec.facts.update is None:
        return dict.fromkeys((*UPDATE, *AXES), "–") | {"forgets": False, "overwrites": False, "competes": False}
    A, b, retention, objective = spec.facts.update
    overwrites, dimensions = objective.startswith("½"), len(spec.state_shapes(WIDTH, HEADS)["memory"])
    return {
        "A_t": A, "b_t": b, "features": "identity", "forgets": True, "overwrites": overwrites, "competes": False,
        "memory": "a matrix per head" if dimensions == 3 else "a vector per channel",
        "objective": objective, "optimizer": "a gradient step", "retention": retention,
    }  # fmt: skip


def _cost(spec, row: dict[str, Any]) -> dict[str, Any]:
    """Size of the state, and FLOPs per token in decoding and in training, which adds the FLOPs within a chunk.
    Attention reads a cache of TOKENS tokens."""
    if spec.facts.cached:
        bounded = getattr(spec, "pattern", None) is not None
        shapes = spec.state_shapes(WIDTH, HEADS, TOKENS)
        seen, H = next(iter(shapes.values()))[0], spec.num_heads(WIDTH, HEADS)  # also of heads that share keys
        training = decoding = sum(spec.head_dims(WIDTH, HEADS))
        if isinstance(spec, LatentSpec):  # few queries are projected to the latents
            rank, _, shared, _ = spec.sizes(WIDTH, HEADS)
            decoding = 2 * rank + shared
        costs = {"training": 2 * H * training * (seen if bounded else TOKENS // 2), "decoding": 2 * H * decoding * seen}
        return {**_state(shapes), **costs, "grows": not bounded}
    shapes, decoding = spec.state_shapes(WIDTH, HEADS), spec.flops_per_token(WIDTH, HEADS)
    inside = 0
    if len(shapes.get("memory", ())) == 3:
        H, K, V = shapes["memory"]
        inside = H * CHUNK * (K + V) * (2 if row["overwrites"] else 1)
    return {**_state(shapes), "training": decoding + inside, "decoding": decoding, "grows": False}


def _state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    listed = " + ".join("×".join(map(str, shape)) for shape in shapes.values())
    return {"state": listed, "numbers": sum(math.prod(shape) for shape in shapes.values())}


def cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "–"
    return f"{value:,}" if isinstance(value, int) else str(value)
