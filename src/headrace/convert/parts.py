"""Views of the parts that many formats have."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeGuard

from .fields import Fields
from .form import Model
from .views import FINAL_NORM, Block, View, Views, below, named


def is_positive(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < float("inf")


def layer_types(c: Fields, kinds: Collection[str], name: str = "layer_types") -> list[str]:
    """Returns the kind of each layer. Raises InputError for other kinds, and for another number of them than layers."""
    listed = c[name] or []
    depth = c.get("num_hidden_layers", len(listed))
    if not listed or len(listed) != depth or not {*listed} <= {*kinds}:
        c.refuse(name, f"num_hidden_layers={depth} times {' or '.join(kinds)}")
    return listed


def multiplier(c: Fields, name: str, value: Any = None) -> float:
    """Returns a factor of activations, which becomes one of weights. value: one item of a field that is a list."""
    value = c[name] if value is None else value
    if not is_positive(value):
        c.refuse(name, "numbers of more than 0")
    return float(value)


def scaled(views: Views, factors: dict[str, float]) -> Views:
    """Returns the views with more factors, by patterns of our names."""
    return {
        name: view._replace(factor=view.factor * prod(x for like, x in factors.items() if fnmatchcase(name, like)))
        for name, view in views.items()
    }  # fmt: skip


def as_granite(
    c: Fields, model: Model, logits: float, ends: Collection[str] = ("*.mixer.o_proj.*", "*.mlp.*down*")
) -> Model:
    """Returns the model with its factors of activations as factors of weights. logits: that of the logits; ends:
    patterns of what is last in a branch."""
    factors = dict.fromkeys(ends, multiplier(c, "residual_multiplier")) | {FINAL_NORM: logits}
    return model._replace(views=scaled(model.views, factors))


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
