"""Launches of the kernels: two for the forward, four for the backward, whatever the length."""

from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ....utils.device import may_round_float32
from ...call import Call, like, product
from ...checks import check_bounds
from .block_sizes import GPU, block_sizes
from .gradients import gradients
from .prepare import prepare
from .scan import reverse_scan, scan

CHUNK = 64  # tokens per chunk unless the call says otherwise
DECAYS = {0: "none", 1: "fixed", 3: "scalar", 4: "vector"}  # by the dimensions of log_decay
Optional = Tensor | None


class Launcher:
    """The kernels' common arguments, and one method per launch."""

    def __init__(self, call: Call):
        self.gpu, self.delta = GPU.of(call.v), call.delta
        (self.H, self.V), (HQ, self.K) = call.v.shape[2:], call.k.shape[2:]
        self.stored = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32
        self.rounded = call.tf32 or call.v.dtype.itemsize == 2 or may_round_float32()
        large = self.gpu.amd and self.stored == torch.float32 and self.K > 128  # 64 keys would fill its shared memory
        self.C = call.chunk_size or (CHUNK // 2 if large else CHUNK)
        self.decay = DECAYS[0 if call.log_decay is None else call.log_decay.dim()]
        self.call = call
        B, T = call.v.shape[:2]
        self.tokens = B * T
        self.q, self.k, self.v, self.g = (one_stride(x) for x in (call.q, call.k, call.v, call.log_decay))
        self.numbers = {
            "beta": one_stride(call.beta), "write": one_stride(call.write_gate), "read": one_stride(call.read_gate),
        }  # fmt: skip
        self.chunks, packed, self.owner = in_chunks(call.cu_seqlens, B, T, self.C)
        self.common: dict[str, Any] = {
            **packed, "T": T, "H": self.H, "HQ": HQ, "K": self.K, "C": self.C, "DECAY": self.decay,
            "DELTA": self.delta, "PACKED": call.cu_seqlens is not None, "enable_fp_fusion": True,
            "OPERAND": tl.bfloat16 if self.stored == torch.bfloat16 else tl.float32,
            "PRECISION": self.gpu.rounded if self.rounded else self.gpu.exact,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.call.v.new_empty(shape, dtype=dtype or self.stored)

    def blocks(self, kernel: str) -> dict[str, int]:
        rule = self.delta, self.decay == "vector"
        few = 2 * self.call.sequences * self.H * -(-self.V // 64) <= self.gpu.processors
        return block_sizes(kernel, self.K, self.V, *rule, self.stored, self.rounded, self.gpu, few)

    def prepare(self, backward: bool) -> dict[str, Any]:
        """Returns the matrices inside each chunk and, under a decay per channel, q and k with the decay applied."""
        delta, vector, square = self.delta, self.decay == "vector", (self.chunks, self.H, self.C, self.C)
        per_token = self.tokens, self.H, self.K
        matrices = {
            "scores": self.new(*square),
            "key_scores": self.new(*square) if delta and backward else None,
            "inverse": self.new(*square) if delta else None,
            "q_rows": self.new(*per_token) if vector else None,
            "k_rows": self.new(*per_token) if vector and delta else None,
            "k_cols": self.new(*per_token) if vector else None,
            "end": self.new(self.chunks, self.H, self.K, dtype=torch.float32) if vector else None,
        }
        prepare[(self.chunks, self.H)](
            self.q, self.k, self.g, self.numbers["beta"], **matrices, owner=self.owner, **self.common,
            **strides(q=self.q, k=self.k, g=self.g), **self.blocks("prepare"),
        )  # fmt: skip
        return matrices

    def carry(self, kernel: Any, matrices: dict[str, Any], **arguments: Any) -> None:
        """Launches `scan` or `reverse_scan` over the states [K, V] of all sequences."""
        q, k_rows, k_cols, heads = self.q, self.k, self.k, self.common["HQ"]
        if self.decay == "vector":
            q, k_rows, k_cols, heads = matrices["q_rows"], matrices["k_rows"], matrices["k_cols"], self.H
        values = {"v": arguments["v"]} if kernel is scan else {}
        blocks = self.blocks("states" if kernel is scan and arguments["out"] is None else "scan")
        kernel[(self.call.sequences * self.H, -(-self.V // blocks["BV"]))](
            q=q, k_rows=k_rows, k_cols=k_cols, g=self.g, end=matrices["end"], **self.numbers,
            scores=matrices["scores"], inverse=matrices["inverse"], **arguments, scale=self.call.scale,
            **strides(q=q, k=k_cols, **values), **self.common | {"HQ": heads}, V=self.V, **blocks,
            STAGES=blocks["num_stages"],
        )  # fmt: skip

    def scan(self, matrices: dict[str, Any], **results: Optional) -> None:
        """Launches `scan` from the initial states."""
        initial = self.call.initial_state
        unwanted = dict.fromkeys({"out", "final", "states", "errors"} - results.keys())
        initial = None if initial is None else initial.contiguous()
        self.carry(scan, matrices, v=self.v, initial=initial, **results, **unwanted)

    def states(self) -> Tensor:
        """Returns an empty state for each sequence."""
        return self.new(*self.call.state_shape, dtype=torch.float32)

    def gradients(self, matrices: dict[str, Any], **tensors: Optional) -> None:
        """Launches `gradients`, with room for R and, for the delta rule, −dP Eᵀ of each chunk."""
        pairs = self.new(self.chunks, self.H, 1 + self.delta, self.C, self.C)
        gradients[(self.chunks, self.H)](
            q=self.q, k=self.k, v=self.v, g=self.g, **self.numbers, scores=matrices["scores"], owner=self.owner,
            key_scores=matrices["key_scores"], pairs=pairs, **tensors, scale=self.call.scale, **self.common, V=self.V,
            **strides(q=self.q, k=self.k, v=self.v, g=self.g, e=tensors["e"]), **self.blocks("gradients"),
        )  # fmt: skip


def in_chunks(bounds: Optional, B: int, T: int, C: int) -> tuple[int, dict[str, Optional], Optional]:
    """Returns the number of chunks, cu_seqlens with the first chunk of each sequence, and the chunks' sequences.

    A chunk of packed sequences ends with its sequence; chunks that are left over are empty."""
    if bounds is None:
        return B * -(-T // C), {"cu_seqlens": None, "first_chunk": None}, None
    first, owner = pieces(bounds, T, C)
    packed: dict[str, Optional] = {"cu_seqlens": bounds.int().contiguous(), "first_chunk": first.int()}
    return len(owner), packed, owner.int()


def one_stride(x: Optional) -> Optional:
    """Returns x [B, T, heads, ·] as [tokens, heads, ·] with any stride between tokens and heads in order, a view where
    it can be, and other tensors contiguous: [heads] as it is, [B, T, heads] as [tokens, heads].

    One dimension of tokens, because PyTorch leaves the stride of a dimension of size 1 as it is, also where it calls a
    tensor contiguous: that of T = 1 need not lead to the next row."""
    if x is None or x.dim() < 4:
        return x if x is None else x.contiguous().flatten(0, x.dim() // 2)
    x = x.flatten(0, 1)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def strides(**tensors: Optional) -> dict[str, int]:
    """Returns the strides between tokens of tensors [..., tokens, heads, ·], 0 for the others, in units of ALIGN.

    Triton knows of an argument whether it is a multiple of 16. Of a stride of 4,616 it would know nothing, and load the
    numbers of a row one by one."""
    numbers = {name: 0 if x is None or x.dim() < 3 else x.stride(-3) for name, x in tensors.items()}
    unit = gcd(16, *numbers.values())
    return {"ALIGN": unit, **{f"{name}_stride": stride // unit for name, stride in numbers.items()}}


def pieces(bounds: Tensor, T: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the first piece of each of N packed sequences and the number of pieces [N + 1], and the sequence of each
    piece. A piece has `size` tokens, the last of a sequence fewer.

    There is room for as many pieces as any lengths could need, so that nothing waits for the device. Those left over
    belong to the last sequence and begin after its end."""
    check_bounds(bounds, T)
    first = F.pad((bounds.diff() + (size - 1)).div(size, rounding_mode="floor").cumsum(0), (1, 0))
    N = len(bounds) - 1
    owner = torch.searchsorted(first, torch.arange(T // size + N, device=first.device), right=True) - 1
    return first, owner.clamp(max=N - 1)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out, final state)."""
    run = Launcher(call)
    out, final = like(call.v), run.states()
    with torch.cuda.device_of(call.v):
        run.scan(run.prepare(backward=False), out=out, final=final)
    return out, final


def backward(d_out: Tensor, d_final: Tensor, call: Call, decay_gradient: bool) -> list[Optional]:
    """Returns the gradients to q, k, v, log_decay, beta, write_gate, read_gate (None for inputs that are None) and the
    initial state."""
    run = Launcher(call)
    states, d_states = (run.new(run.chunks, run.H, run.K, run.V) for _ in range(2))
    d_initial = run.states()
    d_target, errors = run.new(run.tokens, run.H, run.V), run.new(run.tokens, run.H, run.V) if call.delta else None
    gradients = _gradients(run, d_target, decay_gradient)
    with torch.cuda.device_of(call.v):
        matrices = run.prepare(backward=True)
        run.scan(matrices, states=states, errors=errors)
        run.carry(reverse_scan, matrices, d_out=d_out, d_final=d_final, d_target=d_target, d_states=d_states,
                  d_initial=d_initial)  # fmt: skip
        run.gradients(matrices, e=run.v if errors is None else errors, states=states, d_states=d_states, d_out=d_out,
                      d_target=d_target, **gradients)  # fmt: skip
    return [*gradients_like_inputs(call, gradients), d_initial]


def _gradients(run: Launcher, d_target: Tensor, decay_gradient: bool) -> dict[str, Any]:
    """Returns empty tensors for what `gradients` writes, and None for what nobody needs."""
    call, per_token = run.call, (run.tokens, run.H)
    gated_delta = call.delta and call.write_gate is not None
    factor = call.beta is not None or (call.write_gate is not None and not call.delta)

    def new(needed: bool, *shape: int) -> Optional:
        return run.new(*per_token, *shape, dtype=torch.float32) if needed else None

    return {
        "dq": run.new(*per_token, run.K),
        "dk": run.new(*per_token, run.K),
        "dv": run.new(*per_token, run.V) if gated_delta else d_target,
        "dg": new(run.g is not None and decay_gradient, *((run.K,) if run.decay == "vector" else ())),
        "d_factor": new(factor),
        "d_write": new(gated_delta),
        "d_read": new(call.read_gate is not None),
    }


def gradients_like_inputs(call: Call, gradients: dict[str, Any]) -> list[Optional]:
    """Returns the gradients with the shapes of the inputs, in their order."""
    shaped = {name: None if x is None else x.view(*call.v.shape[:3], *x.shape[2:]) for name, x in gradients.items()}
    dg, factor, d_write, d_beta = shaped["dg"], shaped["d_factor"], shaped["d_write"], None
    if call.beta is not None:
        d_beta = factor if call.delta else product(factor, call.write_gate)
    if call.write_gate is not None and not call.delta:
        d_write = product(factor, call.beta)
    if dg is not None and call.log_decay is not None and call.log_decay.dim() == 1:
        dg = dg.sum((0, 1))
    dq, dk = (over_groups(x, call.q.shape[2]) for x in (shaped["dq"], shaped["dk"]) if x is not None)
    return [dq, dk, shaped["dv"], dg, d_beta, d_write, shaped["d_read"]]


def over_groups(x: Tensor, groups: int) -> Tensor:
    """Sums a gradient [B, T, H, K] over the heads that share one of the `groups` heads of q or k."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).sum(3)
