"""Language models of one shape with random weights: those of headrace, and models of transformers of equal width and
depth."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from .. import zoo
from ..convert.checkpoint import read_config
from ..hf.config import HeadraceConfig
from ..hf.model import HeadraceForCausalLM
from ..layers.blocks.widths import default_intermediate_size
from ..spec.expression import split
from ..spec.linear import MixerSpec
from ..utils.errors import InputError

LONGEST = 2**20  # tokens
config_once = lru_cache(read_config)  # of the Hub or a GGUF file, for which it takes seconds; a folder may change


@dataclass(frozen=True)
class Shape:
    """Size of the models. The default is the 340M model of arXiv 2602.01744, table 5."""

    layers: int = 24
    hidden_size: int = 1024
    heads: int = 4
    vocab_size: int = 32000


def ours(name: str, shape: Shape) -> HeadraceConfig:
    """The config of a checkpoint or of a mixer in a model of the shape. Mamba-2 has no MLP, as in transformers; layers
    of other mixers, and of Mamba-2 beside others, have one."""
    return checkpoint_config(name) or HeadraceConfig(
        mixer=name, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_heads=shape.heads, mlp="none" if all("mamba2" in each for each in split(name, "+")) else None,
    )  # fmt: skip


def mamba2(shape: Shape) -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_heads=2 * shape.hidden_size // 64, head_dim=64, n_groups=1, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def qwen3_next(shape: Shape) -> nn.Module:
    """Qwen3-Next with a gated delta net in every layer, the head sizes of headrace's gated-deltanet, and a dense MLP in
    place of experts."""
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


def checkpoint_config(name: str) -> HeadraceConfig | None:
    """The config of a checkpoint by its folder or its name on the Hub; None for a model of PEERS and for a mixer, whose
    name a folder may have too."""
    if name in PEERS or name in zoo.names():
        return None
    if Path(name).is_dir():
        return read_config(name)
    return config_once(name) if "/" in name or Path(name).exists() else None


def build(name: str, shape: Shape) -> nn.Module:
    """A model by its name in PEERS, by a name or expression of the zoo, or by a checkpoint, which keeps its own sizes.
    The weights are random, and the same each time."""
    torch.manual_seed(0)
    return PEERS[name](shape) if name in PEERS else HeadraceForCausalLM(ours(name, shape))


def check(name: str, shape: Shape) -> None:
    """InputError for sizes that the model cannot have."""
    if checkpoint_config(name) is not None:
        return
    if name in PEERS and shape.hidden_size % min(64, shape.hidden_size):
        raise InputError(f"--hidden-size={shape.hidden_size}; expected a multiple of 64 for {name}")
    try:
        with torch.device("meta"):
            build(name, replace(shape, layers=1))
    except StrictDataclassError as error:  # of transformers' configs
        sizes = f"--hidden-size={shape.hidden_size} --heads={shape.heads}"
        raise InputError(f"{name} cannot have {sizes}: {' '.join(str(error).split())}") from None


def obstacle(name: str, shape: Shape, device: str, tokens: int) -> str | None:
    """Why the model cannot be measured on the device with sequences of so many tokens, or None."""
    if name == "transformers-qwen3-next" and device == "cpu" and find_spec("fla"):
        return "where FLA is installed, transformers computes it with FLA's kernels, which need a GPU"
    return None if name in PEERS else too_long(ours(name, shape), tokens)


def too_long(config: HeadraceConfig, tokens: int) -> str | None:
    """Why a sequence of so many tokens is beyond learned positions, or None."""
    longest, learned = config.max_position_embeddings, config.sizes.style.positions == "learned"
    return f"the model has positions for {longest:,} tokens" if learned and tokens > longest else None


def named(text: str) -> tuple[str, ...]:
    """The names in a list of models; the softmax version of each backbone follows the backbone. InputError for an
    unknown name or an empty list."""
    names: dict[str, None] = {}
    for name in zoo.several(text):
        if name not in PEERS and name.startswith("transformers-"):
            raise InputError(f"--mixers: {name!r} is unknown; expected one of {', '.join(PEERS)}, or a name of the zoo")
        names[name] = None
        if name not in PEERS and checkpoint_config(name) is None and competes(name):
            names[f"softmax-{name}"] = None
    return tuple(names)


def competes(name: str) -> bool:
    """Whether the mixer is a backbone with a softmax version."""
    spec = zoo.mixer(name)
    return isinstance(spec, MixerSpec) and spec.competition is None and not name.startswith("softmax-")


def cache_bytes(name: str, shape: Shape, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of `tokens` tokens; 0 for a model without a key-value cache."""
    if name in PEERS:
        return 2 * shape.hidden_size * shape.layers * tokens * itemsize * (name == "transformers-llama")
    config = ours(name, shape)
    cached = [spec for spec in config.mixers if spec.facts.cached]
    return sum(spec.state_bytes(config.hidden_size, config.num_heads, tokens, itemsize=itemsize) for spec in cached)
