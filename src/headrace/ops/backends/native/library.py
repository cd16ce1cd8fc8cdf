"""Loads the native library and calls it through its C interface (native/headrace.h).

The library is loaded when this module is imported. A call packs numbers, addresses and strides into the header's
structs; tensors are not copied if their layout and dtype allow it.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from importlib.resources import as_file, files
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ....spec.decay import DecayShape
from ...call import NORMALIZER_EPS, Call, like
from ...checks import require, sequence_ends
from . import structs

ABI = 15
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
DECAYS = {1: DecayShape.FIXED, 3: DecayShape.SCALAR, 4: DecayShape.VECTOR}  # by the number of dimensions
NO_MEMORY = 3
_PROBLEM, _GRADIENTS = structs.LAYOUTS["hr_problem"], structs.LAYOUTS["hr_gradients"]
PLACE = structs.LAYOUTS["hr_tensor"]
SCALE, SCALE_AT = struct.Struct("@f"), _PROBLEM.offset("scale")
_ABSENT = (0, 0, 0, 0)
ISAS = ("avx512bf16", "avx512", "avx2", "portable")


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Returns (the library, its instruction set on this machine), or (None, why the library is not available).

    The environment variable HEADRACE_LIBRARY names the file of another build; HEADRACE_ISA limits the instructions."""
    named, isa = os.environ.get("HEADRACE_LIBRARY"), os.environ.get("HEADRACE_ISA") or ISAS[0]
    require(isa in ISAS, f"HEADRACE_ISA={isa!r} is unknown; expected one of {', '.join(ISAS)}")
    resource = Path(named) if named else files("headrace") / "libheadrace.so"
    require(not named or resource.is_file(), f"HEADRACE_LIBRARY={named!r} is not a file; expected a native library")
    if not resource.is_file():
        return None, "headrace was installed without its native kernels: no C++ compiler, or HEADRACE_NATIVE=off"
    with as_file(resource) as path:
        try:
            abi = (library := ctypes.CDLL(str(path))).hr_abi()
        except (OSError, AttributeError) as error:  # a library of something else has no such function
            return None, f"its library cannot be loaded: {error}"
    if abi != ABI:
        return None, f"{path} has interface version {abi}, not {ABI}: install headrace again"
    _declare(library)
    if fault := structs.fault(library.hr_structs().decode()):
        raise RuntimeError(f"{path} would read the memory of a call wrongly: {fault}; build it from the same sources")
    return library, library.hr_isa().decode()


def _declare(library: ctypes.CDLL) -> None:
    """Declares the C functions. Structs are passed as bytes, buffers as addresses."""
    struct_, pointer = ctypes.c_char_p, ctypes.c_void_p
    library.hr_isa.restype = library.hr_message.restype = library.hr_structs.restype = ctypes.c_char_p
    library.hr_kept_floats.restype = ctypes.c_int64
    library.hr_kept_floats.argtypes = [struct_]
    library.hr_forward.argtypes = [struct_, struct_, pointer, pointer]
    library.hr_backward.argtypes = [struct_, struct_, pointer, pointer, struct_]
    library.hr_step.argtypes = [struct_, struct_, pointer]
    library.hr_step_at.argtypes = [struct_, struct_]
    library.hr_convolve.argtypes = [struct_] * 3
    library.hr_convolve_backward.argtypes = [struct_] * 4 + [pointer] * 2
    library.hr_selective_scan.argtypes = [struct_] * 3 + [pointer]
    library.hr_selective_scan_backward.argtypes = [struct_] * 3 + [pointer, struct_]
    library.hr_kinds.restype = library.hr_operations.restype = ctypes.c_char_p
    library.hr_run.argtypes = [struct_] * 4


library, _found = _load()
missing = _found if library is None else None
instructions = "" if library is None else _found


class Problem:
    """The struct hr_problem of a call, with references to the tensors that it points to."""

    def __init__(self, call: Call):
        (B, T, H, V), Hq, K, log_decay = call.v.shape, call.q.shape[2], call.k.shape[-1], call.log_decay
        for name, x, heads in (("q", call.q, Hq), ("k", call.k, min(Hq, H))):
            expect(name, x, (B, T, heads, K), call.v.dtype)
        if log_decay is not None:
            dimensions = log_decay.dim()
            expect("log_decay", log_decay, (H,) if dimensions == 1 else (B, T, H, K)[: max(dimensions, 3)])
        for name, gate in (("beta", call.beta), ("write_gate", call.write_gate)):
            expect(name, gate, (B, T, H))
        expect("read_gate", call.read_gate, call.out_shape[:3])
        expect("initial_state", call.initial_state, call.state_shape)
        expect("bonus", call.bonus, (H, K))
        per_token = [_floats(x) for x in (log_decay, call.beta, call.write_gate, call.read_gate)]
        self.tensors: list[Tensor | None] = [_rows(call.q), _rows(call.k), _rows(call.v), *per_token]
        ends = None
        if call.cu_seqlens is not None:  # checked always, because the kernels would access memory outside the tensors
            expect("cu_seqlens", call.cu_seqlens, (len(call.cu_seqlens),))
            ends = torch.tensor(sequence_ends(call.cu_seqlens, T), dtype=torch.int64, device="cpu")
        given = (call.initial_state, call.bonus)
        state, bonus = (None if x is None else x.to(torch.float32).contiguous() for x in given)
        self.alive = (ends, state, bonus)
        decay = 0 if log_decay is None else DECAYS[log_decay.dim()]
        self.packed = _PROBLEM.pack(
            ABI, DTYPES[call.v.dtype], decay, call.delta, call.chunk_size or 0, torch.get_num_threads(),
            call.scale, B, T, H, Hq, K, V, call.sequences, address(ends), *_places(self.tensors), address(state),
            address(bonus), NORMALIZER_EPS if call.normalize else 0,
        )  # fmt: skip


