"""The backend "onnx": while `torch.onnx.export` traces a model, the recurrence becomes one node of the graph,
LinearAttention. ONNX Runtime has kernels for it (CPU, CUDA, WebGPU) in its own domain; opset 27 of ONNX has the same
node.

The node has no gates, no fixed decay, no β under the additive rule and no heads of v that share keys; they are computed
by nodes before it.
"""

import torch
from torch import Tensor

from ..ops.backends.base import PLUGGED, Backend, Kernel
from ..ops.backends.torch import step
from ..ops.call import Call, accumulator, gated

DOMAIN = "com.microsoft"


def _run(call: Call) -> tuple[Tensor, Tensor]:
    dtype, call = call.v.dtype, call.wide()
    (B, T, H, V), v = call.v.shape, gated(call.v, call.write_gate)
    q, k = (x.repeat_interleave(H // x.shape[2], 2) if x.shape[2] < H else x for x in (call.q, call.k))
    decay, beta = call.log_decay, call.beta
    if decay is not None and decay.dim() == 1:
        decay = decay.expand(B, T, H)
    if call.delta:
        beta = torch.ones_like(v[..., 0]) if beta is None else beta
    else:
        v, beta = gated(v, beta), None
    tensors = [gated(q, call.read_gate), k, v, None, decay, beta]
    inputs = [None if x is None else x.flatten(2) for x in tensors]
    inputs[3] = call.initial_state
    while inputs[-1] is None:  # a node's last optional inputs are left out
        inputs.pop()
    rule = "delta" if call.delta else "linear"
    rule = rule if decay is None else "gated_delta" if call.delta else "gated"
    out, state = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention", inputs,
        {"update_rule": rule, "q_num_heads": q.shape[2], "kv_num_heads": H, "scale": call.scale},
        dtypes=(v.dtype, v.dtype), shapes=((B, T, q.shape[2] * V), call.state_shape), version=1,
    )  # fmt: skip
    return out.unflatten(2, (-1, V)).to(dtype), state


def _unsupported_reason(call: Call) -> str | None:
    if call.cu_seqlens is not None:
        return "its node has no packed sequences (cu_seqlens)"
    return "its node has no float64" if accumulator(call.v) == torch.float64 else None


def _missing() -> str | None:
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return None
    return "it writes nodes of an ONNX graph, inside torch.onnx.export only"


PLUGGED["onnx"] = Backend(
    missing=_missing,
    about=lambda: f"PyTorch {torch.__version__}",
    linear_attention=Kernel(_run, _unsupported_reason, extras=("queries",)),
    step=Kernel(step.step),
)
