"""What a token mixer is, as data: small frozen records of literals that say which projections a layer has and how they
become the arguments of `headrace.linear_attention`. JSON in, JSON out; illegal combinations are refused with a reason.

Each kind named here is a key of a table of small modules in `layers/parts.py` (or a branch of the op itself).
"""

import dataclasses
import math
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, Any, Literal

from ..utils.errors import InputError
from .attention import AttentionSpec, Pattern
from .encoder_decoder import RecurrentSpec
from .matrix import MatrixSpec
from .record import Kind, PositiveFloat, PositiveInt, Range, Record, checked, fields, require_positive
from .scan import ScanSpec
from .softmax_rnn import SoftmaxRNNSpec


@dataclass(frozen=True)
class Heads(Record):
    """Widths: all heads together have expand_k · hidden size key and expand_v · hidden size value dimensions."""

    expand_k: PositiveFloat = 1.0
    expand_v: PositiveFloat = 1.0
    qk_groups: PositiveInt | None = None  # heads of q and k, each shared by consecutive value heads; None: one for each
    count: PositiveInt | None = None  # None: the model's num_heads
    key_dim: PositiveInt | None = None  # of each head; None: what expand_k gives


@dataclass(frozen=True)
class Inputs(Record):
    """From the layer's input to q, k, v, in this order: short convolution with SiLU, feature map, norm, rotation.

    taylor-n: features whose products are e^x cut off after order n, x the logit. It is taken of q and k after their
    rotation, and of read.scale's logits.
    """

    # width of the causal depthwise convolution over q, k and v; 0: none
    conv: Annotated[int, Range("0 or at least 2", lambda n: n == 0 or n >= 2)] = 0
    conv_bias: bool = False
    shift: Literal["none", "ddlerp"] = "none"  # RWKV-6's data-dependent mix with the previous token
    feature_map: Literal[
        "identity", "elu+1", "relu", "silu", "dpfp-1", "dpfp-2", "dpfp-3", "taylor-1", "taylor-2", "taylor-3",
        "taylor-4",
    ] = "identity"  # fmt: skip
    qk_norm: Literal["none", "l2", "sum"] = "none"  # sum: of a feature map that is not negative, to a sum of 1
    rotary: bool = False

    @property
    def order(self) -> int | None:
        """Of a Taylor feature map; None: it is another one."""
        kind, _, order = self.feature_map.partition("-")
        return int(order) if kind == "taylor" else None

    @property
    def positive(self) -> bool:
        """Whether no feature is negative."""
        return self.feature_map in ("elu+1", "relu") or self.feature_map.startswith("dpfp")


@dataclass(frozen=True)
class Decay(Record):
    """How memory fades. The kind fixes the shape of log_decay: [H] retnet, [B,T,H] softplus, [B,T,H,K] the others."""

    kind: Literal["none", "retnet", "xpos", "softplus", "sigmoid", "exp", "softplus-vector"] = "none"
    rank: PositiveInt | None = None  # of the low-rank projection of a vector decay; None: the head's key dimension


@dataclass(frozen=True)
class Write(Record):
    """What is added to memory: k ᵀ v ("add"), or k ᵀ (v − what is stored under k) ("delta"), with strength β."""

    rule: Literal["add", "delta"] = "add"
    beta: Literal["one", "sigmoid", "dt"] = "one"  # "dt": the step size of the softplus decay
    # β also sees what memory lacks of v, as it was at the start of a chunk of so many tokens
    look: PositiveInt | None = None


@dataclass(frozen=True)
class Read(Record):
    """From memory to the layer's output: bonus and scale inside the op, then D skip, norm and output gate."""

    norm: Literal["none", "sum", "rms", "group", "rms-joint"] = "rms"  # rms, group: per head; rms-joint: over all heads
    gate: Literal["none", "silu", "sigmoid", "sigmoid-low-rank"] = "none"
    order: Literal["norm-gate", "gate-norm"] = "norm-gate"
    scale: Literal["key", "one"] = "key"  # key: q times K^-1/2
    bonus: bool = False  # RWKV-6's u: the present token is read with its own weight
    skip: bool = False  # Mamba's D: v added to what is read


@dataclass(frozen=True)
class Competition(Record):
    """Softmax linear attention: heads compete for what is written and read (arXiv 2602.01744, equations 3-16)."""

    read: Literal["none", "query", "norm"] = (
        "norm"  # query: on q, as the paper writes it; norm: after the per-head norm
    )
    write: Literal["none", "value", "beta"] = "value"  # value: on v (equation 14); beta: inside β's logit
    source: Literal["head", "diag", "query", "hidden"] = "head"  # what the scores are computed from
    activation: Literal["softmax", "sigmoid", "null"] = "softmax"  # null: softmax with one more, empty, slot
    scale: Literal["identity", "one"] = "identity"  # identity: zero scores give a gate of 1; one: as the paper
    temperature: PositiveFloat = 1.0
    # memories of each head, which compete too: a joint gate of this rank, at as many times the cost
    rank: PositiveInt = 1


