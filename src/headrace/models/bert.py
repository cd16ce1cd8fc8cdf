"""BERT (arXiv 1810.04805): an encoder that says which tokens stood at masked places, and whether its second segment
follows the first. Names of arguments are transformers'.

Dimensions: B batch, T tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..layers.stack import build_norm, initialise, padding_mask
from ..ops.checks import require
from ..spec.stack import BertSpec
from .encoder_decoder import ModelSizes, mean_loss
from .transformer import block_sizes, stack

INITIAL_STD = 0.02


@dataclass
class BertOutput(ModelOutput):
    """loss: the sum of the means over masked tokens and over rows, of those that labels are given for."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, T, V], of the token at every place
    next_logits: Tensor | None = None  # [B, 2], of 0: the second segment follows the first, and 1: it does not


class BertModel(nn.Module):
    """The first column is read by the head for segments: padding belongs to the end. Logits share the embedding."""

    def __init__(self, spec: BertSpec, sizes: ModelSizes):
        super().__init__()
        D = sizes.hidden_size
        self.embedding = nn.Embedding(sizes.vocab_size, D)
        self.segments = nn.Embedding(2, D)
        self.encoder = stack(spec, sizes, causal=False)
        self.token_head = nn.Sequential(nn.Linear(D, D), nn.GELU(), build_norm(block_sizes(spec, sizes)))
        self.token_bias = nn.Parameter(torch.zeros(sizes.vocab_size))
        self.next_head = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
        self.apply(partial(initialise, std=INITIAL_STD))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        labels: Tensor | None = None, next_sentence_label: Tensor | None = None,
    ) -> BertOutput:  # fmt: skip
        """input_ids, attention_mask, token_type_ids (of the segment: 0, 1), labels [B, T]; next_sentence_label [B]."""
        x = self.embedding(input_ids)
        x = x + self.segments(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        mask = padding_mask(attention_mask, x, None)
        require(
            mask is None or bool(mask[:, 0].all()), "attention_mask hides a row's first token; expected padding last"
        )
        x, _ = self.encoder(x, mask=mask)
        logits = F.linear(self.token_head(x), self.embedding.weight, self.token_bias)
        next_logits = self.next_head(x[:, 0])
        losses = [
            mean_loss(*pair) for pair in ((logits, labels), (next_logits, next_sentence_label)) if pair[1] is not None
        ]
        return BertOutput(torch.stack(losses).sum() if losses else None, logits, next_logits)
