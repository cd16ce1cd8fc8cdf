"""The named mixers and models. Each is a spec; adding an entry to a table makes the name available to the models, the
command line, the tests and the documentation.

Every linear mixer `X` also has a version `softmax-X`, in which its heads compete (`compete`).
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import asdict, replace

from .spec.encoder_decoder import Alignment, ModelSpec, RecurrentSpec
from .spec.linear import (
    AttentionSpec,
    Competition,
    Decay,
    Heads,
    Inputs,
    MatrixSpec,
    MixerSpec,
    Pattern,
    Read,
    ScanSpec,
    SoftmaxRNNSpec,
    Write,
    change_all,
    from_json,
    to_json,
)
from .spec.stack import BertSpec, BlockStyle, Decoder, Experts, Layer, StackSpec, TransformerSpec, as_layers
from .utils.errors import InputError

PAPER = Competition(read="query", write="value", scale="one")  # equations 3-16 of arXiv 2602.01744 as published

LINEAR: dict[str, MixerSpec] = {
    # The memory is the sum of k ᵀ v; the output is divided by the sum of weights. https://arxiv.org/abs/2006.16236
    "linear-attention": MixerSpec(inputs=Inputs(feature_map="elu+1"), read=Read("sum", scale="one")),
    # Linear attention on features whose product is 1 + q·k + (q·k)²/2, the second-order Taylor polynomial of softmax
    # attention's e^(q·k). https://arxiv.org/abs/2507.23632
    "taylor-softmax": MixerSpec(Heads(key_dim=16), Inputs(feature_map="taylor-2", rotary=True), read=Read("sum")),
    # Linear attention with a fixed decay per head, rotary positions and RMSNorm per head. https://arxiv.org/abs/2307.08621
    "retnet": MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("retnet"), read=Read("rms", "silu")),
    # RetNet with the decay of xPos: a fixed rate per key channel, the same for all heads. https://arxiv.org/abs/2212.10554
    "xpos-retnet": MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("xpos"), read=Read("rms", "silu")),
    # A step size dt, computed from the token, sets both decay and write strength. https://arxiv.org/abs/2405.21060
    "mamba2": MixerSpec(
        Heads(expand_k=4.0, expand_v=2.0, qk_groups=1), Inputs(conv=4, conv_bias=True), Decay("softplus"),
        Write(beta="dt"), Read("rms-joint", "silu", "gate-norm", scale="one", skip=True),
    ),
    # A decay per key channel, computed by a low-rank sigmoid gate. https://arxiv.org/abs/2312.06635
    "gla": MixerSpec(Heads(expand_k=0.5), decay=Decay("sigmoid", rank=16), read=Read("rms", "silu")),
    # A bonus weight for the current token; inputs are mixed with the previous token. https://arxiv.org/abs/2404.05892
    "rwkv6": MixerSpec(
        inputs=Inputs(shift="ddlerp"), decay=Decay("exp", rank=64), read=Read("group", "silu", scale="one", bonus=True)
    ),
    # Linear attention with the delta rule on sparse features (DPFP) that are normalised to sum 1.
    # https://arxiv.org/abs/2102.11174
    "delta-fast-weights": MixerSpec(
        inputs=Inputs(feature_map="dpfp-1", qk_norm="sum"), write=Write("delta", "sigmoid"),
        read=Read("none", scale="one"),
    ),
    # Delta rule: the value stored under k is removed before v is written. https://arxiv.org/abs/2406.06484
    "deltanet": MixerSpec(inputs=Inputs(conv=4, qk_norm="l2"), write=Write("delta", "sigmoid")),
    # DeltaNet with the decay of Mamba-2. https://arxiv.org/abs/2412.06464
    "gated-deltanet": MixerSpec(
        Heads(expand_k=0.75, expand_v=1.5), Inputs(conv=4, qk_norm="l2"), Decay("softplus"), Write("delta", "sigmoid"),
        Read("rms", "silu"),
    ),
    # Gated DeltaNet whose write strength β also depends on the error v − k S of the memory at the start of each chunk
    # of 16 tokens, with a weight initialised to 0. Original to this library; based on https://arxiv.org/abs/2412.06464
    "residual-delta": MixerSpec(
        Heads(expand_k=0.75, expand_v=1.5), Inputs(conv=4, qk_norm="l2"), Decay("softplus"),
        Write("delta", "sigmoid", look=16), Read("rms", "silu"),
    ),
    # Gated DeltaNet with a decay per key channel. https://arxiv.org/abs/2510.26692
    "kda": MixerSpec(
        inputs=Inputs(conv=4, qk_norm="l2"), decay=Decay("softplus-vector"), write=Write("delta", "sigmoid"),
        read=Read("rms", "sigmoid-low-rank"),
    ),
}  # fmt: skip

ATTENTION: dict[str, AttentionSpec] = {
    # Causal softmax attention with rotary positions (Transformer++); the baseline. https://arxiv.org/abs/2302.13971
    "transformer": AttentionSpec(),
    # Multi-query attention: all query heads share one key/value head. https://arxiv.org/abs/1911.02150
    "mqa": AttentionSpec(kv_heads=1),
    # Grouped-query attention: groups of query heads share a key/value head. https://arxiv.org/abs/2305.13245
    "gqa": AttentionSpec(kv_heads=2),
    # Each token attends to the last 64 tokens. https://arxiv.org/abs/2310.06825
    "sliding-window": AttentionSpec(pattern=Pattern(window=64)),
    # A window of 64 tokens and the first 4 tokens of the sequence. https://arxiv.org/abs/2004.05150
    "longformer": AttentionSpec(pattern=Pattern(window=64, first=4)),
    # A window, the first block and random blocks: 3, 1 and 3 blocks of 16 tokens. https://arxiv.org/abs/2007.14062
    "bigbird": AttentionSpec(pattern=Pattern(window=48, first=16, random=3, block=16)),
    # The transformer with FlashAttention's tiled algorithm in plain PyTorch, for study. https://arxiv.org/abs/2205.14135
    "flash-reference": AttentionSpec(form="tiles"),
}

SOFTMAX_RNNS: dict[str, SoftmaxRNNSpec] = {
    # Softmax attention whose denominator is the norm of its numerator. https://arxiv.org/abs/2507.23632
    "softmax-rnn-norm": SoftmaxRNNSpec(denominator="l2"),
    # The denominator is the number of tokens, and a gate per head multiplies the output.
    "softmax-rnn-gate": SoftmaxRNNSpec(clamp=5.0, denominator="output-gate", by_length=True),
}

SCANS: dict[str, ScanSpec] = {
    # A time-invariant diagonal state-space model per channel. https://arxiv.org/abs/2206.11893
    "s4d": ScanSpec("s4d", state_size=64),
    # A time-invariant state-space model per channel, with HiPPO's matrix as diagonal plus low-rank. https://arxiv.org/abs/2111.00396
    "s4": ScanSpec("s4", state_size=64),
    # A weighted mean of past values per channel; the weights decay at a learned rate. https://arxiv.org/abs/2305.13048
    "rwkv4": ScanSpec("rwkv4"),
    # A diagonal state-space model whose step size, B and C are computed from the token. https://arxiv.org/abs/2312.00752
    "mamba": ScanSpec("mamba", state_size=16, conv=4, expand=2.0),
}

MATRICES: dict[str, MatrixSpec] = {
    # GLA with a second gate, a decay per value channel. https://arxiv.org/abs/2312.06635
    "gla-outer": MatrixSpec("gla-outer", expand_k=0.5),
    # A delta rule whose removal key, replacement key and strength per channel are separate. https://arxiv.org/abs/2503.14456
    "rwkv7": MatrixSpec("rwkv7"),
}


# Whole models. `headrace.models.build` builds the encoder-decoders and BERT, HeadraceConfig(mixer=…) the decoders.
MODELS: dict[str, ModelSpec | Decoder] = {
    # Recurrent encoder-decoder; the decoder starts from the encoder's last state. https://arxiv.org/abs/1409.3215
    "rnn": RecurrentSpec(),
    # Recurrent encoder-decoder with attention; the query is the decoder's state after its step. https://arxiv.org/abs/1508.04025
    "luong": RecurrentSpec(alignment=Alignment("general", query="after", feed=True)),
    # The query is the decoder's state before its step, and the context vector is an input of the step. https://arxiv.org/abs/1409.0473
    "bahdanau": RecurrentSpec("gru", bidirectional=True, alignment=Alignment("additive", query="before")),
    # Encoder-decoder of self-attention and cross-attention. https://arxiv.org/abs/1706.03762
    "transformer-2017": TransformerSpec(
        style=BlockStyle("layer", "post", "relu", bias=True, positions="sinusoidal"), label_smoothing=0.1
    ),
    # The Transformer with pre-norm RMSNorm, relative position biases and unscaled logits. https://arxiv.org/abs/1910.10683
    "t5": TransformerSpec(AttentionSpec(rotary=False, buckets=32, scale="one"), BlockStyle(mlp="relu"), "output"),
    # A Transformer encoder, trained to predict masked tokens. https://arxiv.org/abs/1810.04805
    "bert": BertSpec(
        AttentionSpec(rotary=False, bias=True),
        BlockStyle("layer", "post", "gelu", True, "learned", embedding_norm=True),
    ),
    # Causal softmax attention with learned positions; GPT-2. https://openai.com/research/better-language-models
    "gpt": Decoder(
        (Layer(AttentionSpec(rotary=False, bias=True)),),
        BlockStyle("layer", mlp="gelu-tanh", bias=True, positions="learned"),
    ),
    # Mamba layers, with attention in one layer of eight and a mixture of experts in every second. https://arxiv.org/abs/2403.19887
    "jamba": Decoder(
        tuple(
            Layer(
                AttentionSpec(kv_heads=2, rotary=False) if i == 4 else replace(SCANS["mamba"], norm=True),
                "experts" if i % 2 else "one",
            )
            for i in range(8)
        ),
        BlockStyle(experts=Experts()),
    ),
    # Mamba layers and one attention block that every sixth layer shares. https://arxiv.org/abs/2405.16712
    "zamba": Decoder(
        tuple(Layer(SCANS["mamba"], "none", shared=i == 2) for i in range(6)),
        BlockStyle(mlp="geglu", shared=AttentionSpec(rotary=False, scale="half-key")),
    ),
}


def compete(spec: MixerSpec, competition: Competition | None = None) -> MixerSpec:
    """Returns the Softmax version of a linear mixer, whose heads compete for writes and reads (arXiv 2602.01744).

    competition: None takes the defaults of `Competition`."""
    return replace(spec, competition=competition or Competition())


def plain(spec):
    """Returns the spec with the competition removed from all its mixers: the spec that X and softmax-X share."""
    return each_mixer(spec, lambda mixer: replace(mixer, competition=None))


def each_mixer(spec, change: Callable[[MixerSpec], MixerSpec]):
    """Returns the spec with `change` applied to every linear mixer, including those in hybrids and whole models."""
    if isinstance(spec, Decoder):
        return replace(
            spec, layers=tuple(replace(layer, mixer=each_mixer(layer.mixer, change)) for layer in spec.layers)
        )
    if isinstance(spec, StackSpec):
        return replace(spec, mixer=each_mixer(spec.mixer, change))
    return change(spec) if isinstance(spec, MixerSpec) else spec


def names() -> list[str]:
    """Returns the names of all mixers, with and without competition. Whole models are in `MODELS`."""
    return [*LINEAR, *(f"softmax-{name}" for name in LINEAR), *SCANS, *MATRICES, *ATTENTION, *SOFTMAX_RNNS]


def get(mixer):
    """Returns the spec of a mixer or model given as a name, an expression, a dict (`to_json`) or a spec.

    An expression sets fields of a named spec: `softmax-gla(competition.activation=sigmoid, heads.count=8)`.
    `competition=paper` selects the equations of arXiv 2602.01744 as published, `competition=none` removes the gates.
    `bert(mixer=softmax-gla)` replaces the mixer of a whole model. `a+b` is a decoder whose layers alternate a and b.

    Raises:
        InputError: for an unknown name or field, and for a value that a field does not accept.
    """
    if isinstance(mixer, dict):
        return from_json(mixer)
    if not isinstance(mixer, str):
        return mixer
    if len(parts := split(mixer, "+")) > 1:
        return Decoder(tuple(layer for part in parts for layer in as_layers(get(part))))
    name, settings = expression(mixer, "mixer")
    changes: dict[str, object] = {}
    for path, text in settings.items():
        named = {"paper": asdict(PAPER), "default": asdict(Competition()), "none": None}
        changes[path] = named.get(text, text) if path == "competition" else literal(text)
        if path == "mixer":  # the mixer of a whole model
            changes[path] = to_json(get(text))
    return change_all(_named(name), changes)


def expression(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """Parses "a(b=1, c=d)" into ("a", {"b": "1", "c": "d"}). Raises InputError, which calls the expression `kind`."""
    match = re.fullmatch(r"([^()\s]+)\s*(?:\((.*)\))?", text.strip())  # adjacent \s* would backtrack quadratically
    if not match:
        raise InputError(f"{kind} {text!r} is not of the form NAME or NAME(field=value, ...)")
    settings = [[part.strip() for part in setting.partition("=")] for setting in split(match[2] or "")]
    if wrong := next(("".join(setting) for setting in settings if not setting[1]), None):
        raise InputError(f"{wrong!r} in {kind} {text!r} is not of the form field=value")
    _refuse_overwriting([path for path, *_ in settings], f"{kind} {text!r}")
    return match[1], {path: value for path, _, value in settings}


def _refuse_overwriting(paths: list[str], where: str) -> None:
    """Raises InputError where a later setting would discard an earlier one: the same field, or the record around it."""
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise InputError(f"{where} sets {path!r} twice; expected each field once")
        if lost := next((earlier for earlier in paths[:i] if earlier.startswith(f"{path}.")), None):
            raise InputError(f"{where} sets {lost!r} and {path!r}, which contains {lost!r}; expected {path!r} first")


def several(text: str) -> tuple[str, ...]:
    """Returns the items of a comma-separated list; "all" stands for the names of all mixers.

    Raises InputError for an empty list."""
    if not (found := tuple(names()) if text.strip() == "all" else split(text)):
        raise InputError(f"--mixers={text!r} names none; expected at least one")
    return found


def split(text: str, mark: str = ",") -> tuple[str, ...]:
    """Splits at the mark outside parentheses: "a, b(c=1, d=2), e" -> ("a", "b(c=1, d=2)", "e").

    Raises InputError for an empty item, as in "a,,b"."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    found = tuple(part.strip() for part in parts)
    if any(found) and not all(found):
        sign = "plus" if mark == "+" else "comma"
        raise InputError(f"{text!r} has nothing on one side of a {sign}; expected an item on both sides")
    return tuple(part for part in found if part)


def mixer(given):
    """Returns the spec of a mixer or decoder, like `get`. Raises InputError for an encoder-decoder or BERT."""
    if isinstance(spec := get(given), ModelSpec):
        raise InputError(
            f"mixer {given!r} is a whole model, not a layer's mixer; expected a mixer, or headrace.models.build for it"
        )
    return spec


def _named(name: str):
    if name in (known := LINEAR | SCANS | MATRICES | ATTENTION | SOFTMAX_RNNS | MODELS):
        return known[name]
    if (base := name.removeprefix("softmax-")) in LINEAR:
        return compete(LINEAR[base])
    if base in SCANS:
        raise InputError(
            f"mixer {name!r} does not exist, because {base} has no heads to compete; expected {base!r}, or softmax- "
            f"before one of {', '.join(LINEAR)}"
        )
    near = difflib.get_close_matches(name, [*names(), *MODELS], 3) or names()
    raise InputError(f"mixer {name!r} is unknown; the nearest names are {', '.join(near)}")


def literal(text: str):
    """Returns the int, float or bool that the text spells, else the text."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
