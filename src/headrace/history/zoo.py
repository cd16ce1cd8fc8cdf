"""The named mixers and models of 2014 to 2020 and after, which few train today: rows for the tables of the core."""

from ..extra.specs.scan import KINDS, ScanKind, ScanSpec
from ..spec.attention import LAYERS, AttentionSpec, Pattern
from ..spec.mixer import Facts, Update
from ..spec.serialize import TYPES
from ..spec.stack import BlockStyle
from ..zoo import register
from ..zoo.mixers import Entry
from .specs.encoder_decoder import Alignment, RecurrentSpec
from .specs.softmax_rnn import SoftmaxRNNSpec
from .specs.stack import BertSpec, TransformerSpec

TYPES.update({"softmax-rnn": SoftmaxRNNSpec, "rnn": RecurrentSpec, "transformer": TransformerSpec, "bert": BertSpec})
LAYERS["early"] = "headrace.history.layers.attention.EarlyAttention"
# Operations are per state number and token; x is a complex number of a conjugate pair.
KINDS.update({
    "s4": ScanKind(
        Facts(
            "headrace.history.layers.s4.S4",
            Update("Ā", "B̄ u", "Ā, fixed", "Legendre coefficients of the past"),
            # of the two of a pair: P* x: 4; (1 + dt/2 A) x: 10; its solve by Woodbury's identity: 14; + B̄ u: 4;
            # 2 Re(C x): 4
            flops=18,
        ),
        ("state_size",),
        complex=True,
    ),
    "s4d": ScanKind(
        Facts(
            "headrace.history.layers.s4.S4D",
            Update("Ā, diagonal", "B̄ u", "Ā, fixed"),
            flops=7,  # of the two of a pair: Ā x: 6; + B̄ u: 4; 2 Re(C x): 4
        ),
        ("state_size",),
        complex=True,
    ),
    "rwkv4": ScanKind(
        Facts(
            "headrace.history.layers.rwkv4.RWKV4",
            Update("e^−w", "e^k v", "e^−w, per channel"),
            flops=3,  # of the three of a channel: the sums Σ e^k v and Σ e^k: 3 and 2; their ratio with the bonus: 4
        ),
        ("expand",),
        numbers=3,
        shift=True,
    ),
})  # fmt: skip

ENTRIES: dict[str, Entry] = {
    "s4d": Entry(
        "A time-invariant diagonal state-space model per channel.",
        "https://arxiv.org/abs/2206.11893",
        ScanSpec("s4d", state_size=64),
    ),
    "s4": Entry(
        "A time-invariant state-space model per channel, with HiPPO's matrix as diagonal plus low-rank.",
        "https://arxiv.org/abs/2111.00396",
        ScanSpec("s4", state_size=64),
    ),
    "rwkv4": Entry(
        "A weighted mean of past values per channel; the weights decay at a learned rate.",
        "https://arxiv.org/abs/2305.13048",
        ScanSpec("rwkv4"),
    ),
    "longformer": Entry(
        "A window of 64 tokens and 4 global tokens; the causal form is ours, an encoder's the published one.",
        "https://arxiv.org/abs/2004.05150",
        AttentionSpec(pattern=Pattern(window=64, first=4, global_projections=True)),
    ),
    "bigbird": Entry(
        "A window, global and random blocks of 16 tokens; the causal form is ours, an encoder's the published one.",
        "https://arxiv.org/abs/2007.14062",
        AttentionSpec(pattern=Pattern(window=48, first=16, random=3, block=16, last=16)),
    ),
    "flash-reference": Entry(
        "The transformer with FlashAttention's tiled algorithm in plain PyTorch, for study.",
        "https://arxiv.org/abs/2205.14135",
        AttentionSpec(form="tiles"),
    ),
    "softmax-rnn-norm": Entry(
        "Softmax attention whose denominator is the norm of its numerator.",
        "https://arxiv.org/abs/2507.23632",
        SoftmaxRNNSpec(denominator="l2"),
    ),
    "softmax-rnn-gate": Entry(
        "The denominator is the number of tokens, and a gate per head multiplies the output.",
        "https://arxiv.org/abs/2507.23632",
        SoftmaxRNNSpec(clamp=5.0, denominator="none", gate="output", by_length=True),
    ),
    "rnn": Entry(
        "Recurrent encoder-decoder; the decoder starts from the encoder's last state.",
        "https://arxiv.org/abs/1409.3215",
        RecurrentSpec(),
    ),
    "luong": Entry(
        "Recurrent encoder-decoder with attention; the query is the decoder's state after its step.",
        "https://arxiv.org/abs/1508.04025",
        RecurrentSpec(alignment=Alignment("general", query="after", feed=True)),
    ),
    "bahdanau": Entry(
        "The query is the decoder's state before its step, and the context vector is an input of the step.",
        "https://arxiv.org/abs/1409.0473",
        RecurrentSpec("gru", bidirectional=True, alignment=Alignment("additive", query="before")),
    ),
    "transformer-2017": Entry(
        "Encoder-decoder of self-attention and cross-attention.",
        "https://arxiv.org/abs/1706.03762",
        TransformerSpec(
            style=BlockStyle("layer", "post", "relu", bias=True, positions="sinusoidal"), label_smoothing=0.1
        ),
    ),
    "t5": Entry(
        "The Transformer with pre-norm RMSNorm, relative position biases and unscaled logits.",
        "https://arxiv.org/abs/1910.10683",
        TransformerSpec(AttentionSpec(rotary=False, buckets=32, scale="one"), BlockStyle(mlp="relu"), "output"),
    ),
    "bert": Entry(
        "A Transformer encoder, trained to predict masked tokens.",
        "https://arxiv.org/abs/1810.04805",
        BertSpec(
            AttentionSpec(rotary=False, bias=True),
            BlockStyle("layer", "post", "gelu", True, "learned", embedding_norm=True),
        ),
    ),
}

for _name, _entry in ENTRIES.items():
    register(_name, _entry)
