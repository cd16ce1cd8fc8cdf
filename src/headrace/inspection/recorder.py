"""Records what every mixer of a model computes for one text: gates, decays, β, and the linear map from values to
outputs, whose weights (`layers.maps.weights`) are the effective attention; and names the failures in it.

Dimensions: T tokens, H heads, R memories of each, K key, V value dimension per head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..extra.recurrence import ModuleRecur
from ..extra.rwkv7 import RWKV7
from ..layers.linear.mixer import LinearMixer
from ..layers.maps import Reading, asking
from ..training.gate_statistics import FAILURES, failures

RECORDED_METHODS: dict[type, str] = {LinearMixer: "op", RWKV7: "operands"}  # whose calls are recorded
ALONE = 0.99  # a head is dead as a memory if more than this part of its attention is on the present token
CLOSED = 0.01  # a head is dead if its β, a sigmoid, is below this at every token; a small step size writes in many
RULES = (
    f"{FAILURES} It is also dead if β, where it is a sigmoid, is below {CLOSED} at every token, if its output is zero "
    f"at every token, or if more than {ALONE:.0%} of its attention is on the present token."
)


class Recorded:
    """The record of a mixer on a text; None is what it does not have. place in the layer: "", "parallel", "shared"."""

    def __init__(self, layer: int, mixer: Any, tokens: int, place: str):
        self.layer, self.mixer, self.tokens, self.place = layer, mixer, tokens, place
        self.gates: dict[str, Tensor] = {}  # write, read: [T, H], 1 if all heads are equal
        self.calls: list[tuple[dict[str, Any], Any]] = []  # (arguments, result) of the recorded method
        self.reading: Reading | None = None  # None for a mixer without a weight per head and pair of tokens

    @cached_property
    def call(self) -> tuple[dict[str, Any], Any]:
        """The arguments and the result of one call over all tokens. The residual delta rule calls the op once per
        chunk, with the last chunk padded; its calls are concatenated. Of several steps per token, only the first one's
        arguments are kept."""
        if not isinstance(self.mixer, LinearMixer) or calls_often(self.mixer):
            return self.calls[0]
        steps = self.mixer.spec.write.steps

        def concatenated(pieces: list[Any]) -> Any:
            by_token = isinstance(pieces[0], Tensor) and pieces[0].dim() > 2  # else a tensor per head
            return torch.cat(pieces, 1)[:, ::steps][:, : self.tokens] if by_token else pieces[0]

        names = self.calls[0][0].keys() - {"initial_state"}
        arguments = {name: concatenated([call_arguments[name] for call_arguments, _ in self.calls]) for name in names}
        return arguments, concatenated([result[0] for _, result in self.calls])

    @property
    def horizon(self) -> Tensor | None:
        """Tokens after which the state has decayed to 1/e, [T, H]; with a decay per channel, for the median channel."""
        decay = self.operand("log_decay")
        if decay is None:
            return None
        decay = decay.expand(*self.operand("v").shape[:3]) if decay.dim() == 1 else decay  # type: ignore[union-attr]
        return self._by_head(1 / (decay.median(-1).values if decay.dim() == 4 else decay).abs())  # of 0.0, +inf

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


# --- recording -------------------------------------------------------------------------------------------------------


def record(model: Any, ids: Tensor) -> tuple[Tensor, list[Recorded]]:
    """ids [1, T] -> (last hidden states [1, T, D], a record for each mixer in the order of execution)."""
    records: list[Recorded] = []
    backbone = model.model.backbone
    layers = {mixer: i for i, layer in enumerate(backbone.layers) for mixer in layer.mixers}
    shared = [block.mixer for block in backbone.shared_blocks]
    places = dict.fromkeys(shared, "shared") | {layer.parallel: "parallel" for layer in backbone.layers}
    with ExitStack() as stack:
        for mixer in [*layers, *shared]:
            stack.enter_context(recording(mixer, records, layers.get(mixer), places.get(mixer, "")))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden, records


@contextmanager
def recording(mixer: Any, records: list[Recorded], layer: int | None, place: str) -> Iterator[None]:
    """layer: index of the mixer's layer; None: the shared block, which belongs to the layer that follows."""

    def begin(module: nn.Module, args: Any) -> None:
        where = max((r.layer for r in records if r.place != "shared"), default=-1) + 1 if layer is None else layer
        records.append(Recorded(where, mixer, args[0].shape[1], place))

    def read(reading: Reading) -> None:
        records[-1].reading = reading

    name = None if calls_often(mixer) else RECORDED_METHODS.get(type(mixer))
    with ExitStack() as hooks:
        hooks.enter_context(mixer.register_forward_pre_hook(begin))
        hooks.enter_context(asking(read))
        if calls_often(mixer):
            recurrence = mixer.recur.module(mixer)  # whose second argument is the tensors
            keep = recurrence.register_forward_pre_hook(lambda _, args: records[-1].calls.append((args[1], None)))
            hooks.enter_context(keep)
        for gate in ("write", "read"):
            if (competition := getattr(mixer, f"{gate}_competition", None)) is not None:
                hooks.enter_context(competition.register_forward_hook(partial(keep_gate, records, gate)))
        if name is not None:  # an attribute of the module, or a method of its class
            attributes = vars(mixer)
            hooks.callback(attributes.update, {name: attributes[name]} if name in attributes else {})
            hooks.callback(delattr, mixer, name)
            setattr(mixer, name, partial(keep_call, records, getattr(mixer, name)))
        yield


