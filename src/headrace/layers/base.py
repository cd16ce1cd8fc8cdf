"""`Mixer`, the base of mixers with a recurrent state, which checks the state and removes padding; `SelfInitialized`.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.call import accumulator
from ..ops.checks import check_tensor, require
from ..ops.derivatives import transformed
from ..ops.parallel.context import current, recomputed, refuse_parts
from ..ops.sequences import Sequences, avoid_sync
from ..utils.errors import InputError
from .maps import wanted, with_map
from .packing import padding_last, without_padding


class SelfInitialized(nn.Module):
    """A module that initializes its own parameters in `reset_parameters`."""

    routes = False  # whether tokens choose parts of the module, whose sizes and load then depend on all tokens

    def initialize(self, std: float | None) -> None:
        """Initializes the module in a model, whose weights have this standard deviation; None: their own."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the module's own parameters and buffers, without those of its submodules."""
        raise TypeError(f"{type(self).__name__} does not define reset_parameters")


def named(path: str) -> Any:
    """Returns the class at a path as of `Facts.layer`."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module, __package__), name)


class ShiftState(NamedTuple):
    """The last token of N sequences."""

    shift: Tensor  # [N, 1, D]


class Carried:
    """What a layer passes to the layers above it. It is no list, because FSDP and accelerate copy lists."""

    layer: int = -1
    value: Tensor | None = None  # in the order of the tokens of `run`


Shapes = dict[str, tuple[int, ...]]  # shapes of a state's tensors by name, without the dimension N
ANY = -1  # in a shape: any number of tokens
INTEGERS = ("tokens", "seen", "valid")
OPTIONAL = ("valid", "room")


def check_input(x: Tensor, mask: Tensor | None, packed: bool, hidden_size: int | None) -> None:
    """Raises InputError unless x is [B, T, hidden_size] in a floating-point dtype, and mask, which a pack does not
    have, is a bool [B, T]. hidden_size: None for any."""
    check_tensor("x", x)
    if x.dim() != 3 or (hidden_size is not None and x.shape[2] != hidden_size):
        raise InputError(f"x has shape {_shape(x)}; expected [B, T, {hidden_size or 'D'}]")
    if not x.is_floating_point():
        raise InputError(f"x has dtype {x.dtype}; expected a floating-point dtype")
    if mask is None:
        return
    check_tensor("mask", mask)
    require(not packed, "mask and cu_seqlens are both given; expected one of them")
    if mask.dtype is not torch.bool or mask.shape != x.shape[:2]:
        held = f"dtype {mask.dtype} and shape {_shape(mask)}"
        raise InputError(f"mask has {held}; expected torch.bool and {_shape(x.shape[:2])}")


def check_state(state: Any, kind: Any, shapes: Shapes, x: Tensor, sequences: int, integers: Any = INTEGERS) -> None:
    """Raises InputError unless `state` is a `kind` with exactly the tensors of `shapes`, for this number of sequences
    and the device of x. integers: names of the tensors of integers."""
    if not isinstance(state, kind):
        raise InputError(f"state is a {type(state).__name__}; expected a {kind.__name__}, as this mixer returns")
    for name, part in zip(kind._fields, state, strict=True):
        shape = (sequences, *shapes[name]) if name in shapes else None
        if part is None or shape is None:
            if (part is None) != (shape is None) and name not in OPTIONAL:
                raise InputError(f"state.{name} is {_shape(part)}; expected {_shape(shape)}, as this mixer returns")
        elif part.shape != shape and not _fits(part.shape, shape):
            raise InputError(f"state.{name} has shape {_shape(part)}; expected {_shape(shape)}")
        elif part.device != x.device:
            raise InputError(f"state.{name} is on {part.device}; expected {x.device}, the device of x")
        elif part.is_floating_point() == (name in integers):
            number = "an integer" if name in integers else "a floating-point"
            raise InputError(f"state.{name} has dtype {part.dtype}; expected {number} dtype")


def _fits(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w == ANY or n == w for n, w in zip(shape, wanted, strict=True))


def _shape(x: Any) -> str:
    if x is None:
        return "None"
    return "[" + ", ".join("L" if n == ANY else str(n) for n in (x.shape if isinstance(x, Tensor) else x)) + "]"


def may_write(state: Iterable[Tensor | None]) -> bool:
    """Whether tensors may be written in place: autograd does not need them, no transform captures them, and inference
    tensors are written only in inference mode."""
    if torch.is_grad_enabled() or transformed():
        return False
    anywhere = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    return all(x is None or not (x.requires_grad or (not anywhere and x.is_inference())) for x in state)


def tensors(states: Sequence[Any]) -> list[Tensor]:
    """Returns all tensors of states."""
    return [x for state in states if state is not None for x in state if isinstance(x, Tensor)]


class Mixer(SelfInitialized):
    """Base of mixers with a recurrent state. A subclass defines `state_kind`, `state_shapes` and `run`, which gets at
    least one token and no padding."""

    state_kind: Any  # the NamedTuple class of the state
    state_shapes: Shapes
    hidden_size: int | None = None  # D, set by `layers.build`
    fixed_size = True  # whether the state has one size, whatever the number of tokens
    carries = False  # whether `run` takes `carried`, what the layers below have left
    static_shapes: Any = False  # whether `run` needs nothing of cu_seqlens but its shape before it computes
    splits: Any = False  # whether `context_parallel` can split the tokens over processes

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        """The parameters that consist of several tensors along their rows, with the number of rows of each part."""
        return {}

    def forward(
        self, x: Tensor, state: Any = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequences | None = None, in_place: bool = False, **more: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Applies the mixer to the tokens that follow `state`.

        Args:
            x: [B, T, D].
            state: what the previous call returned; None: x begins its sequences.
            mask: [B, T], bool; False marks padding. An output at padding is 0.
            cu_seqlens: [N + 1], bounds of N packed sequences; B is 1.
            in_place: whether `state` may be overwritten, after which it must not be used. Otherwise it is not changed.
            more: arguments of `run`.

        Returns:
            (y [B, T, D], the next state; without tokens, the state given).

        Raises:
            InputError: for x or a mask of another shape, bounds that are not those of x, and a state of another mixer
                or another number of sequences.
        """
        if (context := recomputed(self)) is not None:
            with context:
                return type(self).forward(self, x, state, mask=mask, cu_seqlens=cu_seqlens, in_place=in_place, **more)
        if isinstance(maps := wanted(), list):
            return with_map(self, maps, x, state, mask=mask, cu_seqlens=cu_seqlens, **more)
        packed = cu_seqlens is not None
        if current() is not None:
            self._check_part(state, mask, packed)
        check_input(x, mask, packed, self.hidden_size)
        plain = mask is None and not packed and not more
        if in_place and plain and maps is None and current() is None and state is not None and x.shape[1]:
            return self.run_in_place(x, state)
        sequences = Sequences.of(x, cu_seqlens)
        state = self.checked(x, state, sequences)
        if mask is not None:
            static = self.static_shapes and avoid_sync(x) and wanted() is None
            remove = padding_last if static else without_padding
            return remove(partial(self.run, **more), x, state, mask)
        return self.run(x, state, sequences, **more) if x.shape[1] else (x, state)

    def checked(self, x: Tensor, state: Any, sequences: Sequences) -> Any:
        """Checks a state of these sequences, and returns it in the precision of x."""
        if state is not None:
            check_state(state, self.state_kind, self.state_shapes, x, sequences.count)
            if "memory" in state._fields:  # the state may come from a layer in another precision
                state = state._replace(memory=state.memory.to(accumulator(x)))
        return state

    def _check_part(self, state: Any, mask: Tensor | None, packed: bool) -> None:
        if not self.splits:
            refuse_parts(self)
        require(mask is None, "mask marks padding under context_parallel; expected packed sequences, by cu_seqlens")
        fresh = state is None or not packed
        require(fresh, "state is given for packed sequences under context_parallel; expected state=None")

    def run(self, x: Tensor, state: Any, sequences: Sequences) -> tuple[Tensor, Any]:
        """Computes the mixer for T ≥ 1 tokens without padding."""
        raise TypeError(f"{type(self).__name__} does not define run")

    def run_in_place(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Computes `forward` for x that was checked, without padding and packing, and may overwrite `state`."""
        return type(self).forward(self, x, state)  # whoever put another forward before it was called already
