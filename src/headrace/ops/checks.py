"""Checks of the arguments of `linear_attention` and `step`: shapes, dtypes and devices always, values on request."""

from typing import Any

import torch
from torch import Tensor, nn

from ..spec.record import require_bools, require_name, require_positive
from ..utils.errors import InputError, require, require_each, shown
from .call import Call

INTEGERS = (  # dtypes of cu_seqlens
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64
)  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of all other tensors
LARGEST = torch.finfo(torch.float32).max


# The checks of shapes run for every decoded token, so they format a message only when they raise it.


def check_shapes(call: Call, axes: tuple[str, ...]) -> None:
    """Checks the shapes, dtypes and devices of the tensors of `linear_attention` or `step`.

    Args:
        axes: names of the dimensions before the heads: ("B", "T"), or ("B",) for `step`.

    Raises:
        InputError: for a tensor that does not fit.
    """
    q, k, v, *_ = call
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_input(name, x, q, axes)
    *lead, H, V = v.shape
    *before, _, K = k.shape
    if before != lead:
        raise InputError(f"k has shape {list(k.shape)}; expected [{', '.join(axes)}] = {lead}, as in v")
    readers = _check_heads(q, k, H)
    state = ((check_sequences(call.cu_seqlens, v, "v"), H, K, V + (1 if call.normalize else 0)),)
    decay = ((H,), (*lead, H), (*lead, H, K))
    expected = {
        "log_decay": decay, "bonus": ((H, K),), "initial_state": state, "read_gate": ((*lead, readers),),
    }  # fmt: skip
    renamed = {"initial_state": "state"} if len(axes) == 1 else {}
    for name, given in zip(Call._fields[3:], call.tensors[3:], strict=False):
        if given is not None:
            _check_option(renamed.get(name, name), given, expected.get(name, ((*lead, H),)), q)


def _check_heads(q: Tensor, k: Tensor, H: int) -> int:
    """Checks q against k and the H heads of v, and returns the number of heads of the output."""
    Hq, Hk = q.shape[-2], k.shape[-2]
    if Hq > Hk and Hk == H and Hq % H == 0 and q.shape == (*k.shape[:-2], Hq, k.shape[-1]):
        return Hq
    if q.shape != k.shape:
        expected = f"the shape of k, {list(k.shape)}, or a multiple of the heads of k and v"
        raise InputError(f"q has shape {list(q.shape)}; expected {expected}")
    if H % Hk:
        raise InputError(f"q and k have {Hk} heads; expected a divisor of the {H} heads of v")
    return H


def _check_input(name: str, x: Tensor, q: Tensor, axes: tuple[str, ...]) -> None:
    check_tensor(name, x)
    if x.dim() != len(axes) + 2:
        expected = f"{'four' if len(axes) == 2 else 'three'} dimensions, [{', '.join(axes)}, heads, ·]"
        raise InputError(f"{name} has shape {list(x.shape)}; expected {expected}")
    if 0 in x.shape[1:]:
        raise InputError(f"{name} has shape {list(x.shape)}; expected every dimension except B to be at least 1")
    _check_kind(name, x, q)
    if x.dtype != q.dtype:
        raise InputError(f"{name} has dtype {x.dtype} and q has {q.dtype}; expected the same dtype")


def _check_option(name: str, x: Tensor, expected: tuple[tuple[int, ...], ...], q: Tensor) -> None:
    check_tensor(name, x)
    # Only shapes of as many dimensions: comparing B with H would make a dynamic B a constant where they are equal.
    if x.shape not in [shape for shape in expected if len(shape) == x.dim()]:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise InputError(f"{name} has shape {list(x.shape)}; expected {wanted}")
    _check_kind(name, x, q)


