"""The specs of recurrent encoder-decoders."""

from dataclasses import dataclass
from typing import Literal

from ...spec.mixer import ModelSpec, Shapes
from ...spec.record import PositiveInt, Record

BUILDER = "headrace.history.models.build"


@dataclass(frozen=True)
class Alignment(Record):
    """The attention of a recurrent decoder to the source (arXiv 1409.0473, 1508.04025)."""

    score: Literal["additive", "dot", "general", "concat"] = "additive"  # score function of query and source position
    query: Literal["before", "after"] = "before"  # the decoder's state before (Bahdanau) or after (Luong) its step
    window: Literal["global", "local-m", "local-p"] = "global"  # all positions, or a window (Luong, section 3.2)
    reach: PositiveInt = 4  # D: a local window has 2 D + 1 positions; D = 10 in the paper
    feed: bool = False  # input feeding, with query="after": the attentional vector is an input of the next step

    def _objections(self):
        yield (
            self.feed and self.query == "before",
            "alignment.feed=True with query='before', whose context is an input of the step already; expected 'after'",
        )


@dataclass(frozen=True)
class RecurrentSpec(ModelSpec):
    """A recurrent encoder-decoder."""

    builder = BUILDER

    cell: Literal["gru", "lstm"] = "lstm"  # recurrent cell of encoder and decoder
    bidirectional: bool = False  # whether the encoder is bidirectional, which doubles the width of its annotations
    alignment: Alignment | None = None  # attention to the source; None: the decoder starts from the last encoder state

    def _objections(self):
        yield (
            self.alignment is not None and self.alignment.score == "dot" and self.bidirectional,
            "alignment.score='dot' needs annotations as wide as the decoder's state, and bidirectional=True doubles "
            "their width; expected score='general' or bidirectional=False",
        )

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int, layers: int) -> Shapes:
        """Returns the shapes of the decoder's state for one source of `tokens` tokens."""
        shapes: Shapes = {"cell": (layers, 2 if self.cell == "lstm" else 1, hidden_size)}
        if self.alignment is not None:
            shapes["annotations"] = (tokens, hidden_size * (2 if self.bidirectional else 1))
            if self.alignment.feed:
                shapes["fed"] = (1, hidden_size)
        return shapes
