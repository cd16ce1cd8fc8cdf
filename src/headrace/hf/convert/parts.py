"""Views of the parts that many formats have."""

from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ...spec.stack import Experts
from ...utils.errors import InputError
from .fields import Fields
from .form import Block, View, Views, below, named

SWIGLU = {f"{name}_proj.weight": f"{name}_proj.weight" for name in ("gate", "up", "down")}
GATED_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def scaled(views: Views, factors: dict[str, float]) -> Views:
    """Returns the views with more factors, by patterns of our names."""
    return {
        name: view._replace(factor=view.factor * prod(x for like, x in factors.items() if fnmatchcase(name, like)))
        for name, view in views.items()
    }  # fmt: skip


def experts(theirs: str, count: int, names: dict[str, str] = GATED_EXPERT, router: str = "gate") -> Views:
    """Returns the views of a router and its experts. names: the matrices of an expert {our name: their name}."""
    views = named("mlp", theirs, {"router.weight": f"{router}.weight"})
    for e in range(count):
        matrices = {our: f"{their}.weight" for our, their in names.items()}
        views |= named(f"mlp.{e}", f"{theirs}.experts.{e}", matrices)
    return views


def mixture_of(c: Fields, fields: dict[str, str], **fixed: Any) -> Experts:
    """Returns a mixture of experts. fields: {field of Experts: their field}; fixed: other fields of Experts.

    Raises InputError, which names their fields, for values that do not fit each other."""
    values = {ours: c[theirs] for ours, theirs in fields.items()}
    try:
        return Experts(**values, **fixed)
    except InputError as reason:
        meant = [name for name in fields if f"experts.{name}=" in str(reason)]
        listed = ", ".join(f"{fields[name]}={values[name]!r}" for name in meant)
        raise InputError(f"config.json has {listed}: {reason}") from None


def deepseek_experts(c: Fields) -> Experts:
    """The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
    width, shared = c["moe_intermediate_size"], c.get("n_shared_experts", c.get("num_shared_experts"))
    return Experts(
        c.get("n_routed_experts", c.get("num_experts")), c.get("num_experts_per_tok", c.get("num_experts_per_token")),
        width=width, scores="sigmoid", biased=True, groups=c.get("n_group", c.get("num_expert_group")),
        chosen_groups=c["topk_group"], normalised=c.get("norm_topk_prob", c.get("moe_renormalize")),
        scale=c["routed_scaling_factor"], shared=width * shared if shared else None,
    )  # fmt: skip


def latent_attention(theirs: str, spec: Any, output: str) -> Views:
    """Returns the views of multi-head latent attention, in whose rows of q and k the rotated channels come last; a
    rotation is of pairs of neighbours, as in DeepSeek-V3."""

    def parts(name: str, heads: int, before: int) -> Views:
        each, half = before + spec.shared_dim, spec.shared_dim // 2
        step, second = (2, 1) if spec.rotary else (1, half)
        rows = {"own": (0, before, 1), "first": (before, half, step), "second": (before + second, half, step)}
        return {
            f"{h}.{part}": View(name, Block(1, heads * each, h * each + start, size, by))
            for h in range(heads) for part, (start, size, by) in rows.items()
        }  # fmt: skip

    pairs = {"kv_a_norm.weight": "kv_a_layernorm.weight", "kv_b_proj.weight": "kv_b_proj.weight"}
    pairs |= {"o_proj.weight": f"{output}.weight"}
    if spec.q_rank is not None:
        pairs |= {"q_a_proj.weight": "q_a_proj.weight", "q_a_norm.weight": "q_a_layernorm.weight"}
    query = "q_proj" if spec.q_rank is None else "q_b_proj"
    if spec.gated:
        pairs["g_proj.weight"] = "g_proj.weight"
    views = named("mixer", theirs, pairs)
    views |= below("mixer.q_proj", parts(f"{theirs}.{query}.weight", spec.count, spec.key_dim))
    return views | below("mixer.kv_a_proj", parts(f"{theirs}.kv_a_proj_with_mqa.weight", 1, spec.rank))
