"""The places of parameters in foreign checkpoints, and views of parts of models by the names of their tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..spec.stack import BlockStyle
from .fields import Fields


class Block(NamedTuple):
    """Rows of a tensor that consists of `groups` groups of `each` rows: of every group `size` rows, from `start` on and
    `step` apart, or all of them in another order."""

    groups: int
    each: int
    start: int
    size: int
    step: int = 1
    order: tuple[int, ...] | None = None

    @property
    def index(self) -> Any:
        """The index of the rows in a group."""
        end = self.start + self.size * self.step
        return slice(self.start, end, self.step) if self.order is None else [*self.order]


class View(NamedTuple):
    """The place of one of our tensors in a foreign checkpoint: a tensor, or the rows `block` of it.

    Our values are factor · theirs + offset, of a matrix that is transposed there if `transposed`. shape: the shape of
    the foreign tensor, where ours has another one; the rows of `block` are then those of its first two dimensions, or
    what is left of them once it is transposed. item: the index, along the first dimension of the foreign tensor, of the
    part to which the other fields apply; None: they apply to the whole tensor."""

    name: str
    block: Block | None = None
    offset: float = 0.0
    factor: float = 1.0
    transposed: bool = False
    shape: tuple[int, ...] | None = None
    item: int | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns the rows of the foreign tensor, as a view where they are consecutive."""
        whole, index = self._place(tensor)
        return whole[index] if self.block is None else whole[index].flatten(0, 1)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Writes the rows to the foreign tensor."""
        whole, index = self._place(tensor)
        whole[index] = rows.reshape(whole[index].shape)

    def _place(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns a view of the foreign tensor, and in it the index of the rows [rows, …], or [groups, size, …] of a
        block."""
        if self.item is not None:
            tensor = tensor[self.item]
        elif self.block is not None and self.shape is not None:
            tensor = tensor.flatten(0, 1)
        tensor = tensor.T if self.transposed else tensor
        if self.block is None:
            return tensor, ...
        return tensor.unflatten(0, (self.block.groups, self.block.each)), (slice(None), self.block.index)


Views = dict[str, View]
NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
BRANCH_NORMS = {"mixer_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
NORMS_OF_ORDER: dict[str, dict[str, str]] = {
    "branch": BRANCH_NORMS, "parallel-joint": {"mixer_norm": "input_layernorm"}
}  # fmt: skip
PRE_FF_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


# --- tensors ---------------------------------------------------------------------------------------------------------


def plain(names: dict[str, str], **options: Any) -> Views:
    """Returns the views of whole tensors: {our name: their name}. options: fields of `View`."""
    return {our: View(their, **options) for our, their in names.items()}


def named(ours: str, theirs: str, pairs: dict[str, str], **options: Any) -> Views:
    """Returns the views of whole tensors: {our name: their name} below two prefixes. options: fields of `View`."""
    return {f"{ours}.{our}": View(f"{theirs}.{their}", **options) for our, their in pairs.items()}


def modules(names: dict[str, str], bias: bool = False) -> Views:
    """Returns the views of the weights of modules, and of their biases: {our name: their name}."""
    return plain({f"{our}.{kind}": f"{their}.{kind}" for our, their in names.items() for kind in kinds_of(bias)})


def kinds_of(bias: bool) -> tuple[str, ...]:
    """Returns the parameters of a module."""
    return ("weight", "bias") if bias else ("weight",)


def stacked(name: str, sizes: dict[str, int], groups: int = 1) -> Views:
    """Returns the views of parts that are stacked along the rows of one tensor, within each of several groups. sizes:
    the number of rows of each part, in all groups together."""
    each, start, views = sum(sizes.values()) // groups, 0, {}
    for part, size in sizes.items():
        views[part] = View(name, Block(groups, each, start, size // groups))
        start += size // groups
    return views


def projections(ours: str, theirs: str, sizes: dict[str, int], groups: int = 1, bias: bool = False) -> Views:
    """Returns the views of projections that are stacked in one of theirs. ours: what is before {part}_proj; sizes,
    groups: as in `stacked`."""
    return {
        f"{ours}.{part}_proj.{kind}": view
        for kind in kinds_of(bias) for part, view in stacked(f"{theirs}.{kind}", sizes, groups).items()
    }  # fmt: skip


def below(prefix: str, views: Views) -> Views:
    """Returns the views with a prefix before our names."""
    return {f"{prefix}.{name}": view for name, view in views.items()}


# --- models ----------------------------------------------------------------------------------------------------------

FINAL_NORM = "model.backbone.norm.weight"
# Names of a model, its embedding, its final norm and its layers.
LLAMA = ("model", "embed_tokens", "norm", "layers")
HYBRID = ("model", "embed_tokens", "final_layernorm", "layers")
BACKBONE = ("backbone", "embeddings", "norm_f", "layers")


def outer_views(c: Fields, style: BlockStyle, names: tuple[str, ...] = LLAMA) -> Views:
    """Returns the views outside of layers: the embedding, the final norm and, unless it is tied, the head."""
    model, embedding, norm, _ = names
    views = modules({"model.embed_tokens": f"{model}.{embedding}"})
    views |= norm_views(style, {"model.backbone.norm": f"{model}.{norm}"})
    if style.positions == "learned":
        views |= modules({"model.backbone.positions.table": f"{model}.wpe"})
    head = plain({"lm_head.weight": "lm_head.weight"} if not c["tie_word_embeddings"] else {})
    return views | head | plain({"lm_head.bias": "lm_head.bias"} if style.head_bias else {})


def norm_views(style: BlockStyle, names: dict[str, str]) -> Views:
    """Returns the views of norms: {our name: their name}."""
    bias = style.norm == "layer-bias" or (style.norm == "layer" and style.bias)
    return {} if style.norm.endswith("plain") else modules(names, bias)


def mlp_views(theirs: str, style: BlockStyle, ours: str = "mlp") -> Views:
    """Returns the views of an MLP with the same names of modules as ours."""
    names = ["gate_proj", "up_proj", "down_proj"] if style.gated else ["up_proj", "down_proj"]
    return modules({f"{ours}.{name}": f"{theirs}.{name}" for name in names}, style.bias)


def gate_up_views(up: str, down: str, width: int, bias: bool = False, ours: str = "mlp") -> Views:
    """Returns the views of an MLP whose gate and other input are one projection `up`."""
    return projections(ours, up, {"gate": width, "up": width}, bias=bias) | modules({f"{ours}.down_proj": down}, bias)


def assembled(layers: Sequence[Views], outside: Views, theirs: str = "model.layers") -> Views:
    """Returns all views of a model. layers: the views of each layer, by our names in it and their names in theirs."""
    return outside | {
        f"{layer_name(i)}.{name}": view._replace(name=f"{theirs}.{i}.{view.name}")
        for i, own in enumerate(layers) for name, view in own.items()
    }  # fmt: skip


def layer_name(i: int) -> str:
    return f"model.backbone.layers.{i}"
