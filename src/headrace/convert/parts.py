"""Views of the parts that many formats have."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeGuard

from ..spec.stack import BlockStyle, Experts
from ..utils.errors import InputError
from .fields import Fields
from .form import Block, Model, View, Views, below, modules, named, projections

NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PRE_FF_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
FINAL_NORM = "model.backbone.norm.weight"
GATED_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def number(c: Fields, name: str, least: int = 0) -> int:
    """Returns the value of a field. InputError unless it is an integer of at least `least`."""
    if type(c[name]) is not int or c[name] < least:
        c.refuse(name, f"an integer of at least {least}")
    return c[name]


def is_positive(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and value > 0


def layer_types(c: Fields, kinds: Collection[str], name: str = "layer_types") -> list[str]:
    """Returns the kind of each layer. Raises InputError for other kinds, and for another number of them than layers."""
    listed = c[name] or []
    depth = c.get("num_hidden_layers", len(listed))
    if len(listed) != depth or not {*listed} <= {*kinds}:
        c.refuse(name, f"num_hidden_layers={depth} times {' or '.join(kinds)}")
    return listed


def mlp_views(theirs: str, style: BlockStyle, ours: str = "mlp") -> Views:
    """Returns the views of an MLP with the same names of modules as ours."""
    names = ["gate_proj", "up_proj", "down_proj"] if style.gated else ["up_proj", "down_proj"]
    return modules({f"{ours}.{name}": f"{theirs}.{name}" for name in names}, style.bias)


def gate_up_views(up: str, down: str, width: int, bias: bool = False, ours: str = "mlp") -> Views:
    """Returns the views of an MLP whose gate and other input are one projection `up`."""
    return projections(ours, up, {"gate": width, "up": width}, bias=bias) | modules({f"{ours}.down_proj": down}, bias)


def multiplier(c: Fields, name: str, value: Any = None) -> float:
    """Returns a factor of activations, which becomes one of weights. value: of a field that lists several."""
    value = c[name] if value is None else value
    if value is None or value <= 0:
        c.refuse(name, "numbers of more than 0")
    return float(value)


def scaled(views: Views, factors: dict[str, float]) -> Views:
    """Returns the views with more factors, by patterns of our names."""
    return {
        name: view._replace(factor=view.factor * prod(x for like, x in factors.items() if fnmatchcase(name, like)))
        for name, view in views.items()
    }  # fmt: skip


def scaled_as_granite(
    c: Fields, model: Model, logits: float, ends: Collection[str] = ("*.mixer.o_proj.*", "*.mlp.*down*")
) -> Model:
    """Returns the model with its factors of activations as factors of weights. logits: that of the logits; ends:
    patterns of what is last in a branch."""
    factors = dict.fromkeys(ends, multiplier(c, "residual_multiplier")) | {FINAL_NORM: logits}
    return model._replace(views=scaled(model.views, factors))


def experts(theirs: str, count: int, names: dict[str, str] = GATED_EXPERT, router: str = "gate") -> Views:
    """Returns the views of a router and its experts. names: the matrices of an expert {our name: their name}."""
    views = named("mlp", theirs, {"router.weight": f"{router}.weight"})
    for e in range(count):
        matrices = {our: f"{their}.weight" for our, their in names.items()}
        views |= named(f"mlp.{e}", f"{theirs}.experts.{e}", matrices)
    return views


# The router, and the matrices of all experts: those of the inputs, and those of the output.
GRANITE_EXPERTS = "router.layer.weight", "input_linear.weight", "output_linear.weight"


def stacked_experts(
    theirs: str, mixture: Any, hidden_size: int, names: tuple[str, str, str] = GRANITE_EXPERTS
) -> Views:
    """Returns the views of experts whose matrices are in two tensors, the gate's above those of the other input. names:
    those of the router, and of the two."""
    count, width = mixture.count, mixture.width
    router, inputs, output = (f"{theirs}.{name}" for name in names)
    views = {"mlp.router.weight": View(router)}
    for part, name, start, shape in (
        ("gate", inputs, 0, (width, hidden_size)), ("up", inputs, width, (width, hidden_size)),
        ("down", output, 0, (hidden_size, width)),
    ):  # fmt: skip
        rows = 2 * width if name == inputs else hidden_size
        for e in range(count):
            block = Block(1, count * rows, e * rows + start, shape[0])
            views[f"mlp.{e}.{part}"] = View(name, block, shape=(count, rows, shape[1]))
    return views


def routed(
    theirs: str, mixture: Experts, style: BlockStyle, choice_bias: str, names: dict[str, str] = GATED_EXPERT
) -> Views:
    """Returns the views of the mixture of experts of DeepSeek-V3. choice_bias: the last part of its name; names: as in
    `experts`."""
    views = experts(theirs, mixture.count, names)
    if mixture.biased:
        views["mlp.choice_bias"] = View(f"{theirs}.{choice_bias}")
    return views | (mlp_views(f"{theirs}.shared_experts", style, "mlp.shared") if mixture.shared else {})


def mixture_of(c: Fields, fields: dict[str, str], kind: type[Experts] = Experts, **fixed: Any) -> Experts:
    """Returns a mixture of experts. fields: {field of its kind: their field}; fixed: other fields.

    Raises InputError, which names their fields, for values that do not fit each other."""
    values = {ours: c[theirs] for ours, theirs in fields.items()}
    try:
        return kind(**values, **fixed)
    except InputError as reason:
        meant = [name for name in fields if f"xperts.{name}=" in str(reason)]
        listed = ", ".join(f"{fields[name]}={values[name]!r}" for name in meant)
        raise InputError(f"config.json has {listed}: {reason}") from None


def balance(c: Fields) -> float:
    """Returns the weight of the load-balancing loss, which transformers adds if the model returns router logits."""
    weight, added = c["router_aux_loss_coef"], c["output_router_logits"]
    return weight if added else 0.0


def deepseek_experts(c: Fields) -> Experts:
    """The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
    names = {ours: next(name for name in listed if name in c.names) for ours, listed in DEEPSEEK_EXPERTS.items()}
    shared = number(c, next(name for name in ("n_shared_experts", "num_shared_experts") if name in c.names))
    width = shared * c["moe_intermediate_size"] or None
    return mixture_of(c, names, balance=0.0, scores="sigmoid", biased=True, shared=width)


