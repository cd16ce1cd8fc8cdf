"""Devices, and what depends on one."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable)
KEPT = "cpu", "cuda"  # kinds of devices whose constants are kept


def kept_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the tensors that `make` returned for the last 64 lists of arguments. The last argument may be a device.

    A tensor on a GPU is not kept, because it could lie in the memory of a CUDA graph, which is used again; nor is a
    tensor without values, as under FakeTensorMode."""
    kept = lru_cache(maxsize=64)(make)

    @wraps(make)
    def made(*arguments: Any) -> Any:
        device = arguments[-1] if isinstance(arguments[-1], torch.device) else torch.get_default_device()
        plain = device.type == "cpu" and (torch.compiler.is_compiling() or not _without_values())
        return kept(*arguments) if plain else make(*arguments)

    made.forget = kept.cache_clear  # type: ignore[attr-defined]
    return made


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the tensors that `make` returned for each list of settings and a device, the last argument: small constants
    of a layer, which take many kernels.

    Nothing is forgotten, as a CUDA graph may read it. What is made while a graph is captured lies in its memory, which
    is used again, and is not kept, nor is what a graph, trace, mode or transform sees made."""
    values: dict[tuple[Any, ...], Any] = {}

    @wraps(make)
    def made(*arguments: Any) -> Any:
        recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if recorded or _in_a_mode() or torch._C._are_functorch_transforms_active():
            return make(*arguments)
        if (before := values.get(arguments)) is not None:  # a hook of a layer may have written it
            return make(*arguments) if before._version or before.requires_grad else before
        on_gpu = (device := arguments[-1]).type == "cuda"
        if device.type not in KEPT or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return make(*arguments)
        with torch.inference_mode(False), torch.no_grad():
            found = make(*arguments)
        if on_gpu:  # another stream may read it next
            torch.cuda.current_stream(device).synchronize()
        return values.setdefault(arguments, found)

    made.values = values  # type: ignore[attr-defined]
    return made


def _without_values() -> bool:
    """Whether a mode is active whose tensors have no values, or are only recorded."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def _in_a_mode() -> bool:
    """Whether a mode sees every operator, as FakeTensorMode and selective checkpointing, which counts them."""
    return torch._C._len_torch_dispatch_stack() > 0


def constant(function: F) -> F:
    """Marks a function whose arguments are constants, such as a device. torch.compile calls it instead of tracing it,
    and takes its result as a constant: for questions to a driver or to the import system, which would break a graph.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is one of NVIDIA's Hopper generation, such as an H100 or H200."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, in Python, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def may_round_float32() -> bool:
    """Whether PyTorch's settings allow products of float32 matrices on a GPU to round them to TF32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the setting was made through fp32_precision, after which the older one cannot be read
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


WITHOUT_FLOAT64 = ["mps"]  # kinds of devices: Apple's GPUs


def float64(x: torch.Tensor) -> torch.Tensor:
    """Returns x in float64, on the CPU if its device has no float64. A result changes its precision before its device,
    because its gradient goes the other way."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast on the device of x. The meta device, used to count operations, has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
