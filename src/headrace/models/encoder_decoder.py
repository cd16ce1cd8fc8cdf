"""What whole encoder-decoders have in common: inputs, loss, and decoding token by token.

Conventions are those of transformers' encoder-decoders: labels of -100 are ignored, a decoder reads the labels shifted
to the right behind a start token, and `attention_mask` is False where the source is padded.

Dimensions: B batch, L source positions, T target positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..ops.call import accumulator
from ..ops.checks import require
from ..ops.loss import IGNORED
from ..spec.record import NonNegativeFloat, NonNegativeInt, PositiveInt, Record


@dataclass(frozen=True)
class ModelSizes(Record):
    """Sizes of a whole model, and the tokens that mean something to it: by default T5's."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt = 64
    num_heads: PositiveInt = 4
    num_layers: PositiveInt = 1
    intermediate_size: PositiveInt | None = None  # of an MLP, where there is one; None: the family's usual one
    max_positions: PositiveInt = 512  # of learned ones
    norm_eps: NonNegativeFloat = 1e-6
    start_token_id: NonNegativeInt = 0  # before the first target token, and after the last
    end_token_id: NonNegativeInt = 1


@dataclass
class EncoderDecoderOutput(ModelOutput):
    """loss: the mean over labels, where there are labels; alignments: what each target position read, if asked for."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, T, V]
    alignments: Tensor | None = None  # [B, T, L]


class Decoded(NamedTuple):
    """What a decoder makes of some target tokens."""

    logits: Tensor  # [B, T, V]
    alignments: Tensor | None  # [B, T, L]
    state: Any  # for the tokens after them


class EncoderDecoder(nn.Module):
    """A family says how it reads a source, in `encode`, and how it goes on with a target, in `decode`."""

    def __init__(self, sizes: ModelSizes, label_smoothing: float = 0.0):
        super().__init__()
        self.sizes, self.label_smoothing = sizes, label_smoothing

    def encode(self, input_ids: Tensor, valid: Tensor) -> Any:
        """input_ids [B, L], valid [B, L] (False: padding) -> whatever `decode` needs of the source."""
        raise TypeError(f"{type(self).__name__} does not say how it encodes")

    def decode(self, ids: Tensor, source: Any, state: Any = None, *, align: bool = False) -> Decoded:
        """The next target tokens ids [B, T], after those that left `state`; None: they are the first.

        align: alignments are wanted; without it they may be None."""
        raise TypeError(f"{type(self).__name__} does not say how it decodes")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None, *, output_alignments: bool = False,
    ) -> EncoderDecoderOutput:  # fmt: skip
        """input_ids [B, L], attention_mask [B, L], labels [B, T] -> loss, logits [B, T, V], alignments [B, T, L].

        The decoder reads `decoder_input_ids` [B, T], or the labels shifted. InputError where both are missing."""
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
        """The likeliest token at every step, up to the end token: [B, at most max_new_tokens], without the start token
        and, after a row's end, filled with it."""
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
    """Cross-entropy of logits [..., V] where labels [...] are not -100, in float32 or better."""
    wide = logits.to(accumulator(logits)).flatten(0, -2)
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, label_smoothing=label_smoothing)


def shift_right(labels: Tensor, start: int) -> Tensor:
    """labels [B, T] -> what the decoder reads [B, T]: the start token, then all labels but the last.

    An ignored label is read as the start token, which also fills rows up."""
    return F.pad(labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, start), (1, 0), value=start)


def valid_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """attention_mask as bool [B, L]. InputError where its shape is not that of input_ids."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    shapes = list(attention_mask.shape), list(input_ids.shape)
    require(shapes[0] == shapes[1], f"attention_mask has shape {shapes[0]}; expected {shapes[1]}, as input_ids have")
    return attention_mask.bool()
