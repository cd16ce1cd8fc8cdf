"""A token through a layer in one native call: as the layer's separate steps, but into a state that may be spent."""

import copy
import itertools

import pytest
import torch
from torch.nn.utils import prune

from equation import MAX_ERROR_RATIO
from headrace import linear_attention, zoo
from headrace.layers.linear.token import find_program
from headrace.ops.backends.native import layer as native_layer
from headrace.ops.backends.native import library as native
from headrace.verification.verify import relative
from tiny import layer

LINEAR = [*zoo.LINEAR, *(f"softmax-{name}" for name in zoo.LINEAR)]
SCORES = itertools.product(("softmax", "sigmoid", "null"), ("head", "diag", "query", "hidden"))
PLACES = itertools.product(("identity", "one"), ("none", "query", "after_norm"), ("none", "value", "beta"))
COMPETITIONS = [(*scores, "one", "after_norm", "value") for scores in SCORES]
COMPETITIONS += [("softmax", "head", *places) for places in PLACES if places[1:] != ("none", "none")]
pytestmark = pytest.mark.usefixtures("native", "no_grad")


def refusal(made, x):
    return find_program(made, x)[1]


def in_float64(made, mixer, x, **sizes):
    exact = layer(mixer, torch.float64, **sizes)
    exact.load_state_dict({name: w.double() for name, w in made.state_dict().items()})
    return exact(x.double())


def token_by_token(made, x, first):
    """All outputs and the last state, from the first few tokens on by the native call."""
    y, state = made(x[:, :first])
    ys = [y]
    for token in x[:, first:].split(1, 1):
        assert refusal(made, token) is None
        y, state = made(token, state, in_place=True)
        ys.append(y)
    return torch.cat(ys, 1), state


@pytest.mark.parametrize("mixer", LINEAR)
def test_decoding_200_tokens_equals_the_full_forward(mixer):
    made, x = layer(mixer), torch.randn(2, 200, 32)
    if (reason := refusal(made, x[:, :1])) is not None:
        pytest.skip(reason)
    (expected, final), (found, state) = in_float64(made, mixer, x), token_by_token(made, x, first=5)
    separate, last = made(x)
    assert relative(found, expected) <= MAX_ERROR_RATIO * relative(separate, expected)
    for mine, other, exact in zip(state, last, final, strict=True):
        assert (mine is None) == (exact is None)
        assert mine is None or relative(mine, exact) <= MAX_ERROR_RATIO * relative(other, exact)


@pytest.mark.parametrize("mixer", ["gated-deltanet", "mamba2", "linear-attention", "gla(read.norm=group)"])
def test_decoding_with_every_competition(mixer):
    for activation, source, scale, read, write in COMPETITIONS:
        if write == "beta" and mixer != "gated-deltanet":
            continue
        name, paren, rest = mixer.partition("(")
        fields = f"activation={activation},source={source},scale={scale},read={read},write={write},temperature=1.3"
        fields += ",range=2.5" * (activation == "sigmoid" and source == "head")  # others: the number of heads
        changes = ",".join(f"competition.{field}" for field in fields.split(","))
        whole = f"softmax-{name}({rest.removesuffix(')')}{',' if paren else ''}{changes})"
        made, x = layer(whole), torch.randn(2, 4, 32)
        found, expected = token_by_token(made, x, 1)[0], in_float64(made, whole, x)[0]
        assert relative(found, expected) <= MAX_ERROR_RATIO * relative(made(x)[0], expected), whole


