"""What came before, and what explains it: recurrent encoder-decoders with attention, the Transformer, T5 and BERT,
sparse and tiled attention, S4 and RWKV-4, and the softmax RNN. It stands on the core, which does not import it."""

from ..utils import tables

tables.offer(
    "headrace.history.zoo",
    scans=("s4", "s4d", "rwkv4"),
    scan_kinds=("s4", "s4d", "rwkv4"),
    attention=("longformer", "bigbird", "flash-reference"),
    others=("softmax-rnn-norm", "softmax-rnn-gate"),
    models=("rnn", "luong", "bahdanau", "transformer-2017", "t5", "bert"),
    types=("softmax-rnn", "rnn", "transformer", "bert"),
    attention_layers=("early",),
)
