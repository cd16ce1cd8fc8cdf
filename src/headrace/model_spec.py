"""What a whole model from sequence to sequence is, as data. Each family has a record of its own."""

from dataclasses import dataclass
from typing import Literal

from .errors import InputError


@dataclass(frozen=True)
class ModelSpec:
    """A whole model: `headrace.models.build` makes it, and `headrace compare` trains it beside mixers."""

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(key, value) dimensions of a head. Raises InputError where the widths do not divide."""
        return hidden_size, hidden_size

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def num_heads(self, default: int) -> int:
        return 1

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        """What a decoder keeps of one source of so many tokens, and of what it has written."""
        raise TypeError(f"{type(self).__name__} does not say what its decoder keeps")


@dataclass(frozen=True)
class Alignment:
    """How a decoder's step looks back at the source: the score of a position, and the positions that are scored."""

    score: Literal["additive", "dot", "general", "concat"] = "additive"
    query: Literal["before", "after"] = "before"  # the decoder's state before its step (Bahdanau) or after (Luong)
    window: Literal["global", "local-m", "local-p"] = "global"
    reach: int = 4  # D: a local window is 2 D + 1 wide
    feed: bool = False  # with query="after": the next step sees what this one read (Luong's input feeding)

    def __post_init__(self) -> None:
        if self.reach < 1:
            raise InputError(f"alignment.reach={self.reach}; expected at least 1 position on either side")
        if self.feed and self.query == "before":
            raise InputError(
                "alignment.feed=True with query='before'; expected 'after': before its step it is fed anyway"
            )


@dataclass(frozen=True)
class RecurrentSpec(ModelSpec):
    """Recurrent encoder and decoder. Without an alignment the decoder knows the source by one vector alone."""

    cell: Literal["gru", "lstm"] = "lstm"
    bidirectional: bool = False  # the encoder: annotations are as wide as two hidden sizes
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        if self.alignment is not None and self.alignment.score == "dot" and self.bidirectional:
            raise InputError(
                "alignment.score='dot' needs annotations as wide as the decoder's state, and bidirectional=True makes "
                "them twice as wide; expected score='general' or bidirectional=False"
            )

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        cell = layers * hidden_size * (2 if self.cell == "lstm" else 1)
        annotations = tokens * hidden_size * (2 if self.bidirectional else 1)
        return itemsize * (cell + (0 if self.alignment is None else annotations))
