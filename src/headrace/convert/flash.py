"""The formats of flash-linear-attention's RetNet, GLA, DeltaNet and Gated DeltaNet."""

from collections.abc import Callable
from typing import Any

from .. import zoo
from ..spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import Block, Format, Model, View, Views, below, conv_width, model_of, named, plain, stacked, whole
from .mamba import divisor
from .parts import mlp_views, of_heads
from .recurrent import mixers_alone

DEFAULTS: Config = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "hidden_ratio": 4, "intermediate_size": None, "norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TYPES: Config = {
    "num_kv_heads": (int, None), "num_v_heads": (int, None), "intermediate_size": (int, None),
    "hidden_ratio": (float, None),
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("swish",), "attn": (None,), "attnres_block_size": (None,)}
# Fields that select an implementation, and two of earlier versions whose other values imply other tensors.
IGNORED = (
    "attn_mode", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "norm_first",
    "share_conv_kernel",
)  # fmt: skip
PROJECTIONS = {f"mixer.in_proj.{part}": f"attn.{part}_proj.weight" for part in "qkv"}
BLOCK = {"mixer_norm.weight": "attn_norm.weight", "mlp_norm.weight": "mlp_norm.weight"}
BLOCK |= {"mixer.o_proj.weight": "attn.o_proj.weight"}
GATE = {"mixer.in_proj.gate": "attn.g_proj.weight"}
BETA = {"mixer.in_proj.beta": "attn.b_proj.weight"}
CONVOLUTIONS = {f"mixer.conv.weight.{part}": f"attn.{part}_conv1d.weight" for part in "qkv"}


def retnet(c: Fields) -> tuple[str, Config]:
    """The mixer and the names of its tensors."""
    c.only("num_kv_heads", None, c["num_heads"])
    return f"retnet({widths(c)})", GATE | FUSED_NORM


def gla(c: Fields) -> tuple[str, Config]:
    c.only("num_kv_heads", None, c["num_heads"])
    return f"gla({widths(c)})", GATE | FUSED_NORM | LOW_RANK_DECAY


def deltanet(c: Fields) -> tuple[str, Config]:
    gate = "silu" if c["use_gate"] else "none"
    mixer = f"deltanet({widths(c)}, inputs.conv={conv_width(c, 'conv_size')}, read.gate={gate})"
    return mixer, BETA | CONVOLUTIONS | NORM | (GATE if c["use_gate"] else {})


def gated_deltanet(c: Fields) -> tuple[str, Config]:
    values = c["num_v_heads"] or c["num_heads"]
    K, V = c["head_dim"], round(c["head_dim"] * c["expand_v"], 6)
    groups = "none" if values == c["num_heads"] else c["num_heads"]
    expand_k, expand_v = (width * values / c["hidden_size"] for width in (K, V))
    mixer = f"heads.expand_k={expand_k}, heads.expand_v={expand_v}, heads.qk_groups={groups}"
    mixer = f"gated-deltanet({mixer}, inputs.conv={conv_width(c, 'conv_size')})"
    return mixer, BETA | CONVOLUTIONS | NORM | GATE | STEP


