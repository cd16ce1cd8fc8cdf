"""Mamba's selective scan as a PyTorch operator for the CPU, `torch.ops.headrace.selective_scan` (native/scan.h).

Dimensions: T tokens of all sequences, N sequences, S state numbers per channel, D channels.
"""

from typing import Any

import torch
from torch import Tensor

from ..ops import derivatives
from ..ops.autograd import define
from ..ops.backends.native import library as native
from ..ops.backends.native.structs import LAYOUTS
from ..ops.call import Call

CHUNK, PART = 32, 256  # HR_SCAN_CHUNK, HR_SCAN_PART
LARGEST = 2**16
_SCAN, _GRADIENTS = LAYOUTS["hr_scan"], LAYOUTS["hr_scan_gradients"]
INPUTS = "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor initial, Tensor cu_seqlens"


def unsupported_reason(u: Tensor, A: Tensor) -> str | None:
    """Returns why the library cannot compute a scan of u with A, or None."""
    if native.missing or torch.onnx.is_in_onnx_export():
        return native.missing or "an ONNX graph takes the scan of PyTorch"
    if u.device.type != "cpu" or u.dtype is not torch.float32:
        return f"it runs on the CPU, in float32, and u is {u.dtype} on {u.device.type}"
    if max(A.shape) > LARGEST or not u.numel():
        return f"it takes a token and up to {LARGEST} channels and state numbers; u is {[*u.shape]}, A {[*A.shape]}"
    return derivatives.transforms_reason()


class _Structs:
    """The structs hr_problem and hr_scan, with references to the tensors that they point to."""

    def __init__(self, u, dt, A, B, C, initial, cu_seqlens, kept: Tensor | None):
        self.call = Call(_one_row(C), _one_row(B), _one_row(u), initial_state=initial[:, None], cu_seqlens=cu_seqlens)
        native.expect("dt", dt, u.shape, torch.float32)
        native.expect("A", A, initial.shape[1:], torch.float32)
        native.expect("initial", initial, initial.shape, torch.float32)
        native.expect("kept", kept, _kept_shape(u, initial), torch.float32)
        self.problem, self.tensors = native.Problem(self.call), (dt.contiguous(), A.contiguous(), kept)
        steps, A, _ = self.tensors
        self.packed = self.problem.packed, _SCAN.pack(A.data_ptr(), *_place(steps), native.address(kept))


def _one_row(x: Tensor) -> Tensor:
    return x[None, :, None]


def _place(x: Tensor) -> tuple[int, ...]:
    return native.place(_one_row(x))


def _kept_shape(u: Tensor, initial: Tensor) -> tuple[int, ...]:
    return u.shape[0] // CHUNK + initial.shape[0], *initial.shape[1:]  # len() would be a constant in a graph


def _forward(u, dt, A, B, C, initial, cu_seqlens, keep):
    assert native.library is not None
    out, final, kept = _fake(u, dt, A, B, C, initial, cu_seqlens, keep)
    structs = _Structs(u, dt, A, B, C, initial, cu_seqlens, kept if keep else None)
    native.check(native.library.hr_selective_scan(*structs.packed, native.PLACE.pack(*_place(out)), final.data_ptr()))
    return out, final, kept


def _fake(u, dt, A, B, C, initial, cu_seqlens, keep):
    kept = u.new_empty(_kept_shape(u, initial) if keep else 0)
    return u.new_empty(u.shape), initial.new_empty(initial.shape), kept


def _backward(d_out, d_final, u, dt, A, B, C, initial, cu_seqlens, kept):
    assert native.library is not None
    structs = _Structs(u, dt, A, B, C, initial, cu_seqlens, kept)
    d_out, d_final = d_out.contiguous(), d_final.contiguous()
    native.expect("d_out", d_out, u.shape, torch.float32)
    native.expect("d_final", d_final, initial.shape, torch.float32)
    d_u, d_dt, d_A, d_initial = (x.new_empty(x.shape) for x in (u, dt, initial, initial))
    parts = u.new_empty(2, -(-u.shape[1] // PART), *B.shape)
    into = _GRADIENTS.pack(*_place(d_u), *_place(d_dt), *(x.data_ptr() for x in (d_A, *parts, d_initial)))
    place = native.PLACE.pack(*_place(d_out))
    native.check(native.library.hr_selective_scan_backward(*structs.packed, place, d_final.data_ptr(), into))
    return d_u, d_dt, d_A.sum(0), *parts.sum(1), d_initial


def _fake_backward(d_out, d_final, u, dt, A, B, C, initial, cu_seqlens, kept):
    return tuple(x.new_empty(x.shape) for x in (u, dt, A, B, C, initial))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], output[2])


@derivatives.first_order("the selective scan", "; expected float64, which PyTorch scans")
def _differentiate(ctx: Any, d_out: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradient(d_out, d_final, *ctx.saved_tensors), None, None


BACKWARD = f"(Tensor d_out, Tensor d_final, {INPUTS}, Tensor kept)"
_gradient = define("selective_scan_backward", BACKWARD, 6, _backward, _fake_backward, "CPU")
_scan = define("selective_scan", f"({INPUTS}, bool keep)", 3, _forward, _fake, "CPU", _differentiate, _save)


def selective_scan(operands: tuple[Tensor, ...], cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `selective_scan` of selective_scan.py for packed sequences with these bounds."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return _scan(*operands, cu_seqlens, keep)[:2]
