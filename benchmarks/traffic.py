"""What one block of a model moves and keeps in a training step, counted without a GPU.

    python benchmarks/traffic.py gla gated-deltanet "mamba2(heads.count=32)"

The unit of what is moved is the residual stream [B, T, D] in bfloat16. Matrix products and the recurrence are counted
apart. Uncompiled, an operator reads its inputs and writes its results once, on tensors without memory; RMSNorm is one
kernel, as on a GPU. Compiled, Inductor plans its kernels for a GPU, and none is generated: a kernel reads and writes
each of its buffers once. What is kept are the tensors that the forward holds for the backward, parameters excluded.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from headrace import set_backend, zoo
from headrace.layers.blocks.block import Block, Sizes
from headrace.layers.blocks.compiled import recomputing
from headrace.layers.blocks.widths import default_intermediate_size
from program import Output, show
from record import RESULTS, append, environment

SHAPE = 4, 4096, 1024  # B, T, D
HEADS = 4
APART = "products", "recurrence"
PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "linear"
FREE = {  # operators that make a tensor without values, or another view of one
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip


class Count(NamedTuple):
    """What a block moves and keeps in one training step."""

    moved: Counter  # bytes by operator
    launches: Counter  # kernels by operator
    kept: dict[str, float]  # bytes per token by module, or by the name of the tensor in a compiled graph

    @property
    def outside(self) -> float:
        """What is moved outside products and recurrence, in units of the residual stream."""
        B, T, D = SHAPE
        return sum(n for name, n in self.moved.items() if name not in APART) / (2 * B * T * D)

    @property
    def kernels(self) -> int:
        return sum(n for name, n in self.launches.items() if name not in APART)


def kind(operator: Any) -> str:
    """The name under which the calls of an operator are counted."""
    name = operator.overloadpacket.__name__ if hasattr(operator, "overloadpacket") else str(operator)
    if name.startswith(("triton", "native")):
        return "recurrence"
    return "products" if name in PRODUCTS else name


class Meter(TorchDispatchMode):
    """Counts the bytes that each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter = Counter()
        self.launches: Counter = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        if kind(operator) not in FREE and operator.namespace != "prim":
            self.add(kind(operator), *tree_leaves((args, kwargs, results)))
        return results

    def add(self, name: str, *values: Any) -> None:
        tensors = [x for x in values if isinstance(x, Tensor)]
        if tensors:
            self.moved[name] += sum(x.numel() * x.itemsize for x in tensors)
            self.launches[name] += 1

    def rms_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        """Takes the place of F.rms_norm."""
        return _Norm.apply(x, weight, self)


class _Norm(torch.autograd.Function):
    """RMSNorm as PyTorch's kernels for a GPU have it: one launch forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, meter: Meter) -> Tensor:
        y, ctx.meter = torch.empty_like(x, memory_format=torch.contiguous_format), meter
        ctx.save_for_backward(x, weight)
        meter.add("rms_norm", x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [x if x is None else torch.empty_like(x) for x in ctx.saved_tensors]
        ctx.meter.add("rms_norm_backward", d_y, *ctx.saved_tensors, *gradients)
        return *gradients, None


@contextmanager
def without_gpu(mixer: str) -> Iterator[Block]:
    """Yields a block that chooses the kernels for a GPU, and whose tensors have no memory."""
    D = SHAPE[2]
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        block = Block(zoo.mixer(mixer), Sizes(D, HEADS, default_intermediate_size(D))).bfloat16().train()
        set_backend(block, "triton")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for module in block.modules():
                for name, p in module.named_parameters(recurse=False):
                    module._parameters[name] = torch.nn.Parameter(mode.from_tensor(p.detach()))
            yield block


def step(block: Callable[[Tensor], Tensor], forward: ExitStack) -> None:
    """A training step of a block; `forward` is closed after its forward."""
    x = torch.empty(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with forward:
        y = block(x)
    y.backward(torch.empty_like(y))


def uncompiled(mixer: str) -> Count:
    """Counts a training step of a block as it is."""
    meter, places, kept = Meter(), ModuleTracker(), {}

    def keep(x: Tensor) -> Tensor:
        place = max(places.parents - {"Global"}, key=len).partition(".")[2]
        storage = x.untyped_storage()
        kept.setdefault(storage._cdata, (place or "block", storage.nbytes()))
        return x

    norm = patch.object(torch.nn.functional, "rms_norm", meter.rms_norm)
    with without_gpu(mixer) as block, norm, meter, ExitStack() as forward:
        forward.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x))
        forward.enter_context(places)
        weights = {p.untyped_storage()._cdata for p in block.parameters()}
        step(block, forward)
    by_module: Counter = Counter()
    for key, (place, size) in kept.items():
        if key not in weights:
            by_module[place] += size / (SHAPE[0] * SHAPE[1])
    return Count(meter.moved, meter.launches, dict(by_module))


class _Planned(Exception):
    """Ends Inductor's work once its kernels are planned."""


