"""Recurrent encoder-decoders without attention (arXiv 1409.3215), with Bahdanau's (arXiv 1409.0473) and with Luong's
attention (arXiv 1508.04025).

Dimensions: B batch, L source positions, T target positions, n hidden size, M width of an annotation (n, or 2 n for a
bidirectional encoder).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ...ops.checks import require
from ..layers.alignment import AlignmentAttention, Memory
from ..specs.encoder_decoder import RecurrentSpec
from .encoder_decoder import Decoded, EncoderDecoder, ModelSizes

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}
Cell = Tensor | tuple[Tensor, Tensor]  # the cell's state [layers, B, n]; for an LSTM a pair


class State(NamedTuple):
    """The state of a decoder."""

    cell: Cell
    fed: Tensor  # [B, 1, n], the attentional vector of the last step; zeros before the first step
    step: int = 0  # number of target tokens so far


class WithoutAttention(nn.Module):
    """A decoder without attention."""

    sequential = False

    def __init__(self, spec: RecurrentSpec, n: int, M: int, layers: int):
        super().__init__()
        self.rnn = CELLS[spec.cell](n, n, layers, batch_first=True)

    def forward(self, y: Tensor, state: State, memory: Memory | None) -> tuple[Tensor, Tensor | None, State]:
        out, cell = self.rnn(y, state.cell)
        return out, None, state._replace(cell=cell)


class Bahdanau(nn.Module):
    """Bahdanau's decoder: the state before the step is the query, the context vector is an input of the step, and the
    output is a maxout of the new state (equation 4; appendix A.2.2 prints the one before), the token and the context.
    PyTorch's GRU applies the reset gate after the recurrent matrix, the paper's before it."""

    sequential = True

    def __init__(self, spec: Any, n: int, M: int, layers: int):
        super().__init__()
        self.rnn = CELLS[spec.cell](n + M, n, layers, batch_first=True)
        self.attention = AlignmentAttention(spec.alignment, n, M)
        self.out = nn.Linear(2 * n + M, 2 * n)

    def forward(self, y: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensor, State]:
        context, weights = self.attention(_top(state.cell), memory, state.step)
        s, cell = self.rnn(torch.cat([y, context], -1), state.cell)
        out = self.out(torch.cat([s, y, context], -1)).unflatten(-1, (-1, 2)).amax(-1)
        return out, weights, state._replace(cell=cell, step=state.step + 1)


class Luong(nn.Module):
    """Luong's decoder: the state after the step is the query, and the output is h~ = tanh(W [context; state]), which is
    an input of the next step with input feeding."""

    def __init__(self, spec: Any, n: int, M: int, layers: int):
        super().__init__()
        self.sequential = spec.alignment.feed
        self.rnn = CELLS[spec.cell](n + n * self.sequential, n, layers, batch_first=True)
        self.attention = AlignmentAttention(spec.alignment, n, M)
        self.out = nn.Linear(M + n, n, bias=False)

    def forward(self, y: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensor, State]:
        h, cell = self.rnn(torch.cat([y, state.fed], -1) if self.sequential else y, state.cell)
        context, weights = self.attention(h, memory, state.step)
        out = torch.tanh(self.out(torch.cat([context, h], -1)))
        return out, weights, State(cell, out[:, -1:], state.step + y.shape[1])


DECODERS = {None: WithoutAttention, "before": Bahdanau, "after": Luong}


class Source(NamedTuple):
    """An encoded source."""

    memory: Memory | None  # annotations, for attention
    cell: Cell  # initial state of the decoder


class RecurrentModel(EncoderDecoder):
    """A recurrent encoder-decoder. Raises InputError for padding before the end of a source."""

    def __init__(self, spec: RecurrentSpec, sizes: ModelSizes):
        super().__init__(sizes)
        n, layers = sizes.hidden_size, sizes.num_layers
        self.spec = spec
        self.source_embedding = nn.Embedding(sizes.vocab_size, n)
        self.target_embedding = nn.Embedding(sizes.vocab_size, n)
        self.encoder = CELLS[spec.cell](n, n, layers, batch_first=True, bidirectional=spec.bidirectional)
        self.first_state = nn.Linear(n, n) if spec.bidirectional else None
        decoder = DECODERS[None if spec.alignment is None else spec.alignment.query]
        self.decoder: Any = decoder(spec, n, n * (2 if spec.bidirectional else 1), layers)
        self.lm_head = nn.Linear(n, sizes.vocab_size)

    def encode(self, input_ids: Tensor, valid: Tensor) -> Source:
        lengths = valid.sum(1)
        places = torch.arange(valid.shape[1], device=valid.device)
        at_end = torch.equal(valid, places < lengths[:, None]) and bool(lengths.all())
        require(
            at_end, "attention_mask has padding before a token, or a row without tokens; expected padding at the end"
        )
        x = pack_padded_sequence(self.source_embedding(input_ids), lengths.cpu(), True, enforce_sorted=False)
        packed, cell = self.encoder(x)
        annotations, _ = pad_packed_sequence(packed, True, total_length=valid.shape[1])
        aligned = None if self.spec.alignment is None else self.decoder.attention.memory(annotations, valid)
        return Source(aligned, self._first(cell))

    def _first(self, cell: Cell) -> Cell:
        """Returns the decoder's initial state: the encoder's last state. For a bidirectional encoder, the state of the
        backward direction, with tanh(W h) for h."""
        if self.first_state is None:
            return cell
        h, *c = (part[1::2] for part in (cell if isinstance(cell, tuple) else (cell,)))
        h = torch.tanh(self.first_state(h))
        return (h, c[0].contiguous()) if c else h

    def decode(self, ids: Tensor, source: Source, state: Any = None, *, align: bool = False) -> Decoded:
        y, outs, alignments = self.target_embedding(ids), [], []
        state = state or State(source.cell, torch.zeros_like(y[:, :1]))
        for part in y.split(1 if self.decoder.sequential else y.shape[1], 1):
            out, weights, state = self.decoder(part, state, source.memory)
            outs.append(out)
            alignments.append(weights)
        aligned = None if source.memory is None else torch.cat(alignments, 1)
        return Decoded(self.lm_head(torch.cat(outs, 1)), aligned, state)


def _top(cell: Cell) -> Tensor:
    """Returns h of the last layer, [B, 1, n]."""
    h = cell[0] if isinstance(cell, tuple) else cell
    return h[-1][:, None]
