"""The spec of variants of softmax attention with other numerators and denominators (arXiv 2507.23632)."""

from dataclasses import dataclass
from typing import Literal

from ..utils.errors import InputError
from .mixer import Facts, Shapes, Spec
from .record import NonNegativeInt, require_positive

NORMS = ("l2", "rms", "layer")


@dataclass(frozen=True)
class SoftmaxRNNSpec(Spec):
    """The mixer Σ_s w(q_t, k_s) v_s / denominator (arXiv 2507.23632, section 4.5). The defaults are softmax attention.

    With x the logit of q_t and k_s, the weight w is e^x for numerator="exp". For "relu", "elu+1" and "cosine", which
    are applied to q and k first, w is x. With an order n, w is 1 + x + … + xⁿ/n! for every numerator.
    """

    numerator: Literal["exp", "relu", "elu+1", "cosine"] = "exp"
    order: NonNegativeInt | None = None  # n, the order of the Taylor polynomial; None: w as above
    clamp: float | None = None  # upper bound of the logits; None: no bound
    # sum: Σ_s w; detached: max(Σ_s w, 1) without a gradient; output-gate and input-gate: no denominator, but a sigmoid
    # gate per head on the output or on v; input-length: v_s is divided by n^σ(c), where n is the number of tokens that
    # token s attends to and c is a parameter per head; l2, rms, layer: the norm of the numerator
    denominator: Literal[
        "sum", "detached", "none", "output-gate", "input-gate", "input-length", "l2", "rms", "layer"
    ] = "sum"  # fmt: skip
    affine: bool = False  # whether the norm has a learned weight (layer: and a bias) per channel of a head
    by_length: bool = False  # whether the output is also divided by the number of tokens attended to

    facts = Facts("attention.softmax_rnn.SoftmaxRNN", cached=True)

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
            self.by_length and self.denominator == "sum",
            "by_length=True has no effect with denominator='sum', since it divides numerator and denominator alike; "
            "expected by_length=False, or another denominator",
        )

    @property
    def gated(self) -> bool:  # type: ignore[override]
        """Whether sigmoid gates take the place of the denominator, on the output, on v or on both."""
        return "gate" in self.denominator

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns the key and value dimensions per head. Raises InputError for sizes that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise InputError(
                f"num_heads={num_heads} and hidden_size={hidden_size}; expected an even head dimension, as rotary needs"
            )
        return hidden_size // num_heads, hidden_size // num_heads

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of one sequence's key/value cache after `tokens` tokens."""
        K, V = self.head_dims(hidden_size, num_heads)
        return {"k": (tokens, num_heads, K), "v": (tokens, num_heads, V)}