def expect(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raises ValueError for a wrong shape or dtype. Every tensor is checked before its address goes to C, because the
    kernels would access memory outside the tensor."""
    if x is None or (x.shape == shape and (dtype is None or x.dtype is dtype)):
        return
    of_dtype = "" if dtype is None else f" in {dtype}"
    raise ValueError(f"{name} has shape {list(x.shape)} in {x.dtype}; expected {list(shape)}{of_dtype}")


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    wide = None if x is None else x.to(torch.float32)
    return _rows(wide) if wide is not None and wide.dim() == 4 else wide


def address(x: Tensor | None) -> int:
    """Returns the address of a tensor's data, 0 for None."""
    return 0 if x is None else x.data_ptr()


def place(x: Tensor | None) -> tuple[int, ...]:
    """Returns the fields of hr_tensor: address and strides of batch, token and head. A fixed decay [H] has only the
    last stride."""
    if x is None:
        return _ABSENT
    return (x.data_ptr(), 0, 0, *x.stride()) if x.dim() == 1 else (x.data_ptr(), *x.stride()[:3])


def _places(tensors: list[Tensor | None]) -> Iterable[int]:
    return chain.from_iterable(map(place, tensors))


def check(status: int) -> None:
    """Raises MemoryError or RuntimeError for an error status of the library."""
    if status == 0:
        return
    assert library is not None
    sentence = f"the native kernels refused a call: {library.hr_message(status).decode()}"
    raise MemoryError(sentence) if status == NO_MEMORY else RuntimeError(sentence)


def forward(call: Call, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (out, final state, a buffer for the backward if `keep`)."""
    assert library is not None, missing
    problem, out = Problem(call), call.v.new_empty(call.out_shape)
    into, kept = PLACE.pack(*place(out)), None
    if call.v.shape[1] == 1 and not keep and call.cu_seqlens is None:
        final = copied(call.initial_state, call.state_shape)
        check(library.hr_step(problem.packed, into, final.data_ptr()))
        return out, final, None
    final = call.v.new_empty(call.state_shape, dtype=torch.float32)
    if keep:
        kept = final.new_empty(library.hr_kept_floats(problem.packed))
    check(library.hr_forward(problem.packed, into, final.data_ptr(), address(kept)))
    return out, final, kept


def copied(state: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Returns a copy of a state, contiguous and in float32; zeros for None."""
    copy = torch.empty(shape, dtype=torch.float32, device="cpu")
    return copy.zero_() if state is None else copy.copy_(state)


def backward(d_out: Tensor, d_final: Tensor, call: Call, kept_: tuple[Tensor], wanted: list[bool]):
    """Returns the gradients of the differentiable inputs, None for those not `wanted`."""
    assert library is not None, missing
    problem, d_out, d_final, kept = Problem(call), _rows(d_out), d_final.contiguous(), kept_[0].contiguous()
    expect("d_out", d_out, call.out_shape, call.v.dtype)
    expect("d_final", d_final, call.state_shape, torch.float32)
    expect("kept", kept, (library.hr_kept_floats(problem.packed),), torch.float32)
    given = zip(problem.tensors, wanted[:7], strict=True)
    new = [like(x) if x is not None and needed else None for x, needed in given]
    d_initial = torch.empty_like(d_final) if wanted[7] else None
    d_bonus = d_final.new_empty(call.bonus.shape) if wanted[8] and call.bonus is not None else None
    gradients = _GRADIENTS.pack(*_places(new), address(d_initial), address(d_bonus))
    out = PLACE.pack(*place(d_out))
    check(library.hr_backward(problem.packed, out, d_final.data_ptr(), kept.data_ptr(), gradients))
    return [*new, d_initial, d_bonus]


def names(function: str) -> dict[str, list[str]]:
    """Returns the lists of names that a function of the library writes; {} without the library."""
    return {} if library is None else structs.lists(getattr(library, function)().decode())
