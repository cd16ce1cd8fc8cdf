"""The spec of variants of softmax attention with other numerators and denominators (arXiv 2507.23632)."""

from dataclasses import dataclass
from typing import Any, Literal

from ...spec.linear import Inputs, MixerSpec, Order, Read
from ...spec.mixer import Facts, Shapes, Spec
from ...spec.record import require_positive
from ...utils.errors import InputError

NORMS = ("l2", "rms", "layer")
RMS_EPS = 2.0**-23  # the default of nn.RMSNorm in float32


@dataclass(frozen=True)
class SoftmaxRNNSpec(Spec):
    """The mixer Σ_s w(q_t, k_s) v_s / denominator (arXiv 2507.23632, section 4.5). The defaults are softmax attention.

    With x the logit of q_t and k_s, the weight w is e^x for numerator="exp". For "relu", "elu+1" and "cosine", which
    are applied to q and k first, w is x. With an order n, w is 1 + x + … + xⁿ/n! for every numerator.
    """

    numerator: Literal["exp", "relu", "elu+1", "cosine"] = "exp"
    order: Order | None = None  # n, the order of the Taylor polynomial; None: w as above
    clamp: float | None = None  # upper bound of the logits; None: no bound
    # sum: Σ_s w; detached: max(Σ_s w, 1) without a gradient; input-length: v_s is divided by n^σ(c), where n is the
    # number of tokens that token s attends to and c is a parameter per head; l2, rms, layer: the norm of the numerator
    denominator: Literal["sum", "detached", "none", "input-length", "l2", "rms", "layer"] = "sum"
    # sigmoid gates, one number per token and head: on the output, on v, or on both
    gate: Literal["none", "output", "input", "both"] = "none"
    gate_order: Literal["norm-gate", "gate-norm"] = "norm-gate"  # which of norm and output gate comes first
    affine: bool = False  # whether the norm has a learned weight (layer: and a bias) per channel of a head
    by_length: bool = False  # whether the output is also divided by the number of tokens attended to

    facts = Facts("headrace.history.layers.softmax_rnn.SoftmaxRNN", cached=True)

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
            self.gate_order == "gate-norm" and (self.denominator not in NORMS or "output" not in self.gates),
            f"gate_order='gate-norm' puts an output gate before a norm; expected denominator to be one of "
            f"{', '.join(NORMS)} and gate='output' or 'both', got {self.denominator!r} and {self.gate!r}",
        )
        yield (
            self.by_length and self.denominator == "sum",
            "by_length=True has no effect with denominator='sum', since it divides numerator and denominator alike; "
            "expected by_length=False, or another denominator",
        )

    @property
    def gates(self) -> tuple[str, ...]:
        """Which of "output" and "input" are gated."""
        return ("output", "input") if self.gate == "both" else () if self.gate == "none" else (self.gate,)

    def recurrent(self) -> MixerSpec:
        """Returns the linear mixer that computes the same from a state of a fixed size: with features of the logit's
        powers, decoding takes the same time for each token.

        `recurrent-` before a name of the zoo does this to the mixer that an expression describes, and
        `history.layers.softmax_rnn.SoftmaxRNN.recurrent` to a layer with its weights. An encoder reads
        one memory of all tokens.

        Raises:
            InputError: if no finite state exists: for e^x without an order, and for clamped logits.
        """
        if self.numerator == "exp" and self.order is None:
            raise InputError(
                "numerator='exp' with order=None has no recurrent form: e^x has infinitely many powers, and each has a "
                "state; expected an order"
            )
        if self.clamp is not None:
            raise InputError(
                f"clamp={self.clamp} has no recurrent form: a bound on the logit of a pair is no product of a function "
                "of q and a function of k; expected clamp=None"
            )
        return MixerSpec(inputs=self._inputs(), read=self._read())

    def _inputs(self) -> Inputs:
        mapped = self.numerator in ("relu", "elu+1")
        feature_map: Any = self.numerator if mapped else "identity"
        return Inputs(
            feature_map=feature_map, qk_norm="l2" if self.numerator == "cosine" else "none", rotary=True,
            rotary_first=mapped, order=self.order, value_gate="input" in self.gates,
            by_length=self.denominator == "input-length",
        )  # fmt: skip

    def _read(self) -> Read:
        norm = "none" if self.denominator == "input-length" else self.denominator
        return Read(
            norm, affine=self.affine if norm in NORMS else None, eps=RMS_EPS if norm == "rms" else None,
            gate="sigmoid-head" if "output" in self.gates else "none", order=self.gate_order,
            scale="one" if self.numerator == "cosine" else "key", by_length=self.by_length,
        )  # fmt: skip

    def idle_gates(self, hidden_size: int | None = None, num_heads: int | None = None) -> list[str]:
        """Returns a sentence for an output gate that the norm cancels."""
        return [
            f"gate_order='gate-norm' multiplies the numerator by one number per head and denominator="
            f"{self.denominator!r} divides it out again, up to its epsilon; gate_order='norm-gate' puts it after that"
        ] * (self.gate_order == "gate-norm")

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.gate != "none"

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise InputError(
                f"num_heads={num_heads} and hidden_size={hidden_size}; expected an even head dimension, as rotary needs"
            )
        return hidden_size // num_heads, hidden_size // num_heads

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        K, V = self.head_dims(hidden_size, num_heads)
        return {"k": (tokens, num_heads, K), "v": (tokens, num_heads, V)}
