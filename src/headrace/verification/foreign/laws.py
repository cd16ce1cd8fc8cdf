"""Laws of a sequence layer or model, as functions law(subject, x, at) -> relative error.

A subject has `module`, `run(x, state, mask, cu_seqlens, ...) -> (y, state)` and what else its adapter offers. x is
[B, T] token ids or [B, T, D] hidden states, and `at` a place in 1 … T − 1 where the law splits, pads or crops. The
snippets of broken laws are made of the source of these functions, which therefore use PyTorch alone.
"""

import copy
import io
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..errors import relative


def prepared(adapter, seed: int, device: str, dtype: torch.dtype) -> SimpleNamespace:
    """The adapter's parts, with every parameter perturbed, so that no gate, norm or bias is at its initial value."""
    torch.manual_seed(seed)
    subject = SimpleNamespace(**adapter())
    with torch.no_grad():
        for parameter in subject.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    subject.module = in_dtype(subject, dtype).eval().to(device)
    subject.adapter = adapter
    # For training, which keeps no state.
    subject.stateless = {"use_cache": False} if "use_cache" in signature(subject.forward).parameters else {}
    subject.run = lambda x, **parts: subject.forward(subject.module, x, **parts)
    return subject


def in_dtype(subject, dtype: torch.dtype):
    """A copy of the module in another dtype."""
    module = copy.deepcopy(subject.module)
    return subject.cast(module, dtype) if hasattr(subject, "cast") else module.to(dtype)


def inputs(subject, B: int, T: int, seed: int) -> Tensor:
    """Token ids [B, T], without the first three, which are often special, or hidden states [B, T, D]."""
    draw, parameter = torch.Generator().manual_seed(seed), next(subject.module.parameters())
    if hasattr(subject, "vocabulary"):
        return torch.randint(3, subject.vocabulary, (B, T), generator=draw).to(parameter.device)
    return torch.randn(B, T, subject.width, generator=draw).to(parameter)


def padding(x: Tensor, start: int, stop: int) -> Tensor:
    """A mask [B, T] with padding in the last row, from start to stop."""
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask[-1, start:stop] = 0
    return mask


