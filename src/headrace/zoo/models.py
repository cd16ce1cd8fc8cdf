"""The named decoders, which HeadraceConfig(mixer=…) builds."""

from ..spec.attention import AttentionSpec
from ..spec.stack import BlockStyle, Decoder, Layer
from .entry import Entry

MODELS: dict[str, Entry] = {
    "gpt": Entry(
        "Causal softmax attention with learned positions; GPT-2.",
        "https://openai.com/research/better-language-models",
        Decoder(
            (Layer(AttentionSpec(rotary=False, bias=True)),),
            BlockStyle("layer", mlp="gelu-tanh", bias=True, positions="learned"),
        ),
    ),
}
