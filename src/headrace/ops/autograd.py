"""Registers a backend's forward and backward as a differentiable PyTorch operator with fake implementations, as
`torch.compile(fullgraph=True)` and `torch.library.opcheck` require.

Uses `Library.define` and `impl` instead of `torch.library.custom_op`, whose calls take five times as long.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from . import derivatives
from .call import DIFFERENTIABLE, SCHEMA, Call, accumulator, schema

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
        backward: backward(d_out, d_final, call, kept, wanted) -> eight gradients in any dtype, None where not `wanted`.
        kept: names of the kept tensors.
        kept_shapes: kept_shapes(call) -> shapes of the kept tensors, which have the final state's dtype.
    """
    plain = define(name, f"({SCHEMA})", 2, lambda *args: forward(Call(*args), False)[:2], _fake_results, key)
    keeping = define(
        f"{name}_kept", f"({SCHEMA})", 2 + len(kept), lambda *args: forward(Call(*args), True),
        _fake_kept(kept_shapes), key,
    )  # fmt: skip
    arguments = "".join(f", Tensor {x}" for x in kept)
    gradient = define(
        f"{name}_backward", f"(Tensor d_out, Tensor d_final, {SCHEMA}{arguments}, bool[] wanted)", DIFFERENTIABLE,
        _like_inputs(backward), _like_inputs(_fake_backward), key,
    )  # fmt: skip
    add_gradient(keeping, _gradient(gradient), _save)

    def run(call: Call) -> tuple[Tensor, Tensor]:
        transformed = derivatives.transformed()
        if transformed:
            derivatives.check_transforms(*NAMES, call)
        # Under vmap, requires_grad is not reliable.
        wanted = torch.is_grad_enabled() and (transformed or _any_requires_grad(call))
        return keeping(*call)[:2] if wanted else plain(*call)

    return run