def calls_often(mixer: Any) -> bool:
    """Whether a linear mixer calls the op several times for the same tokens."""
    return isinstance(mixer, LinearMixer) and type(mixer) is not LinearMixer and isinstance(mixer.recur, ModuleRecur)


def keep_gate(records: list[Recorded], gate: str, competition: Any, args: Any, log_gates: Tensor) -> None:
    by_memory = log_gates[0].unflatten(-1, (-1, competition.memories))
    records[-1].gates[gate] = (by_memory.logsumexp(-1) - math.log(competition.memories)).exp()


def keep_call(records: list[Recorded], function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = function(*args, **named)
    records[-1].calls.append((dict(zip("qkv", args, strict=False)) | named, result))
    return result


# --- failures --------------------------------------------------------------------------------------------------------


def findings(name: str, recorded: Recorded, A: Tensor | None) -> list[str]:
    """Sentences on the failures of one layer; empty if there is none."""
    sentences = [sentence for gate, g in recorded.gates.items() for sentence in of_gate(gate, g)]
    sentences += of_beta(recorded.beta) if recorded.beta is not None and recorded.mixer.spec.write.sigmoid else ()
    sentences += of_weights(A) if A is not None else ()
    return [f"{name}: {sentence}" for sentence in sentences]


def of_gate(gate: str, g: Tensor) -> Iterator[str]:
    if g.shape[-1] == 1:
        return
    shares = g / g.sum(-1, keepdim=True)
    even = float(torch.special.entr(shares).sum(-1).mean()) / math.log(g.shape[-1])  # entropy over log(heads)
    load = shares.mean(0).tolist()
    found = failures(even, load)
    if found.uniform:
        yield f"the {gate} gate is uniform: its entropy is {even:.4f} of log(heads), so all shares are nearly equal"
    if (head := found.collapsed) is not None:
        yield f"the {gate} gate has collapsed: the mean share of head {head} is {load[head]:.1%}"
    for head in found.dead:
        yield f"head {head} is dead: its mean share of the {gate} gate is {load[head]:.1g}"


def of_beta(beta: Tensor) -> Iterator[str]:
    for head in (beta.amax(0) < CLOSED).nonzero().flatten().tolist():
        yield f"head {head} is dead: β is at most {float(beta[:, head].max()):.1g}, so nothing is written"


def of_weights(A: Tensor) -> Iterator[str]:
    total = A.abs().sum(-1)
    own = A.diagonal(dim1=1, dim2=2).abs() / total.clamp(min=torch.finfo(A.dtype).tiny)
    for head, (most, present) in enumerate(zip(total.amax(1).tolist(), own[:, 1:].mean(1).tolist(), strict=True)):
        if most == 0:
            yield f"head {head} is dead: its output is zero at every token"
        elif present > ALONE:
            yield f"head {head} is dead as a memory: {present:.1%} of its attention is on the present token"
