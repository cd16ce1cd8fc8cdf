"""Registers a backend's forward and backward as a differentiable PyTorch operator with fake implementations, as
`torch.compile(fullgraph=True)` and `torch.library.opcheck` require.

Uses `Library.define` and `impl` instead of `torch.library.custom_op`, whose calls take five times as long.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from . import derivatives
from .call import DIFFERENTIABLE, SCHEMA, Call, accumulator, like

INSTEAD = (
    "; expected form='recurrent', which has all derivatives: for a layer, layer.op = partial(linear_attention, "
    "form='recurrent')"
)
NAMES = "linear_attention", INSTEAD
library = torch.library.Library("headrace", "DEF")


def register(name: str, key: str, forward: Callable, backward: Callable, kept: list[str], kept_shapes: Callable) -> Any:
    """Returns a differentiable function from a Call to (out, final state).

    It runs one of two operators in `torch.ops.headrace`: `<name>`, or `<name>_kept`, which has the gradient and twice
    the call overhead.

    Args:
        name: name of the operator.
        key: dispatch key that the implementation is registered for.
        forward: forward(call, keep) -> (out, final state, *kept); kept tensors are saved for the backward if `keep`.
        backward: backward(d_out, d_final, call, kept, wanted) -> the gradients in any dtype, None where not `wanted`;
            the last one, of the bonus, may be left out.
        kept: names of the kept tensors.
        kept_shapes: kept_shapes(call) -> shapes of the kept tensors, which have the final state's dtype.
    """
    plain = define(name, f"({SCHEMA})", 2, lambda *args: forward(Call(*args), False)[:2], _fake_results, key)
    arguments = "".join(f", Tensor {x}" for x in kept)
    gradient = define(
        f"{name}_backward", f"(Tensor d_out, Tensor d_final, {SCHEMA}{arguments}, bool[] wanted)", DIFFERENTIABLE,
        _like_inputs(backward), _like_inputs(_fake_backward), key,
    )  # fmt: skip
    keeping = define(
        f"{name}_kept", f"({SCHEMA})", 2 + len(kept), lambda *args: forward(Call(*args), True),
        _fake_kept(kept_shapes), key, _gradient(gradient), _save,
    )  # fmt: skip

    def run(call: Call) -> tuple[Tensor, Tensor]:
        transformed = derivatives.transformed()
        if transformed:
            derivatives.check_transforms(*NAMES, call)
        # Under vmap, requires_grad is not reliable.
        wanted = torch.is_grad_enabled() if transformed else wants_gradient(call)
        return keeping(*call)[:2] if wanted else plain(*call)

    return run


def define(
    name: str, arguments: str, results: int, real: Callable, fake: Callable, key: str,
    backward: Callable[..., tuple] | None = None, save: Callable[[Any, tuple, Any], None] | None = None,
) -> Any:  # fmt: skip
    """Defines and returns the operator `headrace::<name>`.

    Args:
        arguments: its schema, in brackets.
        results: number of tensors that it returns.
        real: its implementation for the dispatch key.
        fake: its implementation for fake tensors.
        backward: backward(ctx, *d_results) -> the gradients to the arguments; None: it has no gradient.
        save: save(ctx, arguments, results), after the forward; with `backward`.
    """
    library.define(f"{name}{arguments} -> ({', '.join(['Tensor'] * results)})")
    library.impl(name, real, key)
    torch.library.register_fake(f"headrace::{name}", fake, lib=library)
    operator = getattr(torch.ops.headrace, name).default
    if backward is not None and save is not None:
        library.impl(operator.name(), _differentiable(operator, backward, save), "Autograd", with_keyset=True)
    return operator


def _differentiable(operator: Any, backward: Callable[..., tuple], save: Callable[[Any, tuple, Any], None]) -> Callable:
    """Returns the implementation for the key Autograd. `torch.library.register_autograd` does the same, but looks up
    the default values of all arguments at each call: these operators have none, and it takes some 50 µs."""

    def below_autograd(keys: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keys = args
            results = below_autograd(keys, *inputs)
            save(ctx, tuple(inputs), results)
            return results

        @staticmethod
        def backward(ctx: Any, *d_results: Any) -> Any:
            return *backward(ctx, *d_results), None

    def run(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Gradient.apply(*args, keys)
        return below_autograd(keys, *args)

    return run


def wants_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.tensors)


def _like_inputs(backward: Callable[..., Any]) -> Callable:
    """Converts gradients to the dtypes of the inputs, and unwanted gradients to empty tensors."""

    def run(d_out, d_final, *args):
        n = len(Call._fields)
        call, kept, wanted = Call(*args[:n]), args[n:-1], args[-1]
        grads = backward(d_out, d_final, call, kept, wanted)
        given: Any = zip_longest(grads, call.tensors, wanted)
        return tuple(grad.to(x.dtype) if needed else d_out.new_empty(0) for grad, x, needed in given)

    return run


def _fake_results(*args):
    call = Call(*args)
    final = call.q.new_empty(call.state_shape, dtype=accumulator(call.q))
    return call.v.new_empty(call.out_shape), final


def _fake_kept(kept_shapes: Callable) -> Callable:
    def run(*args):
        out, final = _fake_results(*args)
        return out, final, *(final.new_empty(shape) for shape in kept_shapes(Call(*args)))

    return run


def _fake_backward(d_out, d_final, call, kept, wanted):
    return [x if x is None else like(x) for x in call.tensors]


def _save(ctx, inputs, output) -> None:
    tensors, ctx.settings = inputs[: DIFFERENTIABLE + 1], inputs[DIFFERENTIABLE + 1 :]
    ctx.present = [x is not None for x in tensors]
    ctx.final = output[1].shape, output[1].dtype
    ctx.save_for_backward(*(x for x in tensors if x is not None), *output[2:])
    ctx.set_materialize_grads(False)  # avoids zero gradients of the kept tensors, which can be as large as the inputs


def _gradient(backward: Callable) -> Callable:
    @derivatives.first_order(*NAMES)
    def run(ctx, d_out, d_final, *_):
        saved = list(ctx.saved_tensors)
        tensors: list[Any] = [saved.pop(0) if present else None for present in ctx.present]
        (shape, dtype), v = ctx.final, tensors[2]
        d_out = v.new_zeros(Call(*tensors).out_shape) if d_out is None else d_out
        d_final = v.new_zeros(shape, dtype=dtype) if d_final is None else d_final
        wanted = ctx.needs_input_grad[:DIFFERENTIABLE]
        grads = backward(d_out.contiguous(), d_final.contiguous(), *tensors, *ctx.settings, *saved, wanted)
        given = (grad if needed else None for grad, needed in zip(grads, wanted, strict=True))
        return *given, *[None] * (len(Call._fields) - DIFFERENTIABLE)

    return run