def check_tensor(name: str, x: Any, expected: str = "a tensor") -> None:
    """Raises InputError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name}={shown(x)}; expected {expected}")


def check_module(**modules: Any) -> None:
    """Raises InputError for what is no module."""
    require_each(lambda x: isinstance(x, nn.Module), "a torch.nn.Module", **modules)


def _check_kind(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise InputError(f"{name} has dtype {x.dtype}; expected a floating-point dtype of 16 bits or more")
    if x.device != q.device:
        raise InputError(f"{name} is on {x.device} and q is on {q.device}; expected the same device")


def as_bounds(cu_seqlens: Any) -> Tensor | None:
    """Returns cu_seqlens [N + 1], contiguous and in int32 or int64, in which differences and sums of bounds cannot
    overflow; None for None. Every function that takes cu_seqlens from a user calls it first. Raises InputError for
    another shape or dtype."""
    if cu_seqlens is None:
        return None
    check_tensor("cu_seqlens", cu_seqlens, "a tensor of integers")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in INTEGERS:
        description = f"shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
        raise InputError(f"cu_seqlens has {description}; expected shape [N + 1] with N ≥ 1 and an integer dtype")
    return (cu_seqlens if cu_seqlens.dtype == torch.int32 else cu_seqlens.long()).contiguous()


def check_sequences(cu_seqlens: Tensor | None, x: Tensor, name: str = "x") -> int:
    """Returns the number of sequences of x [B, ...]. Raises InputError for bounds, from `as_bounds`, of several rows or
    on another device. name: what errors call x."""
    if cu_seqlens is None:
        return x.shape[0]
    if x.shape[0] != 1:
        raise InputError(f"cu_seqlens packs sequences into one row; expected B=1, got B={x.shape[0]}")
    if cu_seqlens.device != x.device and not x.is_meta:  # operations on the meta device are counted with real bounds
        raise InputError(f"cu_seqlens is on {cu_seqlens.device} and {name} is on {x.device}; expected the same device")
    return cu_seqlens.shape[0] - 1


def check_bounds(cu_seqlens: Tensor, T: int) -> None:
    """Checks that 0 = c_0 ≤ … ≤ c_N = T: at once on a CPU, without a wait elsewhere."""
    (sequence_ends if cu_seqlens.device.type == "cpu" else check_on_device)(cu_seqlens, T)


def check_on_device(cu_seqlens: Tensor, T: int) -> None:
    """Checks cu_seqlens as `sequence_ends` does, but nothing waits for it: a GPU raises an error later."""
    expected = (cu_seqlens.diff() >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == T)
    torch._assert_async(expected, f"cu_seqlens is wrong; expected 0 = c_0 ≤ … ≤ c_N = T = {T}")


def sequence_ends(cu_seqlens: Tensor, T: int) -> list[int]:
    """Returns cu_seqlens as a list. Raises InputError unless 0 = c_0 ≤ … ≤ c_N = T. Synchronizes a GPU."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise InputError(f"cu_seqlens={ends}; expected 0 = c_0 ≤ … ≤ c_N = T = {T}")
    return ends


def check_form(form: str, chunk_size: int | None, check: bool) -> None:
    """Raises InputError for an unknown form, and for a chunk size or `check` of another type."""
    require_bools(check=check)
    require_name(("chunkwise", "recurrent", "parallel"), form=form)
    if chunk_size is not None:
        require_positive(chunk_size=chunk_size)


def check_scale(scale: float | None) -> None:
    """Raises InputError for a scale that is no number of float32. A tensor, whose gradient would be lost, is none."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) <= LARGEST
    require_each(lambda x: x is None or number, "a finite number, or None for K^-1/2", scale=scale)


def check_rule(rule: str, bonus: Tensor | None, normalize: bool) -> None:
    """Raises InputError for an unknown rule, for what is no bool, and for what the rule does not have."""
    require_name(("add", "delta"), rule=rule)
    require_bools(normalize=normalize)
    if rule == "delta" and (bonus is not None or normalize):
        raise InputError("rule='delta' has no bonus and no normalizer; expected bonus=None and normalize=False")
    if bonus is not None and normalize:
        raise InputError("bonus with normalize=True is not defined; expected bonus=None or normalize=False")


def check_values(call: Call) -> None:
    """Raises InputError for values outside the domain of `linear_attention`: NaN, infinities, log_decay > 0, β < 0, a
    diverging delta rule, negative features under normalize, cu_seqlens that do not ascend from 0 to T."""
    given = {name: x for name, x in zip(Call._fields, call.tensors, strict=False) if x is not None}
    tensors = {name: x.detach() for name, x in given.items() if x.numel()}  # nothing is the largest of no numbers
    for name, x in tensors.items():
        require(not bool(x.isnan().any()), f"{name} contains NaN; expected finite numbers")
        require(bool(x.isfinite().all()), f"{name} contains an infinity; expected finite numbers")
    log_decay, beta = tensors.get("log_decay"), tensors.get("beta")
    if log_decay is not None:
        require(bool((log_decay <= 0).all()), f"log_decay reaches {log_decay.max():.4g}; expected values ≤ 0")
    if beta is not None:
        require(bool((beta >= 0).all()), f"beta reaches {beta.min():.4g}; expected values ≥ 0")
    if call.delta and "k" in tensors:
        norms = tensors["k"].float().square().sum(-1).repeat_interleave(call.v.shape[2] // call.k.shape[2], 2)
        strength = float((norms if beta is None else norms * beta).max())
        require(strength <= 2 * (1 + 1e-5), f"β‖k‖² reaches {strength:.4g}; expected ≤ 2, else rule='delta' diverges")
    for name in ("q", "k") if call.normalize and "k" in tensors else ():
        least = float(tensors[name].min())
        require(least >= 0, f"{name} reaches {least:.4g} with normalize=True; expected values ≥ 0")
    if call.cu_seqlens is not None:
        sequence_ends(call.cu_seqlens, call.v.shape[1])
