"""What a whole model from sequence to sequence is, as data. Each family has a record of its own."""

from dataclasses import dataclass
from typing import Literal

from .record import PositiveInt, Record, require_positive


@dataclass(frozen=True)
class ModelSpec(Record):
    """A whole model: `headrace.models.build` makes it, and `headrace compare` trains it beside mixers."""

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(key, value) dimensions of a head. Raises InputError where the widths do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        return hidden_size, hidden_size

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def num_heads(self, default: int) -> int:
        return 1

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        """What a decoder keeps of one source of so many tokens, and of what it has written."""
        raise TypeError(f"{type(self).__name__} does not say what its decoder keeps")


@dataclass(frozen=True)
class Alignment(Record):
    """How a decoder's step looks back at the source: the score of a position, and the positions that are scored."""

    score: Literal["additive", "dot", "general", "concat"] = "additive"
    query: Literal["before", "after"] = "before"  # the decoder's state before its step (Bahdanau) or after (Luong)
    window: Literal["global", "local-m", "local-p"] = "global"
    reach: PositiveInt = 4  # D: a local window is 2 D + 1 wide
    feed: bool = False  # with query="after": the next step sees what this one read (Luong's input feeding)

    def _objections(self):
        yield (
            self.feed and self.query == "before",
            "alignment.feed=True with query='before'; expected 'after': before its step it is fed anyway",
        )


@dataclass(frozen=True)
class RecurrentSpec(ModelSpec):
    """Recurrent encoder and decoder. Without an alignment the decoder knows the source by one vector alone."""

    cell: Literal["gru", "lstm"] = "lstm"
    bidirectional: bool = False  # the encoder: annotations are as wide as two hidden sizes
    alignment: Alignment | None = None

    def _objections(self):
        yield (
            self.alignment is not None and self.alignment.score == "dot" and self.bidirectional,
            "alignment.score='dot' needs annotations as wide as the decoder's state, and bidirectional=True makes them "
            "twice as wide; expected score='general' or bidirectional=False",
        )

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        cell = layers * hidden_size * (2 if self.cell == "lstm" else 1)
        annotations = tokens * hidden_size * (2 if self.bidirectional else 1)
        return itemsize * (cell + (0 if self.alignment is None else annotations))
