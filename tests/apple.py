"""A stand-in for Apple's GPU: the device `apple`, which refuses float64 and computes on the CPU. For a process of its
own, which imports it before headrace: PyTorch has one such device, for good."""

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CPU, DEVICE = torch.device("cpu"), "apple"
# Operators of tensors on several devices, of which indices may be on the CPU, or of no numbers.
MIXED = "copy_", "index", "index_put_", "_has_compatible_shallow_copy_type"
operators = set()  # those that have run on the device
_kernels = {}  # of operators in Python, whose own operators are to be seen too
_register, _tensor = torch.library.Library.impl, torch.tensor


class Device(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Apple(torch.Tensor):
    """A tensor of the device. inner: its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"a tensor of {inner.dtype}, which Apple's GPUs do not have")
        kind = {"dtype": inner.dtype, "device": DEVICE}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), inner.storage_offset(), **kind)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def tolist(self):
        return self.inner.tolist()


class Present(TorchDispatchMode):
    """While it is active, tensors can be made on the device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


def run(operator, args, kwargs):
    given, others = [], []

    def numbers(x):
        if not isinstance(x, Apple):
            others.extend([x] if isinstance(x, torch.Tensor) and x.dim() else [])
            return x
        given.append(x)
        return x.inner

    inner, options = tree_map(numbers, args), tree_map(numbers, kwargs)
    place = options.get("device")
    here = bool(given) if place is None else torch.device(place).type == DEVICE
    if given and operator._opname in _kernels:
        with Present():
            return _kernels[operator._opname](*args, **kwargs)
    if given or here:
        operators.add(operator)
    if given and others and operator._opname not in MIXED:
        raise RuntimeError(f"{operator} of tensors on the CPU and on Apple's GPU")
    if place is not None:
        if given and not here and options.get("dtype") == torch.float64:
            raise TypeError("a copy from Apple's GPU that changes its precision on the way")
        options["device"] = CPU if here else place
    results = operator(*inner, **options)
    changed = [x for x, about in zip(args, operator._schema.arguments, strict=False) if _is_written(about)]
    if changed:  # in place
        return changed[0] if operator._schema.returns else None
    if "out" in kwargs:
        return kwargs["out"]
    on_device = here and operator is not torch.ops.aten._local_scalar_dense.default
    return tree_map(lambda x: Apple(x) if isinstance(x, torch.Tensor) else x, results) if on_device else results


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _note(self, name, function, key="", **options):
    if key == "CompositeExplicitAutograd":
        _kernels[name] = function
    return _register(self, name, function, key, **options)


def _made(data, *, device=None, **options):
    """torch.tensor, which makes tensors of a device where no mode sees it, and of `with torch.device(...)`, whose mode
    does not see this function."""
    return _tensor(data, **options, device=CPU).to(torch.empty(0).device if device is None else device)


backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Device())
torch.library.Library.impl, torch.tensor = _note, _made
torch.autograd.set_multithreading_enabled(False)  # the mode is of this thread
torch.__future__.set_swap_module_params_on_conversion(True)
