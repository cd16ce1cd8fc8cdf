"""The named models. `headrace.models.build` builds the encoder-decoders and BERT, HeadraceConfig(mixer=…) the
decoders."""

from dataclasses import replace

from ..spec.attention import AttentionSpec
from ..spec.encoder_decoder import Alignment, RecurrentSpec
from ..spec.stack import BertSpec, BlockStyle, Decoder, Experts, Layer, TransformerSpec
from .mixers import MAMBA, Entry

MODELS: dict[str, Entry] = {
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
    "gpt": Entry(
        "Causal softmax attention with learned positions; GPT-2.",
        "https://openai.com/research/better-language-models",
        Decoder(
            (Layer(AttentionSpec(rotary=False, bias=True)),),
            BlockStyle("layer", mlp="gelu-tanh", bias=True, positions="learned"),
        ),
    ),
    "jamba": Entry(
        "Mamba layers, with attention in one layer of eight and a mixture of experts in every second.",
        "https://arxiv.org/abs/2403.19887",
        Decoder(
            tuple(
                Layer(
                    AttentionSpec(kv_heads=2, rotary=False) if i == 4 else replace(MAMBA, norm=True),
                    "experts" if i % 2 else "one",
                )
                for i in range(8)
            ),
            BlockStyle(experts=Experts()),
        ),
    ),
    "zamba": Entry(
        "Mamba layers and one attention block that every sixth layer shares.",
        "https://arxiv.org/abs/2405.16712",
        Decoder(
            tuple(Layer(MAMBA, "none", shared=i == 2) for i in range(6)),
            BlockStyle(mlp="geglu", shared=AttentionSpec(rotary=False, scale="half-key")),
        ),
    ),
}
