"""The formats of flash-linear-attention."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from .. import zoo
from ..extra.specs.matrix import MatrixSpec
from ..spec.attention import AttentionSpec, Pattern, Rope
from ..spec.mixer import Spec
from ..spec.stack import BlockStyle
from .fields import Config, Fields
from .form import Format, Mixer, Model, model_of
from .mamba import SILU, Mamba2, divisor, mixers_alone
from .parts import of_heads
from .softmax import activation, attention_views
from .views import BACKBONE, Block, View, Views, below, kinds_of, modules, named, stacked

DEFAULTS: Config = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "hidden_ratio": 4, "intermediate_size": None, "norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "attn": None,
}  # fmt: skip
# Types of fields whose default is None in some format, and of those that may be None where it is not.
TYPES: Config = {
    "num_kv_heads": int, "num_v_heads": int, "intermediate_size": int, "window_size": int, "lower_bound": float,
    "expand_ratio": int, "num_heads": int, "expand_k": float, "hidden_ratio": float, "num_slots": int,
    "value_dim": (int, [int]),
}  # fmt: skip
OPTIONAL = {"hidden_ratio", "num_slots", "expand_ratio"}
# Entries of the field attn and their types.
ATTENTION: Config = {
    "layers": [int], "num_heads": int, "num_kv_heads": (int, None), "qkv_bias": bool, "window_size": (int, None),
    "rope_theta": float,
}  # fmt: skip
ENTRY = {name if name in ("layers", "num_heads") else f"{name}?": form for name, form in ATTENTION.items()}
TYPES["attn"] = (ENTRY, [ENTRY])
# The values that can be converted, also of fields that classes of 2024 and 2025 had and wrote.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",), "attnres_block_size": (None,), "attention_bias": (False,),
    "use_rope": (False,), "elementwise_affine": (True,),
}  # fmt: skip
# Fields that select an implementation, and two of earlier versions whose other values imply other tensors.
IGNORED = (
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "norm_first", "share_conv_kernel",
)  # fmt: skip
NORMS = {"mixer_norm": "attn_norm", "mlp_norm": "mlp_norm"}
EMBEDDINGS = ("model", "embeddings", "norm", "layers")
# Our names of the tensors of a mixer -> theirs.
LINEAR = {f"in_proj.{part}": f"{part}_proj.weight" for part in "qkv"} | {"o_proj.weight": "o_proj.weight"}
GATE, BETA = {"in_proj.gate": "g_proj.weight"}, {"in_proj.beta": "b_proj.weight"}
FUSED_NORM, NORM = {"norm_weight": "g_norm_swish_gate.weight"}, {"norm_weight": "o_norm.weight"}
DELTA_RULE = LINEAR | BETA | NORM | {f"conv.weight.{part}": f"{part}_conv1d.weight" for part in "qkv"}
LOW_RANK_DECAY = {
    "in_proj.decay": "gk_proj.0.weight", "decay.up.weight": "gk_proj.1.weight", "decay.up.bias": "gk_proj.1.bias",
}  # fmt: skip
RATE = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias"}
STEP = RATE | {"in_proj.decay": "a_proj.weight"}


def blocks(c: Fields, mixer: str | Spec, views: Views, **sizes: Any) -> Model:
    """Returns a model of blocks of a mixer and an MLP. mixer: its spec, or the expression of one; views: of the mixer;
    sizes: arguments of `shared` beside the usual ones."""
    sizes = {"num_heads": c["num_heads"], "intermediate_size": mlp_width(c)} | sizes
    return model_of(c, hybrid(c, zoo.get(mixer), views), BlockStyle(), NORMS, names=EMBEDDINGS, **sizes)


def inside(names: dict[str, str]) -> Views:
    """Returns the views of a mixer by its names."""
    return named("mixer", "attn", names)


def hybrid(c: Fields, spec: Spec, views: Views) -> list[Mixer]:
    """Returns the mixer of each layer with its views: softmax attention in the layers that the field attn lists."""
    pairs: list[Mixer] = [(spec, views)] * c["num_hidden_layers"]
    attn = c["attn"] or []
    for own in [attn] if isinstance(attn, dict) else attn:
        layers, heads, groups = own["layers"], own["num_heads"], own.get("num_kv_heads")
        inside = {*layers} <= {*range(len(pairs))} and all(pairs[i][0] is spec for i in layers)
        if not inside or len({*layers}) < len(layers) or not own.keys() <= ATTENTION.keys():
            known = f"no other entries than {', '.join(ATTENTION)}"
            c.refuse("attn", f"layers below num_hidden_layers={len(pairs)}, each once, and {known}")
        window = own.get("window_size")
        attention = AttentionSpec(
            None if groups == heads else groups, count=heads, pattern=None if window is None else Pattern(window),
            bias="qkv" if own.get("qkv_bias") else False, rope=Rope(theta=float(own.get("rope_theta", 1e4))),
        )  # fmt: skip
        for i in layers:
            pairs[i] = attention, attention_views(attention, "attn")
    return pairs


def mlp_width(c: Fields | Config) -> int:
    """Returns intermediate_size, or two thirds of hidden_ratio · hidden_size, rounded up to a multiple of 256."""
    width, ratio = c["intermediate_size"], c["hidden_ratio"]
    return 256 * -(-int(c["hidden_size"] * (ratio or 4) * 2 / 3) // 256) if width is None else width


def widths(c: Fields) -> str:
    c.only("num_kv_heads", None, c["num_heads"])  # of the classes that have it, no layer shares keys
    return f"heads.expand_k={float(c['expand_k'])}, heads.expand_v={float(c['expand_v'])}, heads.width=none"


def retnet(c: Fields) -> Model:
    return blocks(c, f"retnet({widths(c)})", inside(LINEAR | GATE | FUSED_NORM))


def gla(c: Fields) -> Model:
    return blocks(c, f"gla({widths(c)})", inside(LINEAR | GATE | FUSED_NORM | LOW_RANK_DECAY))


def delta_net(c: Fields) -> Model:
    gate = "silu" if c["use_gate"] else "none"
    mixer = f"deltanet({widths(c)}, inputs.conv={c.count('conv_size', 2)}, read.gate={gate}, write.beta={beta(c)})"
    return blocks(c, mixer, inside(DELTA_RULE | (GATE if c["use_gate"] else {})))


def beta(c: Fields) -> str:
    return "sigmoid-2" if c["allow_neg_eigval"] else "sigmoid"


def gated_deltanet(c: Fields) -> Model:
    return delta_rule(c, "gated-deltanet", inside(DELTA_RULE | GATE | STEP))


def delta_rule(c: Fields, mixer: str, views: Views, changes: Config | None = None) -> Model:
    """Returns a model with a delta rule in heads of head_dim, of which those of q and k may be fewer. changes: {path of
    a field of the mixer's spec: value}."""
    D, keys = c["hidden_size"], c["num_heads"]
    H, K, V = c.get("num_v_heads") or keys, c["head_dim"], round(c["head_dim"] * c["expand_v"], 6)
    spec = zoo.change_all(zoo.get(mixer), {
        "heads.expand_k": K * H / D, "heads.expand_v": V * H / D, "heads.width": None,
        "heads.qk_groups": None if keys == H else keys, "inputs.conv": c.count("conv_size", 2),
        "write.beta": beta(c),
    } | (changes or {}))  # fmt: skip
    return blocks(c, spec, views, num_heads=H)


def kda(c: Fields) -> Model:
    safe, bound = c["safe_gate"], c["lower_bound"]
    if safe and bound is None:
        c.refuse("safe_gate", "False, or lower_bound beside it")
    if bound is not None and not safe:
        c.refuse("lower_bound", "None, or safe_gate=True beside it")
    rank = None if c["expand_v"] == 1 else round(c["head_dim"] * c["expand_v"])  # the value dimension, also for decays
    changes = {"decay.rank": rank, "decay.lower_bound": None if bound is None else float(bound)}
    return delta_rule(c, "kda", inside(DELTA_RULE | RATE | LOW_RANK), changes)


LOW_RANK = {
    "in_proj.decay": "f_proj.0.weight", "decay.up.weight": "f_proj.1.weight", "in_proj.gate": "g_proj.0.weight",
    "gate.up.weight": "g_proj.1.weight", "gate.up.bias": "g_proj.1.bias",
}  # fmt: skip


def hgrn2(c: Fields) -> Model:
    """The epsilon of its norm is 1e-5 in any model."""
    D, K, H = c["hidden_size"], c["expand_ratio"], c["num_heads"]
    if not K and not (H and H <= D):
        c.refuse("expand_ratio", f"a number, or None with a num_heads of at most {D}")
    K = K or D // H
    c.only("num_heads", D // K, None)
    mixer = f"hgrn2(heads.expand_k={D // K * K / D}, heads.width=none, read.eps=1e-5)"
    return blocks(c, mixer, inside(HGRN2), num_heads=D // K)


HGRN2 = {
    "in_proj.q": "q_proj.weight", "in_proj.decay": "f_proj.weight", "in_proj.v": "i_proj.weight",
    "o_proj.weight": "o_proj.weight", "norm_weight": "g_norm.weight",
}  # fmt: skip


def gsa(c: Fields) -> Model:
    """The epsilon of its norm is 1e-5 in any model. Its class takes exapnd_k and writes expand_k."""
    c.only("num_kv_heads", None, c["num_heads"])
    wide, written = c["exapnd_k"], c["expand_k"]
    spec = MatrixSpec("gsa", slots=c["num_slots"], expand_k=float(wide if written is None else written), eps=1e-5)
    names = LINEAR | {"in_proj.w": "f_proj.weight", "norm_weight": "g_norm.weight"}
    return blocks(c, spec, inside(names))


def linear_attn(c: Fields) -> Model:
    feature_map = activation(c, "feature_map", FEATURE_MAPS)
    mixer = f"linear-attention({widths(c)}, inputs.feature_map={feature_map}, read.norm=rms, read.scale=key)"
    return blocks(c, mixer, inside(LINEAR | {"norm_weight": "norm.weight"}))


FEATURE_MAPS = {"elu": "elu+1", "relu": "relu", "identity": "identity"}


def gated_deltaproduct(c: Fields) -> Model:
    """The rows of each step of each head are among those of all heads for the step there."""
    gated, decays, n, H = c["use_output_gate"], c["use_forget_gate"], c["num_householder"], c["num_heads"]
    views = inside(DELTA_RULE | (GATE if gated else {}) | (STEP if decays else {}))
    K, V = c["head_dim"], round(c["head_dim"] * c["expand_v"])
    if not 1 <= n <= K:
        c.refuse("num_householder", f"1 to head_dim={K}")
    for part, size in (("k", K), ("v", V), ("beta", 1)) if n > 1 else ():
        for name in {f"mixer.in_proj.{part}", f"mixer.conv.weight.{part}"} & views.keys():
            whole = views.pop(name)
            for h, i in product(range(H), range(n)):
                rows = Block(1, n * H * size, (i * H + h) * size, size)
                views[f"{name}.{h}.{i}"] = whole._replace(block=rows)
    changes: Config = {"write.steps": n, "read.gate": "silu" if gated else "none"}
    return delta_rule(c, "gated-deltanet" if decays else "deltanet", views, changes)


# --- softmax attention -----------------------------------------------------------------------------------------------


def transformer(c: Fields) -> Model:
    if c["qk_norm"] and c["norm_eps"] != 1e-5:
        c.refuse("qk_norm", "False or norm_eps=1e-5, the epsilon of the norms of q and k")
    window = c["window_size"]
    spec = softmax(c, qk_norm="head" if c["qk_norm"] else "none", pattern=None if window is None else Pattern(window))
    return blocks(c, spec, attention_views(spec, "attn"), rope_theta=c["rope_theta"])


def forgetting_transformer(c: Fields) -> Model:
    if c["use_output_gate"] and c["qkv_bias"]:
        c.refuse("qkv_bias", "False with use_output_gate=True, as the gate has no bias")
    spec = softmax(c, rotary=False, forget=True, gate="channel" if c["use_output_gate"] else "none")
    gate = modules({"mixer.f_proj": "attn.f_proj"}, True)
    return blocks(c, spec, attention_views(spec, "attn") | gate)


def softmax(c: Fields, **options: Any) -> AttentionSpec:
    """Returns the spec of softmax attention. options: fields of it."""
    groups = None if c["num_kv_heads"] == c["num_heads"] else c["num_kv_heads"]
    return AttentionSpec(groups, bias="qkv" if c["qkv_bias"] else False, **options)


# --- Mamba-3 and log-linear Mamba-2 -----------------------------------------------------------------------------------


def mamba3(c: Fields) -> Model:
    """Blocks of a mixer alone."""
    D, K, V, bias = c["hidden_size"], c["state_size"], c["head_dim"], c["use_bias"]
    H = expanded_heads(c)
    groups, normed = divisor(c, "n_groups", H), c["is_outproj_norm"]
    if normed and groups < H:  # a norm per head whose weights are of all heads is that of the groups of q and k
        c.refuse("is_outproj_norm", f"False, or n_groups={H} as there are heads")
    spec = zoo.change_all(zoo.get("mamba3"), {
        "heads.expand_k": K * H / D, "heads.expand_v": float(c["expand"]), "heads.width": None,
        "heads.qk_groups": None if groups == H else groups, "inputs.turns": float(c["rope_fraction"]),
        "inputs.bias": bias, "read.bias": bias, "read.norm": "rms-groups" if normed else "none",
    })  # fmt: skip
    return mixers_alone(c, spec, mamba3_views(spec, (H, groups, K, V)), num_heads=H)


def expanded_heads(c: Fields) -> int:
    """Returns the number of heads of head_dim, which that library computes and writes."""
    wide, V = c["expand"] * c["hidden_size"], c["head_dim"]
    if V < 1 or wide % V:
        c.refuse("head_dim", f"a divisor of expand · hidden_size = {wide}")
    c.only("num_heads", wide // V)
    return wide // V


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
    for kind in kinds_of(bias):
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


def log_linear_mamba2(c: Fields) -> Model:
    """Blocks of a mixer and an MLP, whose width no field sets."""
    D, V, H = c["hidden_size"], c["head_dim"], expanded_heads(c)
    order = "norm-gate" if c["norm_before_gate"] else "gate-norm"
    layer = Mamba2(
        H, c["state_size"], V, divisor(c, "n_groups", H), c.count("conv_kernel", 2), c["use_conv_bias"],
        (c["use_bias"],) * 2, norm=order if c["rmsnorm"] else "none", levels=LEVELS,
    )  # fmt: skip
    norms = {name: name for name in ("mixer_norm", "mlp_norm")}
    width = mlp_width({"hidden_size": D, "hidden_ratio": 4, "intermediate_size": None})
    mixer = layer.spec(D, H), layer.views("mixer")
    return model_of(c, [mixer], BlockStyle(), norms, names=BACKBONE, num_heads=H, intermediate_size=width)


LEVELS = 15  # of a log-linear memory: for up to 2^14 tokens


# --- the formats -----------------------------------------------------------------------------------------------------


def fla(
    architecture: str, model: Callable[[Fields], Model], defaults: Config, only: dict[str, tuple[Any, ...]],
    *ignored: str,
) -> Format:  # fmt: skip
    """A format. model: reads the fields that are left; only: fields that must have one of these values."""

    def read(c: Fields) -> Model:
        for name, values in (ONLY | only).items():
            c.only(name, *values)
        c.only("rms_norm_eps", c["norm_eps"])  # its name until 2024
        c.ignore(*IGNORED, *ignored)
        return model(c)

    defaults = DEFAULTS | defaults
    optional = OPTIONAL | {name for name, value in defaults.items() if value is None}
    return Format(architecture, read, defaults, {name: (TYPES[name], None) for name in TYPES.keys() & optional})


# Without fuse_norm the tensor FUSED_NORM has another name.
NORM_AND_GATE = {"feature_map": (None,), "use_output_gate": (True,), "fuse_norm": (True,)}
DELTA = {"use_short_conv": (True,)}
INITIAL = "rescale_prenorm_residual", "dt_min", "dt_max", "dt_init_floor", "chunk_size"  # the last one: of a kernel

FORMATS: dict[str, Format] = {
    "retnet": fla(
        "RetNetForCausalLM", retnet,
        {"num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2}, NORM_AND_GATE,
        "use_short_conv", "conv_size",  # not used by any layer of that library
    ),
    "gla": fla(
        "GLAForCausalLM", gla, {"num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0},
        NORM_AND_GATE | {"use_short_conv": (False,), "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,)},
        "conv_size",
    ),
    "delta_net": fla(
        "DeltaNetForCausalLM", delta_net,
        {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "conv_size": 4, "use_gate": False,
         "allow_neg_eigval": False},
        DELTA | {"use_beta": (True,), "use_output_norm": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
    ),
    "gated_deltanet": fla(
        "GatedDeltaNetForCausalLM", gated_deltanet,
        {"num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0, "conv_size": 4,
         "num_hidden_layers": 21, "allow_neg_eigval": False}, DELTA | {"use_gate": (True,)},
    ),
    "kda": fla(
        "KDAForCausalLM", kda,
        {"num_heads": 16, "num_v_heads": None, "head_dim": 128, "expand_v": 1.0, "conv_size": 4, "safe_gate": False,
         "lower_bound": None, "allow_neg_eigval": False}, DELTA,
    ),
    "hgrn2": fla(
        "HGRN2ForCausalLM", hgrn2, {"num_heads": None, "expand_ratio": 128},
        {"use_short_conv": (False,), "use_lower_bound": (False,)}, "conv_size",
    ),
    "gsa": fla(
        "GSAForCausalLM", gsa,
        {"num_heads": 4, "num_kv_heads": None, "num_slots": 64, "exapnd_k": 1.0, "expand_k": None},
        {"use_short_conv": (False,), "exapnd_v": (1,), "expand_v": (1,), "feature_map": ("swish",),
         "gate_logit_normalizer": (8,), "gate_low_rank_dim": (None,)},
        "conv_size", "clamp_min", "clamp_max", "use_output_gate", "use_norm",  # not used by its layers
    ),
    "linear_attn": fla(
        "LinearAttentionForCausalLM", linear_attn,
        {"num_heads": 4, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 1.0, "feature_map": "elementwise_product"},
        {"norm_q": (False,), "norm_k": (False,), "norm_feature_map": (False,)}, "tie_feature_map_qk",
    ),
    "gated_deltaproduct": fla(
        "GatedDeltaProductForCausalLM", gated_deltaproduct,
        {"num_heads": 6, "head_dim": 256, "expand_v": 2.0, "conv_size": 4, "num_hidden_layers": 21,
         "use_output_gate": True, "use_forget_gate": False, "allow_neg_eigval": False, "num_householder": 1},
        DELTA | {"use_gate": (True,)},
    ),
    "transformer": fla(
        "TransformerForCausalLM", transformer,
        {"num_heads": 32, "num_kv_heads": None, "qkv_bias": False, "qk_norm": False, "window_size": None,
         "rope_theta": 10000.0}, {"attn": (None,)},
    ),
    "forgetting_transformer": fla(
        "ForgettingTransformerForCausalLM", forgetting_transformer,
        {"num_heads": 32, "num_kv_heads": None, "qkv_bias": False, "use_output_gate": False},
        {"qk_norm": (False,), "window_size": (None,), "attn": (None,)},
    ),
    "mamba3": fla(
        "Mamba3ForCausalLM", mamba3,
        {"state_size": 128, "head_dim": 64, "expand": 2, "n_groups": 1, "num_hidden_layers": 48, "norm_eps": 1e-5,
         "pad_token_id": 0, "use_bias": False, "rope_fraction": 0.5, "is_outproj_norm": False},
        {"is_mimo": (False,), "attn": (None,), "A_floor": (1e-4,), "norm_eps": (1e-5,), "rope_fraction": (0.5, 1.0),
         "hidden_act": SILU},
        "mimo_rank", "residual_in_fp32", *INITIAL, "hidden_ratio", "intermediate_size",  # the last two: of MLPs
    ),
    "log_linear_mamba2": fla(
        "LogLinearMamba2ForCausalLM", log_linear_mamba2,
        {"state_size": 128, "head_dim": 64, "expand": 2, "n_groups": 1, "conv_kernel": 4, "num_hidden_layers": 48,
         "norm_eps": 1e-5, "pad_token_id": 0, "use_bias": False, "use_conv_bias": True, "rmsnorm": True,
         "norm_before_gate": False, "D_has_hdim": False, "dt_limit": [0.0, math.inf], "residual_in_fp32": False},
        {"hidden_act": SILU, "D_has_hdim": (False,), "dt_limit": ([0.0, math.inf],), "residual_in_fp32": (False,),
         "attn": (None,)},
        *INITIAL, "conv_init", "A_init_range", "hidden_ratio", "intermediate_size", "max_position_embeddings",
    ),
}  # fmt: skip
