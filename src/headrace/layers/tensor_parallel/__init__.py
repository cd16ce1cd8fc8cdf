"""Tensor parallelism: the heads of mixers and the widths of MLPs split over processes.

cuts.py says which part of a parameter a process holds, parts.py has the layers, ops/parallel/tensor.py the collectives.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_

from ...ops.checks import require
from ...ops.parallel.tensor import Ranks
from ...utils.device import present_device
from ...utils.errors import InputError
from ..attention.attention import SoftmaxAttention
from ..base import Mixer
from ..blocks.block import MLP, LowRank
from ..blocks.moe import MixtureOfExperts
from ..linear.mixer import LinearMixer
from .cuts import Cut
from .parts import PartAttention, PartLinear, PartMLP

PARTS: dict[type, Callable[[Any, Ranks], nn.Module]] = {
    LinearMixer: PartLinear, SoftmaxAttention: PartAttention, MLP: PartMLP,
}  # fmt: skip


def tensor_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Replaces the mixers and MLPs of a model by this process's heads of them, in place, and returns the model.

    All other modules (embedding, norms, head) stay whole in every process. Outputs are those of the whole model, the
    same in every process; gradients are this process's parts of the whole model's. All processes must have the same
    model and input, and make the same calls.

    Args:
        model: a model, or a single mixer, with the same weights in all processes.
        mesh: a DeviceMesh of one dimension; None: all processes that torchrun started.

    Raises:
        InputError: for a mixer whose heads cannot be split (scans, RWKV-7, mixtures of experts, encoders), sizes that
            the number of processes does not divide, and weights that differ between processes.

    Example::

        model = headrace.tensor_parallel(headrace.load(path))
    """
    ranks = Ranks(all_processes() if mesh is None else mesh)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        _check_kind(name, module)
    require(any(type(module) in PARTS for module in modules.values()), "model has no mixer of headrace; expected one")
    _check_equal(model, ranks)
    parts: dict[nn.Module, nn.Module] = {}  # by the whole module, which a model may have in several places
    for name, module in modules.items():
        if type(module) in PARTS and module not in parts:
            parts[module] = PARTS[type(module)](module, ranks).train(module.training)
        if name and module in parts:
            model.set_submodule(name, parts[module])
    return parts.get(model, model)


def _check_kind(name: str, module: nn.Module) -> None:
    if type(module) not in PARTS and isinstance(module, Mixer | MixtureOfExperts | SoftmaxAttention | MLP | LowRank):
        described = type(module).__name__ + (f" at {name!r}" if name else "")
        raise InputError(f"tensor_parallel cannot split {described}; expected linear or softmax attention and MLPs")


def all_processes() -> DeviceMesh:
    """Returns the mesh of all processes that torchrun started, and begins their group if it has not begun."""
    started = dist.is_initialized() or "WORLD_SIZE" in os.environ
    require(started, "tensor_parallel needs several processes; expected a start by torchrun, or init_process_group")
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    return init_device_mesh(present_device().type, (size,))


def read_plan(options: dict[str, Any]) -> DeviceMesh | None:
    """Removes transformers' arguments of tensor parallelism from those of `from_pretrained`, and returns the mesh that
    they ask for, or None. Raises InputError for those that have no effect here."""
    for name in ("tp_size", "distributed_config"):
        value = options.pop(name, None)
        require(value is None, f"{name}={value!r} is not available; expected tp_plan='auto', over all processes")
    plan, mesh = options.pop("tp_plan", None), options.pop("device_mesh", None)
    require(plan in (None, "auto"), f"tp_plan={plan!r}; expected 'auto', or None")
    require(plan is not None or mesh is None, "device_mesh is given without a plan; expected tp_plan='auto'")
    placed = options.get("device_map") if plan else None
    require(placed is None, f"device_map={placed!r} with tp_plan='auto'; expected one of them")
    return None if plan is None else mesh or all_processes()


def _check_equal(model: nn.Module, ranks: Ranks) -> None:
    sums: list[Any] = [None] * ranks.size
    mine = [torch.hash_tensor(p.detach()).view(torch.int64).item() for p in model.parameters()]
    dist.all_gather_object(sums, mine, ranks.group)
    require(all(each == mine for each in sums), "the processes have models of other weights; expected the same in all")


def cuts_of(model: nn.Module) -> dict[str, tuple[Cut, Ranks]]:
    """Returns the cut of each parameter that `tensor_parallel` has cut, and its processes."""
    parts = {
        name: part for name, part in model.named_modules() if isinstance(part, PartLinear | PartAttention | PartMLP)
    }
    return {
        f"{name}.{key}" if name else key: (cut, part.ranks) for name, part in parts.items()
        for key, cut in part.cuts.items()
    }  # fmt: skip


@torch.no_grad()
def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state_dict of the model before `tensor_parallel`, in every process; all of them must call it."""
    cuts, weights = cuts_of(model), model.state_dict()
    for name, (cut, ranks) in cuts.items():
        weights[name] = cut.join(ranks.all(weights[name]))
    return weights


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, for a model of `tensor_parallel`, of whose gradients a process has a part.

    Returns the norm of the whole model's gradient in float64, which is the same in all processes."""
    cuts = cuts_of(model)
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    device = next(iter(parameters.values())).device
    common, own = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for name, p in parameters.items():
        squares = p.grad.double().square()  # type: ignore[union-attr]
        if name not in cuts:
            common = common + squares.sum()
            continue
        cut, ranks = cuts[name]
        weight = 1 / cut.holders[cut.parts[ranks.rank]].to(device)
        own = own + (squares.movedim(cut.dim, -1) @ weight.double()).sum()
    if cuts:
        own = next(iter(cuts.values()))[1].reduced(own)
    total = (common + own).sqrt()
    clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total


__all__ = ["all_processes", "clip_grad_norm_", "cuts_of", "tensor_parallel", "whole_state_dict"]
