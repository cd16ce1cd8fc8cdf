"""Token mixers: x [B, T, D] and a state in, y [B, T, D] and a state out."""

from torch import nn

from .. import zoo
from ..spec.linear import AttentionSpec, MatrixSpec, MixerSpec, ScanSpec, SoftmaxRNNSpec, Spec
from ..spec.stack import Decoder
from ..utils.errors import InputError
from .attention.attention import SoftmaxAttention
from .attention.softmax_rnn import SoftmaxRNN
from .bidirectional import BothWays
from .linear import LinearMixer, MixerState
from .matrix.gla_outer import GLAOuter
from .matrix.rwkv7 import RWKV7
from .scans.mamba import Mamba
from .scans.rwkv4 import RWKV4
from .scans.s4 import S4, S4D

MIXERS: dict[type, type[nn.Module]] = {
    MixerSpec: LinearMixer, AttentionSpec: SoftmaxAttention, SoftmaxRNNSpec: SoftmaxRNN,
}  # fmt: skip
SCANS: dict[str, type[nn.Module]] = {"mamba": Mamba, "rwkv4": RWKV4, "s4": S4, "s4d": S4D}
MATRICES: dict[str, type[nn.Module]] = {"gla-outer": GLAOuter, "rwkv7": RWKV7}


def build(spec: Spec, *, causal: bool = True, **settings) -> nn.Module:
    """The mixer of a spec; settings are hidden_size, num_heads, layer_idx, num_layers, norm_eps, rope_theta.

    causal: False for an encoder's, whose tokens see all others of their sequence."""
    spec.head_dims(settings["hidden_size"], settings.get("num_heads", 1))  # raises for what no layer can be made of
    if isinstance(spec, AttentionSpec | SoftmaxRNNSpec):
        settings["causal"] = causal
    elif not causal:
        return BothWays(*(build(spec, **settings) for _ in range(2)))
    kinds = SCANS | MATRICES
    mixer = kinds[spec.kind] if isinstance(spec, ScanSpec | MatrixSpec) else MIXERS[type(spec)]
    return mixer(spec, **settings)


def Mixer(mixer, *, hidden_size: int, num_heads: int = 4, causal: bool = True, **settings) -> nn.Module:
    """The layer of a mixer, to build models of one's own with.

        layer = headrace.Mixer("softmax-gla", hidden_size=256, num_heads=4)
        y, state = layer(x)                             # x and y [B, T, hidden_size]
        y, state = layer(x, state)                      # the tokens after those, one or many
        y, state = layer(x, mask=mask)                  # mask [B, T], bool: False is padding, anywhere
        y, state = layer(x, cu_seqlens=cu_seqlens)      # x [1, T, D]: sequences with the bounds cu_seqlens [N + 1]

    Args:
        mixer: a name or an expression of the zoo (`headrace zoo`), or a spec.
        num_heads: unless the mixer sets its own.
        causal: False lets every token see all others of its sequence.
        settings: norm_eps, rope_theta; layer_idx and num_layers, for initialisations that depend on the place.
    Raises InputError for an unknown mixer, a whole model, and sizes that do not fit.
    """
    spec = zoo.mixer(mixer)
    if isinstance(spec, Decoder):
        raise InputError(f"mixer {mixer!r} is several layers; expected the mixer of one")
    spec.head_dims(hidden_size, num_heads)
    return build(spec, causal=causal, hidden_size=hidden_size, num_heads=num_heads, **settings)


__all__ = ["BothWays", "LinearMixer", "Mixer", "MixerState", "SoftmaxAttention", "build"]
