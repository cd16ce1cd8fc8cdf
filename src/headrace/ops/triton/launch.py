"""Launches of the kernels: two for the forward, four for the backward, whatever the length."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..torch.tiles import product
from .op import LARGEST_KEY
from .gradients import gradients
from .prepare import prepare
from .scan import reverse_scan, scan

CHUNK = 64  # tokens per chunk unless the call says otherwise


class Layout(NamedTuple):
    """Where the chunks of a call are. Packed sequences have their own chunks; their number is bounded by shapes alone, so
    that nothing waits for the device, and the places that no chunk uses belong to no sequence."""

    chunks: int
    cu_seqlens: Tensor | None = None
    first_chunk: Tensor | None = None  # [N + 1] the first chunk of each sequence
    owner: Tensor | None = None  # [chunks] the sequence of each chunk

    @classmethod
    def of(cls, call: Call, C: int) -> "Layout":
        B, T = call.v.shape[:2]
        if call.cu_seqlens is None:
            return cls(B * -(-T // C))
        bounds = call.cu_seqlens.to(torch.int32)
        first = torch.nn.functional.pad((bounds.diff() + C - 1).div(C, rounding_mode="floor").cumsum(0), (1, 0))
        chunks = T // C + call.sequences
        places = torch.arange(chunks, device=bounds.device)
        owner = torch.searchsorted(first, places, right=True) - 1
        return cls(chunks, bounds, first.int(), owner.clamp(max=call.sequences - 1).int())


class Launcher:
    """The arguments that the kernels share, and their launches."""

    def __init__(self, call: Call):
        self.call, self.C = call, call.chunk_size or CHUNK
        (B, T, H, V), (HQ, K) = call.v.shape, call.k.shape[2:]
        self.tokens, self.H, self.K, self.V = B * T, H, K, V
        self.q, self.k, self.v = (rows_of(x) for x in (call.q, call.k, call.v))
        self.g = None if call.log_decay is None else rows_of(call.log_decay)
        self.beta, self.write, self.read = (
            None if x is None else x.contiguous() for x in (call.beta, call.write_gate, call.read_gate)
        )
        self.layout = Layout.of(call, self.C)
        self.acc = torch.float32
        self.stored = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32
        kind = {0: "none", 1: "fixed", 3: "scalar", 4: "vector"}[0 if call.log_decay is None else call.log_decay.dim()]
        self.vector = kind == "vector"
        self.common = {
            "cu_seqlens": self.layout.cu_seqlens, "first_chunk": self.layout.first_chunk, "T": T, "H": H, "HQ": HQ, "K": K,
            "C": self.C, "DECAY": kind, "DELTA": call.delta,
            "PACKED": call.cu_seqlens is not None, **operands(call.v.dtype), "enable_fp_fusion": True,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.call.v.new_empty(shape, dtype=dtype or self.stored)

    def strides(self, *names: str) -> dict[str, int]:
        given = {f"{name}_stride": getattr(self, name) for name in names}
        return {name: 0 if x is None or x.dim() < 4 else x.stride(-3) for name, x in given.items()}

    def prepare(self, keep: bool) -> dict[str, Any]:
        """Returns the matrices inside each chunk and, under a decay per channel, q and k with the decay applied."""
        delta, vector, shape = self.call.delta, self.vector, (self.layout.chunks, self.H, self.C, self.C)
        found = {
            "scores": self.new(*shape),
            "key_scores": self.new(*shape) if delta and keep else None,
            "inverse": self.new(*shape) if delta else None,
            "q_rows": self.new(self.tokens, self.H, self.K) if vector else None,
            "k_rows": self.new(self.tokens, self.H, self.K) if vector and delta else None,
            "k_cols": self.new(self.tokens, self.H, self.K) if vector else None,
            "end": self.new(self.layout.chunks, self.H, self.K, dtype=self.acc) if vector else None,
        }
        prepare[(self.layout.chunks, self.H)](
            self.q, self.k, self.g, self.beta, **found, owner=self.layout.owner, **self.strides("q", "k", "g"),
            **self.common, **self.blocks("prepare"),
        )  # fmt: skip
        return found

    def blocks(self, kernel: str) -> dict[str, int]:
        """Returns the block sizes and the warps of a kernel: the largest that keep its values in registers."""
        K, V = block(self.K, LARGEST_KEY), block(self.V, 64)
        if kernel == "prepare":
            return {"BK": min(K, 32 if self.vector else 64), "num_warps": 8 if self.vector else 4, "num_stages": 2}
        if kernel == "gradients":
            return {
                "BK": min(K, 16 if self.vector else 64),
                "BV": V,
                "num_warps": 8,
                "num_stages": 1 if self.vector else 2,
            }
        return {"BK": K, "BV": V if K <= 128 else min(V, 32), "num_warps": 4 if K <= 64 else 8, "num_stages": 2}

    def carry(self, kernel: Any, found: dict[str, Any], **tensors: Tensor | None) -> None:
        """Launches `scan` or `reverse_scan`, one program for each sequence, head and block of V."""
        reading: dict[str, Any] = {"q": self.q, "k_rows": self.k, "k_cols": self.k, **self.strides("q", "k")}
        common = self.common
        if self.vector:
            stride, common = self.H * self.K, self.common | {"HQ": self.H}
            reading = {name: found[f"{name}"] for name in ("k_rows", "k_cols")}
            reading |= {"q": found["q_rows"], "q_stride": stride, "k_stride": stride}
        blocks = self.blocks("scan")
        kernel[(-(-self.V // blocks["BV"]), self.call.sequences * self.H)](
            **reading, g=self.g, end=found["end"], beta=self.beta, write=self.write, read=self.read, scores=found["scores"],
            inverse=found["inverse"], **tensors, scale=self.call.scale, **common, V=self.V, **blocks,
        )  # fmt: skip

    def gradients(self, matrices: dict[str, Any], **tensors: Tensor | None) -> None:
        e: Any = tensors["e"]
        gradients[(self.layout.chunks, self.H)](
            self.q, self.k, self.v, self.g, self.beta, self.write, self.read, matrices["scores"], matrices["key_scores"],
            **tensors, owner=self.layout.owner, scale=self.call.scale, **self.strides("q", "k", "v", "g"),
            e_stride=e.stride(-3), **self.common, V=self.V, **self.blocks("gradients"),
        )  # fmt: skip


def block(size: int, most: int) -> int:
    """Returns the power of two, from 16 to `most`, that holds size or that its blocks have."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def operands(dtype: torch.dtype) -> dict[str, Any]:
    """Returns what matrix products round their operands to. float16 is multiplied in TF32, which has its digits and the range
    of float32; float32 is as well where PyTorch is set to."""
    import triton.language as tl

    if dtype == torch.bfloat16:
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    allowed = dtype == torch.float16 or torch.backends.cuda.matmul.allow_tf32
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if allowed else "ieee"}


