"""Launches of the kernels: two for the forward, four for the backward, whatever the length."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...utils.device import interpreted
from ..call import Call
from ..torch.tiles import check_bounds, product
from .gradients import gradients
from .op import LARGEST_KEY
from .prepare import prepare
from .scan import reverse_scan, scan

ROOM_TO_PREFETCH = 160 * 2**10  # bytes of shared memory with which the next chunk is loaded during this one's products
CHUNK = 64  # tokens per chunk unless the call says otherwise
DECAYS = {0: "none", 1: "fixed", 3: "scalar", 4: "vector"}  # by the dimensions of log_decay
Optional = Tensor | None


class GPU(NamedTuple):
    """What the block sizes depend on."""

    wide: bool  # whether matrix instructions read their operands from shared memory: Hopper and Blackwell's data centre
    stages: int  # 2: the next chunk is loaded during the products of this one

    @classmethod
    def of(cls, x: Tensor) -> "GPU":
        if interpreted():
            return cls(True, 1)
        about: Any = torch.cuda.get_device_properties(x.device)
        return cls(about.major in (9, 10), 2 if about.shared_memory_per_block_optin >= ROOM_TO_PREFETCH else 1)


class Launcher:
    """The kernels' common arguments, and one method per launch."""

    def __init__(self, call: Call):
        self.call, self.C = call, call.chunk_size or CHUNK
        (B, T, self.H, self.V), (HQ, self.K) = call.v.shape, call.k.shape[2:]
        self.tokens = B * T
        self.decay = DECAYS[0 if call.log_decay is None else call.log_decay.dim()]
        self.q, self.k, self.v, self.g = (one_stride(x) for x in (call.q, call.k, call.v, call.log_decay))
        self.numbers = {
            "beta": one_stride(call.beta), "write": one_stride(call.write_gate), "read": one_stride(call.read_gate),
        }  # fmt: skip
        self.stored = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32
        self.gpu = GPU.of(call.v)
        self.chunks, packed, self.owner = self._chunks(B, T)
        self.common: dict[str, Any] = {
            **packed, "T": T, "H": self.H, "HQ": HQ, "K": self.K, "C": self.C, "DECAY": self.decay,
            "DELTA": call.delta, "PACKED": call.cu_seqlens is not None, "enable_fp_fusion": True,
            **operands(call.v.dtype),
        }  # fmt: skip

    def _chunks(self, B: int, T: int) -> tuple[int, dict[str, Optional], Optional]:
        """Returns the number of chunks, cu_seqlens with the first chunk of each sequence, and the chunks' sequences.

        A chunk of packed sequences ends with its sequence. The number of chunks is bounded by shapes, so that nothing
        waits for the device; the chunks that are left over are empty."""
        bounds, C, N = self.call.cu_seqlens, self.C, self.call.sequences
        if bounds is None:
            return B * -(-T // C), {"cu_seqlens": None, "first_chunk": None}, None
        check_bounds(bounds, T)
        first = F.pad((bounds.diff() + (C - 1)).div(C, rounding_mode="floor").cumsum(0), (1, 0))
        chunks = T // C + N
        owner = torch.searchsorted(first, torch.arange(chunks, device=first.device), right=True) - 1
        packed: dict[str, Optional] = {"cu_seqlens": bounds.int(), "first_chunk": first.int()}
        return chunks, packed, owner.clamp(max=N - 1).int()

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.call.v.new_empty(shape, dtype=dtype or self.stored)

    def blocks(self, kernel: str) -> dict[str, int]:
        """Returns the block sizes and warps of a kernel: the largest blocks that (nearly) stay in registers."""
        K, vector, about = block(self.K, LARGEST_KEY), self.decay == "vector", self.gpu
        if kernel == "prepare":
            return {"BK": min(K, 32 if vector else 64), "num_warps": 8 if vector else 4, "num_stages": about.stages}
        if kernel == "gradients":
            BK, stages = (16, 1) if vector else (64 if about.wide else 32, about.stages)
            return {"BK": min(K, BK), "BV": block(self.V, 64), "num_warps": 8, "num_stages": stages}
        BV = block(self.V, 64 if K <= 128 and about.wide else 32)
        return {"BK": K, "BV": BV, "num_warps": 4 if K <= 64 else 8, "num_stages": about.stages}

    def prepare(self, backward: bool) -> dict[str, Any]:
        """Returns the matrices inside each chunk and, under a decay per channel, q and k with the decay applied."""
        delta, vector, square = self.call.delta, self.decay == "vector", (self.chunks, self.H, self.C, self.C)
        per_token = self.tokens, self.H, self.K
        found = {
            "scores": self.new(*square),
            "key_scores": self.new(*square) if delta and backward else None,
            "inverse": self.new(*square) if delta else None,
            "q_rows": self.new(*per_token) if vector else None,
            "k_rows": self.new(*per_token) if vector and delta else None,
            "k_cols": self.new(*per_token) if vector else None,
            "end": self.new(self.chunks, self.H, self.K, dtype=torch.float32) if vector else None,
        }
        prepare[(self.chunks, self.H)](
            self.q, self.k, self.g, self.numbers["beta"], **found, owner=self.owner, **self.common,
            **strides(q=self.q, k=self.k, g=self.g), **self.blocks("prepare"),
        )  # fmt: skip
        return found

    def carry(self, kernel: Any, found: dict[str, Any], **arguments: Any) -> None:
        """Launches `scan` or `reverse_scan`."""
        q, k_rows, k_cols, heads = self.q, self.k, self.k, self.common["HQ"]
        if self.decay == "vector":
            q, k_rows, k_cols, heads = found["q_rows"], found["k_rows"], found["k_cols"], self.H
        blocks = self.blocks("scan")
        kernel[(self.call.sequences * self.H, -(-self.V // blocks["BV"]))](
            q=q, k_rows=k_rows, k_cols=k_cols, g=self.g, end=found["end"], **self.numbers, scores=found["scores"],
            inverse=found["inverse"], **arguments, scale=self.call.scale, **strides(q=q, k=k_cols),
            **self.common | {"HQ": heads}, V=self.V, **blocks,
        )  # fmt: skip

    def scan(self, found: dict[str, Any], **results: Optional) -> None:
        initial = one_stride(self.call.initial_state)
        self.carry(scan, found, v=self.v, **strides(v=self.v), initial=initial, **results)

    def gradients(self, found: dict[str, Any], **tensors: Optional) -> None:
        gradients[(self.chunks, self.H)](
            q=self.q, k=self.k, v=self.v, g=self.g, **self.numbers, scores=found["scores"], owner=self.owner,
            key_scores=found["key_scores"], **tensors, scale=self.call.scale, **self.common, V=self.V,
            **strides(q=self.q, k=self.k, v=self.v, g=self.g, e=tensors["e"]), **self.blocks("gradients"),
        )  # fmt: skip


def block(size: int, most: int) -> int:
    """Returns the smallest power of two that is not below size, but at least 16 and at most `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def operands(dtype: torch.dtype) -> dict[str, Any]:
    """Returns what matrix products round their operands to.

    float16 is multiplied in TF32, which has the digits of float16 and the range of float32. float32 is multiplied in
    TF32 only after torch.set_float32_matmul_precision("high")."""
    if dtype == torch.bfloat16:
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    rounded = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if rounded else "ieee"}


def one_stride(x: Optional) -> Optional:
    """Returns x if one stride leads from each token to the next through all rows of the batch, else a copy."""
    if x is None or x.dim() < 4:
        return None if x is None else x.contiguous()
    B, T, _, K = x.shape
    return x if x.stride()[2:] == (K, 1) and (B == 1 or x.stride(0) == T * x.stride(1)) else x.contiguous()


def strides(**tensors: Optional) -> dict[str, int]:
    """Returns the stride between tokens of tensors [..., tokens, heads, ·]; 0 for the others."""
    return {f"{name}_stride": 0 if x is None or x.dim() < 3 else x.stride(-3) for name, x in tensors.items()}


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out, final state)."""
    run = Launcher(call)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = run.new(*call.state_shape, dtype=torch.float32)
    with torch.cuda.device_of(call.v):
        run.scan(run.prepare(backward=False), out=out, final=final, states=None, errors=None)
    return out, final


def backward(d_out: Tensor, d_final: Tensor, call: Call, decay_gradient: bool) -> list[Optional]:
    """Returns the gradients to q, k, v, log_decay, beta, write_gate, read_gate (None for inputs that are None) and the
    initial state."""
    run = Launcher(call)
    states, d_states = (run.new(run.chunks, run.H, run.K, run.V) for _ in range(2))
    d_initial = run.new(*call.state_shape, dtype=torch.float32)
    d_target, errors = run.new(run.tokens, run.H, run.V), run.new(run.tokens, run.H, run.V) if call.delta else None
    wanted = _wanted(run, d_target, decay_gradient)
    with torch.cuda.device_of(call.v):
        found = run.prepare(backward=True)
        run.scan(found, out=None, final=None, states=states, errors=errors)
        run.carry(reverse_scan, found, d_out=d_out, d_final=d_final, d_target=d_target, d_states=d_states,
                  d_initial=d_initial)  # fmt: skip
        run.gradients(found, e=run.v if errors is None else errors, states=states, d_states=d_states, d_out=d_out,
                      d_target=d_target, **wanted)  # fmt: skip
    return [*_in_place_of_inputs(call, wanted), d_initial]


def _wanted(run: Launcher, d_target: Tensor, decay_gradient: bool) -> dict[str, Any]:
    """Returns empty tensors for what `gradients` writes, and None for what nobody needs."""
    call, per_token = run.call, (run.tokens, run.H)
    gated_delta = call.delta and call.write_gate is not None
    factor = call.beta is not None or (call.write_gate is not None and not call.delta)

    def new(wanted: bool, *shape: int) -> Optional:
        return run.new(*per_token, *shape, dtype=torch.float32) if wanted else None

    return {
        "dq": run.new(*per_token, run.K),
        "dk": run.new(*per_token, run.K),
        "dv": run.new(*per_token, run.V) if gated_delta else d_target,
        "dg": new(run.g is not None and decay_gradient, *((run.K,) if run.decay == "vector" else ())),
        "d_factor": new(factor),
        "d_write": new(gated_delta),
        "d_read": new(call.read_gate is not None),
    }


def _in_place_of_inputs(call: Call, found: dict[str, Any]) -> list[Optional]:
    """Returns the gradients with the shapes of the inputs, in their order."""
    shaped = {name: None if x is None else x.view(*call.v.shape[:3], *x.shape[2:]) for name, x in found.items()}
    dg, factor, d_write, d_beta = shaped["dg"], shaped["d_factor"], shaped["d_write"], None
    if call.beta is not None:
        d_beta = factor if call.delta else product(factor, call.write_gate)
    if call.write_gate is not None and not call.delta:
        d_write = product(factor, call.beta)
    if dg is not None and call.log_decay is not None and call.log_decay.dim() == 1:
        dg = dg.sum((0, 1))
    dq, dk = (over_groups(found[name].view(*call.v.shape[:3], -1), call.q.shape[2]) for name in ("dq", "dk"))
    return [dq, dk, shaped["dv"], dg, d_beta, d_write, shaped["d_read"]]


def over_groups(x: Tensor, groups: int) -> Tensor:
    """Sums a gradient [B, T, H, K] over the heads that share one of the `groups` heads of q or k."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).sum(3)
