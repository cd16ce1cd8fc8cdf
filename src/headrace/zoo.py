"""The named architectures, in order of growing complexity. Each is a value; a new one is one line here, and the laws,
the model, the command line and the docs pick it up.

`compete(spec)` derives the Softmax version of any linear one: names get the prefix `softmax-`.
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

PAPER = Competition(read="query", write="value", scale="one")  # the literal equations 3-16 of arXiv 2602.01744

LINEAR: dict[str, MixerSpec] = {
    # Sums of k ᵀ v, read as a weighted mean. https://arxiv.org/abs/2006.16236
    "linear-attention": MixerSpec(inputs=Inputs(feature_map="elu+1"), read=Read("sum", scale="one")),
    # The same of features whose product is 1 + q·k + (q·k)²/2: softmax attention's e^(q·k), cut off after its second
    # order. https://arxiv.org/abs/2507.23632
    "taylor-softmax": MixerSpec(Heads(key_dim=16), Inputs(feature_map="taylor-2", rotary=True), read=Read("sum")),
    # + a fixed decay per head, rotation, and a norm per head instead of the sum. https://arxiv.org/abs/2307.08621
    "retnet": MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("retnet"), read=Read("rms", "silu")),
    # RetNet whose decay is that of xPos, a rate per key channel and none per head. https://arxiv.org/abs/2212.10554
    "xpos-retnet": MixerSpec(Heads(expand_v=2.0), Inputs(rotary=True), Decay("xpos"), read=Read("rms", "silu")),
    # + the decay and the write strength are one step size dt, read from the token. https://arxiv.org/abs/2405.21060
    "mamba2": MixerSpec(
        Heads(expand_k=4.0, expand_v=2.0, qk_groups=1), Inputs(conv=4, conv_bias=True), Decay("softplus"),
        Write(beta="dt"), Read("rms-joint", "silu", "gate-norm", scale="one", skip=True),
    ),
    # + a decay per key channel, by a low-rank gate. https://arxiv.org/abs/2312.06635
    "gla": MixerSpec(Heads(expand_k=0.5), decay=Decay("sigmoid", rank=16), read=Read("rms", "silu")),
    # + the present token is read with a weight of its own; inputs mix with the token before. https://arxiv.org/abs/2404.05892
    "rwkv6": MixerSpec(
        inputs=Inputs(shift="ddlerp"), decay=Decay("exp", rank=64), read=Read("group", "silu", scale="one", bonus=True)
    ),
    # Linear attention that overwrites, of sparse features that sum to 1; with an additive rule it is linear attention.
    # https://arxiv.org/abs/2102.11174
    "delta-fast-weights": MixerSpec(
        inputs=Inputs(feature_map="dpfp-1", qk_norm="sum"), write=Write("delta", "sigmoid"),
        read=Read("none", scale="one"),
    ),
    # Linear attention that overwrites: what k holds is taken out before v goes in. https://arxiv.org/abs/2406.06484
    "deltanet": MixerSpec(inputs=Inputs(conv=4, qk_norm="l2"), write=Write("delta", "sigmoid")),
    # + Mamba-2's decay. With β = 0 nothing is written, with decay 1 it is DeltaNet. https://arxiv.org/abs/2412.06464
    "gated-deltanet": MixerSpec(
        Heads(expand_k=0.75, expand_v=1.5), Inputs(conv=4, qk_norm="l2"), Decay("softplus"), Write("delta", "sigmoid"),
        Read("rms", "silu"),
    ),
    # Gated DeltaNet whose write strength also sees how wrong the memory was, every 16 tokens; with a weight of 0 for
    # what it sees, where it begins, it is Gated DeltaNet. Ours, no paper's: after https://arxiv.org/abs/2412.06464
    "residual-delta": MixerSpec(
        Heads(expand_k=0.75, expand_v=1.5), Inputs(conv=4, qk_norm="l2"), Decay("softplus"),
        Write("delta", "sigmoid", look=16), Read("rms", "silu"),
    ),
    # + that decay per key channel. https://arxiv.org/abs/2510.26692
    "kda": MixerSpec(
        inputs=Inputs(conv=4, qk_norm="l2"), decay=Decay("softplus-vector"), write=Write("delta", "sigmoid"),
        read=Read("rms", "sigmoid-low-rank"),
    ),
}  # fmt: skip

ATTENTION: dict[str, AttentionSpec] = {
    # Softmax attention with rotary positions (Transformer++): the yardstick. https://arxiv.org/abs/2302.13971
    "transformer": AttentionSpec(),
    # One head of keys and values for all query heads: the smallest cache of every token. https://arxiv.org/abs/1911.02150
    "mqa": AttentionSpec(kv_heads=1),
    # A few of them; with as many as query heads it is the transformer. https://arxiv.org/abs/2305.13245
    "gqa": AttentionSpec(kv_heads=2),
    # The last tokens alone. https://arxiv.org/abs/2310.06825
    "sliding-window": AttentionSpec(pattern=Pattern(window=64)),
    # + the first tokens, seen by all. https://arxiv.org/abs/2004.05150
    "longformer": AttentionSpec(pattern=Pattern(window=64, first=4)),
    # + random blocks; three blocks of window and three random ones. https://arxiv.org/abs/2007.14062
    "bigbird": AttentionSpec(pattern=Pattern(window=48, first=16, random=3, block=16)),
    # The transformer, computed as FlashAttention does: to be read, not to be fast. https://arxiv.org/abs/2205.14135
    "flash-reference": AttentionSpec(form="tiles"),
}

SOFTMAX_RNNS: dict[str, SoftmaxRNNSpec] = {
    # Softmax attention whose sum is a norm of what it divides. https://arxiv.org/abs/2507.23632
    "softmax-rnn-norm": SoftmaxRNNSpec(denominator="l2"),
    # Or a gate, and the number of tokens.
    "softmax-rnn-gate": SoftmaxRNNSpec(clamp=5.0, denominator="output-gate", by_length=True),
}

SCANS: dict[str, ScanSpec] = {
    # In every channel a linear system with a diagonal matrix, the same for all tokens. https://arxiv.org/abs/2206.11893
    "s4d": ScanSpec("s4d", state_size=64),
    # + a matrix of rank one, which makes it HiPPO's memory of the whole past. https://arxiv.org/abs/2111.00396
    "s4": ScanSpec("s4", state_size=64),
    # A mean over the past in every channel, with weights that fade at a learnt rate. https://arxiv.org/abs/2305.13048
    "rwkv4": ScanSpec("rwkv4"),
    # A diagonal state space whose step size, input and output weights are read from the token. https://arxiv.org/abs/2312.00752
    "mamba": ScanSpec("mamba", state_size=16, conv=4, expand=2.0),
}

MATRICES: dict[str, MatrixSpec] = {
    # GLA whose gate decays value channels too; with none of those decays it is GLA. https://arxiv.org/abs/2312.06635
    "gla-outer": MatrixSpec("gla-outer", expand_k=0.5),
    # KDA that corrects, erases and writes in three directions; with one for all it is KDA. https://arxiv.org/abs/2503.14456
    "rwkv7": MatrixSpec("rwkv7"),
}


# Whole models: `headrace.models.build` makes those from sequence to sequence, HeadraceConfig(mixer=…) the decoders.
MODELS: dict[str, ModelSpec | Decoder] = {
    # The source is one vector, the encoder's last state. https://arxiv.org/abs/1409.3215
    "rnn": RecurrentSpec(),
    # + every decoder step reads a weighted mean of what the encoder saw. https://arxiv.org/abs/1508.04025
    "luong": RecurrentSpec(alignment=Alignment("general", query="after", feed=True)),
    # The state before a step asks, what it reads goes into the step. https://arxiv.org/abs/1409.0473
    "bahdanau": RecurrentSpec("gru", bidirectional=True, alignment=Alignment("additive", query="before")),
    # No recurrence: attention within the source, within the target, and across. https://arxiv.org/abs/1706.03762
    "transformer-2017": TransformerSpec(
        style=BlockStyle("layer", "post", "relu", bias=True, positions="sinusoidal"), label_smoothing=0.1
    ),
    # + norms before, without means and biases; a bias for each distance; nothing divides by √d. https://arxiv.org/abs/1910.10683
    "t5": TransformerSpec(AttentionSpec(rotary=False, buckets=32, scale="one"), BlockStyle(mlp="relu"), "output"),
    # The encoder alone, that fills gaps in a text. https://arxiv.org/abs/1810.04805
    "bert": BertSpec(
        AttentionSpec(rotary=False, bias=True),
        BlockStyle("layer", "post", "gelu", True, "learned", embedding_norm=True),
    ),
    # Causal softmax attention with learned positions; GPT-2. https://openai.com/research/better-language-models
    "gpt": Decoder(
        (Layer(AttentionSpec(rotary=False, bias=True)),),
        BlockStyle("layer", mlp="gelu-tanh", bias=True, positions="learned"),
    ),
    # Mamba, with attention in one layer of eight and experts in every other one. https://arxiv.org/abs/2403.19887
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
    # Mamba, and one attention block that every sixth layer shares. https://arxiv.org/abs/2405.16712
    "zamba": Decoder(
        tuple(Layer(SCANS["mamba"], "none", shared=i == 2) for i in range(6)),
        BlockStyle(mlp="geglu", shared=AttentionSpec(rotary=False, scale="half-key")),
    ),
}


def compete(spec: MixerSpec, competition: Competition | None = None) -> MixerSpec:
    """The Softmax version of a linear mixer: its heads compete for what is written and what is read."""
    return replace(spec, competition=competition or Competition())


def plain(spec):
    """Without competition: what X and softmax-X share."""
    return each_mixer(spec, lambda mixer: replace(mixer, competition=None))


def each_mixer(spec, change: Callable[[MixerSpec], MixerSpec]):
    """The spec with every linear mixer in it changed, those of hybrids and of whole models too."""
    if isinstance(spec, Decoder):
        return replace(
            spec, layers=tuple(replace(layer, mixer=each_mixer(layer.mixer, change)) for layer in spec.layers)
        )
    if isinstance(spec, StackSpec):
        return replace(spec, mixer=each_mixer(spec.mixer, change))
    return change(spec) if isinstance(spec, MixerSpec) else spec


def names() -> list[str]:
    """Every mixer that `get` knows, plain and Softmax."""
    return [*LINEAR, *(f"softmax-{name}" for name in LINEAR), *SCANS, *MATRICES, *ATTENTION, *SOFTMAX_RNNS]


def get(mixer):
    """The spec of a mixer given as a name, an expression, a dict or a spec.

    An expression changes fields of a named mixer: `softmax-gla(competition.activation=sigmoid, heads.count=8)`;
    `competition=paper` takes the paper's literal equations, `competition=none` takes the gates away;
    `bert(mixer=softmax-gla)` builds a whole model of another mixer. `a+b` is a model whose layers are a and b in turn.
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
        if path == "mixer":  # of a whole model
            changes[path] = to_json(get(text))
    return change_all(_named(name), changes)