@pytest.mark.parametrize(
    "change",
    [
        "inputs.feature_map=silu", "inputs.feature_map=relu", "inputs.conv=2", "inputs.conv=7", "inputs.rotary=true",
        "heads.qk_groups=2", "heads.expand_k=0.6875", "heads.expand_v=1.375", "read.gate=none", "read.gate=sigmoid",
        "read.order=gate-norm", "read.norm=none", "read.skip=true", "read.bonus=true", "decay.rank=5",
        "inputs.shift=ddlerp", "heads.count=8", "read.eps=0.1",
    ],
)  # fmt: skip
def test_decoding_with_every_part(change):
    """On an additive mixer with a vector decay; widths that are no multiple of a vector among them."""
    mixer = f"softmax-gla({change})"
    made, x = layer(mixer, hidden_size=64), torch.randn(3, 12, 64)
    found, expected = token_by_token(made, x, 2)[0], in_float64(made, mixer, x, hidden_size=64)[0]
    assert relative(found, expected) <= MAX_ERROR_RATIO * relative(made(x)[0], expected)


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        ("retnet(inputs.order=1)", "inputs.order=1"), ("gla(inputs.value_gate=true)", "inputs.value_gate=True"),
        ("gla(inputs.by_length=true)", "inputs.by_length=True"), ("gla(read.by_length=true)", "read.by_length=True"),
        ("gla(read.affine=false)", "read.affine=False"), ("gla(read.norm=layer)", "norm='layer'"),
        ("linear-attention(read.norm=detached)", "read.norm='detached'"),
        ("gla(read.gate=sigmoid-head)", "gate='sigmoid-head'"), ("kda(read.gate_bias=false)", "read.gate_bias=False"),
        ("gla(inputs.value_map=silu)", "inputs.value_map='silu'"),
        ("mamba2(heads.qk_groups=2, read.norm=rms-groups)", "norm='rms-groups'"),
        ("mamba2(decay.dt_floor=0.01)", "decay.dt_floor=0.01"),
        ("kda(decay.lower_bound=-5.0)", "decay.lower_bound=-5.0"), ("kda(decay.rank=full)", "decay.rank='full'"),
        ("retnet(decay.kind=slopes)", "decay='slopes'"), ("gla(decay.temperature=1)", "decay.temperature=1.0"),
        ("gla(inputs.key=complement)", "inputs.key='complement'"),
        ("deltanet(write.beta=sigmoid-2)", "beta='sigmoid-2'"), ("retnet(write.beta=exp)", "write.beta='exp'"),
        ("deltaproduct", "write.steps=2"), ("comba", "write.erase='feedback'"),
    ],
)  # fmt: skip
def test_what_the_native_call_does_not_compute_is_refused(mixer, reason):
    assert refusal(layer(mixer), torch.randn(2, 1, 32)) == f"it does not support {reason}"


@pytest.mark.parametrize("mixer", ["softmax-gated-deltanet", "kda", "rwkv6", "softmax-mamba2", "retnet"])
def test_bfloat16_decoding_is_as_accurate_as_separate_steps(mixer):
    made, x = layer(mixer, torch.bfloat16, hidden_size=64), torch.randn(2, 60, 64).bfloat16()
    expected, separate = in_float64(made, mixer, x, hidden_size=64)[0], made(x)[0]
    found = token_by_token(made, x, 5)[0]
    assert found.dtype == torch.bfloat16
    # Almost all of it is the rounding of what both keep in bfloat16: 0.94 to 0.97 over seeds and instruction sets.
    assert relative(found, expected) <= 1.1 * relative(separate, expected)


def test_decoding_at_far_positions():
    made, x = layer("retnet"), torch.randn(2, 4, 32)
    state = made(x[:, :1])[1]._replace(tokens=torch.tensor([100_000, 3]))
    exact = layer("retnet", torch.float64)
    exact.load_state_dict({name: w.double() for name, w in made.state_dict().items()})
    expected = exact(x[:, 1:].double(), state._replace(memory=state.memory.double()))[0]
    ys = []
    for token in x[:, 1:].split(1, 1):
        y, state = made(token, state, in_place=True)
        ys.append(y)
    assert state.tokens.tolist() == [100_003, 6] and relative(torch.cat(ys, 1), expected) < 1e-6


@pytest.mark.parametrize("mixer", ["retnet", "softmax-gated-deltanet", "softmax-kda"])
def test_thread_count_does_not_change_results(mixer):
    made, x = layer(mixer, hidden_size=1024, num_heads=2), torch.randn(8, 4, 1024)
    state, results = made(x[:, :3])[1], []
    for threads in (1, 3, 16):
        torch.set_num_threads(threads)
        own = copy.deepcopy(state)
        results.append([made(x[:, 3:], own, in_place=True)[0], *(y for y in own if y is not None)])
    assert not torch.equal(results[0][1], state.memory)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


# --- whose state it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@torch.enable_grad()
def test_state_keeps_no_other_memory_alive(rows):
    state = layer("gated-deltanet")(torch.randn(rows, 500, 32))[1]
    assert all(y is None or (y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes) for y in state)


