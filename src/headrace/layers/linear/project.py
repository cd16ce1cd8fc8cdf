"""The input projection of a linear mixer, and the heads of q, k and v.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.modules import is_plain
from ...ops.sequences import Sequences
from ...utils.device import interpreted
from .stage import Stage, Tokens

ALIGNED = 16  # numbers; a GPU's matrix products are fast for widths that are a multiple of it


class Positions(Stage):
    """The position of each token in its sequence, for stages that depend on it."""

    kinds = ()

    @staticmethod
    def applies(spec: Any) -> bool:
        return spec.counts_tokens

    def __call__(self, mixer: Any, t: Tokens) -> None:
        before = t.before("tokens")
        t.positions = t.sequences.positions(before, t.x)
        t.next["tokens"] = t.sequences.counted(before, t.x)


class Project(Stage):
    """The input projection. With a short convolution, q, k and v are one part, "qkv", so that nothing copies them."""

    kinds = ()

    def reset(self, mixer: Any) -> None:
        if mixer.in_proj.bias is not None:
            mixer.in_proj.bias.zero_()

    def __call__(self, mixer: Any, t: Tokens) -> None:
        names, sizes = list(mixer.parts), list(mixer.parts.values())
        if t.streams is not None:
            inputs = [t.streams.get(name, t.x) for name in names]
            parts: Sequence[Tensor] = project(mixer.in_proj, t.sequences, inputs, sizes)
        else:
            if mixer.spec.inputs.conv:
                names, sizes = ["qkv", *names[3:]], [sum(sizes[:3]), *sizes[3:]]
            parts = _projected(mixer, t, sizes)
        t.parts = dict(zip(names, parts, strict=True))


def _projected(mixer: Any, t: Tokens, sizes: list[int]) -> Sequence[Tensor]:
    """Returns the parts of in_proj(x), [B, T, size] each.

    In training on a GPU, the input of a convolution is a product of its own, whose gradient need not be copied to those
    of the other parts, and their width is rounded up, because products of odd widths are slow there."""
    first, rest = sizes[0], sum(sizes[1:])
    on_gpu = (t.x.is_cuda or interpreted()) and torch.is_grad_enabled()
    if not (mixer.spec.inputs.conv and rest and on_gpu and is_plain(mixer.in_proj, nn.Linear)):
        return t.sequences.tokenwise(mixer.in_proj, t.x).split(sizes, -1)
    more, bias = -rest % ALIGNED, mixer.in_proj.bias
    weights = mixer.in_proj.weight.split([first, rest])
    biases = (None, None) if bias is None else (bias[:first], F.pad(bias[first:], (0, more)))
    others = F.linear(t.x, F.pad(weights[1], (0, 0, 0, more)) if more else weights[1], biases[1])
    return F.linear(t.x, weights[0], biases[0]), *others.split([*sizes[1:], more], -1)[:-1]


def project(linear: nn.Module, sequences: Sequences, streams: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Computes part i of the layer's output from streams[i].

    A module other than an `nn.Linear` without hooks is called on all inputs, which takes n times the work.

    Args:
        sequences: the sequences of the inputs.
        streams: n inputs [B, T, D].
        sizes: sizes of the n parts of the output.

    Returns:
        n tensors [B, T, size].
    """
    if is_plain(linear, nn.Linear):
        biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
        return [F.linear(*given) for given in zip(streams, linear.weight.split(sizes), biases, strict=True)]
    wholes = sequences.tokenwise(linear, torch.stack(streams, -2)).unbind(-2)
    return [whole.split(sizes, -1)[i] for i, whole in enumerate(wholes)]


class Heads(Stage):
    """Divides q and k into Hq heads, v into H, and β's logits, if a head has several. With n steps per token, k and v
    of a head are n times as wide."""

    kinds = ()

    def __call__(self, mixer: Any, t: Tokens) -> None:
        for name in t.parts.keys() & set("qkv"):
            t.parts[name] = t.parts[name].unflatten(-1, (mixer.H if name == "v" else mixer.Hq, -1))
        t.q, t.k, t.v, t.beta = (t.parts.get(name) for name in ("q", "k", "v", "beta"))
        write = mixer.spec.write
        if t.beta is not None and (write.steps > 1 or write.erase == "channel"):
            t.beta = t.beta.unflatten(-1, (mixer.H, -1))


class ValueMap(Stage):
    """The map of v."""

    field = "inputs.value_map"

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = t.parts["v"] = F.silu(t.v)
