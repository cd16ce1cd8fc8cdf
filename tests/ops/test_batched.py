"""The PyTorch backend as on a GPU, all chunks at once: the number of its calls, and that nothing waits for a device."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equation import detached, inputs, prepare
from headrace import zoo
from headrace.layers import build
from headrace.ops import checks
from headrace.ops.backends.torch import chunkwise, tiles
from headrace.ops.call import Call
from headrace.verification.verify import relative, worst
from tiny import covering

# They only describe memory: views, and memory that is not written.
NO_LAUNCH = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "expand",
    "new_empty", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal"}


class Calls(TorchDispatchMode):
    """Counts the library calls that launch something on a GPU, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        boolean = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.names["nonzero" if boolean else name] += name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def calls(decay, tokens, packed=False, gates=False, rule="delta"):
    """The calls of a forward and those of a backward, by name, and the number of chunks."""
    x = detached(inputs(decay, rows=1, tokens=tokens, key=64, value=64, state=False))
    x |= {} if gates else {"read_gate": None, "write_gate": None} | ({} if rule == "delta" else {"beta": None})
    ends = torch.tensor([0, 3, 70, 70, tokens]) if packed else None
    call = Call(**x, cu_seqlens=ends, delta=rule == "delta", scale=0.5)
    for _ in range(2):  # the first makes the masks of this length of chunk, which are kept
        with Calls() as forward:
            out, state, *kept = chunkwise.forward(call, True)
        with Calls() as backward:
            chunkwise.backward(out, state, call, *kept, decay_gradient=decay != "none")
    return forward.names, backward.names, tiles.grid(call).chunks


# The calls of a forward and of a backward without those that a further chunk adds, by rule and decay.
CEILINGS = {
    ("add", "none"): (14, 18), ("add", "fixed"): (20, 41), ("add", "scalar"): (20, 40), ("add", "vector"): (29, 59),
    ("delta", "none"): (21, 27), ("delta", "fixed"): (27, 50), ("delta", "scalar"): (27, 49),
    ("delta", "vector"): (37, 70),
}  # fmt: skip
GATES = {"add": (2, 9), "delta": (2, 5)}  # what gates (and β, for "add") add to them
PACKED, RAGGED = (25, 30), (1, 1)  # what packed sequences and an incomplete chunk add at most


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("rule", "decay"), CEILINGS)
def test_number_of_library_calls_is_independent_of_length(rule, decay, gates, packed, monkeypatch):
    """But for the states, which pass from chunk to chunk: in a direction at most 3 calls per chunk."""
    prepare("batched", monkeypatch)
    for tokens in (192, 300):
        *result, chunks = calls(decay, tokens, packed, gates, rule)
        scan = chunks * ((2 if rule == "delta" else 1) + packed)
        for way, names in enumerate(result):
            assert not WAITS & names.keys()
            ceiling = CEILINGS[rule, decay][way] + GATES[rule][way] * gates + PACKED[way] * packed
            assert 0 < names.total() - scan <= ceiling + RAGGED[way] * (tokens % 64 > 0)


def test_bounds_are_checked_on_the_device():
    """A GPU gets the check as an operation of its own, for which nothing waits."""
    checks.check_on_device(torch.tensor([0, 4, 4, 9]), 9)
    for ends in ([0, 5], [1, 9], [0, 9, 4, 9]):
        with pytest.raises(RuntimeError, match="expected 0 = c_0 ≤ … ≤ c_N = T = 9"):
            checks.check_on_device(torch.tensor(ends), 9)


# Where β depends on the memory (write.residual_chunk), and under write.erase, a loop over chunks needs the lengths of
# the sequences, and waits for them.
LOOPS = [name for name, spec in zoo.LINEAR.items() if spec.write.residual_chunk or spec.write.erase != "beta"]
MIXERS = [
    name
    for name in zoo.names()
    if type(zoo.get(name)).__name__ == "MixerSpec" and name.removeprefix("softmax-") not in LOOPS
]
# With competition, of which a mixer without it has all but the gates; test_compile.py has mixers without.
# log-linear-gated-deltanet has all parts of log-linear-mamba2, and two steps of mesa have those of thirty.
ONE_GRAPH = covering(
    [
        f"softmax-{name}" + "(ridge_steps=2)" * (name == "mesa")
        for name in zoo.LINEAR
        if name not in (*LOOPS, "log-linear-mamba2")
    ]
)


def layer(name):
    return build(zoo.get(name), hidden_size=16, num_heads=2, layer_idx=1, num_layers=3).double()


@pytest.mark.filterwarnings("ignore::headrace.utils.errors.GateWarning")
@pytest.mark.parametrize("name", covering(MIXERS))
def test_padding_is_dropped_without_a_device_sync(name, monkeypatch):
    """Outputs, states and gradients are those of the form that waits for the mask."""
    made, x = layer(name), torch.randn(3, 9, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(9) >= torch.tensor([[0], [4], [8]])
    with torch.no_grad():
        _, state = made(torch.randn(3, 5, 16, dtype=torch.float64))
    results = []
    for waits in (True, False):
        monkeypatch.setattr("headrace.layers.base.avoid_sync", lambda x, waits=waits: not waits)
        with Calls() as called:
            y, after = made(x, state, mask=mask)
        assert ("nonzero" in called.names) == waits
        given = [x, *(p for p in made.parameters() if p.requires_grad)]
        grads = torch.autograd.grad(y.square().sum() + after.memory.square().sum(), given, allow_unused=True)
        results.append(([y, *(z for z in after if z is not None)], [g for g in grads if g is not None]))
    (actual, gradients), (expected, exact) = results
    assert len(gradients) == len(exact)
    assert max(relative(a.double(), b.double()) for a, b in zip(actual, expected, strict=True)) <= 1e-12
    assert worst(gradients, exact) <= 1e-10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "padded", "backend"),
    list(zip(ONE_GRAPH, itertools.cycle([True, True, False]), itertools.cycle(["aot_eager", *["eager"] * 8]))),
)
def test_linear_mixers_compile_to_one_graph(name, padded, backend):
    """One in nine with a graph of the backward too, which takes longer to make than that of the layer."""
    torch._dynamo.reset()
    made, x = layer(name), torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(9) >= torch.tensor([[0], [4]]) if padded else None
    weight, given = torch.randn_like(x), [x, *made.parameters()]
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    outs = [f(x, mask=mask)[0] for f in (compiled, made)]
    grads = [torch.autograd.grad((y * weight).sum(), given, allow_unused=True) for y in outs]
    assert relative(*outs) <= 1e-12 and worst(*([g for g in some if g is not None] for some in grads)) <= 1e-10
