"""The backend "fla": the recurrence on the chunk kernels of flash-linear-attention (fla-core), for GPUs.

    rule    log_decay                    kernel
    add     none, [H], [B, T, H]         chunk_simple_gla
    add     [B, T, H, K]                 chunk_gla
    delta   none                         chunk_delta_rule
    delta   [H], [B, T, H]               chunk_gated_delta_rule
    delta   [B, T, H, K]                 chunk_kda

FLA itself takes FlashQLA's kernels for chunk_gated_delta_rule where they are installed and K = V = 128, on Hopper and
newer. The kernels have no gates. The read gate multiplies q, the write gate multiplies v, and under the additive rule β
multiplies v too, each product rounded once to v's dtype. Autograd gives the gradients of the gates through the
products. fla-core is imported by the first call, because its import takes seconds.
"""

import os
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...ops.autograd import INSTEAD
from ...ops.backends.base import PLUGGED, Backend, Kernel
from ...ops.call import Call
from ...ops.derivatives import first_order, transformed
from ...utils.device import constant, interpreted, is_hopper, may_round_float32, without_autocast
from ...utils.extras import named
from .packing import packing

DTYPES = torch.bfloat16, torch.float16, torch.float32
CHUNK = 64  # tokens per chunk of all of FLA's kernels
LEAST = -104.0  # lower bound of log_decay: e^LEAST is 0 in float32, and −∞ would give NaN differences of sums
NAME = "backend='fla'"


def _not_installed() -> str | None:
    if any(util.find_spec(name) is None for name in ("fla", "triton", "packaging", "einops")):
        return f"it needs {named('gpu')}"
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        return "the package fla has no metadata of fla-core; expected fla-core 0.6"
    return None if installed.startswith("0.6.") else f"fla-core is {installed}; expected 0.6"


PACKAGES = _not_installed()


@constant
def _missing() -> str | None:
    if PACKAGES is None and not (interpreted() or torch.cuda.is_available()):
        return "it runs on a GPU, and PyTorch finds none"
    return PACKAGES


# --- which calls it takes --------------------------------------------------------------------------------------------


def _unsupported_reason(call: Call) -> str | None:
    """Returns why FLA cannot compute a call, or None."""
    (B, _, _, V), K, dtype = call.v.shape, call.k.shape[-1], call.v.dtype
    if not (call.v.is_cuda or interpreted()):
        return f"it runs on a GPU, and v is on {call.v.device}"
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace its kernels"
    if transformed():
        return "it has no rules for torch.func and forward-mode derivatives"
    if dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, and v is {dtype}"
    if B == 0 or min(K, V) < 16:
        return f"it takes B ≥ 1 and K, V ≥ 16, and they are {B}, {K} and {V}"
    if dtype.itemsize == 2 and (K % 2 or V % 2):
        return f"it takes even K and V in {dtype}, and they are {K} and {V}"
    if call.delta and K > 256:
        return f"it takes K up to 256 under rule='delta', and K is {K}"
    if call.chunk_size not in (None, CHUNK):
        return f"its chunks have {CHUNK} tokens, and chunk_size is {call.chunk_size}"
    return _imprecise(call) or _miscompiled(call)


def _imprecise(call: Call) -> str | None:
    """Triton rounds the float32 operands of matrix products to TF32 by itself."""
    if call.v.dtype != torch.float32:
        return None
    if call.delta and call.log_decay is None:
        return "it takes bfloat16 and float16 for rule='delta' without decay, and v is torch.float32"
    if call.tf32 or interpreted() or may_round_float32():
        return None
    if os.environ.get("TRITON_F32_DEFAULT") == "ieee":
        return None
    return "it rounds float32 to TF32 in products, which torch.set_float32_matmul_precision('high') permits"


def _miscompiled(call: Call) -> str | None:
    """Triton from 3.4 to 3.7.0 makes wrong gradients of FLA's kernels on Hopper (FLA's issues 640 and 984)."""
    decay, wanted = call.log_decay, any(x is not None and x.requires_grad for x in call.tensors)
    if not (wanted and torch.is_grad_enabled()) or interpreted():
        return None
    # One number per token and head, which a fixed decay with a gradient becomes.
    scalar = decay is not None and (decay.dim() == 3 or (decay.dim() == 1 and decay.requires_grad))
    if not (call.delta or scalar) or not is_hopper(call.v.device):
        return None
    triton_version = TorchVersion(import_module("triton").__version__)
    if triton_version >= "3.4" and triton_version < "3.7.1":
        return f"Triton {triton_version} miscompiles its gradients for this GPU; expected Triton 3.7.1 or newer"
    return None


# --- a call ----------------------------------------------------------------------------------------------------------


@first_order(NAME, INSTEAD)
def _only_first(gradient: Tensor) -> None:
    """A hook of the results, because the second derivatives of FLA's kernels would be zeros."""


def _run(call: Call) -> tuple[Tensor, Tensor]:
    with without_autocast(call.v):  # the recurrence is in the dtypes that it is given
        out, state = _kernel(call)
    for result in (out, state):
        if result.requires_grad:
            result.register_hook(_only_first)
    return out, state


def _kernel(call: Call) -> tuple[Tensor, Tensor]:
    ops, H, state = import_module("fla.ops"), call.v.shape[2], call.initial_state
    q, k, v, decay = call.q, call.k, _gated(call.v, call.write_gate), _decay(call)
    shared = call.q.shape[2] == call.k.shape[2] and call.read_gate is None  # by the heads of a group
    if not (shared and call.delta and decay is not None):  # two kernels take such heads
        q, k = _per_head(q, H), _per_head(k, H)
    q = _gated(q, call.read_gate)
    settings: dict[str, Any] = {
        "scale": call.scale, "initial_state": None if state is None else state.float(), "output_final_state": True,
    }  # fmt: skip
    if call.cu_seqlens is not None:
        bounds = packing(call.cu_seqlens, call.v.shape[1])
        settings |= {"cu_seqlens": bounds.on_device, "cu_seqlens_cpu": bounds.on_host}
    if not call.delta:
        v = _gated(v, call.beta)
        if decay is not None and decay.dim() == 4:
            return ops.chunk_gla(q, k, v, decay, **settings)
        name = "g_gamma" if decay is not None and decay.dim() == 1 else "g"
        return ops.chunk_simple_gla(q, k, v, **{name: decay}, **settings)
    beta = torch.ones_like(v[..., 0]) if call.beta is None else call.beta
    if decay is None:
        return ops.chunk_delta_rule(q, k, v, beta, **settings)
    kernel = ops.chunk_kda if decay.dim() == 4 else ops.chunk_gated_delta_rule
    return kernel(q, k, v, decay, beta, **settings)


def _decay(call: Call) -> Tensor | None:
    """Returns log_decay in float32. A fixed decay that needs a gradient, or a delta rule, becomes one per token."""
    if call.log_decay is None:
        return None
    decay = call.log_decay.float().clamp(min=LEAST)
    if decay.dim() == 1 and (call.delta or decay.requires_grad):
        decay = decay.expand(call.v.shape[:3]).contiguous()
    return decay


def _per_head(x: Tensor, H: int) -> Tensor:
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else (x * gate[..., None]).to(x.dtype)


def _about() -> str:
    more = f", flash-qla {version('flash-qla')}" if util.find_spec("flash_qla") else ""
    return f"fla-core {version('fla-core')}, Triton {import_module('triton').__version__}{more}"


BACKEND = PLUGGED["fla"] = Backend(_missing, _about, Kernel(_run, _unsupported_reason))
