"""The spec of a linear mixer: frozen records of literals that say which projections a layer has and how it computes the
arguments of `headrace.linear_attention`. Contradictory fields raise InputError.

Each kind named here is a key of a table in `layers/`, or an option of `linear_attention`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from ..utils.errors import InputError, require
from ..utils.tables import Table
from .competition import Competition
from .decay import DECAYS, STEPPED, Decay, DecayShape
from .mixer import Facts, Shapes, Spec, heads_of_width, width_per_head
from .read import HEAD_NORMS, SUMS, Read
from .record import Factor, PositiveInt, Range, Record, asked_for, require_positive

Order = Annotated[int, Range("0 to 100", lambda n: 0 <= n <= 100)]  # of a Taylor polynomial of e^x
# Objections to a spec in which a field is not its default, of plug-ins that have the field's stage.
RULES: Table[Callable[[Any], Iterator[tuple[bool, str]]]] = Table("rules")
LAYERS: Table[str] = Table("linear_layers")  # as `Facts.layer`, of encoders
# Besides a decay and the delta rule: fields that make the order of tokens matter, or that an encoder's memory lacks.
APART = "inputs.conv", "inputs.shift", "inputs.key", "heads.qk_groups", "read.bonus"
LARGEST_FEATURES = 2**24  # rows of a head's memory; 8 GiB per head for values of 128


@dataclass(frozen=True)
class Heads(Record):
    """Number and widths of the heads."""

    expand_k: Factor = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: Factor = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    qk_groups: PositiveInt | None = None  # number of q/k heads, shared by consecutive value heads; None: `count`
    count: PositiveInt | None = None  # number of heads; None: that of `width`
    key_dim: PositiveInt | None = None  # key dimension per head; None: derived from expand_k
    # value dimension per head, that of the paper or its released models; the number of heads follows from it unless
    # `count` is set. None, and in a model narrower than 4 such heads: the model's num_heads
    width: PositiveInt | None = None


@dataclass(frozen=True)
class Inputs(Record):
    """How q, k and v are computed. After the projection come, in this order: short convolution with SiLU, feature map,
    norm, rotation, and the features of the order.

    With an order n, the weight of a pair of tokens is 1 + x + … + xⁿ/n! instead of the logit x = read.scale · q·k
    (arXiv 2507.23632): q and k are replaced by their C(K + n, n) monomials up to degree n.
    """

    # width of the causal depthwise convolution over q, k and v; 0: no convolution
    conv: Annotated[int, Range("0 or at least 2", lambda n: n == 0 or n >= 2)] = 0
    conv_bias: bool = False  # whether the convolution has a bias
    # mix with the previous token: by weights per channel (lerp, RWKV-5), which depend on the data (ddlerp, RWKV-6)
    shift: Literal["none", "lerp", "ddlerp"] = "none"
    key: Literal["projected", "complement"] = "projected"  # complement: k is 1 − the decay, with no map (HGRN2)
    # applied to q and k; dpfp-n: arXiv 2102.11174
    feature_map: Literal["identity", "elu+1", "relu", "silu", "dpfp-1", "dpfp-2", "dpfp-3"] = "identity"
    # q and k divided by their L2 norm, by the sum of their features, or by their root mean square, with a weight per
    # channel and a bias per head after it (Mamba-3)
    qk_norm: Literal["none", "l2", "sum", "rms-bias"] = "none"
    rotary: bool = False  # whether q and k get rotary position embeddings; of more features than K, the first K do
    # share of the key channels that rotate by the sum of angles computed from the tokens, times dt (Mamba-3)
    turns: Annotated[float, Range("0 to 1", lambda x: 0 <= x <= 1)] = 0.0
    rotary_first: bool = False  # whether the rotation comes before the feature map
    order: Order | None = None  # n, the order of the Taylor polynomial; None: the weight is the logit
    value_gate: bool = False  # whether v is multiplied by a sigmoid gate per head, with a bias (arXiv 2507.23632, E)
    # whether v is divided by n^σ(c), where n is the number of tokens up to its own and c is a parameter per head
    by_length: bool = False
    bias: bool = False  # whether the input projection has a bias
    value_map: Literal["identity", "silu"] = "identity"  # applied to v, after the convolution if there is one

    def _objections(self):
        yield (
            self.rotary_first and not self.rotary,
            "inputs.rotary_first=True places a rotation; expected inputs.rotary=True, got False",
        )
        yield (
            self.key == "complement" and (self.conv or self.qk_norm != "none" or self.rotary or self.order is not None),
            "inputs.key='complement' gives the key of the memory itself; expected inputs.conv=0, qk_norm='none', "
            f"rotary=False and order=None, got {self.conv}, {self.qk_norm!r}, {self.rotary} and {self.order}",
        )


@dataclass(frozen=True)
class Write(Record):
    """The update of the memory S: β kᵀ v for the rule "add", β kᵀ (v − k S) for "delta"."""

    rule: Literal["add", "delta"] = "add"
    # β: 1, a sigmoid of the token, twice that (arXiv 2411.12537), the softplus decay's step size dt, the exponential of
    # the token, where what is read is divided by max(|sum of weights|, 1) (arXiv 2405.04517), or a share λ of dt, with
    # 1 − λ for the token before (arXiv 2603.15569)
    beta: Literal["one", "sigmoid", "sigmoid-2", "dt", "exp", "trapezoid"] = "one"
    # chunk size in tokens: β also depends on the error v − k S of the memory at the chunk's start; None: it does not
    residual_chunk: PositiveInt | None = None
    # updates by the delta rule per token, with a key, a value and a β each, before the token reads (arXiv 2502.10297)
    steps: PositiveInt = 1
    # what an update by the delta rule removes, in place of β k S'. feedback: β b k S, before the decay, b per head, and
    # q − d k in place of q, d per head (arXiv 2506.02475). channel: (β ⊙ k) S', with β per key channel, and v
    # has a gate per value channel in place of β (arXiv 2605.22791)
    erase: Literal["beta", "feedback", "channel"] = "beta"

    @property
    def sigmoid(self) -> bool:
        """Whether β is a sigmoid of the token, or twice that."""
        return self.beta.startswith("sigmoid")


@dataclass(frozen=True)
class MixerSpec(Spec):
    """A linear-time token mixer: a layer around `headrace.linear_attention`. competition: None for no gates."""

    heads: Heads = field(default_factory=Heads)
    inputs: Inputs = field(default_factory=Inputs)
    decay: Decay = field(default_factory=Decay)
    write: Write = field(default_factory=Write)
    read: Read = field(default_factory=Read)
    competition: Competition | None = None

    facts = Facts(".linear.mixer.LinearMixer")
    table = "linear"
    matrices: ClassVar[int] = 1  # number of matrices in the memory of a head

    @property
    def gated(self) -> bool:  # type: ignore[override]
        """Whether the layer has an output gate, a gate on v or competing heads."""
        return any((self.competition, self.read.gate != "none", self.inputs.value_gate, self.write.erase == "channel"))

    def _objections(self):
        yield from self._objections_to_division()
        yield from self._objections_to_updates()
        if self.competition is not None:
            yield from self._objections_to_gates(self.competition)
        for path in RULES:
            if asked_for(self, path):
                yield from RULES[path](self)

    def _objections_to_division(self):
        """Denominators that can vanish."""
        inputs, read, delta = self.inputs, self.read, self.write.rule == "delta"
        even = inputs.order is not None and inputs.order % 2 == 0
        turned = (inputs.rotary and not inputs.rotary_first) or inputs.turns > 0  # which makes features negative again
        yield (
            read.norm in SUMS and not even and not self.positive,
            f"read.norm={read.norm!r} divides by q·z, which can vanish or change sign under inputs.feature_map="
            f"{inputs.feature_map!r} and inputs.order={inputs.order}; expected a feature map without negative features "
            "(elu+1, relu, dpfp) or an even order",
        )
        yield (
            read.norm in SUMS and (delta or read.bonus or (turned and not even)),
            f"read.norm={read.norm!r} divides by q·z, which the delta rule, a bonus or rotary positions can make "
            "vanish; expected write.rule='add', read.bonus=False, and inputs.rotary=False or inputs.rotary_first=True",
        )
        yield (
            inputs.qk_norm == "sum" and not self.positive,
            f"inputs.qk_norm='sum' divides by a sum that inputs.feature_map={inputs.feature_map!r} can make vanish; "
            "expected 'elu+1', 'relu' or dpfp",
        )

    def _objections_to_updates(self):
        """Decays, write strengths and reads that are not defined for the rest of the update."""
        inputs, decay, write, delta = self.inputs, self.decay, self.write, self.write.rule == "delta"
        yield (
            delta and inputs.qk_norm not in ("l2", "sum"),
            f"write.rule='delta' with inputs.qk_norm={inputs.qk_norm!r} diverges once β‖k‖² > 2; expected 'l2', 'sum'",
        )
        yield (
            decay.kind == "xpos" and (not inputs.rotary or inputs.rotary_first or self.memory_rows(2) != 2),
            "decay.kind='xpos' is defined for rotated q and k; expected inputs.rotary=True, rotary_first=False, order="
            f"None, neither dpfp nor a learned map, got {inputs.rotary}, {inputs.rotary_first} and {inputs.order}",
        )
        kind = DECAYS.get(decay.kind)
        per_channel = kind is not None and kind.shape is DecayShape.VECTOR
        shared_keys = self.heads.qk_groups not in (None, self.heads.count)
        yield (
            inputs.key == "complement" and (shared_keys or not per_channel or DECAYS[decay.kind].fixed),
            "inputs.key='complement' is 1 − the decay per token and key channel; expected decay.kind=sigmoid, exp or "
            f"softplus-vector and heads.qk_groups=None, got {decay.kind!r} and {self.heads.qk_groups}",
        )
        yield (
            delta and self.read.bonus,
            "read.bonus=True reads the memory before the write; expected write.rule='add'",
        )
        yield (
            self.step_size and decay.kind not in STEPPED,
            f"write.beta={write.beta!r} with inputs.turns={inputs.turns} is of a step size; expected decay.kind="
            f"{' or '.join(map(repr, STEPPED))}, got {decay.kind!r}",
        )
        frozen = self.competition is not None and self.competition.freeze
        unlike_sums = delta or self.read.bonus or self.read.norm in SUMS or frozen
        yield (
            (write.beta == "exp" and (unlike_sums or per_channel))
            or (write.beta == "trapezoid" and (unlike_sums or inputs.shift != "none")),
            f"write.beta={write.beta!r} is defined for write.rule='add', read.bonus=False, read.norm not in {SUMS} and "
            "competition.freeze=False; 'exp' for a decay per head, 'trapezoid' for inputs.shift='none'",
        )

    def _objections_to_gates(self, gate: Competition):
        """Gates of competition that gate nothing or that the write does not have."""
        yield (gate.read == gate.write == "none", "competition with read='none' and write='none' gates nothing")
        yield (
            gate.write == "beta" and not self.write.sigmoid,
            f"competition.write='beta' acts inside β's logit and needs write.beta='sigmoid'; got {self.write.beta!r}",
        )
        erases = self.write.rule == "delta" and gate.write != "beta"
        yield (
            gate.freeze and (gate.write == "none" or erases or self.decay.kind == "none"),
            f"competition.freeze=True with write.rule={self.write.rule!r}, competition.write={gate.write!r} and "
            f"decay.kind={self.decay.kind!r} keeps no memory; expected a write gate, and for write.rule='delta', which "
            "erases, competition.write='beta', and a decay",
        )

    def idle_gates(self, hidden_size: int | None = None, num_heads: int | None = None) -> list[str]:
        """Returns a sentence for each gate of this spec that has no effect, or nearly none."""
        gate, sentences, groups = self.competition, [], self.heads.qk_groups
        H = self.num_heads(hidden_size or 0, num_heads or 0)
        single = self.read.norm == "rms-groups" and groups in (None, H)  # a head per group
        cancels = self.read.norm in HEAD_NORMS or single
        if gate is not None and gate.read == "query" and cancels and not (self.sums or self.read.skip):
            sentences.append(
                f"competition.read='query' scales q by one number per head and read.norm={self.read.norm!r} divides it "
                "out again: the read gate acts only where it is below sqrt(ε / mean square of the readout); "
                "competition.read='after_norm' puts it after the norm"
            )
        if self.read.gate == "sigmoid-head" and self.read.order == "gate-norm" and cancels:
            sentences.append(
                f"read.gate='sigmoid-head' is one number per head and read.norm={self.read.norm!r} divides it out "
                "again, up to its epsilon; read.order='norm-gate' puts it after the norm"
            )
        if gate is not None and gate.fixed and H == 1:
            sentences.append(f"a {gate.activation} over num_heads=1 head is always 1: this competition is the identity")
        gates = H * self.memories_per_head
        if gate is not None and gate.top_k is not None and 0 < gates <= gate.top_k:
            sentences.append(f"competition.top_k={gate.top_k} keeps all of {gates} gates: it has no effect")
        if gate is not None and gate.untrained:
            sentences.append(
                "competition.top_k=1 keeps one gate, whose size does not depend on its score, so that with "
                "competition.gradient='chosen' the scores are not trained; competition.gradient='all' trains them"
            )
        return sentences

    def layer(self, causal: bool) -> str:
        """Returns module and class of the layer: an encoder's is one memory of all tokens if their order is free."""
        return self.facts.layer if causal or not self.additive else LAYERS["encoder"]

    @property
    def additive(self) -> bool:
        """Whether the memory is a sum of one write per token, so that an encoder can have one memory of all tokens."""
        ordered = type(self) is not MixerSpec or self.decay.kind != "none" or self.write.rule != "add"
        ordered |= self.write.beta == "exp"  # a strength over the largest so far
        return not ordered and not any(asked_for(self, path) for path in (*APART, *RULES))

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of heads: `heads.count`, or that of `heads.width` at this hidden size, or `default`."""
        return heads_of_width(self.heads.count, self.heads.width, self.heads.expand_v * hidden_size, default)

    @property
    def positive(self) -> bool:
        """Whether the feature map and the norm give no negative feature."""
        kind = self.inputs.feature_map
        return (kind in ("elu+1", "relu") or kind.startswith("dpfp")) and self.inputs.qk_norm != "rms-bias"

    @property
    def memories_per_head(self) -> int:
        """Number of memories per head."""
        return 1 if self.competition is None else self.competition.memories_per_head

    def columns(self, K: int, V: int) -> int:
        """Returns the number of columns of a head's memory."""
        return (V + self.sums) * self.matrices

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(hidden_size, num_heads)
        V = width_per_head("heads.expand_v", self.heads.expand_v, hidden_size, H)
        K = self.heads.key_dim or width_per_head("heads.expand_k", self.heads.expand_k, hidden_size, H)
        groups = self.heads.qk_groups
        require(groups is None or H % groups == 0, f"heads.qk_groups={groups} does not divide num_heads={H}")
        require(not (self.inputs.rotary and K % 2), f"inputs.rotary=True needs an even key dimension per head; got {K}")
        if self.inputs.turns and not self.angles(K):
            raise InputError(f"inputs.turns={self.inputs.turns} of {K} key channels per head is less than a pair")
        self._require_contraction(K)
        return K, V

    def _require_contraction(self, K: int) -> None:
        """Raises InputError if the delta rule with Taylor features can diverge: ‖k‖² is the polynomial at the scale."""
        scale, order = K**-0.5 if self.read.scale == "key" else 1.0, self.inputs.order
        if self.write.rule == "add" or order is None:
            return
        square = sum(scale**m / math.factorial(m) for m in range(order + 1))
        beta = 2 if self.write.beta == "sigmoid-2" else 1
        if beta * square > 2:
            raise InputError(
                f"write.rule='delta' with inputs.order={order}, write.beta={self.write.beta!r} and a key dimension of "
                f"{K} per head has β‖k‖² up to {beta * square:.3g} and diverges above 2; expected "
                "write.beta='sigmoid', read.scale='key' and a key dimension above 2"
            )

    def features(self, key_dim: int) -> int:
        """Returns the number of features that the feature map makes of a key: K, or 2 K n for dpfp-n."""
        kind, _, shifts = self.inputs.feature_map.partition("-")
        return 2 * key_dim * int(shifts) if kind == "dpfp" else key_dim

    def memory_rows(self, key_dim: int) -> int:
        """Returns the number of rows of a head's memory: C(f + n, n) for f features and order n, or f without an order.
        Raises InputError for more than 2^24."""
        order, features = self.inputs.order, self.features(key_dim)
        rows = features if order is None else math.comb(features + order, order)
        many = f"inputs.order={order} makes more than {LARGEST_FEATURES:,} features of {features} per head"
        require(rows <= LARGEST_FEATURES, f"{many}; expected a smaller inputs.order or heads.key_dim")
        return rows

    def angles(self, key_dim: int) -> int:
        """Returns the number of angles of inputs.turns, each of two key channels."""
        return int(self.inputs.turns * key_dim) // 2

    @property
    def step_size(self) -> bool:
        """Whether more than the decay depends on the step size of the decay."""
        return self.write.beta in ("dt", "trapezoid") or self.inputs.turns > 0

    @property
    def sums(self) -> bool:
        """Whether the memory has the sum of weights as one more column."""
        return self.read.norm in SUMS or self.write.beta == "exp"

    @property
    def counts_tokens(self) -> bool:
        """Whether the output depends on the position of a token in its sequence."""
        shuffled = self.competition is not None and self.competition.shuffle
        counted = self.inputs.rotary or self.inputs.by_length or self.read.by_length
        return counted or self.write.residual_chunk is not None or shuffled

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of the recurrent state of one sequence, without the batch dimension."""
        H = self.num_heads(hidden_size, num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        memory = H * self.memories_per_head, self.memory_rows(K), self.columns(K, V)
        shapes: Shapes = {"memory": memory}
        if self.write.beta == "exp":
            shapes["peak"] = (H,)
        if (self.write.residual_chunk or 1) > 1:
            shapes["before"] = memory
        if self.inputs.turns:
            shapes["angles"] = (H, self.angles(K))
        if self.write.beta == "trapezoid":
            shared = self.heads.qk_groups if self.inputs.qk_norm != "rms-bias" else None
            shapes["shift"] = (1, (shared or H) * memory[1] + memory[0] * (V + 1))
        if self.inputs.conv:
            groups = self.heads.qk_groups or H
            steps = self.write.steps
            shapes["conv"] = (self.inputs.conv - 1, (1 + steps) * groups * K + steps * H * V)
        if self.inputs.shift != "none":
            shapes["shift"] = (1, hidden_size)
        return shapes

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        H = self.num_heads(hidden_size, num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        K, V = self.memory_rows(K), self.columns(K, V)
        decay, delta = self.decay.kind != "none", self.write.rule == "delta"
        # of the memory before the chunk, which decays too
        residual = 2 + decay if (self.write.residual_chunk or 1) > 1 else 0
        update = (2 + 2 * delta) * self.write.steps + residual
        return H * self.memories_per_head * K * V * (2 + decay + update)
