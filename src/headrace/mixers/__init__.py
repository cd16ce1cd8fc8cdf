"""Token mixers: x [B, T, D] and a state in, y [B, T, D] and a state out."""

from torch import nn

from ..spec import AttentionSpec, MixerSpec
from .attention import SoftmaxAttention
from .layer import LinearMixer, MixerState

MIXERS: dict[type, type[nn.Module]] = {MixerSpec: LinearMixer, AttentionSpec: SoftmaxAttention}


def build(spec: MixerSpec | AttentionSpec, **settings) -> nn.Module:
    """The mixer of a spec; settings are hidden_size, num_heads, layer_idx, num_layers, norm_eps, rope_theta."""
    return MIXERS[type(spec)](spec, **settings)


__all__ = ["LinearMixer", "MixerState", "SoftmaxAttention", "build"]
