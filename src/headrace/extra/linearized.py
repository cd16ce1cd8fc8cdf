"""Linear mixers in place of attention layers: the rotary frequencies and the norms of q and k that a trained attention
layer brings, and feature maps that learn to imitate its softmax. `convert.linearize` makes them of a trained model.

    φ(x) = [softmax(W x), softmax(−W x)]    map="softmax" (LoLCATs, arXiv 2410.10254, section 3.1, after Hedgehog)
    φ(x) = [e^(W x), e^(−W x)]              map="exp" (Hedgehog, arXiv 2402.04347, section 4.1)

x is q or k times the root of the factor of the logits, and W [K, K] a matrix of each head, the identity at first. In
the code of LoLCATs x is q or k itself, and W has 64 rows, random at first.

Dimensions: B batch, T tokens, H heads, K key dimension per head.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.linear.features import RotateFirst
from ..layers.linear.mixer import LinearMixer
from ..layers.linear.stage import Stage, Tokens
from ..layers.linear.token import TOKENS, add_mixer
from ..ops.backends.native.program import UnsupportedError
from ..ops.call import accumulator
from ..spec.attention import Rope
from ..spec.linear import Inputs, MixerSpec, Read
from ..spec.mixer import Facts
from ..spec.serialize import TYPES
from ..utils.errors import require
from .registration import register_mixer

FARTHEST = 30.0  # |W x| up to which map="exp" is e^(W x): a product of two features is then at most e^60


class LearnedMap(SelfInitialized):
    """φ of q and of k: [B, T, H, K] -> [B, T, H, 2 K]."""

    no_weight_decay = ("q", "k")

    def __init__(self, kind: str, num_heads: int, key_dim: int):
        super().__init__()
        self.kind = kind
        self.q, self.k = (nn.Parameter(torch.empty(num_heads, key_dim, key_dim)) for _ in range(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in (self.q, self.k):
            weight.copy_(torch.eye(weight.shape[-1]))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._map(q, self.q), self._map(k, self.k)

    def _map(self, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.einsum("bthi,hji->bthj", x, weight.to(x.dtype)).to(accumulator(x))
        if self.kind == "softmax":
            return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).to(x.dtype)
        return torch.cat([y, -y], -1).clamp(-FARTHEST, FARTHEST).exp()


class MapLearned(Stage):
    """The learned feature map of q and k."""

    @staticmethod
    def applies(spec: Any) -> bool:
        return spec.map != "none"

    def build(self, mixer: Any) -> None:
        mixer.learned_map = LearnedMap(mixer.spec.map, mixer.Hq, mixer.K)

    def native(self, mixer: Any) -> dict[str, Any]:
        return {"feature_map": f"learned-{mixer.spec.map}", "F": 2 * mixer.K}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        root = mixer.logit_scale**0.5
        t.q, t.k = mixer.learned_map(t.q * root, t.k * root)
        t.v = t.v.to(t.q.dtype)  # map="exp" has features that a float16 does not


class QKNorm(Stage):
    """RMSNorm of q and of k, of each head or of all heads together, before the rotation and the map."""

    field = "qk_norm"
    values: ClassVar[tuple[Any, ...]] = ("head", "joint")

    def build(self, mixer: Any) -> None:
        for name in "qk":
            width = mixer.parts[name] if mixer.spec.qk_norm == "joint" else mixer.K
            setattr(mixer, f"{name}_norm", nn.RMSNorm(width, eps=mixer.qk_eps))

    def native(self, mixer: Any) -> dict[str, Any]:
        eps = mixer.q_norm.eps
        if eps is None or eps != mixer.k_norm.eps:
            raise UnsupportedError(f"it does not support norms of q and k with eps={eps} and {mixer.k_norm.eps}")
        return {"head_norm": mixer.spec.qk_norm, "head_eps": eps}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        for name in "qk":
            x, norm = getattr(t, name), getattr(mixer, f"{name}_norm")
            own = x.shape[2] // (mixer.parts[name] // mixer.K)  # heads that have one projection
            wide = x[:, :, ::own].to(norm.weight.dtype).flatten(2).unflatten(2, (-1, *norm.normalized_shape))
            y = norm(wide).to(x.dtype).flatten(2).unflatten(2, (-1, mixer.K))
            setattr(t, name, y.repeat_interleave(own, 2) if own > 1 else y)


class LateNorm(QKNorm):
    """RMSNorm of the heads of q and k after the rotation."""

    values = ("late",)

    def native(self, mixer: Any) -> dict[str, Any]:
        return Stage.native(self, mixer)


PLACE = LinearMixer.INPUTS.index(RotateFirst)


class LinearizedMixer(LinearMixer):
    """The layer of a LinearizedSpec."""

    INPUTS = (
        *LinearMixer.INPUTS[:PLACE], QKNorm, RotateFirst, LateNorm, MapLearned, *LinearMixer.INPUTS[PLACE + 1 :],
    )  # fmt: skip

    spec: Any

    def __init__(self, spec: Any, *, norm_eps: float = 1e-6, **sizes: Any):
        self.qk_eps = norm_eps  # whatever read.eps is, which is of the norm of what is read
        super().__init__(spec, norm_eps=norm_eps, **sizes)

    @property
    def rope(self) -> Rope:  # type: ignore[override]
        return self.spec.rope


@dataclass(frozen=True)
class LinearizedSpec(MixerSpec):
    """A linear mixer in place of an attention layer."""

    map: Literal["softmax", "exp", "none"] = "softmax"  # learned feature map of q and k, in place of inputs.feature_map
    # RMSNorm with weights of q and of k: before the rotation, of each head (head: Qwen3) or of all heads together
    # (joint: OLMo 2), or after it, of each head (late: Hunyuan)
    qk_norm: Literal["none", "head", "joint", "late"] = "none"
    rope: Rope = field(default_factory=Rope)  # frequencies of the rotation

    facts = Facts("headrace.extra.linearized.LinearizedMixer")

    def _objections(self):
        yield from super()._objections()
        yield (
            self.map != "none" and self.inputs.feature_map != "identity",
            f"map={self.map!r} stands for inputs.feature_map; expected 'identity', got {self.inputs.feature_map!r}",
        )
        yield (
            self.inputs.key != "projected" and (self.map != "none" or self.qk_norm != "none"),
            f"map={self.map!r} and qk_norm={self.qk_norm!r} are of a key that is projected; expected "
            "inputs.key='projected', or 'none' for both",
        )
        first = self.inputs.rotary_first or self.qk_norm != "late"
        yield not first, "qk_norm='late' follows a rotation before the map; expected inputs.rotary_first=True"
        yield not self.inputs.rotary and self.rope != Rope(), "rope sets frequencies; expected inputs.rotary=True"
        yield (
            self.map != "none" and self.write.steps > 1,
            f"map={self.map!r} maps one key per token and head; expected write.steps=1 or map='none', got "
            f"{self.write.steps}",
        )
        yield (
            self.write.rule == "delta" and self.inputs.rotary and not self.inputs.rotary_first and self._lengthens,
            f"rope makes keys {self.rope.scale:.3g} times as long after their norm, by which write.rule='delta' with "
            f"write.beta={self.write.beta!r} and inputs.order={self.inputs.order} diverges once β‖k‖² > 2; expected "
            "rope.amplitude=1, or inputs.rotary_first=True",
        )
        yield (
            self.rope.by_length,
            f"rope.kind={self.rope.kind!r} turns all keys again when a sequence grows, which a memory cannot; expected "
            "another kind",
        )

    @property
    def positive(self) -> bool:
        return (self.map != "none" and self.inputs.qk_norm != "rms-bias") or super().positive

    @property
    def _lengthens(self) -> bool:
        """Whether a rotation after the norm of k may make β‖k‖² more than 2."""
        square, most = self.rope.scale**2, 2 if self.write.beta == "sigmoid-2" else 1
        return most * square > 2 or (self.inputs.order is not None and square > 1)

    def features(self, key_dim: int) -> int:
        return 2 * key_dim if self.map != "none" else super().features(key_dim)

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        K, V = super().head_dims(hidden_size, num_heads)
        if self.inputs.rotary:
            self.rope.require_width(K)
        whole = self.decay.kind != "xpos" or self.rope.dims in (None, K)
        require(whole, f"decay.kind='xpos' is of all {K} key channels; expected rope.dims=None, got {self.rope.dims}")
        return K, V


TYPES["linearized"] = LinearizedSpec
TOKENS[LinearizedSpec.facts.layer] = add_mixer
register_mixer(
    "hedgehog",
    LinearizedSpec(inputs=Inputs(rotary=True, rotary_first=True), read=Read("sum")),
    about="Linear attention whose feature map learns to imitate softmax attention: the softmax of W x and of −W x.",
    paper="https://arxiv.org/abs/2402.04347",
)
