"""`GraphedStep`, one token of a batch as a CUDA graph; which models have one, and what it depends on."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten

from ..ops.checks import require
from ..spec.record import Record
from ..utils.device import may_round_float32
from .base import tensors

KEPT = frozenset(vars(nn.Module()))  # what PyTorch keeps in every module
SCALARS = bool, int, float, str, torch.dtype, type(None), Record
WARM_UP = 3  # steps before the capture, in which kernels are compiled and libraries allocate


class GraphedStep:
    """step(token, states) -> (result, states) as a CUDA graph, which replays all kernels of the step at once, without
    the time that Python takes to launch each. The token, the states and the result keep their memory."""

    def __init__(self, step: Callable[[Tensor, Any], tuple[Tensor, Any]], token: Tensor, states: Sequence[Any]):
        """Captures the step, which leaves the states as they are.

        Args:
            step: may overwrite the states.
            token: an example of the step's input.
            states: NamedTuples of tensors or None, contiguous and apart. Every call overwrites them.

        Raises:
            InputError: if a state changes its shape from step to step.
        """
        self.token, self.states = token.clone(), states

        def advance() -> Tensor:
            result, after = step(self.token, self.states)
            for old, new in zip(tensors(self.states), tensors(after), strict=True):
                was, now = list(old.shape), list(new.shape)
                require(was == now, f"a state of shape {was} has shape {now} after a token; expected the same")
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            return result

        self.result, self.replay = captured(lambda: step(self.token, deepcopy(self.states)), advance, token.device)

    def load(self, states: Sequence[Any]) -> None:
        """Goes on from a copy of other states of the same shapes."""
        for kept, x in zip(tensors(self.states), tensors(states), strict=True):
            kept.copy_(x)

    def __call__(self, token: Tensor) -> Tensor:
        """Runs the step. The next call overwrites the result."""
        self.token.copy_(token)
        self.replay()
        return self.result


def captured(
    warm_up: Callable[[], Any], run: Callable[[], Any], device: torch.device
) -> tuple[Any, Callable[[], None]]:
    """Returns what `run` returns, and a replay of its kernels on the GPU `device`, which writes the same memory. `run`
    is captured, not executed. `warm_up` is executed, and does what `run` does to other memory."""
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    capture = partial(torch.cuda.graph, capture_error_mode="thread_local")
    # PyTorch's own stream for captures is of the first GPU. The outer context leaves the stream where a capture fails.
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(WARM_UP):
            warm_up()
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, stream=side):
                result = run()
        except BaseException:  # PyTorch before 2.13 refuses random numbers and replays until a capture succeeds
            with capture(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
                torch.zeros(1, device=device)
            raise
    current.wait_stream(side)
    return result, graph.replay


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a captured step depends on: the memory of all tensors, the modules, their settings, and PyTorch's own."""
    modes = may_round_float32(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return *modes, *(entry for module in model.modules() for entry in _of(module))


def _of(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    yield module.training
    yield module._compiled_call_impl is None
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None:
            yield x.data_ptr(), x.shape, x.stride(), x.dtype, x.device
    for name, value in vars(module).items():
        if name in KEPT:
            continue
        if isinstance(value, SCALARS):
            yield name, value
        else:
            leaves, structure = tree_flatten(value)  # of adapters, the settings are in lists and dicts
            leaves = [x.data_ptr() if isinstance(x, Tensor) else x for x in leaves]  # tensors that are no parameters
            yield name, structure, [x for x in leaves if isinstance(x, SCALARS) or callable(x)]


def unsupported_reason(model: Any) -> str | None:
    """Returns why a token of a language model is not computed by a CUDA graph, or None."""
    if (kind := model.device.type) != "cuda":
        return f"the model is on {kind}"
    if len(devices := {str(x.device) for x in model.parameters()}) > 1:
        return f"its weights are on {', '.join(sorted(devices))}"
    backbone = model.model.backbone
    if backbone.positions is not None and backbone.positions.table is not None:
        return "its positions are learned, and have an end"
    for i, layer in enumerate(backbone.layers):
        if not layer.recurrent:
            return f"the state of layer {i} grows with the tokens"
        if getattr(layer.mlp, "routes", False):
            return f"layer {i} is a mixture of experts, whose sizes depend on the tokens"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has a hook"
    return "a hook is registered for all modules" if _has_any_global_hook() else None