def expression(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """ "a(b=1, c=d)" -> ("a", {"b": "1", "c": "d"}); kind: what the sentences of an InputError call it."""
    match = re.fullmatch(r"([^()\s]+)\s*(?:\((.*)\))?", text.strip())  # no two \s* could share a run of spaces
    if not match:
        raise InputError(f"{kind} {text!r} is not of the form NAME or NAME(field=value, ...)")
    settings = [[part.strip() for part in setting.partition("=")] for setting in split(match[2] or "")]
    if wrong := next(("".join(setting) for setting in settings if not setting[1]), None):
        raise InputError(f"{wrong!r} in {kind} {text!r} is not of the form field=value")
    _refuse_overwriting([path for path, *_ in settings], f"{kind} {text!r}")
    return match[1], {path: value for path, _, value in settings}


def _refuse_overwriting(paths: list[str], where: str) -> None:
    """A field that is set again, or a record after one of its fields, would leave nothing of what was set first."""
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise InputError(f"{where} sets {path!r} twice; expected each field once")
        if lost := next((earlier for earlier in paths[:i] if earlier.startswith(f"{path}.")), None):
            raise InputError(f"{where} sets {lost!r} and {path!r}, which it is part of; expected {path!r} first")


def several(text: str) -> tuple[str, ...]:
    """The mixers of a list separated by commas; "all" is every named mixer. InputError for an empty list."""
    if not (found := tuple(names()) if text.strip() == "all" else split(text)):
        raise InputError(f"--mixers={text!r} names none; expected at least one")
    return found


def split(text: str, mark: str = ",") -> tuple[str, ...]:
    """ "a, b(c=1, d=2), e" -> ("a", "b(c=1, d=2)", "e"). InputError for "a,,b"."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    found = tuple(part.strip() for part in parts)
    if any(found) and not all(found):
        raise InputError(f"{text!r} has nothing on one side of a {'plus' if mark == '+' else 'comma'}")
    return tuple(part for part in found if part)


def mixer(given):
    """`get`, for what must be the mixer of a layer. Raises InputError for a whole model."""
    if isinstance(spec := get(given), ModelSpec):
        raise InputError(f"mixer {given!r} is a whole model, not a layer's mixer; headrace.models.build makes it")
    return spec


def _named(name: str):
    if name in (known := LINEAR | SCANS | MATRICES | ATTENTION | SOFTMAX_RNNS | MODELS):
        return known[name]
    if (base := name.removeprefix("softmax-")) in LINEAR:
        return compete(LINEAR[base])
    if base in SCANS:
        raise InputError(
            f"mixer {name!r} cannot be: it is heads that compete, and {base} has none; expected {base!r}, or softmax- "
            f"before one of {', '.join(LINEAR)}"
        )
    near = difflib.get_close_matches(name, [*names(), *MODELS], 3) or names()
    raise InputError(f"mixer {name!r} is unknown; the nearest names are {', '.join(near)}")


def literal(text: str):
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