def test_unsupported_layers_use_separate_steps(monkeypatch):
    made, x = layer("softmax-gla"), torch.randn(2, 9, 32)
    assert "one token" in refusal(made, x)
    x = x[:, :1]
    with torch.enable_grad():
        assert "no gradient" in refusal(made, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in refusal(made, x)
    assert "float32 and bfloat16; x is a Tensor of torch.float64 on cpu" in refusal(made, x.double())
    assert "the weights have another dtype than x, torch.bfloat16" in refusal(made, x.bfloat16())
    other = layer("softmax-gla")
    other.decay.up = torch.nn.Sequential(other.decay.up)  # as whoever adapts a model may put something around a part
    assert "SigmoidDecay.up is a Sequential" in refusal(other, x)
    monkeypatch.setattr(native, "missing", "it is not here")
    assert refusal(made, x) == "it is not here"
    monkeypatch.undo()
    for control, field in (("shuffle=true", "shuffle=True"), ("top_k=2",) * 2):
        reason = f"it does not support competition.{field}"
        assert refusal(layer(f"softmax-gla(competition.{control})"), x) == reason
    monkeypatch.setattr(native, "missing", "it is not here")
    state = made(torch.randn(2, 5, 32))[1]
    expected = made(x, state)
    y, after = made(x, state, in_place=True)
    torch.testing.assert_close(y, expected[0])  # PyTorch's products, whose last bits depend on where tensors lie
    torch.testing.assert_close(after.memory, expected[1].memory)


def subclassed(path):
    """Changes the class of a module to one that triples what it returns."""

    def change(mixer):
        module = mixer.get_submodule(path)
        kind = type(module)
        module.__class__ = type("Changed", (kind,), {"forward": lambda self, *a, **k: 3 * kind.forward(self, *a, **k)})

    return change


def reading(mixer):
    """A method of the layer, which a subclass has changed, in place of a module."""
    kind = type(mixer)

    def run(self, *given, **where):
        y, state = kind.run(self, *given, **where)
        return 3 * y, state

    mixer.__class__ = type("Changed", (kind,), {"run": run})


def computing(mixer):
    """Another recurrence, whose outputs have the token's own value in addition."""

    def op(q, k, v, **settings):
        out, state = linear_attention(q, k, v, **settings)
        return out + v, state

    mixer.op = op


def patched(mixer):
    forward = mixer.gate.forward
    mixer.gate.forward = lambda x: 3 * forward(x)


CHANGES = {
    "gates": ("softmax-gla", subclassed("read_competition")), "decay": ("kda", subclassed("decay")),
    "fixed decay": ("retnet", subclassed("decay")), "conv": ("gated-deltanet", subclassed("conv")),
    "forward": ("gla", patched), "eps": ("gla", lambda mixer: setattr(mixer, "norm_eps", 0.1)),
    "hook": ("retnet", lambda mixer: mixer.decay.register_forward_hook(lambda module, given, out: 3 * out)),
    "replaced": ("kda", lambda mixer: setattr(mixer, "decay", layer("kda").decay)),
    "method": ("gla", reading), "op": ("gla", computing), "op of a delta rule": ("gated-deltanet", computing),
    "op of several memories": ("softmax-gla(competition.memories_per_head=2)", computing),
    "pruned skip": ("mamba2", lambda mixer: prune.random_unstructured(mixer, "skip", 0.5)),
    "pruned bonus": ("rwkv6", lambda mixer: prune.random_unstructured(mixer, "bonus", 0.5)),
    "another kind": ("kda", lambda mixer: setattr(mixer, "decay", layer("gated-deltanet").decay)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_mixer_decodes_with_its_changes(change):
    name, apply = CHANGES[change]
    made, x = layer(name), torch.randn(2, 9, 32)
    apply(made)
    if change == "another kind":  # one number a head in place of one a channel
        assert "LinearMixer.decay is a " in refusal(made, x[:, :1])
        return
    whole, state, out = made(x)[0], None, []
    assert relative(made(x[:, 8:], made(x[:, :8])[1])[0].double(), whole[:, 8:].double()) < 1e-4
    for token in x.split(1, 1):
        y, state = made(token, state, in_place=True)
        out.append(y)
    assert relative(torch.cat(out, 1).double(), whole.double()) < 1e-4


def test_kinds_are_passed_by_name():
    names = {kind: values[-1] for kind, values in native_layer.KINDS.items()}
    assert native_layer.numbered(names) == ({name: len(all_) - 1 for name, all_ in native_layer.KINDS.items()}, None)
    assert native_layer.numbered(names | {"gate": "gelu"}) == ({}, "it does not support gate='gelu'")


@pytest.mark.slow
def test_decoding_compiles_to_one_graph():
    made, x = layer("softmax-gated-deltanet"), torch.randn(2, 3, 32)
    mine, compiled = (made(x[:, :2])[1] for _ in range(2))
    step = torch.compile(lambda *given: made(*given, in_place=True), fullgraph=True, backend="aot_eager")
    (y, after), (expected, state) = step(x[:, 2:], compiled), made(x[:, 2:], mine, in_place=True)
    assert relative(y, expected.double()) < 1e-6 and relative(after.memory, state.memory.double()) < 1e-6