# Fields of Experts -> the names of fields that DeepSeek-V3 and its descendants have.
DEEPSEEK_EXPERTS = {
    "count": ("n_routed_experts", "num_experts"), "chosen": ("num_experts_per_tok", "num_experts_per_token"),
    "groups": ("n_group", "num_expert_group"), "chosen_groups": ("topk_group",), "width": ("moe_intermediate_size",),
    "normalized": ("norm_topk_prob", "moe_renormalize"), "scale": ("routed_scaling_factor",),
}  # fmt: skip


def in_order(views: Views, head_dim: int, heads: tuple[int, int], order: tuple[int, ...]) -> Views:
    """Returns the views of a layer of attention with the channels of the heads of q and k, and of their norms, in
    another order. heads: those of q, and of k."""
    if order == (*range(head_dim),):
        return views
    of = Block(1, head_dim, 0, head_dim, order=order)
    blocks = {"mixer.q_norm": of, "mixer.k_norm": of}
    blocks |= {f"mixer.{n}_proj": of._replace(groups=count) for n, count in zip("qk", heads, strict=True)}
    return {
        name: view._replace(block=blocks[part]) if (part := name.rpartition(".")[0]) in blocks else view
        for name, view in views.items()
    }


def of_heads(view: View, heads: int, rows: dict[str, tuple[int, int, int]]) -> Views:
    """Returns the views of the rows of each head, by kinds of rows: {kind: (the first in the head, how many, how far
    apart)}. view: of the rows of all heads."""
    block: Any = view.block
    return {
        f"{h}.{kind}": view._replace(block=Block(1, block.each, block.start + h * (block.size // heads) + first, n, by))
        for h in range(heads) for kind, (first, n, by) in rows.items() if n
    }  # fmt: skip


def latent_attention(theirs: str, spec: Any, output: str, pairs: bool) -> Views:
    """Returns the views of multi-head latent attention, in whose rows of q and k the rotated channels come last. pairs:
    whether those that turn together are neighbours, as in DeepSeek-V3."""

    def parts(name: str, heads: int, before: int) -> Views:
        each, half = before + spec.shared_dim, spec.shared_dim // 2
        step, second = (2, 1) if pairs else (1, half)
        rows = {"own": (0, before, 1), "first": (before, half, step), "second": (before + second, half, step)}
        return of_heads(View(name, Block(1, heads * each, 0, heads * each)), heads, rows)

    names = {"kv_a_norm.weight": "kv_a_layernorm.weight", "kv_b_proj.weight": "kv_b_proj.weight"}
    names |= {"o_proj.weight": f"{output}.weight"}
    if spec.q_rank is not None:
        names |= {"q_a_proj.weight": "q_a_proj.weight", "q_a_norm.weight": "q_a_layernorm.weight"}
    query = "q_proj" if spec.q_rank is None else "q_b_proj"
    if spec.gated:
        names["g_proj.weight"] = "g_proj.weight"
    views = named("mixer", theirs, names)
    views |= below("mixer.q_proj", parts(f"{theirs}.{query}.weight", spec.count, spec.key_dim))
    return views | below("mixer.kv_a_proj", parts(f"{theirs}.kv_a_proj_with_mqa.weight", 1, spec.rank))
