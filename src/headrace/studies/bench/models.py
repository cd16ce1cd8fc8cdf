"""Language models of one shape: ours, and transformers' own of equal width and depth, with weights at random."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers
from torch import nn

from ... import zoo
from ...hf.config import HeadraceConfig
from ...hf.model import HeadraceForCausalLM
from ...layers.stack import default_intermediate_size
from ...spec.linear import CACHED, MixerSpec
from ...utils.errors import InputError

LONGEST = 2**20  # tokens


@dataclass(frozen=True)
class Shape:
    """The paper's 340M by default: table 5 of arXiv 2602.01744."""

    layers: int = 24
    hidden_size: int = 1024
    heads: int = 4
    vocab_size: int = 32000


def ours(mixer: str, shape: Shape) -> nn.Module:
    """Mamba-2 has no MLP, here as in transformers; all others have."""
    config = HeadraceConfig(
        mixer=mixer, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_heads=shape.heads, mlp="none" if "mamba2" in mixer else "swiglu",
    )  # fmt: skip
    return HeadraceForCausalLM(config)


def mamba2(shape: Shape) -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_heads=2 * shape.hidden_size // 64, head_dim=64, n_groups=1, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def qwen3_next(shape: Shape) -> nn.Module:
    """Its gated delta net in every layer, with our gated-deltanet's heads, and a dense MLP instead of experts."""
    key, value = zoo.get("gated-deltanet").head_dims(shape.hidden_size, shape.heads)[-2:]
    config = transformers.Qwen3NextConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        intermediate_size=default_intermediate_size(shape.hidden_size),
        layer_types=["linear_attention"] * shape.layers, mlp_only_layers=list(range(shape.layers)),
        linear_key_head_dim=key, linear_value_head_dim=value, linear_num_key_heads=shape.heads,
        linear_num_value_heads=shape.heads, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def llama(shape: Shape) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        intermediate_size=default_intermediate_size(shape.hidden_size),
        num_attention_heads=shape.hidden_size // 64 or 1, tie_word_embeddings=True, max_position_embeddings=LONGEST,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


PEERS: dict[str, Callable[[Shape], nn.Module]] = {
    "transformers-llama": llama,
    "transformers-mamba2": mamba2,
    "transformers-qwen3-next": qwen3_next,
}


def build(name: str, shape: Shape) -> nn.Module:
    """One of ours, by a name or expression of the zoo, or one of PEERS. The same weights each time."""
    torch.manual_seed(0)
    return PEERS[name](shape) if name in PEERS else ours(name, shape)


def check(name: str, shape: Shape) -> None:
    """InputError for a width that the heads cannot share."""
    if name in PEERS and shape.hidden_size % min(64, shape.hidden_size):
        raise InputError(f"--hidden-size={shape.hidden_size}; expected a multiple of 64 for {name}")
    with torch.device("meta"):
        build(name, replace(shape, layers=1))


def named(text: str) -> tuple[str, ...]:
    """What a user lists, each linear mixer with its softmax version after it. InputError for what does not exist."""
    found: dict[str, None] = {}
    for name in zoo.several(text):
        if name not in PEERS and name.startswith("transformers-"):
            raise InputError(f"--mixers: {name!r} is unknown; expected one of {', '.join(PEERS)}, or a name of the zoo")
        found[name] = None
        if name not in PEERS and competes(name):
            found[f"softmax-{name}"] = None
    return tuple(found)


def competes(name: str) -> bool:
    """Whether this is a backbone that has a softmax version."""
    spec = zoo.mixer(name)
    return isinstance(spec, MixerSpec) and spec.competition is None and not name.startswith("softmax-")


def cache_bytes(name: str, shape: Shape, tokens: int, itemsize: int) -> int:
    """Of the keys and values of so many tokens; 0 for a model whose state does not grow."""
    if name in PEERS:
        return 2 * shape.hidden_size * shape.layers * tokens * itemsize * (name == "transformers-llama")
    spec = zoo.mixer(name)
    if not isinstance(spec, CACHED):
        return 0
    return shape.layers * spec.state_bytes(shape.hidden_size, shape.heads, itemsize, tokens)
