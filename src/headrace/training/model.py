"""Builds the model of a recipe, and estimates its parameters, operations and memory without allocating it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from ..convert import load
from ..convert.checkpoint import read_config
from ..extra.recurrence import Recurrence
from ..hf import HeadraceConfig, HeadraceForCausalLM
from ..ops.backends.torch.op import BACKEND
from ..ops.backends.triton.op import unsupported_on_gpus
from ..ops.call import Call
from ..ops.dispatch import BACKENDS, set_backend
from ..spec.attention import SoftmaxSpec
from ..spec.stack import Decoder
from ..utils.errors import InputError
from .parameters import gate_parameters, initialize_gates
from .recipes import CHECKPOINT, SIZES, Recipe

SHARED = 12  # bytes per parameter of the weight and AdamW's two moments in float32
WHOLE = 4  # of the gradient, which a process keeps whole until the end of a step
FORWARD = 3  # FLOPs of a step over those of its forward pass, which is all that a teacher computes
ASKING = "asking"  # a backend that computes as PyTorch's, and notes what the kernels say of each call
KEPT = ("style", "mlp", "norm_eps", "rope_theta")  # fields of a config that a recipe does not have


def config(recipe: Recipe) -> HeadraceConfig:
    """The config of a recipe's model. Fields that a recipe does not have are those of its weights."""
    found: Any = None if recipe.weights is None else read_config(recipe.weights)
    if recipe.mixer == CHECKPOINT:
        if found.sizes.style.positions != "learned":  # which end with their table
            found.max_position_embeddings = max(found.max_position_embeddings, recipe.length)
        return found
    kept = {} if found is None else {name: getattr(found, name) for name in KEPT}
    return HeadraceConfig(
        mixer=recipe.mixer, max_position_embeddings=recipe.length, initializer_range=recipe.initializer_range,
        **{name: getattr(recipe, field) for name, field in SIZES.items()}, **kept,
    )  # fmt: skip


def build(recipe: Recipe) -> HeadraceForCausalLM:
    """Builds the model with the weights of the recipe's checkpoint or, without one, with initial weights drawn from
    torch's global generator. InputError if the checkpoint is of another model."""
    if recipe.weights is None:
        return initialize_gates(HeadraceForCausalLM(config(recipe)), recipe.gate_std, recipe.gate_init)
    checkpoint = load(recipe.weights)
    model = HeadraceForCausalLM(config(recipe))
    for name, field in SIZES.items():
        stored = getattr(checkpoint.config, name)
        needed = getattr(recipe, field) if recipe.mixer == CHECKPOINT else getattr(model.config, name)
        if stored != needed:
            raise InputError(
                f"weights={recipe.weights!r} has {name}={stored}; the recipe has {needed}; set {field}={stored}"
            )
    if checkpoint.config.mixers != model.config.mixers:
        others = f"weights={recipe.weights!r} has other layers than mixer={recipe.mixer}"
        raise InputError(f"{others}; set mixer={CHECKPOINT}, or the mixer of that checkpoint")
    try:
        model.load_state_dict(checkpoint.state_dict())
    except RuntimeError as error:  # such as learned positions for another length
        raise InputError(f"weights={recipe.weights!r}: {str(error).splitlines()[-1].strip()}") from error
    model.generation_config = checkpoint.generation_config
    return model


def meta_model(recipe: Recipe) -> HeadraceForCausalLM:
    """The model on the meta device, where only PyTorch computes."""
    made = config(recipe)
    with torch.device("meta"):
        model = HeadraceForCausalLM(made).train()
    set_backend(model, "torch")
    return model


def taught_by(recipe: Recipe) -> Recipe:
    """The same with the teacher as its model."""
    loaded: dict[str, Any] = {"mixer": CHECKPOINT, "weights": recipe.teacher, "gate_std": 0.0, "gate_init": "normal"}
    return replace(recipe, **loaded, teacher=None, kl=Recipe.kl)


