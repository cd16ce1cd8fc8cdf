"""RWKV-4 in the format of transformers, RWKV-6 and RWKV-7 in those of flash-linear-attention."""

from collections.abc import Sequence

from .. import zoo
from ..extra.rwkv7 import RWKV7
from ..extra.specs.matrix import MatrixSpec
from ..extra.specs.scan import ScanSpec
from ..layers.linear.readout import GROUP_NORM_EPS
from ..spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .flash import EMBEDDINGS, fla, hybrid, inside, widths
from .form import Format, Mixer, Model, model_of, shared
from .views import Block, View, Views, assembled, modules, norm_views, outer_views, plain


def rwkv4(c: Fields) -> Model:
    D, depth = c["hidden_size"], c["num_hidden_layers"]
    c.only("layer_norm_epsilon", 1e-5)  # which the last norm has in any case
    c.ignore("rescale_every")  # halves the stream for float16, and all that is added to it
    spec = ScanSpec("rwkv4", expand=c["attention_hidden_size"] / D)
    style = BlockStyle("layer", mlp="rwkv4", bias=True, embedding_norm=True)
    views = outer_views(c, style, ("rwkv", "embeddings", "ln_out", "blocks"))
    views |= {} if c["tie_word_embeddings"] else {"lm_head.weight": View("head.weight")}
    views |= norm_views(style, {"model.backbone.embedding_norm": "rwkv.blocks.0.pre_ln"})
    own = norm_views(style, {"mixer_norm": "ln1", "mlp_norm": "ln2"}) | modules(RWKV_PROJECTIONS)
    own |= plain(RWKV_RATES) | plain(RWKV_MIXES, shape=(1, 1, D))
    views = assembled([own] * depth, views, "rwkv.blocks")
    sizes = {"intermediate_size": c["intermediate_size"], "max_position_embeddings": c["context_length"]}
    return Model(shared(c, [Layer(spec)] * depth, style, **sizes), views)


RWKV_RATES = {"mixer.log_rate": "attention.time_decay", "mixer.bonus": "attention.time_first"}
RWKV_PROJECTIONS = {
    "mixer.r_proj": "attention.receptance", "mixer.k_proj": "attention.key", "mixer.v_proj": "attention.value",
    "mixer.o_proj": "attention.output", "mlp.gate_proj": "feed_forward.receptance", "mlp.up_proj": "feed_forward.key",
    "mlp.down_proj": "feed_forward.value",
}  # fmt: skip
RWKV_MIXES = {
    "mixer.mix.r": "attention.time_mix_receptance", "mixer.mix.k": "attention.time_mix_key",
    "mixer.mix.v": "attention.time_mix_value", "mlp.mix.r": "feed_forward.time_mix_receptance",
    "mlp.mix.k": "feed_forward.time_mix_key",
}  # fmt: skip


def rwkv6(c: Fields) -> Model:
    """In the channel mixing, its weights of the token before are 1 minus our weights of the token itself."""
    mixer = f"rwkv6({widths(c)}, decay.rank={c['gate_low_rank_dim']}, read.eps={c['norm_eps']})"
    own = inside(RWKV6)
    own["mixer.decay.up"] = View("attn.w_proj.linear.lora.2.weight", transposed=True)
    for i, (stream, name) in enumerate(RWKV6_STREAMS.items()):
        rows = Block(1, 5 * RWKV6_RANK, i * RWKV6_RANK, RWKV6_RANK)
        own[f"mixer.shift.offset.{stream}"] = View("attn.x_bias", Block(1, 5, i, 1))
        own[f"mixer.shift.down.{stream}"] = View("attn.x_proj.0.linear.weight", rows)
        own[f"mixer.shift.up.{stream}"] = View("attn.x_proj.2.weight", rows, transposed=True)
        own[f"mixer.in_proj.{stream}"] = View(f"attn.{name}_proj.linear.weight")
    own["mixer.in_proj.decay"] = View("attn.w_proj.linear.lora.0.weight")
    mlp = {"gate": "receptance.linear", "up": "key.linear"}
    mixes = {"r": "ffn.receptance.mu", "k": "ffn.key.mu"}
    return blocks(c, "rwkv4", hybrid(c, zoo.get(mixer), own), mixes, mlp, num_heads=c["num_heads"], ratio=3.5)


RWKV6_RANK = 32  # of the weights of a stream's mix
RWKV6_STREAMS = {"q": "r", "decay": "w", "k": "k", "v": "v", "gate": "g"}  # in their order
RWKV6 = {
    "shift.base": "x_proj.0.mu", "decay.bias": "w_proj.linear.lora.2.bias", "bonus": "bonus",
    "norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias", "o_proj.weight": "o_proj.weight",
}  # fmt: skip


