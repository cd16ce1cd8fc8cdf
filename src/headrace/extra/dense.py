"""What the specs of softmax attention with one change of its layer have in common."""

from dataclasses import dataclass
from typing import Any

from ..ops.backends.native.program import Program, UnsupportedError
from ..ops.checks import require
from ..spec.attention import AttentionSpec

QUERIES = 64  # that attention without a kernel for its logits computes at once


@dataclass(frozen=True)
class DenseSpec(AttentionSpec):
    """Softmax attention of all pairs of tokens, or of a window, with a layer of its own."""

    change = ""  # of softmax attention, as messages call it

    def layer(self, causal: bool) -> str:
        alone = causal or self.pattern is None
        require(alone, f"a pattern with {self.change} is of causal attention; expected pattern=None")
        return self.facts.layer

    def _objections(self):
        yield from super()._objections()
        random = self.pattern is not None and self.pattern.random > 0
        other = self.form != "sdpa" or self.buckets is not None or random
        yield other, f"{self.change} supports neither form='tiles', buckets nor pattern.random; expected none of them"


def refuse(program: Program, mixer: Any, *where: Any, **how: Any) -> None:
    """Adds no token's step to a native program, as a row of TOKENS."""
    raise UnsupportedError(f"it does not support {mixer.spec.change}")
