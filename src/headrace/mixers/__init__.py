"""Token mixers: x [B, T, D] and a state in, y [B, T, D] and a state out."""

from torch import nn

from ..spec import AttentionSpec, MatrixSpec, MixerSpec, ScanSpec, SoftmaxRNNSpec, Spec
from .attention import SoftmaxAttention
from .both_ways import BothWays
from .gla_outer import GLAOuter
from .layer import LinearMixer, MixerState
from .mamba import Mamba
from .rwkv4 import RWKV4
from .rwkv7 import RWKV7
from .s4 import S4, S4D
from .softmax_rnn import SoftmaxRNN

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


__all__ = ["BothWays", "LinearMixer", "MixerState", "SoftmaxAttention", "build"]