def rwkv7(c: Fields) -> Model:
    """Its number of heads is that of head_dim, whatever num_heads is."""
    D, K, depth = c["hidden_size"], c["head_dim"], c["num_hidden_layers"]
    c.only("value_dim", None, D, [D] * depth)
    c.ignore("num_heads")
    if not K or D % K:
        c.refuse("head_dim", f"a divisor of hidden_size={D}")
    H, eps = D // K, K * c["norm_eps"]
    ranks = {ours: c[f"{theirs}_low_rank_dim"] for ours, theirs in RANKS.items()}
    spec = MatrixSpec("rwkv7", count=H, eps=None if eps == GROUP_NORM_EPS else eps, **ranks)
    own = inside(RWKV7_NAMES) | {"mixer.bonus": View("attn.r_k", Block(1, D, 0, D), shape=(H, K))}
    for name, letter in ("decay", "w"), ("rate", "a"), ("gate", "g"):
        own |= low_rank(name, letter)
    own |= {f"mixer.mix.{ours}": mix(f"attn.x_{theirs}", D) for ours, theirs in RWKV7_STREAMS.items()}
    above = own | low_rank("value", "v") | plain({"mixer.value_bias": "attn.v_lora.lora.2.bias"})
    pairs = [(spec, own), *[(spec, above)] * (depth - 1)]
    return blocks(c, "rwkv7", pairs, {"k": "ffn.x_k"}, {"up": "key"}, num_heads=H, ratio=4)


def mix(name: str, width: int) -> View:
    return View(name, Block(1, 1, 0, 1), shape=(1, 1, width))


def low_rank(ours: str, theirs: str) -> Views:
    places = {f"mixer.{ours}.down": f"attn.{theirs}_lora.lora.0.weight"}
    return plain(places | {f"mixer.{ours}.up": f"attn.{theirs}_lora.lora.2.weight"}, transposed=True)


RANKS = {"rank": "decay", "rate_rank": "a", "value_rank": "v", "gate_rank": "gate"}
RWKV7_STREAMS = dict(zip(RWKV7.STREAMS, "rwkvag", strict=True))
RWKV7_NAMES = {
    "q_proj.weight": "r_proj.weight", "k_proj.weight": "k_proj.weight", "v_proj.weight": "v_proj.weight",
    "o_proj.weight": "o_proj.weight", "decay_bias": "w_lora.lora.2.bias", "rate_bias": "a_lora.lora.2.bias",
    "k_read": "k_k", "k_rate": "k_a", "norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias",
}  # fmt: skip


def blocks(
    c: Fields, kind: str, mixers: Sequence[Mixer], mixes: dict[str, str], mlp: dict[str, str], *,
    num_heads: int, ratio: float,
) -> Model:  # fmt: skip
    """Returns a model of blocks with channel mixing.

    mixers: of each layer; mixes, mlp: their names of the mixes and of the first projections of the channel mixing;
    ratio: of the width of the channel mixing to the hidden size, where config.json has none."""
    style = BlockStyle("layer", mlp=kind, bias=c["norm_bias"], embedding_norm=True)  # type: ignore[arg-type]
    channels = modules({f"mlp.{name}_proj": f"ffn.{module}" for name, module in (mlp | {"down": "value"}).items()})
    mixed = {f"mlp.mix.{name}": weight for name, weight in mixes.items()}
    channels |= plain(mixed, offset=1.0, factor=-1.0, shape=(c["hidden_size"],))
    given, written = c["hidden_ratio"], c["intermediate_size"]
    width = written or 32 * -(-int(c["hidden_size"] * (ratio if given is None else given)) // 32)
    norms = {"mixer_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    sizes: Config = {"num_heads": num_heads, "intermediate_size": width}
    model = model_of(c, mixers, style, norms, channels, names=EMBEDDINGS, **sizes)
    first = norm_views(style, {"model.backbone.embedding_norm": "model.layers.0.pre_norm"})
    return model._replace(views=model.views | first)


FORMATS: dict[str, Format] = {
    "rwkv": Format("RwkvForCausalLM", rwkv4),
    "rwkv6": fla(
        "RWKV6ForCausalLM", rwkv6,
        {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "hidden_ratio": 3.5, "norm_eps": 1e-5, "norm_bias": True,
         "gate_low_rank_dim": 64},
        {"hidden_act": ("sqrelu",), "norm_first": (True,), "proj_low_rank_dim": (RWKV6_RANK,)},
    ),
    "rwkv7": fla(
        "RWKV7ForCausalLM", rwkv7,
        {"num_heads": None, "head_dim": 64, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
         "v_low_rank_dim": 16, "norm_eps": 1e-5, "norm_bias": True, "value_dim": None},
        {"hidden_act": ("sqrelu",), "norm_first": (True,), "attn": (None,)},
    ),
}  # fmt: skip
