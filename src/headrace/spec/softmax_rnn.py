"""What softmax attention taken apart is, as data: its numerator, its denominator, and what keeps both in bounds."""

import math
from dataclasses import dataclass
from typing import Literal

from ..utils.errors import InputError
from .record import NonNegativeInt, Record, require_positive

NORMS = ("l2", "rms", "layer")


@dataclass(frozen=True)
class SoftmaxRNNSpec(Record):
    """Σ_s w(q_t, k_s) v_s over a denominator (arXiv 2507.23632, section 4.5). As it stands: softmax attention.

    With x the logit of a query and a key, w is e^x ("exp"), or x itself where "relu", "elu+1" or "cosine" is first
    applied to q and k; with an order n it is 1 + x + … + xⁿ/n!, for any of them.
    """

    numerator: Literal["exp", "relu", "elu+1", "cosine"] = "exp"
    order: NonNegativeInt | None = None
    clamp: float | None = None  # largest logit; None: any
    # detached: the sum, at least 1, without a gradient; gates: σ of the token's input, per head, on what is read or on
    # v; input-length: v_s over n^σ(c), n the number of tokens that token s sees, c a parameter per head
    denominator: Literal[
        "sum", "detached", "none", "output-gate", "input-gate", "input-length", "l2", "rms", "layer"
    ] = "sum"  # fmt: skip
    affine: bool = False  # a norm has a weight per channel of a head ("layer": and a bias)
    by_length: bool = False  # also divided by the number of tokens seen

    def _objections(self):
        order = self.order
        signed = {"exp": order is not None and order % 2 == 1, "cosine": order is None or order % 2 == 1}
        yield (
            self.denominator in ("sum", "detached") and signed.get(self.numerator, False),
            f"denominator={self.denominator!r} can vanish or be negative with numerator={self.numerator!r} and "
            f"order={order}; expected an even order, or one of the norms {', '.join(NORMS)}",
        )
        yield (
            self.affine and self.denominator not in NORMS,
            f"affine=True gives parameters to a norm; expected denominator to be one of {', '.join(NORMS)}, "
            f"got {self.denominator!r}",
        )
        yield (
            self.by_length and self.denominator in ("sum", "detached"),
            f"by_length=True divides numerator and denominator={self.denominator!r} alike and does nothing; "
            "expected by_length=False, or another denominator",
        )

    def num_heads(self, default: int) -> int:
        return default

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise InputError(
                f"num_heads={num_heads} does not divide hidden_size={hidden_size} into even heads, which rotate"
            )
        return hidden_size // num_heads, hidden_size // num_heads

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> dict[str, tuple[int, ...]]:
        """The key/value cache after `tokens` tokens: it grows with every one of them."""
        K, V = self.head_dims(hidden_size, num_heads)
        return {"k": (tokens, num_heads, K), "v": (tokens, num_heads, V)}

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4, tokens: int = 1) -> int:
        sizes = (math.prod(s) for s in self.state_shapes(hidden_size, num_heads, tokens).values())
        return itemsize * sum(sizes)
