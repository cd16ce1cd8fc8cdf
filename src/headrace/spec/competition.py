"""The record of head competition: how the heads of a linear mixer compete for writes and reads."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .record import PositiveFloat, PositiveInt, Range, Record


@dataclass(frozen=True)
class Competition(Record):
    """Softmax linear attention: a softmax over the heads gates writes and reads (arXiv 2602.01744, equations 3-16)."""

    # the read gate multiplies q (the paper; not with beta="exp" or norm "detached"), or the output of the per-head norm
    read: Literal["none", "query", "after_norm"] = "after_norm"
    # the write gate multiplies v (equation 14), or is added to β's logit
    write: Literal["none", "value", "beta"] = "value"
    # input of the scores: q or k of the head itself, the same with weights shared as a diagonal, all heads' q or k, x
    source: Literal["head", "diag", "query", "hidden"] = "head"
    activation: Literal["softmax", "sigmoid", "null"] = "softmax"  # null: a softmax with one more logit, fixed at 0
    scale: Literal["identity", "one"] = "identity"  # identity: gates are scaled to be 1 for equal scores; one: unscaled
    temperature: PositiveFloat = 1.0  # divides the scores
    # largest gate R of a sigmoid with scale "identity": R σ(s − log(R − 1)), of slope 1 − 1/R at s = 0; heads: the
    # number of heads, with which range and slope are those of the softmax, so that only the competition is missing
    range: Annotated[float, Range("more than 1", lambda r: r > 1)] | Literal["heads"] = "heads"
    # a control: at position t of a sequence, each head gets the gate of the head t further on, so that the gates of a
    # token have the values of the activation but belong to no head
    shuffle: bool = False
    # number of the largest gates of a token that are kept, among the heads for reads and all memories for writes; the
    # others are 0 (MoM, arXiv 2502.13685); None: all. Scores that equal the smallest one kept are kept as well
    top_k: PositiveInt | None = None
    # with top_k: of the activation of the kept scores, or of all scores, although some gates are 0 (straight-through)
    gradient: Literal["chosen", "all"] = "chosen"
    freeze: bool = False  # with top_k: whether a memory whose write gate is 0 also keeps its content from decaying
    weight_decay: bool = False  # whether an optimizer's weight decay applies to the weights of the scores
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
    def untrained(self) -> bool:
        """Whether the gates that are kept have one size for all scores, so that the scores get no gradient."""
        return self.top_k == 1 and self.gradient == "chosen" and self._as_far_as_softmax

    @property
    def fixed(self) -> bool:
        """Whether the gate of a single head is 1 for all scores."""
        return self.memories_per_head == 1 and self._as_far_as_softmax

    @property
    def _as_far_as_softmax(self) -> bool:
        """Whether gates have the range of a softmax: n of equal scores are 1/n each, and a single one is constant."""
        return self.activation == "softmax" or (self.activation == "sigmoid" and self.range == "heads")
