"""The operators under torch.compile, with the default compiler where strides matter, and what opcheck says of them."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from equation import B, T, inputs, leaves
from headrace import linear_attention, step
from headrace.ops.autograd import DIFFERENTIABLE
from headrace.ops.backends.torch import tiles

pytestmark = pytest.mark.filterwarnings("ignore")  # of compilers, which are not ours


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


NAMES = ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate", "initial_state", "bonus")


def drawn(decay, packed, tokens=T, **options):
    """The operator's differentiable arguments in order, and where packed sequences end."""
    x = leaves(inputs(decay, rows=1 if packed else B, n=3 if packed else None, tokens=tokens, **options))
    return [x.get(name) for name in NAMES], torch.tensor([0, 3, 9, tokens]) if packed else None


OF_THE_CODE = "test_schema", "test_faketensor"  # what it changes; shapes and strides of its results
OF_THE_OPERATOR = "test_autograd_registration", "test_aot_dispatch_dynamic"


@pytest.mark.parametrize(
    ("rule", "decay", "packed"),
    [("add", "none", False), ("add", "fixed", True), ("add", "vector", False), ("delta", "scalar", True)],
)
def test_operators_pass_opcheck(backend, rule, decay, packed):
    given, ends = drawn(decay, packed)
    constant = [x if x is None else x.detach() for x in given]
    linear_attention(*constant[:3], backend=backend)  # registers the operator
    operators = {
        name: getattr(torch.ops.headrace, {"torch": "chunkwise", "native": "native"}[backend] + name).default
        for name in ("", "_kept", "_backward")
    }
    settings = (ends, rule == "delta", 0.5, 16, False, False)
    out, state, *kept = operators["_kept"](*constant, *settings)
    calls = [("", (*constant, *settings)), ("_kept", (*given, *settings))]
    for wanted in ([x is not None for x in given], [False] * DIFFERENTIABLE):
        calls.append(("_backward", (out, state, *constant, *settings, *kept, wanted)))
    checks = OF_THE_CODE if tiles.at_once(out.device) else OF_THE_CODE + OF_THE_OPERATOR
    for name, arguments in calls:
        found = torch.library.opcheck(operators[name], arguments, test_utils=checks)
        assert found == dict.fromkeys(checks, "SUCCESS"), name


def scalar(calls, backend):
    """Of the outputs and states of all calls: of each the arguments, where sequences end, and the rule."""
    found = 0
    for given, ends, rule in calls:
        operands = dict(zip(NAMES, given, strict=True))
        out, state = linear_attention(**operands, rule=rule, cu_seqlens=ends, backend=backend)
        found = found + out.sum() + state.square().sum()
    return found


def assert_compiled_is_eager(calls, backend, compiler="inductor"):
    """Gradients to all arguments. The operator gets what it gets in eager mode, so they are equal."""
    tensors = [x for given, *_ in calls for x in given if x is not None]
    found, expected = (
        torch.autograd.grad(f(calls, backend), tensors)
        for f in (torch.compile(scalar, fullgraph=True, backend=compiler), scalar)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# "batched" is the operator of "torch", with other code in it, which a compiler does not see.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_calls_compile_to_one_graph(backend):
    """All kinds of calls in one, because every graph takes the C++ compiler's time."""
    kinds = [("add", "vector", False), ("add", "fixed", True), ("delta", "scalar", True)]
    assert_compiled_is_eager([(*drawn(decay, packed), rule) for rule, decay, packed in kinds], backend)


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
@pytest.mark.parametrize("packed", [False, True])
def test_other_lengths_do_not_recompile(backend, packed):
    """But where PyTorch's backend has one chunk, as PyTorch compiles a size of 1 for itself."""
    counter = CompileCounterWithBackend("aot_eager")
    for tokens, rule in itertools.product((13, 40, 200, 91), ("add", "delta")):
        given, ends = drawn("scalar", packed, tokens=tokens)
        for x in given[: NAMES.index("initial_state")]:
            torch._dynamo.mark_dynamic(x, 1)
        assert_compiled_is_eager([(given, ends, rule)], backend, counter)
    assert counter.frame_count <= {"native": 2, "torch": 6}[backend]  # two rules


def test_steps_in_eager_mode_do_not_recompile_a_graph():
    """Each adds a prepared call to a table."""
    counter, q = CompileCounterWithBackend("eager"), torch.randn(2, 3, 4)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for rows in (3, 4, 5):
        step(*[torch.randn(rows, 3, 4)] * 3)
        compiled(q, q, q)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_grouped_queries_compile_to_one_graph(backend):
    calls = [(*drawn("vector", packed, heads=2, queries=2), "delta") for packed in (False, True)]
    assert_compiled_is_eager(calls, backend, "aot_eager")