class Counted(NamedTuple):
    """What is counted on the meta-device model of a recipe."""

    parameters: dict[str, int]  # by part
    blocks: tuple[int, ...]  # parameters of each block
    flops_per_token: int
    kept_per_row: dict[str, int]  # bytes that a forward pass over one row saves for the backward in a process, by part
    without_kernel: dict[str, list[int]]  # layers that no kernel computes on a GPU, by the reason


def counted(recipe: Recipe) -> Counted:
    """Counts on the model of a recipe, once for all recipes that differ in rows per pass and seed alone."""
    return _counted(replace(recipe, micro_batch=1, seed=0), config(recipe).stack)


@lru_cache(maxsize=64)
def _counted(recipe: Recipe, stack: Decoder) -> Counted:
    """stack: the layers of the model, as the zoo may give the name of the recipe's mixer to others later."""
    model = meta_model(recipe)
    parameters, flops = count(model), flops_per_token(model, recipe)
    blocks = tuple(sum(p.numel() for p in block.parameters()) for block in model.model.backbone.layers)
    with _RealIntegers():
        slow = without_kernel(model)
    if recipe.recompute:
        recompute_blocks(model)
    nn.Module.to(model, getattr(torch, recipe.precision))
    ids = torch.zeros(1, recipe.length // recipe.context_parallel, dtype=torch.long)
    # of an uncompiled model, whose loss keeps as much as the last hidden states
    kept = kept_for_backward(lambda: model(input_ids=ids, use_cache=False), model.parameters())
    return Counted(parameters, blocks, flops, kept, slow)


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Parameters by part, steps, tokens, FLOPs and bytes per process of a run, counted on a meta-device model."""
    parameters, _, flops, kept, slow = counted(recipe)
    trained = parameters["tied" if recipe.tie else "untied"]
    held = {"weights, gradients, moments": WHOLE * trained + SHARED * trained // recipe.shard}
    if recipe.teacher is not None:
        flops += counted(taught_by(recipe)).flops_per_token // FORWARD
        teacher: Any = meta_model(taught_by(recipe))
        held["teacher"] = teacher.num_parameters() * (teacher.config.dtype or torch.float32).itemsize
    return {
        "parameters": dict(parameters),
        "steps": recipe.steps,
        "warmup_steps": recipe.warmup_steps,
        "rows_per_step": recipe.rows,
        "tokens": recipe.trained_tokens,
        "flops_per_token": flops,
        "flops": flops * recipe.trained_tokens,
        "kept_per_token": {part: size * recipe.context_parallel // recipe.length for part, size in kept.items()},
        "bytes": held | {"kept for the backward": recipe.micro_batch * sum(kept.values())},
        "layers_without_gpu_kernel": {reason: list(layers) for reason, layers in slow.items()},
    }


def count(model: Any) -> dict[str, int]:
    """Parameters of a language model: of its blocks (`body`, which includes `competition`), and of the whole model with
    the embedding counted once (`tied`) or twice (`untied`)."""
    embedding = model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.model.backbone.parameters())
    gates = sum(p.numel() for p in gate_parameters(model))
    tied = body + embedding + sum(p.numel() for name, p in model.lm_head.named_parameters() if name == "bias")
    return {"body": body, "competition": gates, "tied": tied, "untied": tied + embedding}


def flops_per_token(model: HeadraceForCausalLM, recipe: Recipe) -> int:
    """Training FLOPs per token: 3 times those of the forward pass, with recurrences in their recurrent form."""
    row = torch.zeros(1, recipe.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, _RealIntegers(), torch.no_grad():
        model(input_ids=row, use_cache=False)
    per_token = matrix_products(counter, model) // recipe.length
    config = model.config  # whose sizes a teacher's recipe does not have
    per_token += sum(spec.flops_per_token(config.hidden_size, config.num_heads) for spec in config.mixers)
    return 3 * per_token


class _RealIntegers(TorchDispatchMode):
    """Computes integers and booleans on the CPU where all other numbers are on the meta device, because lengths and
    positions decide the shapes of some mixers' tensors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            if function is torch.ops.aten.index.Tensor:  # masks choose a number of elements that only their values say
                args = args[0], [index for x in args[1] for index in _indices(x)]
            return function(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        if kwargs.get("device") == torch.device("meta"):
            on_meta = function(*tree_map(_to_meta, args), **kwargs)
            return on_meta if on_meta.is_floating_point() else function(*args, **kwargs | {"device": "cpu"})
        return function(*args, **kwargs)


def _indices(x: Tensor | None) -> tuple[Tensor | None, ...]:
    return x.nonzero(as_tuple=True) if x is not None and x.dtype == torch.bool else (x,)


def _to_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) else x


class _FusedAttention(TorchFunctionMode):
    """Uses fused attention on the meta device, as real devices do; otherwise PyTorch would count T × T weights."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention or any(mask is not None for mask in args[3:]):
            return function(*args, **(kwargs or {}))
        width, widest = args[2].shape[-1], max(x.shape[-1] for x in args[:3])
        wide = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in args[:3])
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, is_causal=kwargs["is_causal"])[0]
        return out if width == widest else out[..., :width]  # the CPU's takes values as wide as keys


def recompute_blocks(model: HeadraceForCausalLM) -> None:
    """Lets the backward compute each block again in place of keeping what it needs of it."""
    # transformers has renamed the method, and will remove the old name
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def kept_for_backward(call: Callable[[], Any], weights: Iterable[Tensor]) -> dict[str, int]:
    """Returns the bytes that a call on the meta device saves for its backward, beside the weights. Each storage counts
    once, for the part of the layers, such as `mlp` or `mixer`, that saved it first, and outside the layers for ""."""
    kept: dict[int, tuple[str, Any]] = {}
    modules = ModuleTracker()

    def keep(x: Tensor) -> Tensor:
        inside = re.search(r"\.layers\.\d+\.?(\w*)", max(modules.parents, key=len))
        kept.setdefault(x.untyped_storage()._cdata, (inside[1] or "block" if inside else "", x.untyped_storage()))
        return x

    own = {p.untyped_storage()._cdata for p in weights}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), _RealIntegers(), _FusedAttention(), modules:
        result = call()
    found: Counter[str] = Counter()
    for key, (part, storage) in kept.items():
        found[part] += storage.nbytes() * (key not in own)
    del result  # until here, so that no storage's address is taken twice
    return dict(found)


def matrix_products(counter: FlopCounterMode, model: nn.Module) -> int:
    """The FLOPs that PyTorch counted in a forward pass of the model, without those of recurrences."""
    root, counted = type(model).__name__, counter.get_flop_counts()
    recurrences = [f"{root}.{name}" for name, module in model.named_modules() if isinstance(module, Recurrence)]
    return counter.get_total_flops() - sum(sum(counted[name].values()) for name in recurrences if name in counted)


# --- kernels ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def without_kernel(model: Any) -> dict[str, list[int]]:
    """Returns the layers of a language model that no kernel of headrace computes on a GPU, by the reason, as their own
    calls of `linear_attention` have it. Layers of softmax attention, which PyTorch's kernels compute, are left out.

    model: on any device, where it computes 64 tokens; on the meta device this takes no memory. Its backend is set to
        "torch"."""
    asked: list[str | None] = []

    def note(call: Call) -> None:
        asked.append(unsupported_on_gpus(call))

    x = model.model.embed_tokens.weight.new_zeros(1, 64, model.config.hidden_size)  # on the length no reason depends
    found: dict[str, list[int]] = {}
    BACKENDS[ASKING] = BACKEND._replace(linear_attention=BACKEND.linear_attention._replace(unsupported_reason=note))
    try:
        set_backend(model, ASKING)
        for i, layer in enumerate(model.model.backbone.layers):
            for mixer in (layer.mixer, layer.parallel):
                if mixer is None or isinstance(getattr(mixer, "spec", None), SoftmaxSpec):
                    continue
                asked.clear()
                mixer(x)
                reasons = asked or [f"the recurrence of {type(mixer).__name__} has none"]
                if reason := next(filter(None, reasons), None):
                    found.setdefault(reason, []).append(i)
    finally:
        del BACKENDS[ASKING]
        set_backend(model, "torch")
    return found
