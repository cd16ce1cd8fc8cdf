"""Token mixers: modules that map x [B, T, D] and a state to y [B, T, D] and the next state."""

from torch import nn

from .. import zoo
from ..spec.linear import LAYERS
from ..spec.mixer import Spec
from ..spec.record import require_bools, require_positive, require_positive_numbers
from ..utils.errors import require, require_each, shown
from .attention.attention import SoftmaxAttention
from .base import named
from .linear.mixer import LinearMixer, MixerState


def build(spec: Spec, *, causal: bool = True, **settings) -> nn.Module:
    """Returns the mixer of a spec.

    Args:
        causal: False for an encoder's mixer, in which tokens also see later tokens of their sequence.
        settings: hidden_size, num_heads, layer_idx, num_layers, norm_eps and rope_theta.

    Raises:
        InputError: for sizes that do not divide.
    """
    spec.head_dims(settings["hidden_size"], settings.get("num_heads", 1))  # raises for sizes that do not divide
    if spec.facts.cached and not getattr(spec, "forget", False):
        settings["causal"] = causal
    elif not causal and spec.layer(False) == spec.layer(True):
        return named(LAYERS["both-ways"])(*(build(spec, **settings) for _ in range(2)))
    built = named(spec.layer(causal))(spec, **settings)
    built.spec, built.hidden_size = spec, settings["hidden_size"]
    return built


def Mixer(
    mixer, *, hidden_size: int, num_heads: int = 4, causal: bool = True, layer_idx: int = 0, num_layers: int = 1,
    norm_eps: float = 1e-6, rope_theta: float = 10000.0,
) -> nn.Module:  # fmt: skip
    """Returns a mixer as a layer for your own models, an `nn.Module` that maps x to (y, state).

        layer = headrace.Mixer("softmax-gla", hidden_size=256, num_heads=4)
        y, state = layer(x)                             # x and y [B, T, hidden_size]
        y, state = layer(x, state)                      # the next tokens of the same sequences, one or more
        y, state = layer(x, mask=mask)                  # mask [B, T], bool: False marks padding, at any position
        y, state = layer(x, cu_seqlens=cu_seqlens)      # x [1, T, D]: N packed sequences with bounds cu_seqlens [N + 1]

    Args:
        mixer: a name or an expression of the zoo (`headrace zoo`), or a spec.
        hidden_size: width D of x and y.
        num_heads: number of heads, unless the mixer sets it.
        causal: False lets tokens also see later tokens of their sequence. A linear mixer in which their order does not
            matter then has one memory of all tokens; another mixer with a memory becomes two, one for each direction.
            Such a layer takes no state, and what it returns as state, None or keys and values, cannot be continued.
        layer_idx, num_layers: index of the layer and depth of the model, for initializations that depend on them.
        norm_eps: epsilon of the norm after the readout.
        rope_theta: base of the rotary frequencies.

    Raises:
        InputError: for an unknown mixer, a whole model, and sizes that do not divide.
    """
    require_positive(num_layers=num_layers)
    expected = f"0 to {num_layers - 1}, below num_layers"
    require_each(lambda i: type(i) is int and 0 <= i < num_layers, expected, layer_idx=layer_idx)
    require_positive_numbers(norm_eps=norm_eps, rope_theta=rope_theta)
    require_bools(causal=causal)
    spec = zoo.mixer(mixer)
    require(isinstance(spec, Spec), f"mixer={shown(mixer)} is a {type(spec).__name__}; expected the mixer of one layer")
    depth = {"layer_idx": layer_idx, "num_layers": num_layers, "norm_eps": norm_eps, "rope_theta": rope_theta}
    return build(spec, causal=causal, hidden_size=hidden_size, num_heads=num_heads, **depth)


__all__ = ["LinearMixer", "Mixer", "MixerState", "SoftmaxAttention", "build"]
