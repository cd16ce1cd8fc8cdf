"""What mixers with a recurrent state have in common: their state is looked at, and written into only on permission;
padding is taken out before them and put back after them.

Dimensions: B batch, T tokens, D hidden size, N sequences; E channels, S numbers that each of them carries.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.call import accumulator
from ..utils.errors import InputError
from .packing import without_padding
from .parts import SelfInitialised


class ScanState(NamedTuple):
    """What a sequence carries on; None where the mixer has no such part."""

    memory: Tensor  # [N, S, E]
    conv: Tensor | None = None  # [N, width − 1, E]
    shift: Tensor | None = None  # [N, 1, D]


Shapes = dict[str, tuple[int, ...]]  # of the tensors of a state by name, without the dimension N
ANY = -1  # in a shape: as many tokens as there are
INTEGERS = ("tokens", "seen", "valid")
OPTIONAL = ("valid", "room")


def check_state(state: Any, kind: Any, shapes: Shapes, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises InputError unless `state` is a `kind` with exactly the tensors of `shapes`, for the sequences of x."""
    if not isinstance(state, kind):
        raise InputError(f"state is a {type(state).__name__}; expected a {kind.__name__}, as from this mixer")
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, found in zip(kind._fields, state, strict=True):
        wanted = (sequences, *shapes[name]) if name in shapes else None
        if found is None or wanted is None:
            if (found is None) != (wanted is None) and name not in OPTIONAL:
                raise InputError(f"state.{name} is {_shape(found)}; expected {_shape(wanted)}, as from this mixer")
        elif found.shape != wanted and not _fits(found.shape, wanted):
            raise InputError(f"state.{name} has shape {_shape(found)}; expected {_shape(wanted)}")
        elif found.device != x.device:
            raise InputError(f"state.{name} is on {found.device}; expected {x.device}, where x is")
        elif found.is_floating_point() == (name in INTEGERS):
            number = "an integer" if name in INTEGERS else "a floating-point"
            raise InputError(f"state.{name} has dtype {found.dtype}; expected {number} dtype")


def _fits(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (n, ANY) for n, w in zip(shape, wanted, strict=True))


def _shape(x: Any) -> str:
    if x is None:
        return "None"
    return "[" + ", ".join("L" if n == ANY else str(n) for n in (x.shape if isinstance(x, Tensor) else x)) + "]"


def may_write(state: Iterable[Tensor | None]) -> bool:
    """Whether autograd lets tensors be written into: nothing is differentiated through them, and where one was made in
    inference mode that is still on."""
    if torch.is_grad_enabled():
        return False
    anywhere = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    return all(x is None or not (x.requires_grad or (not anywhere and x.is_inference())) for x in state)


class Mixer(SelfInitialised):
    """A layer that only has to say what its state is and, in `run`, what it does to tokens: at least one, and none of
    them padding."""

    state_kind: Any  # a NamedTuple
    state_shapes: Shapes

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, Any]:
        """x [B, T, D] -> (y [B, T, D], state). mask [B, T]: False is padding; cu_seqlens [N + 1]: x is a pack.

        in_place: `state` may be written into, and must not be used again; otherwise it is never changed.
        Where there is no token, or padding alone, the state is the one given.
        Raises InputError for a state of another mixer or of another number of sequences."""
        if in_place and state is not None and mask is None and cu_seqlens is None and x.shape[1]:
            return self.run_in_place(x, state)
        if state is not None:
            check_state(state, self.state_kind, self.state_shapes, x, cu_seqlens)
            if "memory" in state._fields:  # perhaps from a layer in another precision
                state = state._replace(memory=state.memory.to(accumulator(x)))
        if mask is not None:
            return without_padding(self.run, x, state, mask)
        return self.run(x, state, cu_seqlens) if x.shape[1] else (x, state)

    def run(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        raise TypeError(f"{type(self).__name__} does not say what it computes")

    def run_in_place(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`forward` of rows without padding that may write into `state`. Most mixers have no use for that."""
        return self.forward(x, state)
