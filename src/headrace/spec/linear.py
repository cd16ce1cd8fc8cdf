"""The spec of a linear mixer: frozen records of literals that say which projections a layer has and how it computes the
arguments of `headrace.linear_attention`. Contradictory fields raise InputError.

Each kind named here is a key of a table in `layers/`, or an option of `linear_attention`.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..utils.errors import InputError
from .decay import DECAYS, Decay
from .mixer import Facts, Shapes, Spec, width_per_head
from .record import PositiveFloat, PositiveInt, Range, Record, require_positive

SUMS = ("sum", "detached")  # norms that divide by the sum of weights, which is one more column of the state
HEAD_NORMS = ("rms", "group", "l2", "layer")  # norms over the channels of a head, which cancel a factor per head
WIDE_NORMS = ("rms-joint", "rms-groups")  # norms over the channels of several heads
Order = Annotated[int, Range("0 to 100", lambda n: 0 <= n <= 100)]  # of a Taylor polynomial of e^x
LARGEST_FEATURES = 2**24  # rows of a head's memory; 8 GiB per head for values of 128


@dataclass(frozen=True)
class Heads(Record):
    """Number and widths of the heads."""

    expand_k: PositiveFloat = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: PositiveFloat = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    qk_groups: PositiveInt | None = None  # number of q/k heads, shared by consecutive value heads; None: `count`
    count: PositiveInt | None = None  # number of heads; None: the model's num_heads
    key_dim: PositiveInt | None = None  # key dimension per head; None: derived from expand_k


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
    shift: Literal["none", "ddlerp"] = "none"  # ddlerp: RWKV-6's data-dependent mix with the previous token
    # applied to q and k; dpfp-n: arXiv 2102.11174
    feature_map: Literal["identity", "elu+1", "relu", "silu", "dpfp-1", "dpfp-2", "dpfp-3"] = "identity"
    qk_norm: Literal["none", "l2", "sum"] = "none"  # q and k divided by their L2 norm, or by the sum of their features
    rotary: bool = False  # whether q and k get rotary position embeddings
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

    @property
    def positive(self) -> bool:
        """Whether the feature map and the norm give no negative feature."""
        return self.feature_map in ("elu+1", "relu") or self.feature_map.startswith("dpfp")

    @property
    def positive_weights(self) -> bool:
        """Whether no pair of tokens has a negative weight."""
        rotated_last = self.rotary and not self.rotary_first
        even = self.order is not None and self.order % 2 == 0
        return even or (self.positive and not rotated_last)


@dataclass(frozen=True)
class Write(Record):
    """The update of the memory S: β kᵀ v for the rule "add", β kᵀ (v − k S) for "delta"."""

    rule: Literal["add", "delta"] = "add"
    # β: 1, a sigmoid of the token, twice that (arXiv 2411.12537), or the softplus decay's step size
    beta: Literal["one", "sigmoid", "sigmoid-2", "dt"] = "one"
    # chunk size in tokens: β also depends on the error v − k S of the memory at the chunk's start; None: it does not
    residual_chunk: PositiveInt | None = None
    # updates by the delta rule per token, with a key, a value and a β each, before the token reads (arXiv 2502.10297)
    steps: PositiveInt = 1

    @property
    def sigmoid(self) -> bool:
        """Whether β is a sigmoid of the token, or twice that."""
        return self.beta.startswith("sigmoid")


@dataclass(frozen=True)
class Read(Record):
    """How the layer's output is read from the memory. Bonus and scale are arguments of `linear_attention`; its output
    passes through the skip, the norm and the output gate."""

    # sum: linear attention's normaliser; detached: max(sum of weights, 1) without a gradient; rms, group, l2 and layer:
    # norm per head; rms-joint: RMSNorm over all heads; rms-groups: over the heads that share a head of q and k
    norm: Literal["none", "sum", "detached", "rms", "group", "l2", "layer", "rms-joint", "rms-groups"] = "rms"
    # activation of the output gate; sigmoid-head: one number per head, with a bias, instead of one per channel
    gate: Literal["none", "silu", "sigmoid", "sigmoid-low-rank", "sigmoid-head"] = "none"
    order: Literal["norm-gate", "gate-norm"] = "norm-gate"  # which of norm and gate comes first
    scale: Literal["key", "one"] = "key"  # factor of q: K^-1/2 or 1
    bonus: bool = False  # RWKV-6's u: a learned weight for the current token
    skip: bool = False  # Mamba-2's D: v times a learned weight per head is added to the output
    by_length: bool = False  # whether what is read is divided by the number of tokens so far
    # number of levels of log-linear attention (arXiv 2506.04761), which are memories of 1, 1, 2, 4, 8, … tokens back,
    # with a weight per token, head and level; the last has all older tokens. None: one memory
    levels: Annotated[int, Range("2 to 40", lambda n: 2 <= n <= 40)] | None = None
    # number of steps of conjugate gradients that solve (Σ β kᵀk + λ) x = q, where x takes the place of q: the layer
    # reads the prediction of ridge regression (MesaNet, arXiv 2506.05233); None: q itself
    ridge_steps: PositiveInt | None = None
    # whether the norm has a weight (group, layer: and a bias); None: l2 and layer have none, the others do
    affine: bool | None = None
    eps: PositiveFloat | None = None  # epsilon of the norms rms, rms-joint and rms-groups; None: the model's
    gate_bias: bool = True  # whether the logits of sigmoid-low-rank and sigmoid-head have a bias
    bias: bool = False  # whether the output projection has a bias

    def _objections(self):
        yield (
            self.affine is not None and self.norm in ("none", *SUMS),
            f"read.affine={self.affine} is of a norm with channels; expected read.norm to be one of "
            f"{', '.join((*HEAD_NORMS, *WIDE_NORMS))}, got {self.norm!r}",
        )
        yield (
            self.affine is False and self.norm in ("group", *WIDE_NORMS),
            f"read.affine=False with read.norm={self.norm!r}; expected one of rms, l2, layer, whose weight is optional",
        )
        yield (
            self.eps is not None and self.norm not in ("rms", *WIDE_NORMS),
            f"read.eps={self.eps} is of read.norm='rms', 'rms-joint' and 'rms-groups'; got {self.norm!r}",
        )
        yield (
            not self.gate_bias and self.gate not in ("sigmoid-low-rank", "sigmoid-head"),
            f"read.gate_bias=False is of read.gate='sigmoid-low-rank' and 'sigmoid-head'; got {self.gate!r}",
        )
        yield (
            self.by_length and self.norm == "sum",
            "read.by_length=True has no effect with read.norm='sum', since it divides numerator and denominator alike; "
            "expected read.by_length=False, or another norm",
        )

    @property
    def weighted(self) -> bool:
        """Whether the norm has a learned weight."""
        return self.norm in ("rms", "group", *WIDE_NORMS) if self.affine is None else self.affine


@dataclass(frozen=True)
class Competition(Record):
    """Softmax linear attention: a softmax over the heads gates writes and reads (arXiv 2602.01744, equations 3-16)."""

    # the read gate multiplies q (the paper), or the output of the per-head norm
    read: Literal["none", "query", "after_norm"] = "after_norm"
    write: Literal["none", "value", "beta"] = (
        "value"  # the write gate multiplies v (equation 14), or is added to β's logit
    )
    # input of the scores: q or k of the head itself, the same with weights shared as a diagonal, all heads' q or k, x
    source: Literal["head", "diag", "query", "hidden"] = "head"
    activation: Literal["softmax", "sigmoid", "null"] = "softmax"  # null: a softmax with one more logit, fixed at 0
    scale: Literal["identity", "one"] = "identity"  # identity: gates are scaled to be 1 for equal scores; one: unscaled
    temperature: PositiveFloat = 1.0  # divides the scores
    # largest gate R of a sigmoid with scale "identity": R σ(s − log(R − 1)), of slope 1 − 1/R at s = 0; heads: the
    # number of heads, with which range and slope are those of the softmax, so that only the competition is missing
    range: Annotated[float, Range("more than 1", lambda r: r > 1)] | Literal["heads"] = 2.0
    # a control: at position t of a sequence, each head gets the gate of the head t further on, so that the gates of a
    # token have the values of the activation but belong to no head
    shuffle: bool = False
    # number of the largest gates of a token that are kept, among the heads for reads and all memories for writes; the
    # others are 0 (MoM, arXiv 2502.13685); None: all. Scores that equal the smallest one kept are kept as well
    top_k: PositiveInt | None = None
    # with top_k: of the activation of the kept scores, or of all scores, although some gates are 0 (straight-through)
    gradient: Literal["chosen", "all"] = "chosen"
    freeze: bool = False  # with top_k: whether a memory whose write gate is 0 also keeps its content from decaying
    weight_decay: bool = False  # whether an optimiser's weight decay applies to the weights of the scores
    # number of memories per head, which compete as well; state and cost are multiplied by it
    memories_per_head: PositiveInt = 1

    def _objections(self):
        yield (
            self.range != Competition.range and self.activation != "sigmoid",
            f"competition.range={self.range} is of sigmoid gates; expected competition.activation='sigmoid', got "
            f"{self.activation!r}",
        )
        yield (
            self.top_k is None and (self.freeze or self.gradient != "chosen"),
            f"competition.freeze={self.freeze} and competition.gradient={self.gradient!r} are of gates that are 0; "
            "expected competition.top_k to be a number of gates, got None",
        )
        yield (
            self.gradient == "all" and self.write == "beta",
            "competition.gradient='all' with competition.write='beta': the logarithm of a gate of 0 has no gradient; "
            "expected gradient='chosen' or write='value'",
        )

    @property
    def fixed(self) -> bool:
        """Whether the gate of a single head is 1 for all scores."""
        return self.memories_per_head == 1 and (self.activation == "softmax" or self.range == "heads")


@dataclass(frozen=True)
class MixerSpec(Spec):
    """A linear-time token mixer: a layer around `headrace.linear_attention`. competition: None for no gates."""

    heads: Heads = field(default_factory=Heads)
    inputs: Inputs = field(default_factory=Inputs)
    decay: Decay = field(default_factory=Decay)
    write: Write = field(default_factory=Write)
    read: Read = field(default_factory=Read)
    competition: Competition | None = None

    facts = Facts("linear.mixer.LinearMixer")

    @property
    def gated(self) -> bool:  # type: ignore[override]
        """Whether the layer has an output gate, a gate on v or competing heads."""
        return self.competition is not None or self.read.gate != "none" or self.inputs.value_gate

    def _objections(self):
        yield from self._objections_to_division()
        yield from self._objections_to_updates()
        if self.competition is not None:
            yield from self._objections_to_gates(self.competition)

    def _objections_to_division(self):
        """Denominators that can vanish."""
        inputs, read, delta = self.inputs, self.read, self.write.rule == "delta"
        even = inputs.order is not None and inputs.order % 2 == 0
        yield (
            read.norm in SUMS and not even and not inputs.positive,
            f"read.norm={read.norm!r} divides by q·z, which can vanish or change sign under inputs.feature_map="
            f"{inputs.feature_map!r} and inputs.order={inputs.order}; expected a feature map without negative features "
            "(elu+1, relu, dpfp) or an even order",
        )
        yield (
            read.norm in SUMS and (delta or read.bonus or not inputs.positive_weights),
            f"read.norm={read.norm!r} divides by q·z, which the delta rule, a bonus or rotary positions can make "
            "vanish; expected write.rule='add', read.bonus=False, and inputs.rotary=False or inputs.rotary_first=True",
        )
        yield (
            inputs.qk_norm == "sum" and not inputs.positive,
            f"inputs.qk_norm='sum' divides by a sum that inputs.feature_map={inputs.feature_map!r} can make vanish; "
            "expected 'elu+1', 'relu' or dpfp",
        )

    def _objections_to_updates(self):
        """Decays, write strengths and reads that are not defined for the rest of the update."""
        inputs, decay, write, delta = self.inputs, self.decay, self.write, self.write.rule == "delta"
        yield (
            delta and inputs.qk_norm == "none",
            "write.rule='delta' with inputs.qk_norm='none' diverges once β‖k‖² > 2; expected 'l2', or 'sum'",
        )
        yield (
            decay.kind == "xpos" and (not inputs.rotary or inputs.rotary_first or inputs.order is not None),
            f"decay.kind='xpos' is defined for rotated q and k; expected inputs.rotary=True, rotary_first=False and "
            f"order=None, got {inputs.rotary}, {inputs.rotary_first} and {inputs.order}",
        )
        yield (
            delta and self.read.bonus,
            "read.bonus=True reads the memory before the write; expected write.rule='add'",
        )
        yield (
            write.beta == "dt" and decay.kind != "softplus",
            f"write.beta='dt' is the step size of decay.kind='softplus'; got decay.kind={decay.kind!r}",
        )
        yield (
            write.residual_chunk is not None and (not delta or write.beta != "sigmoid"),
            f"write.residual_chunk={write.residual_chunk} makes β depend on what the delta rule corrects; expected "
            f"write.rule='delta' and write.beta='sigmoid', got {write.rule!r} and {write.beta!r}",
        )

        yield (
            self.read.levels is not None
            and (self.read.bonus or self.read.norm in SUMS or write.residual_chunk is not None or write.steps > 1),
            f"read.levels={self.read.levels} weights what is read of each level; expected read.bonus=False, "
            f"write.residual_chunk=None, write.steps=1 and read.norm without a sum, got {self.read.bonus}, "
            f"{write.residual_chunk}, {write.steps} and {self.read.norm!r}",
        )
        yield (
            write.steps > 1 and (not delta or write.beta == "dt" or write.residual_chunk is not None or self.read.skip),
            f"write.steps={write.steps} makes several updates by the delta rule, each with a β and a v of its own; "
            "expected write.rule='delta', write.beta='one', 'sigmoid' or 'sigmoid-2', write.residual_chunk=None and "
            "read.skip=False",
        )

        shape = "none" if decay.kind == "none" else DECAYS[decay.kind].shape.name
        symmetric = not delta and shape != "VECTOR" and write.residual_chunk is None
        plain = self.read.norm not in SUMS and not self.read.bonus and self.read.levels is None
        yield (
            self.read.ridge_steps is not None and not (symmetric and plain and self.read.scale == "one"),
            f"read.ridge_steps={self.read.ridge_steps} is of a memory Σ β kᵀv that decays by one number per head; "
            "expected write.rule='add', no decay per key channel, read.scale='one', read.norm without a sum, "
            "read.bonus=False and read.levels=None",
        )

    def _objections_to_gates(self, gate: Competition):
        """Gates of competition that gate nothing or that the write does not have."""
        yield (gate.read == gate.write == "none", "competition with read='none' and write='none' gates nothing")
        yield (
            gate.write == "beta" and not self.write.sigmoid,
            f"competition.write='beta' acts inside β's logit and needs write.beta='sigmoid'; got {self.write.beta!r}",
        )
        yield (
            gate.memories_per_head > 1 and gate.write == "none",
            f"competition.memories_per_head={gate.memories_per_head} with competition.write='none': the memories "
            "of a head would hold the same",
        )
        erases = self.write.rule == "delta" and gate.write != "beta"
        yield (
            gate.freeze and (gate.write == "none" or erases),
            f"competition.freeze=True with write.rule={self.write.rule!r} and competition.write={gate.write!r} keeps "
            "no memory; expected a write gate, and for write.rule='delta', which erases, competition.write='beta'",
        )

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        """Returns a sentence for each gate of this spec that has no effect, or nearly none."""
        gate, sentences, groups = self.competition, [], self.heads.qk_groups
        single = self.read.norm == "rms-groups" and groups in (None, self.num_heads(num_heads or 0))  # a head per group
        cancels = self.read.norm in HEAD_NORMS or single
        if gate is not None and gate.read == "query" and cancels:
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
        if gate is not None and gate.fixed and self.num_heads(num_heads or 0) == 1:
            sentences.append(f"a {gate.activation} over num_heads=1 head is always 1: this competition is the identity")
        gates = self.num_heads(num_heads or 0) * self.memories_per_head
        if gate is not None and gate.top_k is not None and 0 < gates <= gate.top_k:
            sentences.append(f"competition.top_k={gate.top_k} keeps all of {gates} gates: it has no effect")
        return sentences

    # --- derived, never stored -----------------------------------------------------------------------------------
    def num_heads(self, default: int) -> int:
        """Returns the number of heads, which is `default` unless the spec sets it."""
        return self.heads.count or default

    @property
    def memories_per_head(self) -> int:
        """Number of memories per head."""
        return 1 if self.competition is None else self.competition.memories_per_head

    @property
    def matrices(self) -> int:
        """Number of matrices that a memory consists of: one for each level but that of the token itself."""
        return 1 if self.read.levels is None else self.read.levels - 1

    def _columns(self, K: int, V: int) -> int:
        """Number of columns of a head's memory."""
        ridge = self.memory_rows(K) if self.read.ridge_steps is not None else 0
        return (V + (self.read.norm in SUMS)) * self.matrices + ridge

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (K, V), the key and value dimensions per head. Raises InputError for widths that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(num_heads)
        V = width_per_head("heads.expand_v", self.heads.expand_v, hidden_size, H)
        K = self.heads.key_dim or width_per_head("heads.expand_k", self.heads.expand_k, hidden_size, H)
        groups = self.heads.qk_groups
        if groups is not None and H % groups:
            raise InputError(f"heads.qk_groups={groups} does not divide num_heads={H}")
        if self.inputs.rotary and K % 2:
            raise InputError(f"inputs.rotary=True needs an even key dimension per head; got {K}")
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
        if rows > LARGEST_FEATURES:
            raise InputError(
                f"inputs.order={order} makes more than {LARGEST_FEATURES:,} features of {features} per head; expected "
                "a smaller inputs.order or heads.key_dim"
            )
        return rows

    @property
    def counts_tokens(self) -> bool:
        """Whether the output depends on the position of a token in its sequence."""
        shuffled = self.competition is not None and self.competition.shuffle
        counted = self.inputs.rotary or self.inputs.by_length or self.read.by_length
        return counted or self.write.residual_chunk is not None or shuffled or self.read.levels is not None

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of the recurrent state of one sequence, without the batch dimension."""
        H = self.num_heads(num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        memory = H * self.memories_per_head, self.memory_rows(K), self._columns(K, V)
        shapes: Shapes = {"memory": memory}
        if (self.write.residual_chunk or 1) > 1:
            shapes["before"] = memory
        if self.inputs.conv:
            groups = self.heads.qk_groups or H
            steps = self.write.steps
            shapes["conv"] = (self.inputs.conv - 1, (1 + steps) * groups * K + steps * H * V)
        if self.inputs.shift != "none":
            shapes["shift"] = (1, hidden_size)
        return shapes

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        H = self.num_heads(num_heads)
        K, V = self.head_dims(hidden_size, num_heads)
        solved = 2 * min(self.read.ridge_steps or 0, self.memory_rows(K)) * self.memory_rows(K)
        K, V = self.memory_rows(K), self._columns(K, V)
        decay, delta = self.decay.kind != "none", self.write.rule == "delta"
        # of the memory before the chunk, which decays too
        residual = 2 + decay if (self.write.residual_chunk or 1) > 1 else 0
        update = (2 + 2 * delta) * self.write.steps + residual
        return H * self.memories_per_head * K * (V * (2 + decay + update) + solved)
