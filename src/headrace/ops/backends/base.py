"""The interface of a backend."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Kernel(NamedTuple):
    """A backend's implementation of an operation. Both functions take the operation's arguments."""

    run: Callable[..., Any]
    unsupported_reason: Callable[..., str | None]  # returns why the backend cannot compute these arguments, or None
    # Of linear_attention: which of "bonus" and "normalise" `run` takes in a call; rewrite.py expresses the others.
    extras: tuple[str, ...] = ()


class HasBackend:
    """A layer whose recurrence a backend computes: the one of this name, or with "auto" the fastest for the call."""

    backend: str


class LayerStep(Protocol):
    """One token of one linear layer in one call, from the output of the input projection to the input of the output
    projection, with the state updated in place.

    It is made once per layer from (kinds, sizes, numbers, names of the weights); see `FusedStep` in
    layers/linear/token.py.
    The state is (memory, conv, tokens).
    """

    unknown: str | None  # why the backend has no such layer, or None

    def unsupported_reason(self, x: Tensor, weights: Sequence[Tensor]) -> str | None:
        """Returns why x [B, 1, D] cannot be computed with these weights, or None. Raises InputError for a weight whose
        shape is not the layer's."""

    def fits(self, state: Sequence[Tensor | None], x: Tensor) -> bool:
        """Whether the state of the sequences of x can be updated in place; otherwise it is checked and copied."""

    def state(self, rows: int, dtype: torch.dtype) -> Sequence[tuple[tuple[int, ...] | None, torch.dtype, str]]:
        """Returns (shape, or None for a part that the layer does not have, dtype, name) of each tensor of the state."""

    def run(self, weights: Sequence[Tensor], token: Sequence[Tensor | None], state: Sequence[Tensor | None]) -> Tensor:
        """Computes [B, H V]. token: the projected input [B, parts], and the layer's input [B, D] or None.

        The tensors of the state must not share memory with others; ValueError from a backend that checks it."""


class Backend(NamedTuple):
    """A row of the table of backends.

    The recurrence is the first seam, `linear_attention` and `step`; the second is the whole token of a layer,
    `layer_step`. None for what a backend does not have: `linear_attention` alone is enough."""

    missing: Callable[[], str | None]  # returns why the backend is not available on this machine, or None
    about: Callable[[], str]  # returns the backend's version
    linear_attention: Kernel  # (call) -> (out, final state); differentiable
    step: Kernel | None = None  # (call without token dimension, bonus, normalise, in_place) -> (out, state)
    layer_step: Callable[..., LayerStep] | None = None  # (kinds, sizes, numbers, names of the weights) -> LayerStep
    on_request: bool = False  # whether only its name chooses it, and "auto" does not


OPERATIONS = Backend._fields[2:-1]
