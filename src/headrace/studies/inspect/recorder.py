"""Records what every mixer of a model computes for one text: gates, decays, β, and the linear map from values to
outputs, which is the effective attention.

Dimensions: T tokens, H heads, R memories of each, K key, V value dimension per head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...layers.attention.attention import SoftmaxAttention
from ...layers.attention.latent import LatentAttention
from ...layers.attention.softmax_rnn import SoftmaxRNN
from ...layers.chunks import recur
from ...layers.linear.mixer import LinearMixer
from ...layers.matrix.rwkv7 import RWKV7, form, step
from ...ops.sequences import Sequences

WIDE = 512  # columns of values per call of `mix`


class Reading(NamedTuple):
    """out = mix(values) of a mixer: a function linear in the values, so a matrix of weights for every head."""

    values: Tensor  # [1, T, heads of v, V]
    out: Tensor  # [1, T, H, V]
    mix: Callable[[Tensor], Tensor]
    width: int = WIDE  # dimension V of the values in one call of mix


def weights(reading: Reading) -> Tensor:
    """The effective attention [H, T, T]: the weight of each token's value in each token's output. `mix` of the identity
    matrix as values gives the weights."""
    T, heads = reading.values.shape[1:3]
    identity = torch.eye(T, -(-T // reading.width) * reading.width).to(reading.values)
    columns = [reading.mix(x[None, :, None].expand(1, T, heads, -1)) for x in identity.split(reading.width, 1)]
    return torch.cat(columns, -1)[0, ..., :T].transpose(0, 1)


class Recorded:
    """The record of one mixer on a text. A quantity that the mixer does not have is None."""

    def __init__(self, layer: int, mixer: Any, tokens: int, shared: bool):
        self.layer, self.mixer, self.tokens, self.shared = layer, mixer, tokens, shared
        self.gates: dict[str, Tensor] = {}  # write, read: [T, H], 1 if all heads are equal
        self.calls: list[tuple[dict[str, Any], Any]] = []  # (arguments, result) of the recorded method

    @cached_property
    def call(self) -> tuple[dict[str, Any], Any]:
        """The arguments and the result of one call over all tokens. The residual delta rule calls the op once per
        chunk, with the last chunk padded; its calls are concatenated. Of several steps per token, only the first one's
        arguments are kept."""
        if not isinstance(self.mixer, LinearMixer):
            return self.calls[0]
        if method(self.mixer) == "_recur":
            (arguments, result), *_ = self.calls
            return arguments["given"][0], result[0]
        steps = self.mixer.spec.write.steps

        def concatenated(pieces: list[Any]) -> Any:
            by_token = isinstance(pieces[0], Tensor) and pieces[0].dim() > 2  # else a tensor per head
            return torch.cat(pieces, 1)[:, ::steps][:, : self.tokens] if by_token else pieces[0]

        names = self.calls[0][0].keys() - {"initial_state", "given"}
        arguments = {name: concatenated([call_arguments[name] for call_arguments, _ in self.calls]) for name in names}
        return arguments, concatenated([result[0] for _, result in self.calls])

    def reading(self) -> Reading | None:
        """The linear map of the mixer; None for a mixer without a scalar weight per head and pair of tokens."""
        several = isinstance(self.mixer, LinearMixer) and self.mixer.spec.write.steps > 1  # values of a token
        return RECORDED_METHODS[type(self.mixer)][1](self.mixer, *self.call) if self.calls and not several else None

    @property
    def horizon(self) -> Tensor | None:
        """Tokens after which the state has decayed to 1/e, [T, H]; with a decay per channel, for the median channel."""
        decay = self.operand("log_decay")
        if decay is None:
            return None
        decay = decay.expand(*self.operand("v").shape[:3]) if decay.dim() == 1 else decay  # type: ignore[union-attr]
        return self._by_head(-1 / (decay.median(-1).values if decay.dim() == 4 else decay))

    @property
    def beta(self) -> Tensor | None:
        """The write strength β [T, H], the mean over the memories of a head."""
        beta = self.operand("beta")
        return None if beta is None else self._by_head(beta)

    def operand(self, name: str) -> Tensor | None:
        """An operand of the recurrence, [1, T, H R, ·] or [H R]; None if the mixer has no such operand."""
        if isinstance(self.mixer, LinearMixer):
            return self.call[0][name] if self.calls else None  # a general delta rule does not call the op
        return getattr(self.call[1], name, None) if isinstance(self.mixer, RWKV7) else None

    def _by_head(self, x: Tensor) -> Tensor:
        rank = self.mixer.spec.memories_per_head if isinstance(self.mixer, LinearMixer) else 1
        return x[0].unflatten(1, (-1, rank)).mean(-1)


# --- linear maps from values to outputs -------------------------------------------------------------------------------


def linear_map(mixer: Any, arguments: dict[str, Any], out: Tensor) -> Reading:
    """The map of a linear mixer. It includes the read gate if the op applies it, but not if the layer applies it after
    its norm."""
    rank = mixer.spec.memories_per_head
    if method(mixer) == "_recur":

        def recur_with(v: Tensor) -> Tensor:
            tensors = arguments | {"v": v.repeat_interleave(rank, 2)}
            return mixer._recur(tensors, None, Sequences(v, None), False)[0]

        return Reading(arguments["v"][:, :, ::rank], out, recur_with)

    def sum_memories(out: Tensor) -> Tensor:
        return out.unflatten(2, (-1, rank)).sum(3)  # a head reads the sum of its memories

    def mix(v: Tensor) -> Tensor:
        return sum_memories(mixer.op(**arguments | {"v": v.repeat_interleave(rank, 2)})[0])

    return Reading(arguments["v"][:, :, ::rank], sum_memories(out), mix)


def softmax_map(mixer: Any, arguments: dict[str, Any], out: Any) -> Reading:
    q, k, v, *rest = arguments["given"]
    attend = getattr(mixer, method(mixer))  # type: ignore[arg-type]

    def mix(v: Tensor) -> Tensor:
        return output_of(attend(q, k, v, *rest))

    narrow = getattr(mixer.spec, "form", None) == "tiles" or method(mixer) == "_attend_within"  # as wide as its keys
    return Reading(v, output_of(out), mix, v.shape[-1] if narrow else WIDE)


def output_of(out: Any) -> Tensor:
    """The output without the state that the method may return with it."""
    return out[0] if isinstance(out, tuple) else out


def rwkv7_map(mixer: Any, arguments: dict[str, Any], x: Any) -> Reading:
    """The map of RWKV-7, without the bonus of the present token, which is added after the norm."""

    def mix(v: Tensor) -> Tensor:
        return recur(step, form, x._replace(v=v), Sequences(v, None), None)[0]

    return Reading(x.v, mix(x.v), mix, x.v.shape[-1])


# Mixer class -> (name of the method whose calls are recorded, function that makes a Reading of a call).
RECORDED_METHODS: dict[type, tuple[str, Callable[..., Reading]]] = {
    LinearMixer: ("op", linear_map),
    SoftmaxAttention: ("_attend", softmax_map),
    LatentAttention: ("_attend", softmax_map),
    SoftmaxRNN: ("_attend", softmax_map),
    RWKV7: ("operands", rwkv7_map),
}


def method(mixer: Any) -> str | None:
    name = RECORDED_METHODS.get(type(mixer), (None,))[0]
    if name == "op" and not mixer.levels is mixer.ridge is None:  # which calls the op several times
        return "_recur"
    return "_attend_within" if name == "_attend" and getattr(mixer.spec, "pattern", None) is not None else name


# --- recording -------------------------------------------------------------------------------------------------------


def record(model: Any, ids: Tensor) -> tuple[Tensor, list[Recorded]]:
    """ids [1, T] -> (last hidden states [1, T, D], a record for each mixer in the order of execution)."""
    records: list[Recorded] = []
    backbone = model.model.backbone
    layers = {mixer: i for i, layer in enumerate(backbone.layers) for mixer in layer.mixers}
    with ExitStack() as stack:
        for mixer in [*layers, *(block.mixer for block in backbone.shared_blocks)]:
            stack.enter_context(recording(mixer, records, layers.get(mixer)))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden, records


@contextmanager
def recording(mixer: Any, records: list[Recorded], layer: int | None) -> Iterator[None]:
    """layer: index of the mixer's layer; None: the shared block, which belongs to the layer that follows."""

    def begin(module: nn.Module, args: Any) -> None:
        where = max((r.layer for r in records if not r.shared), default=-1) + 1 if layer is None else layer
        records.append(Recorded(where, mixer, args[0].shape[1], layer is None))

    name = method(mixer)
    with ExitStack() as hooks:
        hooks.enter_context(mixer.register_forward_pre_hook(begin))
        for gate in ("write", "read"):
            if (competition := getattr(mixer, f"{gate}_competition", None)) is not None:
                hooks.enter_context(competition.register_forward_hook(partial(keep_gate, records, gate)))
        if name is not None:  # an attribute of the module, or a method of its class
            attributes = vars(mixer)
            hooks.callback(attributes.update, {name: attributes[name]} if name in attributes else {})
            hooks.callback(delattr, mixer, name)
            setattr(mixer, name, partial(keep_call, records, getattr(mixer, name)))
        yield


def keep_gate(records: list[Recorded], gate: str, competition: Any, args: Any, log_gates: Tensor) -> None:
    by_memory = log_gates[0].unflatten(-1, (-1, competition.memories))
    records[-1].gates[gate] = (by_memory.logsumexp(-1) - math.log(competition.memories)).exp()


def keep_call(records: list[Recorded], function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = function(*args, **named)
    records[-1].calls.append((dict(zip("qkv", args, strict=False)) | {"given": args} | named, result))
    return result
