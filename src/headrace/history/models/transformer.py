"""The Transformer encoder-decoder (arXiv 1706.03762) and T5 (arXiv 1910.10683), with any mixer in place of
self-attention.

Dimensions: B batch, L source positions, T target positions, D hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.attention.attention import AttentionState, SoftmaxAttention
from ...layers.blocks.block import Sizes
from ...layers.blocks.stack import Backbone, initialize
from ...layers.blocks.widths import default_intermediate_size
from ...layers.packing import padding_mask
from ...ops.checks import require
from ..specs.stack import StackSpec, TransformerSpec
from .encoder_decoder import Decoded, EncoderDecoder, ModelSizes


def block_sizes(spec: StackSpec, sizes: ModelSizes) -> Sizes:
    """Returns the settings of the blocks of a model."""
    width = sizes.intermediate_size or default_intermediate_size(sizes.hidden_size, spec.style.gated)
    return Sizes(
        sizes.hidden_size, sizes.num_heads, width, sizes.norm_eps, max_positions=sizes.max_positions, style=spec.style
    )


def stack(spec: StackSpec, sizes: ModelSizes, **changes: Any) -> Backbone:
    """Returns the blocks of a model, which share one relative position bias. changes: further fields of `Sizes`."""
    backbone = Backbone([spec.mixer] * sizes.num_layers, replace(block_sizes(spec, sizes), **changes))
    for layer in backbone.layers:
        if isinstance(mixer := layer.mixer, SoftmaxAttention):
            mixer.bias = backbone.layers[0].mixer.bias  # type: ignore[union-attr, assignment]
    return backbone


class TransformerModel(EncoderDecoder):
    """A Transformer encoder-decoder with one embedding for source, target and logits. It returns no alignments.

    Raises InputError for a source without tokens."""

    def __init__(self, spec: TransformerSpec, sizes: ModelSizes):
        super().__init__(sizes, spec.label_smoothing)
        self.spec = spec
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.encoder = stack(spec, sizes, causal=False)
        self.decoder = stack(spec, sizes, cross=spec.cross)
        self.apply(initialize)
        self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Scales initial weights, so that the blocks' input and the attention logits have variance 1."""
        if self.spec.scaled == "input":
            self.embedding.weight *= self.sizes.hidden_size**-0.5
        for module in self.modules():
            if isinstance(module, SoftmaxAttention) and module.spec.scale == "one":
                module.q_proj.weight *= module.head_dim**-0.5
                module.reset_parameters()

    def encode(self, input_ids: Tensor, valid: Tensor) -> list[AttentionState]:
        """Returns the source's keys and values for the cross-attention of each decoder block."""
        require(bool(valid.any(1).all()), "attention_mask has a row without tokens; expected a token in each row")
        x = self._embed(input_ids)
        mask = padding_mask(valid, x, False)
        return self.decoder.remember(self.encoder(x, mask=mask)[0], mask)

    def decode(self, ids: Tensor, source: Any, state: Any = None, *, align: bool = False) -> Decoded:
        x, state = self.decoder(self._embed(ids), state, memories=source)
        x = x * self.sizes.hidden_size**-0.5 if self.spec.scaled == "output" else x
        return Decoded(F.linear(x, self.embedding.weight), None, state)

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x * self.sizes.hidden_size**0.5 if self.spec.scaled == "input" else x
