"""`Stage`, a step of a linear mixer, and `Tokens`, which the stages of a mixer fill one after the other.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from ...ops.backends.native.program import UnsupportedError
from ...ops.sequences import Sequences
from ...spec.record import asked_for
from ...utils.tables import Table


class Tokens:
    """A batch of tokens on its way through a linear mixer. Fields are None for stages that the mixer does not have.

    Attributes:
        x: the layer's input [B, T, D].
        state: the mixer's state before x; None: x begins its sequences.
        in_place: whether the state may be overwritten.
        next: tensors of the next state by name, of the stages up to the recurrence; `after`: of the recurrence.
        positions: of each token in its sequence [B or 1, T].
        parts: outputs of in_proj by name, [B, T, size]; of q, k and v those of all heads, [B, T, heads, size].
        streams: the input of in_proj [B, T, D] by part, where it is not x.
        q, k: [B, T, Hq, rows of the memory]; v: [B, T, H, V].
        log_decay: [H], [B, T, H] or [B, T, H, rows]; dt: the step size [B, T, H].
        beta: the write strength, [B, T, H], with several numbers per head [B, T, H, ·]; its logit at first.
        write: the write gate of head competition [B, T, H]; its logarithm for competition.write="beta".
        read_gate, read: the read gate [B, T, H], of the recurrence, or of what the heads read.
        peaks: the running maximum of an exponential gate [B, T, H].
        strengths: β of other values, where β depends on the values.
        out: what the heads read [B, T, H, V]; y [B, T, D] after the last stage.
    """

    positions: Any = None
    streams: Any = None
    log_decay: Any = None
    dt: Any = None
    beta: Any = None
    write: Any = None
    read_gate: Any = None
    read: Any = None
    peaks: Any = None
    strengths: Any = None

    def __init__(self, x: Tensor, state: Any, sequences: Sequences, in_place: bool):
        self.x, self.state, self.sequences, self.in_place = x, state, sequences, in_place
        self.next: dict[str, Tensor | None] = {}
        self.after: dict[str, Tensor | None] = {}
        self.parts: dict[str, Tensor] = {}
        self.q: Any = None
        self.k: Any = None
        self.v: Any = None
        self.out: Any = None

    def before(self, name: str) -> Any:
        """Returns a tensor of the state; None at the beginning."""
        return None if self.state is None else getattr(self.state, name)


class Stage:
    """A step of a linear mixer. It has no data: its modules and parameters are the mixer's, under the names that
    checkpoints have, and it reads and writes the fields of `Tokens`."""

    field: str = ""  # of the spec, which asks for the stage; "": every mixer has it. That of a plug-in is in `Plugged`
    values: ClassVar[tuple[Any, ...]] = ()  # of the field; (): all but its default
    kinds: ClassVar[tuple[str, ...] | None] = None  # of the native layer, to which the field's value is given
    splits: ClassVar[bool] = True  # whether `context_parallel` can split the tokens over processes
    static_shapes: Any = True  # whether the stage needs nothing of cu_seqlens but its shape before it computes

    @classmethod
    def applies(cls, spec: Any) -> bool:
        """Whether the mixer of a spec has this stage."""
        return not cls.field or asked_for(spec, cls.field, cls.values)

    def build(self, mixer: Any) -> None:
        """Adds the stage's parts of in_proj, modules and parameters to a mixer. `reset` initializes the parameters."""

    def reset(self, mixer: Any) -> None:
        """Initializes the stage's own parameters; modules initialize theirs."""

    def native(self, mixer: Any) -> dict[str, Any]:
        """Returns the fields of the native layer that compute this stage. Raises UnsupportedError if there are none."""
        if self.kinds == ():
            return {}
        value = attrgetter(self.field)(mixer.spec)
        if self.kinds is None:
            raise UnsupportedError(f"it does not support {self.field}={value!r}")
        return dict.fromkeys(self.kinds, value)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        raise TypeError(f"{type(self).__name__} does not define __call__")


STAGES: Table[type[Stage]] = Table("stages")  # that plug-ins have, by the names in LinearMixer


@dataclass(frozen=True)
class Plugged:
    """The place of a stage that a plug-in has, which is imported for a spec that asks for it by a field."""

    name: str  # in STAGES
    field: str  # of the spec, as in `Stage`
    values: tuple[Any, ...] = ()

    def applies(self, spec: Any) -> bool:
        return asked_for(spec, self.field, self.values)

    def __call__(self) -> Stage:
        stage = STAGES[self.name]()
        stage.field = self.field
        return stage


def refuse_changes(spec: Any, *names: str) -> None:
    """Raises UnsupportedError for a field that has another value than its default."""
    for name in names:
        if asked_for(spec, name):
            raise UnsupportedError(f"it does not support {name}={attrgetter(name)(spec)!r}")
