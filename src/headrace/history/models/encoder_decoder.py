"""The base of encoder-decoders: inputs, loss and greedy decoding.

The conventions are those of transformers: labels of −100 are ignored, the decoder's input is the labels shifted right
after a start token, and `attention_mask` is 0 at the source's padding.

Dimensions: B batch, L source positions, T target positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ...layers.packing import token_mask
from ...ops.call import accumulator
from ...ops.checks import require
from ...ops.loss import IGNORED, per_item
from ...spec.record import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Record


@dataclass(frozen=True)
class ModelSizes(Record):
    """Sizes and special tokens of a whole model. The default tokens are T5's."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt = 64
    num_heads: PositiveInt = 4
    num_layers: PositiveInt = 1
    intermediate_size: PositiveInt | None = None  # width of the MLP; None: the default for hidden_size
    initializer_range: PositiveFloat | None = None  # standard deviation of BERT's initial weights; None: 0.64 / √D
    max_positions: PositiveInt = 512  # number of learned absolute positions
    norm_eps: NonNegativeFloat = 1e-6
    start_token_id: NonNegativeInt = 0  # the decoder's first input, and padding after the end of an output
    end_token_id: NonNegativeInt = 1  # ends an output


@dataclass
class EncoderDecoderOutput(ModelOutput):
    """Output of an encoder-decoder."""

    loss: Tensor | None = None  # mean cross-entropy, if labels are given
    logits: Tensor | None = None  # [B, T, V]
    alignments: Tensor | None = None  # [B, T, L], attention weights of each target position, on request


class Decoded(NamedTuple):
    """Output of a decoder for T target tokens."""

    logits: Tensor  # [B, T, V]
    alignments: Tensor | None  # [B, T, L]
    state: Any  # state for the next tokens


class EncoderDecoder(nn.Module):
    """Base of the encoder-decoders. A subclass defines `encode` and `decode`."""

    def __init__(self, sizes: ModelSizes, label_smoothing: float = 0.0):
        super().__init__()
        require(
            sizes.initializer_range is None,
            f"initializer_range={sizes.initializer_range}; expected None, as an encoder-decoder has its own rule",
        )
        self.sizes, self.label_smoothing = sizes, label_smoothing

    def encode(self, input_ids: Tensor, valid: Tensor) -> Any:
        """Encodes the source input_ids [B, L] for `decode`. valid [B, L]: False marks padding."""
        raise TypeError(f"{type(self).__name__} does not define encode")

    def decode(self, ids: Tensor, source: Any, state: Any = None, *, align: bool = False) -> Decoded:
        """Computes the logits after each of the next target tokens ids [B, T].

        Args:
            source: the result of `encode`.
            state: the state that the previous call returned; None: ids begin the target.
            align: whether to return alignments, if the model has any.
        """
        raise TypeError(f"{type(self).__name__} does not define decode")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None, *, output_alignments: bool = False,
    ) -> EncoderDecoderOutput:  # fmt: skip
        """Computes the logits [B, T, V], the loss if labels are given, and alignments [B, T, L] on request.

        Args:
            input_ids, attention_mask: the source [B, L]; a 0 in the mask marks padding.
            labels: the target [B, T].
            decoder_input_ids: input of the decoder [B, T]; None: the labels shifted right.

        Raises:
            InputError: without labels and decoder_input_ids, and for a mask that does not fit.
        """
        if decoder_input_ids is None:
            require(labels is not None, "labels=None and decoder_input_ids=None; expected one of them")
            decoder_input_ids = shift_right(labels, self.sizes.start_token_id)  # type: ignore[arg-type]
        source = self.encode(input_ids, valid_tokens(input_ids, attention_mask))
        decoded = self.decode(decoder_input_ids, source, align=output_alignments)
        loss = None
        if labels is not None:
            loss = mean_loss(decoded.logits, labels, self.label_smoothing if self.training else 0.0)
        return EncoderDecoderOutput(loss, decoded.logits, decoded.alignments if output_alignments else None)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, max_new_tokens: int = 20) -> Tensor:
        """Decodes greedily until every row has an end token, for at most max_new_tokens tokens.

        Returns the tokens [B, T] without the start token, which pads rows after their end token."""
        source, state = self.encode(input_ids, valid_tokens(input_ids, attention_mask)), None
        start, end = self.sizes.start_token_id, self.sizes.end_token_id
        token = torch.full_like(input_ids[:, :1], start)
        written: list[Tensor] = []
        ended = torch.zeros_like(token, dtype=torch.bool)
        while len(written) < max_new_tokens and not ended.all():
            logits, _, state = self.decode(token, source, state)
            token = logits.argmax(-1).masked_fill(ended, start)
            written.append(token)
            ended = ended | (token == end)
        return torch.cat(written, 1) if written else token[:, :0]


def mean_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the mean cross-entropy of logits [..., V] and labels [...] other than −100, in float32 or float64; 0
    without any."""
    shape, expected = list(labels.shape), list(logits.shape[:-1])
    require(shape == expected, f"labels have shape {shape}; expected {expected}")
    wide, labels = logits.to(accumulator(logits)).flatten(0, -2), labels.flatten()
    total = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return per_item(total, labels)


def shift_right(labels: Tensor, start: int) -> Tensor:
    """Returns the decoder's input [B, T] for labels [B, T]: the start token, then all labels except the last.

    Ignored labels are replaced by the start token, which also pads rows."""
    return F.pad(labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, start), (1, 0), value=start)


def valid_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns attention_mask as bool [B, L]; None: all True. Raises InputError if its shape differs from input_ids, or
    if it has values other than 0 and 1."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    shapes = list(attention_mask.shape), list(input_ids.shape)
    require(shapes[0] == shapes[1], f"attention_mask has shape {shapes[0]}; expected {shapes[1]}, as input_ids has")
    return token_mask(attention_mask.to(input_ids.device))