def register_function(
    kind: Any, name: str, key: str, what: str, forward: Callable[[Any], tuple], backward: Callable[..., list],
    passes: Callable[[Any], bool] = lambda call: False,
) -> Callable[[Any], Any]:  # fmt: skip
    """Returns a differentiable function from a `kind` to a tensor, or to tensors; those that a call does not have are
    empty.

    Args:
        kind: a NamedTuple. Its property `tensors` is the first fields, which are tensors or None; its method `results`
            returns empty tensors with the shapes and dtypes of the function's, None for those that a call does not
            have, and its annotation has one entry for each.
        name: name of the operator in `torch.ops.headrace`.
        key: dispatch key that the implementation is registered for.
        what: name of the function in errors.
        forward: forward(call) -> the results.
        backward: backward(*d_results, call) -> gradients to `tensors` in any dtype, None for None and for integers. A
            gradient to a result is None where there is none.
        passes: whether the first result of a call is the first tensor, whose gradient `backward` then adds to. The
            operator returns an empty tensor for it.
    """

    def present(call: Any, tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(call.x.new_empty(0) if x is None else x for x in tensors)

    def as_operator(forward: Callable[[Any], tuple]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        def run(*args: Any) -> Tensor | tuple[Tensor, ...]:
            call = kind(*args)
            found = present(call, forward(call))
            return found if len(found) > 1 else found[0]

        return run

    results = len(get_args(get_type_hints(kind.results)["return"]))
    run = define(name, f"({schema(kind)})", results, as_operator(forward), as_operator(kind.results), key)

    def gradients(backward: Callable[..., list]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*args: Any) -> tuple[Tensor, ...]:
            call = kind(*args[results:])
            grads = zip(backward(*args[:results], call), call.tensors, strict=True)
            return present(call, (grad if grad is None or x is None else grad.to(x.dtype) for grad, x in grads))

        return run

    def fake(*args: Any) -> list[Tensor | None]:
        tensors = (x if differentiable(x) else None for x in args[-1].tensors)
        return [x if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]

    tensors = sum("Tensor" in kind for kind in schema(kind).split(", "))
    d_results = ", ".join(f"Tensor? d_{i}" for i in range(results))
    arguments = f"({d_results}, {schema(kind)})"
    gradient = define(f"{name}_backward", arguments, tensors, gradients(backward), gradients(fake), key)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.settings = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors])
        ctx.set_materialize_grads(False)

    @derivatives.first_order(what, "; expected float64, which PyTorch computes")
    def differentiate(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # accessed once, because activation checkpointing recomputes them at each access
        grads = zip(gradient(*d_results, *saved, *ctx.settings), saved, strict=True)
        return *(grad if differentiable(x) else None for grad, x in grads), *(None for _ in ctx.settings)

    def with_first(results: Any, inputs: tuple) -> Any:
        return (inputs[0].view_as(inputs[0]), *results[1:]) if passes(kind(*inputs)) else results

    add_gradient(run, differentiate, save, with_first)

    def call_operator(call: Any) -> Any:
        found = run(*call)
        return (call[0], *found[1:]) if passes(call) and not found[0].numel() else found

    return call_operator


def differentiable(x: Tensor | None) -> bool:
    """Whether x can have a gradient."""
    return x is not None and x.is_floating_point()


def define(name: str, arguments: str, results: int, real: Callable, fake: Callable, key: str) -> Any:
    """Defines the operator `headrace::<name>` with `results` tensors, and its implementation for the dispatch key."""
    library.define(f"{name}{arguments} -> ({', '.join(['Tensor'] * results)})")
    library.impl(name, real, key)
    torch.library.register_fake(f"headrace::{name}", fake, lib=library)
    return getattr(torch.ops.headrace, name).default


def add_gradient(
    operator: Any, backward: Callable[..., tuple], save: Callable[[Any, tuple, Any], None],
    finish: Callable[[Any, tuple], Any] = lambda results, inputs: results,
) -> None:  # fmt: skip
    """Makes an operator differentiable, as `torch.library.register_autograd` does, without its look-up of the
    default values of all arguments at each call: these operators have none, and it takes some 50 µs.

    Args:
        operator: what `define` has returned.
        backward: backward(ctx, *d_results) -> the gradients to the arguments.
        save: save(ctx, arguments, results), after the forward.
        finish: finish(results, arguments) -> what autograd takes for the results.
    """

    def below_autograd(keys: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keys = args
            results = below_autograd(keys, *inputs)
            save(ctx, tuple(inputs), results)
            return finish(results, tuple(inputs))

        @staticmethod
        def backward(ctx: Any, *d_results: Any) -> Any:
            return *backward(ctx, *d_results), None

    def run(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Gradient.apply(*args, keys)
        return below_autograd(keys, *args)

    library.impl(operator.name(), run, "Autograd", with_keyset=True)


def _any_requires_grad(call: Call) -> bool:
    return any(x is not None and x.requires_grad for x in call.tensors)


def _like_inputs(backward: Callable[..., Any]) -> Callable:
    """Converts gradients to the dtypes of the inputs, and unwanted gradients to empty tensors."""

    def run(d_out, d_final, *args):
        n = len(Call._fields)
        call, kept, wanted = Call(*args[:n]), args[n:-1], args[-1]
        grads = backward(d_out, d_final, call, kept, wanted)
        given: Any = zip(grads, call.tensors, wanted, strict=True)
        return tuple(grad.to(x.dtype) if needed else d_out.new_empty(0) for grad, x, needed in given)

    return run


def _fake_results(*args):
    call = Call(*args)
    final = call.q.new_empty(call.state_shape, dtype=accumulator(call.q))
    return torch.empty_like(call.v, memory_format=torch.contiguous_format), final


def _fake_kept(kept_shapes: Callable) -> Callable:
    def run(*args):
        out, final = _fake_results(*args)
        return out, final, *(final.new_empty(shape) for shape in kept_shapes(Call(*args)))

    return run


def _fake_backward(d_out, d_final, call, kept, wanted):
    return [x if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in call.tensors]


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
        d_out = torch.zeros_like(v) if d_out is None else d_out
        d_final = v.new_zeros(shape, dtype=dtype) if d_final is None else d_final
        wanted = ctx.needs_input_grad[:DIFFERENTIABLE]
        grads = backward(d_out.contiguous(), d_final.contiguous(), *tensors, *ctx.settings, *saved, wanted)
        given = (grad if needed else None for grad, needed in zip(grads, wanted, strict=True))
        return *given, *[None] * (len(Call._fields) - DIFFERENTIABLE)

    return run