@dataclass(frozen=True)
class MixerSpec(Record):
    """A linear-time token mixer. `competition=None` is the plain backbone."""

    heads: Heads = field(default_factory=Heads)
    inputs: Inputs = field(default_factory=Inputs)
    decay: Decay = field(default_factory=Decay)
    write: Write = field(default_factory=Write)
    read: Read = field(default_factory=Read)
    competition: Competition | None = None

    def _objections(self):
        inputs, decay, write, read, gate = self.inputs, self.decay, self.write, self.read, self.competition
        delta, order = write.rule == "delta", inputs.order
        positive = inputs.positive or (order is not None and order % 2 == 0)
        yield (
            read.norm == "sum" and not positive,
            f"read.norm='sum' divides by q·z, which can vanish or change sign under inputs.feature_map="
            f"{inputs.feature_map!r}; expected one without negative features: elu+1, relu, dpfp, taylor of even order",
        )
        yield (
            read.norm == "sum" and (delta or read.bonus or (inputs.rotary and order is None)),
            "read.norm='sum' needs write.rule='add', no bonus and no rotary: each of them can make q·z vanish",
        )
        yield (
            delta and inputs.qk_norm == "none",
            "write.rule='delta' with inputs.qk_norm='none' diverges once β‖k‖² > 2; expected 'l2', or 'sum'",
        )
        yield (
            inputs.qk_norm == "sum" and not inputs.positive,
            f"inputs.qk_norm='sum' divides by a sum that inputs.feature_map={inputs.feature_map!r} can make vanish; "
            "expected 'elu+1', 'relu' or dpfp",
        )
        yield (
            decay.kind == "xpos" and (not inputs.rotary or order is not None),
            f"decay.kind='xpos' fades what a rotation turns; expected inputs.rotary=True and no taylor features, got "
            f"rotary={inputs.rotary} and feature_map={inputs.feature_map!r}",
        )
        yield (delta and read.bonus, "read.bonus=True reads the memory before the write; expected write.rule='add'")
        yield (
            write.beta == "dt" and decay.kind != "softplus",
            f"write.beta='dt' is the step size of decay.kind='softplus'; got decay.kind={decay.kind!r}",
        )
        yield (
            write.look is not None and (not delta or write.beta != "sigmoid"),
            f"write.look={write.look} makes β depend on what the delta rule corrects; expected write.rule='delta' and "
            f"write.beta='sigmoid', got {write.rule!r} and {write.beta!r}",
        )
        if gate is None:
            return
        yield (gate.read == gate.write == "none", "competition with read='none' and write='none' gates nothing")
        yield (
            gate.write == "beta" and write.beta != "sigmoid",
            f"competition.write='beta' acts inside β's logit and needs write.beta='sigmoid'; got {write.beta!r}",
        )
        yield (
            gate.rank > 1 and gate.write == "none",
            f"competition.rank={gate.rank} with competition.write='none': the memories of a head would hold the same",
        )

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        """Sentences naming each gate of this spec that cannot act, or hardly (empty: all gates act)."""
        found: list[str] = []
        gate = self.competition
        if gate is None:
            return found
        if gate.read == "query" and self.read.norm in ("rms", "group"):
            found.append(
                f"competition.read='query' scales q by one number per head and read.norm={self.read.norm!r} divides it "
                "out again: the read gate acts only where it is below sqrt(ε / mean square of the readout); "
                "competition.read='norm' puts it after the norm"
            )
        if (self.heads.count or num_heads) == 1 and gate.activation == "softmax" and gate.rank == 1:
            found.append("a softmax over num_heads=1 head is always 1: this competition is the identity")
        return found

    # --- derived, never stored -----------------------------------------------------------------------------------
    def num_heads(self, default: int) -> int:
        return self.heads.count or default

    @property
    def rank(self) -> int:
        """Memories per head."""
        return 1 if self.competition is None else self.competition.rank

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(K, V) per head. Raises InputError where the widths do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(num_heads)
        dims = self.heads.key_dim or self._share("expand_k", hidden_size, H), self._share("expand_v", hidden_size, H)
        groups = self.heads.qk_groups
        if groups is not None and H % groups:
            raise InputError(f"heads.qk_groups={groups} does not divide num_heads={H}")
        if self.inputs.rotary and dims[0] % 2:
            raise InputError(f"inputs.rotary=True needs an even key dimension per head; got {dims[0]}")
        return dims

    def _share(self, name: str, hidden_size: int, H: int) -> int:
        width = round(getattr(self.heads, name) * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
        if width % H or width < H:
            raise InputError(
                f"num_heads={H} does not divide heads.{name} · hidden_size = {width:g}; expected a multiple of {H}"
            )
        return int(width) // H

    def memory_rows(self, key_dim: int) -> int:
        """Numbers that a head's key is in memory: K, the C(K + n, n) monomials of taylor-n, the 2 K n of dpfp-n."""
        order, (kind, _, shifts) = self.inputs.order, self.inputs.feature_map.partition("-")
        if kind == "dpfp":
            return 2 * key_dim * int(shifts)
        return key_dim if order is None else math.comb(key_dim + order, order)

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's place in its sequence matters."""
        return self.inputs.rotary or self.write.look is not None

    def state_shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """What one sequence carries from token to token, without the batch dimension."""
        H = self.num_heads(num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        memory = H * self.rank, self.memory_rows(K), V + (self.read.norm == "sum")
        shapes: dict[str, tuple[int, ...]] = {"memory": memory}
        if (self.write.look or 1) > 1:
            shapes["before"] = memory
        if self.inputs.conv:
            groups = self.heads.qk_groups or H
            shapes["conv"] = (self.inputs.conv - 1, 2 * groups * K + H * V)
        if self.inputs.shift != "none":
            shapes["shift"] = (1, hidden_size)
        return shapes

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4) -> int:
        sizes = (math.prod(s) for s in self.state_shapes(hidden_size, num_heads).values())
        return itemsize * sum(sizes)

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        """Multiply-adds of the recurrence itself, counted as two each, in the recurrent form (no projections)."""
        H = self.num_heads(num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        K, V = self.memory_rows(K), V + (self.read.norm == "sum")
        decay = 0 if self.decay.kind == "none" else K * V
        return H * self.rank * (4 * K * V + decay + (2 * K * V if self.write.rule == "delta" else 0))


# --- JSON --------------------------------------------------------------------------------------------------------
TYPES: dict[str, type] = {
    "linear": MixerSpec, "attention": AttentionSpec, "scan": ScanSpec, "matrix": MatrixSpec, "rnn": RecurrentSpec,
    "softmax-rnn": SoftmaxRNNSpec,
}  # fmt: skip
Spec = MixerSpec | AttentionSpec | ScanSpec | MatrixSpec | SoftmaxRNNSpec
CACHED = (AttentionSpec, SoftmaxRNNSpec)  # whose state has tokens in it


def to_json(spec) -> Any:
    """A spec as plain dicts, lists and literals; `from_json` reads it back to an equal spec."""
    if isinstance(spec, tuple):
        return [to_json(item) for item in spec]
    if not isinstance(spec, Record):
        return spec
    cls: Any = type(spec)
    data = {name: to_json(getattr(spec, name)) for name in fields(cls)}
    kind = next((name for name, of in TYPES.items() if of is cls), None)
    return {"type": kind} | data if kind else data


def from_json(data: Any, where: str = ""):
    """The spec that `to_json` wrote. Raises InputError, which calls it `where`, for anything that is none."""
    if not isinstance(data, dict):
        raise InputError(f"{where or 'mixer'}={data!r}; expected a dict as to_json returns it")
    kind = data.get("type", "linear")
    if not isinstance(kind, str) or kind not in TYPES:
        raise InputError(f"mixer type {kind!r} is unknown; expected one of {', '.join(TYPES)}")
    return record(TYPES[kind], {name: value for name, value in data.items() if name != "type"}, where or kind)


def record(cls, data: dict[str, Any], where: str):
    """A record of literals and records from plain dicts. Raises InputError for what its fields do not admit."""
    values = admitted(cls, data, where)
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := next((name for name in needed if name not in values), None):
        raise InputError(f"{where} has no {missing}; expected one")
    return cls(**values)


def admitted(cls, data: dict[str, Any], where: str) -> dict[str, Any]:
    """Values of fields as a record holds them. InputError, which calls it `where`, for what the fields do not admit."""
    known, values = fields(cls), {}
    for name, value in data.items():
        if name not in known:
            raise InputError(f"{where} has no field {name!r}; expected one of {', '.join(known)}")
        path = f"{where}.{name}"
        values[name] = checked(_value(value, known[name], path), known[name], path)
    return values


def _value(value: Any, kinds: tuple[Kind, ...], where: str) -> Any:
    """What plain data stand for, where a field admits these kinds: dicts for records, "none" for None, and an item for
    the tuple of it."""
    if value == "none" and any(kind.type is NoneType for kind in kinds):
        return None
    if items := next((kind.items for kind in kinds if kind.items), ()):
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(item, items, f"{where}.{i}") for i, item in enumerate(listed))
    nested = next((kind.type for kind in kinds if issubclass(kind.type, Record)), None)
    if nested is None or not isinstance(value, dict):
        return value
    return from_json(value, where) if "type" in value else record(nested, value, where)


def change(spec, path: str, value):
    """A copy of spec with one field changed: change(spec, "heads.expand_v", 2.0). Values are checked."""
    return change_all(spec, {path: value})


def change_all(spec, values: dict[str, Any]):
    """Several fields at once: what is checked is what they are together."""
    data = to_json(spec)
    for path, value in values.items():
        *parents, last = path.split(".")
        node = data
        for name in parents:
            if not isinstance(node.get(name), dict):
                raise InputError(f"{path!r} names no field of this mixer ({name!r} is not one of its records)")
            node = node[name]
        node[last] = value
    return from_json(data)


__all__ = [
    "CACHED", "AttentionSpec", "Competition", "Decay", "Heads", "Inputs", "MatrixSpec", "MixerSpec", "Pattern", "Read",
    "ScanSpec", "SoftmaxRNNSpec", "Spec", "Write", "admitted", "change", "change_all", "from_json", "record", "replace",
    "to_json",
]  # fmt: skip
