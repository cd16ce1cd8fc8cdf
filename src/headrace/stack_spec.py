"""What stands around the token mixers of a model, as data."""

from dataclasses import dataclass
from typing import Any, Literal

from .errors import InputError
from .spec import record


@dataclass(frozen=True)
class BlockStyle:
    """What all blocks of a stack have in common beside their mixers."""

    norm: Literal["rms", "layer"] = "rms"
    order: Literal["pre", "post"] = "pre"  # pre: norms before mixer and MLP; post: after each sum, and none at the end
    mlp: Literal["swiglu", "geglu", "gelu", "gelu-tanh", "relu", "none"] = "swiglu"
    bias: bool = False  # of the MLP and of layer norms
    positions: Literal["none", "sinusoidal", "learned"] = "none"  # added to the embeddings

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


def as_style(given: Any) -> BlockStyle:
    """A style given as one, as a dict of what differs from the default, or as None. Raises InputError."""
    if given is None or isinstance(given, BlockStyle):
        given = {} if given is None else vars(given)
    if not isinstance(given, dict):
        raise InputError(f"style={given!r}; expected a BlockStyle or a dict of its fields")
    return record(BlockStyle, given, "style")
