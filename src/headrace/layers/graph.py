"""`GraphedStep`, one token of a batch as a CUDA graph."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import require

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
            for old, new in zip(_tensors(self.states), _tensors(after), strict=True):
                was, now = list(old.shape), list(new.shape)
                require(was == now, f"a state of shape {was} has shape {now} after a token; expected the same")
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            return result

        self.result, self.replay = captured(lambda: step(self.token, deepcopy(self.states)), advance, token.device)

    def load(self, states: Sequence[Any]) -> None:
        """Goes on from a copy of other states of the same shapes."""
        for own, x in zip(_tensors(self.states), _tensors(states), strict=True):
            own.copy_(x)

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
    before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(before)
    # The stream is named, because PyTorch's own for captures belongs to the first GPU that was captured on. The outer
    # context leaves it also where a capture fails.
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(WARM_UP):
            warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = run()
    before.wait_stream(side)
    return result, graph.replay


def _tensors(states: Sequence[Any]) -> list[Tensor]:
    return [x for state in states if state is not None for x in state if isinstance(x, Tensor)]
