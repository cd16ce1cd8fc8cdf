"""`Call`: the arguments of the recurrence that `linear_attention` passes to a backend."""

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

DIFFERENTIABLE = 9  # number of arguments of a call, counted from the first, that have gradients
TOKENWISE = ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate")  # arguments with a token dimension
NORMALIZER_EPS = 1e-6


class Call(NamedTuple):
    """The arguments of every backend's operator, in the order of its schema. Shapes are those of `linear_attention`,
    which expresses a bonus and a normalizer through the others for a backend without them, or those of `step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    write_gate: Tensor | None = None
    read_gate: Tensor | None = None
    initial_state: Tensor | None = None
    bonus: Tensor | None = None
    cu_seqlens: Tensor | None = None
    delta: bool = False
    scale: float = 1.0
    chunk_size: int | None = None  # None: the backend's choice
    tf32: bool = False  # whether products may be rounded to TF32, since the caller's tensors had 16 bits
    normalize: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The differentiable arguments: all tensors except cu_seqlens."""
        return self[:DIFFERENTIABLE]  # type: ignore[return-value]

    @property
    def sequences(self) -> int:
        """N, the number of sequences: the batch size, or the number of packed sequences."""
        return self.v.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def queries(self) -> int:
        """The number of heads of q that read each state: 1, or more with grouped queries."""
        return max(self.q.shape[-2] // self.v.shape[-2], 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the output: v's, with the heads of q if the queries are grouped."""
        *lead, H, V = self.v.shape
        return *lead, H * self.queries, V

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """The shape [N, H, K, V] of the state (V + 1 with normalize)."""
        return self.sequences, self.v.shape[2], self.k.shape[3], self.v.shape[3] + (1 if self.normalize else 0)

    def wide(self) -> "Call":
        """Converts all tensors but the state to the accumulator's precision. Products need no more digits than
        before."""
        acc, names = accumulator(self.v), (*TOKENWISE, "bonus")
        tensors: dict[str, Any] = {name: x.to(acc) for name in names if (x := getattr(self, name)) is not None}
        return self._replace(**tensors, tf32=self.tf32 or self.v.dtype.itemsize == 2)

    def ungrouped(self) -> "Call":
        """Repeats what the queries of a group share, so that each has a state of its own, equal to the group's."""
        if self.queries == 1:
            return self
        shared = {"k": 2, "v": 2, "log_decay": 2, "beta": 2, "write_gate": 2, "initial_state": 1, "bonus": 0}
        given = {name: (x, dim) for name, dim in shared.items() if (x := getattr(self, name)) is not None}
        repeated = {name: x.repeat_interleave(self.queries, min(dim, x.dim() - 1)) for name, (x, dim) in given.items()}
        return self._replace(**repeated)

    def with_tokens(self) -> "Call":
        """Adds the token dimension to the tensors of a call of `step`, [B, ·] -> [B, 1, ·], but to a fixed decay."""
        given = {name: x for name in TOKENWISE if (x := getattr(self, name)) is not None and x.dim() > 1}
        tensors: dict[str, Any] = {name: x.unsqueeze(1) for name, x in given.items()}
        return self._replace(**tensors)


TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", float: "float", int | None: "int?",
}  # fmt: skip
SCHEMA = ", ".join(f"{TYPES[hint]} {name}" for name, hint in get_type_hints(Call).items())


def accumulator(x: Tensor) -> torch.dtype:
    """Returns the dtype of states, gates, norms and sums: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gated(x: Tensor, gate: Tensor | None) -> Tensor:
    """Multiplies x [..., V] by its gate [...], if any."""
    return x if gate is None else x * gate[..., None]


def like(x: Tensor, *_: Any) -> Tensor:
    """Returns an empty, contiguous tensor of the shape, dtype and device of x."""
    return x.new_empty(x.shape)


def product(x: Tensor | None, y: Tensor | None = None, out: Tensor | None = None) -> Any:
    """Returns the product of the factors that are not None; None for two of them."""
    if x is None or y is None:
        factor: Any = y if x is None else x
        return factor if out is None else out.copy_(factor)
    return torch.mul(x, y, out=out)
