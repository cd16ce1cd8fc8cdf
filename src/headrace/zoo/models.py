"""The named decoders, which HeadraceConfig(mixer=…) builds."""

from dataclasses import replace

from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Decoder, Experts, Layer
from .entry import Entry
from .mixers import MAMBA

MODELS: dict[str, Entry] = {
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