def rows_of(x: Tensor) -> Tensor:
    """Returns x if a single stride leads from each token to the next, through all rows of the batch, else a copy."""
    if x.dim() < 4:
        return x.contiguous()
    B, T, _, K = x.shape
    whole = x.stride()[2:] == (K, 1) and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if whole else x.contiguous()


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out, final state)."""
    run = Launcher(call)
    out, final = (
        torch.empty_like(call.v, memory_format=torch.contiguous_format),
        run.new(*call.state_shape, dtype=run.acc),
    )
    initial = None if call.initial_state is None else call.initial_state.contiguous()
    run.carry(scan, run.prepare(keep=False), v=run.v, v_stride=run.v.stride(-3), initial=initial, out=out, final=final,
              states=None, errors=None)  # fmt: skip
    return out, final


def backward(d_out: Tensor, d_final: Tensor, call: Call, decay_gradient: bool) -> list[Tensor | None]:
    """Returns the gradients to q, k, v, log_decay, beta, write_gate, read_gate (None for inputs that are None) and the
    initial state."""
    run = Launcher(call)
    matrices = run.prepare(keep=True)
    states, d_states = (run.new(run.layout.chunks, run.H, run.K, run.V) for _ in range(2))
    d_initial, target = run.new(*call.state_shape, dtype=run.acc), run.new(run.tokens, run.H, run.V)
    errors = run.new(run.tokens, run.H, run.V) if call.delta else None
    initial = None if call.initial_state is None else call.initial_state.contiguous()
    run.carry(scan, matrices, v=run.v, v_stride=run.v.stride(-3), initial=initial, out=None, final=None, states=states,
              errors=errors)  # fmt: skip
    run.carry(reverse_scan, matrices, d_out=d_out, d_final=d_final, d_target=target, d_states=d_states,
              d_initial=d_initial)  # fmt: skip

    def numbers(wanted: bool) -> Tensor | None:
        return run.new(run.tokens, run.H, dtype=run.acc) if wanted else None

    dq, dk = (run.new(run.tokens, run.H, run.K) for _ in range(2))
    dg = None
    if call.log_decay is not None and decay_gradient:
        vector = call.log_decay.dim() == 4
        dg = run.new(run.tokens, run.H, run.K, dtype=run.acc) if vector else numbers(True)
    gated_delta = call.delta and call.write_gate is not None
    d_factor = numbers(call.beta is not None or (not call.delta and call.write_gate is not None))
    d_write, d_read = numbers(gated_delta), numbers(call.read_gate is not None)
    dv = run.new(run.tokens, run.H, run.V) if gated_delta else target
    run.gradients(
        matrices, e=errors if call.delta else run.v, states=states, d_states=d_states, d_out=d_out, d_target=target, dq=dq,
        dk=dk, dv=dv, dg=dg, d_factor=d_factor, d_write=d_write, d_read=d_read,
    )  # fmt: skip
    per_token = [None if x is None else x.view(call.v.shape[:3]) for x in (d_factor, d_write, d_read)]
    d_factor, d_write, d_read = per_token
    d_beta = None
    if call.beta is not None:
        d_beta = d_factor if call.delta else product(d_factor, call.write_gate)
    if call.write_gate is not None and not call.delta:
        d_write = product(d_factor, call.beta)
    return [over_groups(dq, call.q), over_groups(dk, call.k), dv.view(call.v.shape), over_tokens(dg, call), d_beta, d_write,
            d_read, d_initial]  # fmt: skip


def over_groups(x: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient [tokens, H, K] over the heads that share a head of q or k."""
    return x.view(*like.shape[:3], -1, like.shape[3]).sum(3) if x.shape[1] != like.shape[2] else x.view(like.shape)


def over_tokens(x: Tensor | None, call: Call) -> Tensor | None:
    """Gives the gradient to log_decay its shape: a fixed decay sums over the tokens."""
    if x is None or call.log_decay is None:
        return None
    return x.sum(0) if call.log_decay.dim() == 1 else x.view(call.log_decay.shape)