def read(subject, x: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """The outputs of x, read in pieces of these sizes, each from the state of those before."""
    given: dict[str, Any] = {}
    rows: list[Tensor] = []
    for piece in x.split(sizes, 1):
        if mask is not None:
            given["mask"] = mask[:, : sum(row.shape[1] for row in rows) + piece.shape[1]]
        y, given["state"] = subject.run(piece, **given)
        rows.append(y)
    return torch.cat(rows, 1)


def causal(subject, x: Tensor, at: int) -> float:
    """Later tokens do not change earlier outputs."""
    return relative(subject.run(x)[0][:, :at], subject.run(x[:, :at])[0])


def packed(subject, x: Tensor, at: int) -> float:
    """Two sequences in one row, with their boundaries, give what each gives alone."""
    ends = torch.tensor([0, at, x.shape[1]], device=x.device)
    apart = [subject.run(x[:1, :at])[0], subject.run(x[:1, at:])[0]]
    return relative(subject.run(x[:1], cu_seqlens=ends, **subject.stateless)[0], torch.cat(apart, 1))


def packed_by_positions(subject, x: Tensor, at: int) -> float:
    """Two sequences in one row, with positions that begin again at 0 and nothing else, give what each gives alone."""
    positions = torch.cat([torch.arange(at), torch.arange(x.shape[1] - at)])[None].to(x.device)
    apart = [subject.run(x[:1, :at])[0], subject.run(x[:1, at:])[0]]
    return relative(subject.run(x[:1], positions=positions, **subject.stateless)[0], torch.cat(apart, 1))


def left_padded(subject, x: Tensor, at: int) -> float:
    """A row with padding on the left gives what it gives without."""
    return relative(subject.run(x, mask=padding(x, 0, at))[0][-1:, at:], subject.run(x[-1:, at:])[0])


def right_padded(subject, x: Tensor, at: int) -> float:
    """A row with padding on the right gives what it gives without."""
    return relative(subject.run(x, mask=padding(x, at, x.shape[1]))[0][-1:, :at], subject.run(x[-1:, :at])[0])


def left_padded_decoding(subject, x: Tensor, at: int) -> float:
    """A row with padding on the left, read at once and then token by token, gives what it gives without."""
    y = read(subject, x, [at, *[1] * (x.shape[1] - at)], padding(x, 0, at // 2))
    return relative(y[-1:, at // 2 :], subject.run(x[-1:, at // 2 :])[0])


def left_padded_pieces(subject, x: Tensor, at: int) -> float:
    """A row with padding on the left, read in two pieces, gives what it gives without."""
    y = read(subject, x, [at, x.shape[1] - at], padding(x, 0, at // 2))
    return relative(y[-1:, at // 2 :], subject.run(x[-1:, at // 2 :])[0])


def in_pieces(subject, x: Tensor, at: int) -> float:
    """Two pieces, the second from the state of the first, give what the whole gives."""
    return relative(read(subject, x, [at, x.shape[1] - at]), subject.run(x)[0])


def cached(subject, x: Tensor, at: int) -> float:
    """A pass that returns a state gives what a pass without one gives."""
    return relative(subject.run(x)[0], subject.run(x, use_cache=False)[0])


def decoding(subject, x: Tensor, at: int) -> float:
    """The tokens after `at`, one by one from the state of those before, give what the whole gives."""
    return relative(read(subject, x, [at, *[1] * (x.shape[1] - at)]), subject.run(x)[0])


def cropped(subject, x: Tensor, at: int) -> float:
    """A state without the tokens after `at`, which were removed, continues as the state at `at` does."""
    other = torch.cat([x[:, :at], x[:, at:].flip(1)], 1)
    state = subject.crop(subject.module, x, x.shape[1] - at)
    return relative(subject.run(other[:, at:], state=state)[0], subject.run(other)[0][:, at:])


def copied(subject, x: Tensor, at: int) -> float:
    """A copy of the state of a prefix continues as the prefix does, after the original has gone on: prefix reuse."""
    state = subject.run(x[:, :at])[1]
    copy_of_state = copy.deepcopy(state)
    subject.run(x[:, at:], state=state)
    other = torch.cat([x[:, :at], x[:, at:].flip(1)], 1)
    return relative(subject.run(other[:, at:], state=copy_of_state)[0], subject.run(other)[0][:, at:])


def reordered(subject, x: Tensor, at: int) -> float:
    """A state whose rows were reordered continues as the reordered rows do: beam search."""
    order = torch.arange(len(x), device=x.device).roll(1)
    state = subject.reorder(subject.run(x[:, :at])[1], order)
    return relative(subject.run(x[order][:, at:], state=state)[0], subject.run(x[order])[0][:, at:])


def batch_order(subject, x: Tensor, at: int) -> float:
    """Permuted rows give permuted outputs."""
    order = torch.arange(len(x), device=x.device).roll(1)
    return relative(subject.run(x[order])[0], subject.run(x)[0][order])


def batch_size(subject, x: Tensor, at: int) -> float:
    """A row alone gives what it gives in a batch."""
    return relative(torch.cat([subject.run(row)[0] for row in x.split(1)]), subject.run(x)[0])


def nan_in_row(subject, x: Tensor, at: int) -> float:
    """NaN in one row does not reach the others."""
    x = x if x.is_floating_point() else subject.embed(subject.module, x)
    spoiled = x.clone()
    spoiled[0] = float("nan")
    return relative(subject.run(spoiled)[0][1:], subject.run(x)[0][1:])


def nan_in_padding(subject, x: Tensor, at: int) -> float:
    """NaN in the padding of a row does not reach its tokens."""
    x = x if x.is_floating_point() else subject.embed(subject.module, x)
    spoiled = x.clone()
    spoiled[-1, :at] = float("nan")
    return relative(subject.run(spoiled, mask=padding(x, 0, at))[0][-1:, at:], subject.run(x[-1:, at:])[0])


def derivatives(subject, module, x: Tensor) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs, for each parameter and for hidden states."""
    x = x.to(next(module.parameters()).dtype).requires_grad_() if x.is_floating_point() else x
    leaves = [*[x] * x.is_floating_point(), *module.parameters()]
    with torch.enable_grad():
        y = subject.forward(module, x, **subject.stateless)[0]
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        computed = torch.autograd.grad((y * weights.to(y)).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, computed, strict=True)]


def gradients(subject, x: Tensor, at: int) -> float:
    """Gradients are those of a copy in float64, each relative to its norm or a thousandth of the largest."""
    exact = derivatives(subject, in_dtype(subject, torch.float64), x)
    floor = 1e-3 * max(float(g.norm()) for g in exact)
    computed = derivatives(subject, subject.module, x)
    return max(relative(g, e, floor) for g, e in zip(computed, exact, strict=True))


def differences(subject, x: Tensor, at: int) -> float:
    """Gradients are finite differences in float64, along each parameter's gradient and a random direction.

    A gradient is right if the difference of one of five step sizes is: too small a step shows the rounding of what a
    module computes in float32 all the same, and too large a one the curvature, or an expert that changes. Relative to
    the gradient's norm or a thousandth of the largest."""
    module = in_dtype(subject, torch.float64)
    x = x.double() if x.is_floating_point() else x
    exact = derivatives(subject, module, x)[x.is_floating_point() :]
    floor, draw = 1e-3 * max(float(g.norm()) for g in exact), torch.Generator().manual_seed(2)

    def value() -> float:
        y = subject.forward(module, x, **subject.stateless)[0]
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return float((y * weights.to(y)).sum())

    def slope(parameter: Tensor, direction: Tensor, step: float) -> float:
        before, values = parameter.clone(), []
        for sign in (1, -1):
            values.append((parameter.copy_(before + sign * step * direction), value())[1])
        parameter.copy_(before)
        return (values[0] - values[1]) / (2 * step)

    errors = []
    for parameter, gradient in zip(module.parameters(), exact, strict=True):
        size = max(float(gradient.norm()), floor, 1e-30)
        direction = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter)
        direction = gradient / size + direction / direction.norm()
        expected = float((gradient * direction).sum())
        steps = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
        errors.append(min(abs(slope(parameter.data, direction, step) - expected) for step in steps) / size)
    return float(torch.tensor(errors).nan_to_num(float("inf"), float("inf")).max())  # Python's max may pass over NaN


def tensors_of(state) -> list[Tensor]:
    """The tensors in a state of lists, dicts and objects, in order."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict | list | tuple):
        return [y for part in (state.values() if isinstance(state, dict) else state) for y in tensors_of(part)]
    return tensors_of(vars(state)) if hasattr(state, "__dict__") and not callable(state) else []


def state_dtype(subject, x: Tensor, at: int) -> tuple[float, str]:
    """In a bfloat16 module, the recurrent state is kept in at least float32: its sums grow, and 8 bits lose them.
    The error is the rounding of the state. A state that grows with the tokens keeps them, and sums nothing."""
    module = in_dtype(subject, torch.bfloat16)
    x = x.bfloat16() if x.is_floating_point() else x
    pick = getattr(subject, "recurrent", tensors_of)
    half, whole = (pick(subject.forward(module, part)[1]) for part in (x[:, :at], x))
    sums = [s.dtype for h, s in zip(half, whole, strict=True) if h.shape == s.shape and s.is_floating_point()]
    if not sums:
        return 0.0, "no recurrent state"
    coarsest = max(sums, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.finfo(coarsest).eps, f"state in {str(coarsest).removeprefix('torch.')}"


def compiled(subject, x: Tensor, at: int) -> tuple[float, str]:
    """torch.compile (backend aot_eager) gives what eager mode gives."""

    def whole(x):
        return subject.run(x)[0]

    torch._dynamo.reset()
    try:
        y, note = torch.compile(whole, backend="aot_eager", fullgraph=True)(x), "one graph"
    except Exception as broken:
        torch._dynamo.reset()
        y, note = torch.compile(whole, backend="aot_eager")(x), f"several graphs: {type(broken).__name__}"
    return relative(y, subject.run(x)[0]), note


def saved(subject, x: Tensor, at: int) -> float:
    """A module that was saved and loaded gives what it gave."""
    if hasattr(subject, "reload"):
        loaded = subject.reload(subject.module)
    else:
        file = io.BytesIO()
        torch.save(subject.module.state_dict(), file)
        file.seek(0)
        loaded = subject.adapter()["module"].to(next(subject.module.parameters()))
        loaded.load_state_dict(torch.load(file))
    return relative(subject.forward(loaded.eval(), x)[0], subject.run(x)[0])