def compiled(mixer: str) -> Count:
    """Counts a training step of a compiled block, by the kernels that Inductor plans."""
    from torch._inductor import compile_fx, config, graph

    found = Count(Counter(), Counter(), {"x": 2.0 * SHAPE[2]})

    def plan(lowering: Any) -> None:
        lowering._update_scheduler()
        for node in lowering.scheduler.nodes:
            name, size = kernel(node)
            found.moved[name] += size
            found.launches[name] += size > 0
        raise _Planned

    def inner(traced: Any, inputs: Any, **options: Any) -> Any:
        try:
            compile_fx.compile_fx_inner(traced, inputs, **options)
        except Exception as error:  # Inductor wraps it
            if "_Planned" not in repr(error):
                raise
        if options.get("is_backward"):
            found.kept.update(kept_by(traced))

        def run(args: list[Any]) -> Any:
            given = [*args]
            args.clear()
            return traced(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    whole = compile_fx.compile_fx
    patches = (
        patch.object(graph.GraphLowering, "compile_to_module", plan),
        patch.object(compile_fx, "compile_fx", lambda traced, inputs: whole(traced, inputs, inner_compile=inner)),
        config.patch(cpu_backend="triton", force_disable_caches=True),
    )
    with ExitStack() as entered:
        folder = entered.enter_context(tempfile.TemporaryDirectory())  # Inductor leaves its files after an error
        entered.enter_context(patch.object(tempfile, "tempdir", folder))
        for each in patches:
            entered.enter_context(each)
        block = entered.enter_context(without_gpu(mixer))
        step(torch.compile(block, backend=recomputing, fullgraph=True), ExitStack())
    return found


def kept_by(backward: Any) -> dict[str, float]:
    """Returns the bytes per token of what a graph of the backward takes from that of the forward."""
    places = (node for node in backward.graph.nodes if node.op == "placeholder")
    values = {n.name: n.meta["val"] for n in places if not n.name.startswith(("primals", "tangents"))}
    storages = {x.untyped_storage()._cdata: (name, x) for name, x in values.items() if isinstance(x, Tensor)}
    return {name: x.untyped_storage().nbytes() / (SHAPE[0] * SHAPE[1]) for name, x in storages.values()}


def kernel(node: Any) -> tuple[str, int]:
    """Returns the name and the bytes of one of Inductor's kernels; 0 bytes for what is not launched."""
    name = type(node).__name__
    if name in ("FusedSchedulerNode", "SchedulerNode", "FusedMixOrderReductions"):
        return "fused", min(touched(node), node.get_read_write_buffers_sizes())  # each may count too much
    called = getattr(node.node, "op_overload", None)
    if called is None or name != "ExternKernelSchedulerNode":
        return "free", 0
    return kind(called), node.get_read_write_buffers_sizes()


def touched(node: Any) -> int:
    """Returns the bytes of a fused kernel at most: of each buffer from outside what its loads touch, and of each result
    that another kernel reads."""
    from torch._inductor.virtualized import V

    inside = {part.get_name() for part in node.get_nodes()}
    made = {name for part in node.get_nodes() for name in part.get_buffer_names()}
    buffers, sizes = node.scheduler.name_to_buf, Counter[str]()
    for access in (*node.read_writes.reads, *node.read_writes.writes):
        users = buffers[access.name].users if access.name in made else []
        internal = access.name in made and users and all(user.node.get_name() in inside for user in users)
        if internal or not hasattr(access, "index"):
            continue
        sizes[access.name] = max(sizes[access.name], numbers(access) * V.graph.get_dtype(access.name).itemsize)
    return sum(sizes.values())


def numbers(access: Any) -> int:
    """Returns how many numbers of a buffer a loop over `access` reads or writes."""
    size = 1
    for variable, length in zip(access.var_names, access.size, strict=True):
        size *= int(length) if variable in access.index.free_symbols else 1
    return size


def main(
    mixers: Annotated[list[str], typer.Argument(help="Mixers, or expressions of them.")],
    output: Output = RESULTS / "traffic.csv",
) -> None:
    """Count what a block moves and keeps in a training step."""
    rows = []
    for mixer in mixers:
        for way in (uncompiled, compiled):
            count = way(mixer)
            rows.append({
                "mixer": mixer, "way": way.__name__, "moved": round(count.outside, 1), "kernels": count.kernels,
                "kept": round(sum(count.kept.values())),
            })  # fmt: skip
    append(output, environment(), rows)
    show("Of the residual stream; bytes per token", [*rows[0]], [[str(x) for x in row.values()] for row in rows])


if __name__ == "__main__":
    typer.run(main)