def mlp_width(c: Fields | Config) -> int:
    """Returns intermediate_size, or two thirds of hidden_ratio · hidden_size, rounded up to a multiple of 256."""
    width, ratio = c["intermediate_size"], c["hidden_ratio"]
    return 256 * -(-int(c["hidden_size"] * (ratio or 4) * 2 / 3) // 256) if width is None else width


def widths(c: Fields) -> str:
    return f"heads.expand_k={float(c['expand_k'])}, heads.expand_v={float(c['expand_v'])}, heads.width=none"


def fla(
    architecture: str, mixer: Callable[[Fields], tuple[str, Config]], defaults: Config,
    only: dict[str, tuple[Any, ...]], *ignored: str,
) -> Format:  # fmt: skip
    """A format. mixer: maps the fields to the expression of the mixer, and to the names of those of its tensors that
    not all formats have. only: fields that must have one of these values."""

    def read(c: Fields) -> Model:
        for name, values in (ONLY | only).items():
            c.only(name, *values)
        c.ignore(*IGNORED, *ignored)
        expression, tensors = mixer(c)
        layers = [Layer(zoo.get(expression))] * c["num_hidden_layers"]
        heads = c["num_v_heads"] if c.get("num_v_heads") else c["num_heads"]
        own = plain(BLOCK | PROJECTIONS | tensors) | mlp_views("mlp", BlockStyle())
        outside = whole("model", "embeddings", "norm", c["tie_word_embeddings"])
        sizes = {"num_heads": heads, "intermediate_size": mlp_width(c)}
        return model_of(c, layers, BlockStyle(), [own] * len(layers), outside, **sizes)

    return Format(architecture, read, DEFAULTS | defaults, TYPES)


# --- Mamba-3 ---------------------------------------------------------------------------------------------------------


def mamba3(c: Fields) -> Model:
    """Blocks of a mixer alone."""
    D, K, V, bias = c["hidden_size"], c["state_size"], c["head_dim"], c["use_bias"]
    if c["expand"] * D % V:
        c.refuse("head_dim", f"a divisor of expand · hidden_size = {c['expand'] * D}")
    H = c["expand"] * D // V
    c.only("num_heads", H)  # which that library computes and writes
    for name, values in MAMBA3_ONLY.items():
        c.only(name, *values)
    c.ignore(*IGNORED, *MAMBA3_IGNORED)
    groups, normed = divisor(c, "n_groups", H), c["is_outproj_norm"]
    if normed and groups < H:  # a norm per head whose weights are of all heads is that of the groups of q and k
        c.refuse("is_outproj_norm", f"False, or n_groups={H} as there are heads")
    spec = zoo.change_all(zoo.get("mamba3"), {
        "heads.expand_k": K * H / D, "heads.expand_v": float(c["expand"]), "heads.width": None,
        "heads.qk_groups": None if groups == H else groups, "inputs.turns": c["rope_fraction"], "inputs.bias": bias,
        "read.bias": bias, "read.norm": "rms-groups" if normed else "none",
    })  # fmt: skip
    return mixers_alone(c, spec, mamba3_views(spec, (H, groups, K, V)), num_heads=H)


MAMBA3_ONLY: dict[str, tuple[Any, ...]] = {
    "is_mimo": (False,), "A_floor": (1e-4,), "norm_eps": (1e-5,), "rope_fraction": (0.5, 1.0),
}  # fmt: skip
MAMBA3_IGNORED = (
    "hidden_act", "mimo_rank", "residual_in_fp32", "rescale_prenorm_residual", "dt_min", "dt_max", "dt_init_floor",
    "chunk_size",
)  # fmt: skip


def mamba3_views(spec: Any, sizes: tuple[int, int, int, int]) -> Views:
    """Returns the views of a layer. Of q and k, called C and B, the channels that turn together are neighbours there.
    sizes: the number of heads, of heads of q and k, and the key and value dimensions per head."""
    H, groups, K, V = sizes
    angles, bias = spec.angles(K), spec.inputs.bias
    rows = {"first": (0, angles, 2), "second": (1, angles, 2), "own": (2 * angles, K - 2 * angles, 1)}
    parts = {"gate": H * V, "v": H * V, "k": groups * K, "q": groups * K}
    parts |= {"decay.step": H, "decay.rate": H, "beta": H, "turns": angles}
    own = {"decay.dt_bias": "dt_bias", "skip": "D", "o_proj.weight": "out_proj.weight"}
    own |= {"o_proj.bias": "out_proj.bias"} if bias else {}
    own |= {"norm_weight": "norm.weight"} if spec.read.weighted else {}
    views = named("mixer", "mixer", own)
    for kind in ("weight", "bias") if bias else ("weight",):
        places = stacked(f"mixer.in_proj.{kind}", parts)
        for part in "qk":
            places |= below(part, of_heads(places.pop(part), groups, rows))
        views |= below(f"mixer.in_proj.{kind}".removesuffix(".weight"), places)
    for part, letter in (("q", "C"), ("k", "B")):
        weight = View(f"mixer.{letter}_norm.weight", Block(1, K, 0, K))
        shift = View(f"mixer.{letter}_bias", Block(1, K, 0, K), transposed=True, shape=(H, 1, K))
        views |= below(f"mixer.qk_norm.weight.{part}", of_heads(weight, 1, rows))
        views |= below(f"mixer.qk_norm.bias.{part}", of_heads(shift, 1, rows))
    return views


# --- the formats -----------------------------------------------------------------------------------------------------

FUSED_NORM = {"mixer.norm_weight": "attn.g_norm_swish_gate.weight"}
NORM = {"mixer.norm_weight": "attn.o_norm.weight"}
LOW_RANK_DECAY = {
    "mixer.in_proj.decay": "attn.gk_proj.0.weight",
    "mixer.decay.up.weight": "attn.gk_proj.1.weight",
    "mixer.decay.up.bias": "attn.gk_proj.1.bias",
}
STEP = {
    "mixer.in_proj.decay": "attn.a_proj.weight",
    "mixer.decay.A_log": "attn.A_log",
    "mixer.decay.dt_bias": "attn.dt_bias",
}

# Without fuse_norm the tensor FUSED_NORM has another name.
NORM_AND_GATE = {
    "feature_map": (None,), "use_output_gate": (True,), "elementwise_affine": (True,), "fuse_norm": (True,),
}  # fmt: skip
DELTA = {"use_short_conv": (True,), "allow_neg_eigval": (False,)}

FORMATS: dict[str, Format] = {
    "retnet": fla(
        "RetNetForCausalLM", retnet,
        {"num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2}, NORM_AND_GATE,
        "use_short_conv", "conv_size",  # not used by any layer of that library
    ),
    "gla": fla(
        "GLAForCausalLM", gla,
        {"num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0},
        NORM_AND_GATE | {"use_short_conv": (False,), "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,)},
        "conv_size",
    ),
    "delta_net": fla(
        "DeltaNetForCausalLM", deltanet,
        {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "conv_size": 4, "use_gate": False},
        DELTA | {"use_beta": (True,), "use_output_norm": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
        "fuse_norm",
    ),
    "gated_deltanet": fla(
        "GatedDeltaNetForCausalLM", gated_deltanet,
        {"num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0, "conv_size": 4,
         "num_hidden_layers": 21},
        DELTA | {"use_gate": (True,)},
        "fuse_norm",
    ),
    "mamba3": Format(
        "Mamba3ForCausalLM", mamba3,
        {"head_dim": 64, "vocab_size": 32000, "hidden_size": 2048, "state_size": 128, "num_hidden_layers": 48,
         "norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "expand": 2, "n_groups": 1,
         "use_bias": False, "rope_fraction": 0.5, "is_outproj_norm": False, "tie_word_embeddings": False},
    ),
}  # fmt: skip
