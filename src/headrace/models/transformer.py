"""Encoder and decoder of attention, the Transformer of 2017 (arXiv 1706.03762) and T5 (arXiv 1910.10683); or of any
other mixer, with cross attention between them.

Dimensions: B batch, L source positions, T target positions, D hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.attention.attention import AttentionState, SoftmaxAttention
from ..layers.stack import Backbone, Sizes, default_intermediate_size, initialise, padding_mask
from ..ops.checks import require
from ..spec.stack import StackSpec, TransformerSpec
from .encoder_decoder import Decoded, EncoderDecoder, ModelSizes


def block_sizes(spec: StackSpec, sizes: ModelSizes) -> Sizes:
    width = sizes.intermediate_size or default_intermediate_size(sizes.hidden_size, spec.style.gated)
    return Sizes(
        sizes.hidden_size, sizes.num_heads, width, sizes.norm_eps, max_positions=sizes.max_positions, style=spec.style
    )


def stack(spec: StackSpec, sizes: ModelSizes, **changes: Any) -> Backbone:
    """The blocks of a model; changes are other fields of `Sizes`. A bias for distances is one for all of them."""
    made = Backbone([spec.mixer] * sizes.num_layers, replace(block_sizes(spec, sizes), **changes))
    for layer in made.layers:
        if isinstance(mixer := layer.mixer, SoftmaxAttention):
            mixer.bias = made.layers[0].mixer.bias  # type: ignore[union-attr, assignment]
    return made


class TransformerModel(EncoderDecoder):
    """One embedding for source, target and logits. No alignments are kept. InputError for a source of padding alone."""

    def __init__(self, spec: TransformerSpec, sizes: ModelSizes):
        super().__init__(sizes, spec.label_smoothing)
        self.spec = spec
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.encoder = stack(spec, sizes, causal=False)
        self.decoder = stack(spec, sizes, cross=spec.cross)
        self.apply(initialise)
        self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Embeddings as the blocks see them, and logits of attention, begin with a variance of 1."""
        if self.spec.scaled == "input":
            self.embedding.weight *= self.sizes.hidden_size**-0.5
        for module in self.modules():
            if isinstance(module, SoftmaxAttention) and module.spec.scale == "one":
                module.q_proj.weight *= module.head_dim**-0.5

    def encode(self, input_ids: Tensor, valid: Tensor) -> list[AttentionState]:
        """-> what each block of the decoder reads of the source, made once."""
        require(bool(valid.any(1).all()), "attention_mask has a row of padding alone; expected a token in each")
        x = self._embed(input_ids)
        mask = padding_mask(valid, x, None)
        return self.decoder.remember(self.encoder(x, mask=mask)[0], mask)

    def decode(self, ids: Tensor, source: Any, state: Any = None, *, align: bool = False) -> Decoded:
        x, state = self.decoder(self._embed(ids), state, memories=source)
        x = x * self.sizes.hidden_size**-0.5 if self.spec.scaled == "output" else x
        return Decoded(F.linear(x, self.embedding.weight), None, state)

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x * self.sizes.hidden_size**0.5 if self.spec.scaled == "input" else x
