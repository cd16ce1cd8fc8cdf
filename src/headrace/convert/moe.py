"""Mixtures of experts: their fields in config.json, and the views of their tensors."""

from collections.abc import Collection
from typing import Any

from ..spec.stack import BlockStyle, Experts
from .fields import Fields
from .form import Model
from .parts import layer_types
from .views import Block, View, Views, mlp_views, named, plain

GATED_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
# Fields of Experts -> fields of the mixture of experts.
COUNTED = {"count": "num_local_experts", "chosen": "num_experts_per_tok"}
QWEN_EXPERTS = {
    "count": "num_experts", "chosen": "num_experts_per_tok", "width": "moe_intermediate_size",
    "normalized": "norm_topk_prob", "shared": "shared_expert_intermediate_size",
}  # fmt: skip


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
    gate = View(inputs, Block(1, 2 * width, 0, width), shape=(count, 2 * width, hidden_size))
    up, down = gate._replace(block=Block(1, 2 * width, width, width)), View(output, shape=(count, hidden_size, width))
    parts = {"gate": gate, "up": up, "down": down}
    views = {f"mlp.{e}.{part}": view._replace(item=e) for part, view in parts.items() for e in range(count)}
    return views | {"mlp.router.weight": View(router)}


def routed(
    theirs: str, mixture: Experts, style: BlockStyle, choice_bias: str, names: dict[str, str] = GATED_EXPERT
) -> Views:
    """Returns the views of the mixture of experts of DeepSeek-V3. choice_bias: the last part of its name; names: as in
    `experts`."""
    views = experts(theirs, mixture.count, names)
    if mixture.biased:
        views["mlp.choice_bias"] = View(f"{theirs}.{choice_bias}")
    return views | (mlp_views(f"{theirs}.shared_experts", style, "mlp.shared") if mixture.shared else {})


def mixture_of(
    c: Fields, fields: dict[str, str], kind: type[Experts] = Experts, balance: float | None = None, **fixed: Any
) -> Experts:
    """Returns a mixture of experts. fields: {field of its kind: their field}; balance: weight of the load-balancing
    loss; None: the one that transformers adds if the model returns router logits; fixed: other fields.

    Raises InputError for values that do not fit each other."""
    if balance is None:
        weight, added = c["router_aux_loss_coef"], c["output_router_logits"]
        balance = weight if added else 0.0
    c.meant |= {f"experts.{ours}=": theirs for ours, theirs in fields.items()}
    return kind(**{ours: c[theirs] for ours, theirs in fields.items()}, balance=balance, **fixed)


def deepseek_experts(c: Fields) -> Experts:
    """The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
    names = {ours: next(name for name in listed if name in c.names) for ours, listed in DEEPSEEK_EXPERTS.items()}
    shared = c.count(next(name for name in ("n_shared_experts", "num_shared_experts") if name in c.names))
    width = shared * c["moe_intermediate_size"] or None
    return mixture_of(c, names, balance=0.0, scores="sigmoid", biased=True, shared=width)


# Fields of Experts -> the names of fields that DeepSeek-V3 and its descendants have.
DEEPSEEK_EXPERTS = {
    "count": ("n_routed_experts", "num_experts"), "chosen": ("num_experts_per_tok", "num_experts_per_token"),
    "groups": ("n_group", "num_expert_group"), "chosen_groups": ("topk_group",), "width": ("moe_intermediate_size",),
    "normalized": ("norm_topk_prob", "moe_renormalize"), "scale": ("routed_scaling_factor",),
}  # fmt: skip


def qwen_experts(count: int, style: BlockStyle) -> Views:
    gate = {"mlp.shared_gate.weight": "mlp.shared_expert_gate.weight"}
    return experts("mlp", count) | mlp_views("mlp.shared_expert", style, "mlp.shared") | plain(gate)


def qwen_mixture(
    c: Fields, fields: dict[str, str] = QWEN_EXPERTS, **fixed: Any
) -> tuple[Collection[int], Experts | None]:
    """Returns the layers with experts, and their mixture. fields, fixed: as in `mixture_of`."""
    depth, step = c["num_hidden_layers"], c.count("decoder_sparse_step", 1)
    dense, count = {*(c["mlp_only_layers"] or [])}, c[fields["count"]]
    which = {*range(step - 1, depth, step)} - dense if count else set()
    mixture = mixture_of(c, fields, **fixed) if which else None
    c.ignore(*fields.values(), "router_aux_loss_coef", "output_router_logits")  # of a model without experts
    return which, mixture


def routed_layers(c: Fields) -> Collection[int]:
    """Returns the layers with experts, by a list, or by the number of dense layers before them."""
    if "mlp_layer_types" in c.names:
        return [i for i, k in enumerate(layer_types(c, ("dense", "sparse"), "mlp_layer_types")) if k == "sparse"]
    first = c.count("first_k_dense_replace") if "first_k_dense_replace" in c.names else 0
    return range(first, c["num_hidden_layers"])


def predicting(c: Fields, model: Model) -> Model:
    """Returns the model without the layers of multi-token prediction, which follow the others."""
    first, name = c["num_hidden_layers"], "num_nextn_predict_layers"
    more = range(first, first + (c.count(name) if name in c.names else 0))
    return model._replace(outside=tuple(f"model.layers.{i}." for i in more))
