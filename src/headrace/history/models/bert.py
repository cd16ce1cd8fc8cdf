"""BERT (arXiv 1810.04805): an encoder trained to predict masked tokens and whether the second segment follows the
first. The names of arguments are those of transformers.

Dimensions: B batch, T tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ...layers.blocks.block import build_norm
from ...layers.blocks.stack import initialize
from ...layers.blocks.widths import default_std
from ...layers.packing import padding_mask
from ...ops.checks import require
from ..specs.stack import BertSpec
from .encoder_decoder import ModelSizes, mean_loss
from .transformer import block_sizes, stack


@dataclass
class BertOutput(ModelOutput):
    """Output of `BertModel`."""

    loss: Tensor | None = None  # mean over masked tokens plus mean over rows; only the terms that have labels
    logits: Tensor | None = None  # [B, T, V], of the token at every position
    next_logits: Tensor | None = None  # [B, 2]; class 0: the second segment follows the first, class 1: it does not


class BertModel(nn.Module):
    """The model. The next-sentence head reads the first token, so that padding must be at the end of a row. The token
    logits use the embedding's weights."""

    def __init__(self, spec: BertSpec, sizes: ModelSizes):
        super().__init__()
        D = sizes.hidden_size
        self.embedding = nn.Embedding(sizes.vocab_size, D)
        self.segments = nn.Embedding(2, D)
        self.encoder = stack(spec, sizes, causal=False)
        self.token_head = nn.Sequential(nn.Linear(D, D), nn.GELU(), build_norm(block_sizes(spec, sizes)))
        self.token_bias = nn.Parameter(torch.zeros(sizes.vocab_size))
        self.next_head = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
        self.apply(partial(initialize, std=sizes.initializer_range or default_std(D)))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        labels: Tensor | None = None, next_sentence_label: Tensor | None = None,
    ) -> BertOutput:  # fmt: skip
        """Computes the logits, and the loss for the labels given.

        Args:
            input_ids, attention_mask: [B, T]; a 0 in the mask marks padding.
            token_type_ids: [B, T], the segment (0 or 1) of each token; None: 0.
            labels: [B, T], the tokens at masked positions, −100 elsewhere.
            next_sentence_label: [B], the class of `next_logits`.

        Raises:
            InputError: for a mask that does not fit, or that marks a row's first token as padding.
        """
        require(input_ids.shape[1] > 0, f"input_ids has shape {list(input_ids.shape)}; expected at least one token")
        x = self.embedding(input_ids)
        x = x + self.segments(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        mask = padding_mask(attention_mask, x, False)
        require(
            mask is None or bool(mask[:, 0].all()),
            "attention_mask marks a row's first token as padding; expected padding at the end",
        )
        x, _ = self.encoder(x, mask=mask)
        logits = F.linear(self.token_head(x), self.embedding.weight, self.token_bias)
        next_logits = self.next_head(x[:, 0])
        losses = [
            mean_loss(*pair) for pair in ((logits, labels), (next_logits, next_sentence_label)) if pair[1] is not None
        ]
        return BertOutput(torch.stack(losses).sum() if losses else None, logits, next_logits)
