"""torch.compile as on a GPU, on a CPU: the backend "triton" is chosen and traced, and what asks a driver breaks graphs.
The chunkwise form in PyTorch computes what its kernels would.
"""

import copy
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from headrace import HeadraceForCausalLM, InputError, compile_blocks, linear_attention
from headrace.ops import dispatch
from headrace.ops.backends.native import library
from headrace.ops.backends.torch import chunkwise
from headrace.ops.backends.triton import limits, op
from headrace.training.compiled import compile_for_training, is_compiled, report_compiler_errors
from headrace.training.gate_statistics import GateWatch
from headrace.training.watch import first_not_finite
from headrace.utils.device import is_hopper
from tiny import SIZES, config

pytestmark = pytest.mark.filterwarnings("ignore")  # of compilers, which are not ours


def answer(value):
    """A question to a driver or to the import system, which torch.compile cannot trace."""

    def asked(*args):
        torch._dynamo.graph_break()
        return value

    return asked


def forward(call):
    ran.append(call.v.shape)
    return chunkwise.forward(call, False)[:2]


def backward(d_out, d_final, call, decay_gradient):
    return chunkwise.backward(d_out, d_final, call, *chunkwise.forward(call, True)[2:], decay_gradient)


ran = []


@pytest.fixture(autouse=True)
def gpu():
    """A Hopper GPU, whose tensors PyTorch calls tensors on the CPU."""
    torch._dynamo.reset()
    ran.clear()
    triton = op.BACKEND._replace(on_request=lambda call, *_: not is_hopper(call.v.device))
    replaced = [
        (torch.cuda, "get_device_capability", answer((9, 0))), (limits, "find_spec", answer("found")),
        (limits, "interpreted", answer(True)), (op, "interpreted", lambda: True), (library, "missing", "on a GPU"),
        (op, "_chunks_forward", forward), (op, "_chunks_backward", backward),
    ]  # fmt: skip
    with ExitStack() as patches:
        patches.enter_context(patch.dict(dispatch.BACKENDS, triton=triton))
        for place, name, value in replaced:
            patches.enter_context(patch.object(place, name, value))
        yield


ROWS = (  # of calls: the options on which the choice of a backend and the operator depend
    {"log_decay": "vector", "write_gate": "number", "read_gate": "number"},
    {"log_decay": "number", "beta": "number", "rule": "delta"},
)
PACKS = {"normalize": True}, {"log_decay": "vector", "bonus": "bonus"}


def inputs(options, B, T, H=2, K=16):
    """The arguments of linear_attention for these options, with gradients."""
    shapes = {"vector": (B, T, H, K), "number": (B, T, H), "bonus": (H, K)}
    drawn = {name: torch.rand(B, T, H, K) / 4 for name in "qkv"}  # β‖k‖² below 1
    for name, kind in options.items():
        drawn[name] = torch.rand(shapes[kind]) * (-1 if name == "log_decay" else 1) if kind in shapes else kind
    return {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in drawn.items()}


def losses(calls, packed):
    found = 0
    for call in calls:
        T = call["v"].shape[1]
        bounds = torch.tensor([0, 3, T], dtype=torch.int32) if packed else None
        out, state = linear_attention(**call, cu_seqlens=bounds)
        found = found + out.sum() + state.square().sum()
    return found


@pytest.mark.parametrize(("kinds", "sizes"), [(ROWS, ((3, 20), (5, 77))), (PACKS, ((1, 20), (1, 77)))])
def test_calls_run_on_the_gpus_kernels_in_one_graph(kinds, sizes):
    """Forward and backward, and again with other numbers of rows and tokens, without a second graph."""
    counter, packed = CompileCounterWithBackend("aot_eager"), kinds is PACKS
    compiled = torch.compile(losses, backend=counter, fullgraph=True, dynamic=True)
    for B, T in sizes:
        calls = [inputs(options, B, T) for options in kinds]
        tensors = [x for call in calls for x in call.values() if isinstance(x, torch.Tensor)]
        found, expected = (torch.autograd.grad(f(calls, packed), tensors) for f in (compiled, losses))
        assert all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in zip(found, expected, strict=True))
    assert len(ran) == 2 * len(sizes) * len(kinds) and counter.frame_count == 1


def model(mixer):
    return HeadraceForCausalLM(config(mixer, num_hidden_layers=1)).float()


def test_twenty_lengths_and_batches_compile_three_graphs():
    """For rows, one row, and packed sequences."""
    counter = CompileCounterWithBackend("eager")
    block = compile_blocks(model("softmax-gla"), backend=counter, fullgraph=True).model.backbone.layers[0]
    rows = [(2 + T % 4, T, 0) for T in range(9, 79, 7)] + [(1, 30, 0)]
    for B, T, N in rows + [(1, T, 2 + T % 5) for T in range(40, 76, 4)]:
        bounds = torch.linspace(0, T, N + 1).long() if N else None
        block(torch.randn(B, T, SIZES["hidden_size"]), cu_seqlens=bounds)
    assert 0 < counter.frame_count <= 3


def test_gates_are_watched_in_compiled_models():
    """A hook that reads values breaks a graph, which fullgraph=True refuses."""
    plain, ids = model("softmax-gla"), torch.randint(1, SIZES["vocab_size"], (2, 9))
    compiled, found = compile_blocks(copy.deepcopy(plain), backend="eager", fullgraph=True), []
    for each in (plain, compiled):
        with torch.no_grad(), GateWatch().on(each) as watch:
            watch.labelled = torch.ones_like(ids, dtype=torch.bool)
            each(ids, use_cache=False)
        found.append(watch.summary())
    assert found[0] and found[0] == found[1]


def test_what_is_not_finite_is_found_in_compiled_models():
    """As in the watch of gates: the blocks of a model that trains on a GPU have fullgraph=True."""
    compiled = compile_blocks(model("softmax-gla"), backend="eager", fullgraph=True).train()
    compiled.model.backbone.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    ids = torch.randint(1, SIZES["vocab_size"], (2, 9))
    compiled(ids, use_cache=False)
    assert first_not_finite(compiled, lambda: compiled(ids, use_cache=False)) == "layer 0"


def test_training_compiles_on_cuda_where_lengths_stay_on_the_device():
    for mixer, wanted, cuda, packed, expected in (
        ("softmax-gla", None, True, True, True), ("softmax-gla", None, False, True, False),
        ("softmax-gla", False, True, True, False), ("softmax-gla", True, False, False, True),
        ("mamba", None, True, False, False), ("transformer", None, True, False, True),
        ("transformer", None, True, True, False), ("longformer", None, True, False, False),
    ):  # fmt: skip
        made = model(mixer)
        compile_for_training(made, wanted, cuda, packed)
        assert is_compiled(made) == expected, (mixer, wanted, cuda, packed)
    others = nn.Sequential(nn.Linear(2, 2))  # as a model of a plug-in
    compile_for_training(others, None, cuda=True, packed=False)
    assert not is_compiled(others)
    with pytest.raises(InputError, match="model is a Sequential without blocks of headrace"):
        compile_for_training(others, True, cuda=False, packed=False)


def test_failure_to_compile_ends_with_its_reason():
    def breaks(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(InputError, match=r"graph_break.*; expected compile=false"), report_compiler_errors():
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))
    with pytest.raises(ValueError, match="another"), report_compiler_errors():
        raise ValueError("another")
