"""The operations of one token of a block, and of a language model, in a program of the native backend."""

from typing import Any

import torch.nn.functional as F
from torch import nn

from ...ops.backends.native.program import NAMES, Program, UnsupportedError
from ...utils.errors import shown
from ..linear.token import add_linear, token_of
from ..norms import OffsetRMSNorm
from ..quantized import QuantizedLinear
from .block import AFTER, BEFORE, MLP, Block, gelu_tanh, relu2
from .stack import Backbone

NORMS = {nn.RMSNorm: "rms", OffsetRMSNorm: "rms-offset", nn.LayerNorm: "layer"}
ACTIVATIONS: Any = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", relu2: "relu2", gelu_tanh: "gelu-tanh"}


def language_model(program: Program, model: Any) -> None:
    """Builds the program tokens [B] -> logits [B, vocabulary] of a `HeadraceForCausalLM`.

    The logits are written by its last operation, and with a cap of the logits by the one before it too."""
    program.module(model, "model", model.base_class)
    embedding = program.module(model.model, "embed_tokens", nn.Embedding)
    backbone = program.module(model.model, "backbone", Backbone)
    program.module(backbone, "layers", nn.ModuleList)
    program.fixed(model, "cap", "model.backbone.embedding_scale", "model.embed_tokens.num_embeddings")
    program.vocabulary, D = shape = embedding.weight.shape
    x, weight = program.columns(D), program.weight(embedding, "weight", shape)
    program.add("embed", out=x, outputs=D, number=backbone.embedding_scale, weight=weight)
    add_backbone(program, backbone, x, D)
    program.linear(program.module(model, "lm_head", nn.Linear, QuantizedLinear), x, 0)
    if model.cap is not None:
        program.add("cap", outputs=model.lm_head.out_features, number=model.cap)


def add_backbone(program: Program, backbone: Backbone, x: int, D: int) -> None:
    """Adds a stack of blocks D wide without the factor of the embeddings: x = backbone(x).

    Raises UnsupportedError for positions, a shared block, and what `add_block` does not support."""
    for name in ("positions", "shared"):
        if getattr(backbone, name) is not None:
            raise UnsupportedError(f"the model has {name}={type(getattr(backbone, name)).__name__}")
    add_norm(program, backbone, "embedding_norm", x, x)
    for name in backbone.layers._modules:  # also a block that occurs twice
        add_block(program, program.module(backbone.layers, name, backbone.block_class), x, D)
    add_norm(program, backbone, "norm", x, x)


def add_block(program: Program, block: Any, x: int, D: int) -> None:
    """Adds a block D wide: x = block(x)."""
    program.fixed(block, "order")
    if block.order == "post" and block.parallel is not None:
        raise UnsupportedError("two parallel mixers with order='post'")
    start = branch = program.columns(D)
    read = of_mlp = x
    if block.order in BEFORE:
        read = of_mlp = program.columns(D)
        add_norm(program, block, "mixer_norm", x, read)
    if block.mlp is not None and block.order == "parallel":
        of_mlp = program.columns(D)
        add_norm(program, block, "mlp_norm", x, of_mlp)
    into = branch if block.order in AFTER else x
    for i, name in enumerate(["mixer"] if block.parallel is None else ["mixer", "parallel"]):
        mixer = program.module(block, name, *filter(token_of, [type(getattr(block, name))]))
        add_token: Any = token_of(type(mixer))
        add_token(program, mixer, read, into, len(program.kinds), add=into == x or i > 0)
        program.kinds.append(mixer.state_kind)
    _end_branch(program, block, "mixer", x, branch)
    if block.mlp is not None:
        mlp = program.module(block, "mlp", MLP)
        if block.order in ("pre", "both"):
            add_norm(program, block, "mlp_norm", x, of_mlp)
        _add_mlp(program, mlp, of_mlp, into, add=into == x)
        _end_branch(program, block, "mlp", x, branch)
    program.release(start)


def _end_branch(program: Program, block: Block, name: str, x: int, branch: int) -> None:
    if block.order == "post":
        add_norm(program, block, f"{name}_norm", x, x)
    elif block.order in AFTER:
        add_norm(program, block, name + AFTER[block.order], branch, x, add=True)


def _add_mlp(program: Program, mlp: MLP, x: int, out: int, add: bool) -> None:
    """Adds an MLP: out = mlp(x), or out += mlp(x)."""
    width = program.module(mlp, "up_proj", nn.Linear, QuantizedLinear).out_features
    start = hidden = program.columns(width)
    program.fixed(mlp, "activation")
    if (kind := ACTIVATIONS.get(mlp.activation)) is None:
        raise UnsupportedError(f"it does not support activation={shown(mlp.activation)}, in an MLP")
    fields = {"x": hidden, "out": hidden, "inputs": width, "what": NAMES["activation"].index(kind)}
    if mlp.gate_proj is None:
        add_linear(program, mlp, "up_proj", x, hidden)
    else:
        fields["other"] = program.columns(width)
        add_linear(program, mlp, "gate_proj", x, hidden)
        add_linear(program, mlp, "up_proj", x, fields["other"])
    program.add("activate", **fields)
    add_linear(program, mlp, "down_proj", hidden, out, add)
    program.release(start)


def add_norm(program: Program, parent: nn.Module, name: str, x: int, out: int, add: bool = False, of: int = 0) -> None:
    """Adds the norm `parent.name`: out = norm(x), or out += norm(x). of: number of columns, if the norm is that of each
    head of them; then x and out are different columns."""
    norm = program.module(parent, name, *NORMS, *[nn.Identity] * (out == x))
    if type(norm) is nn.Identity:
        return
    program.fixed(norm, "eps", "normalized_shape")
    if norm.eps is None:
        raise UnsupportedError(f"{type(parent).__name__}.{name}.eps is None")
    names = [n for n in ("weight", "bias") if getattr(norm, n, None) is not None]
    weights = {n: program.weight(norm, n, norm.normalized_shape) for n in names}
    what = NAMES["norm"].index(NORMS[type(norm)])
    program.add("norm", x=x, out=out, inputs=norm.normalized_shape[0], outputs=of, what=what, add=add, number=norm.eps,
                **weights)  # fmt: skip
