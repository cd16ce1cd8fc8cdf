"""What is kept between calls outlives no batch, lies in no memory of a graph, and may be read by several threads."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiny
from equation import skip_if_missing
from headrace import HeadraceCache, InputError, Mixer, step
from headrace.extra import fixed_decays
from headrace.extra.fla import packing
from headrace.history.layers import attention, symmetric
from headrace.layers import graph, rotary
from headrace.layers.linear import decays
from headrace.layers.packing import padding_last
from headrace.ops import prepared
from headrace.ops.backends.torch import decay
from headrace.spec.attention import Pattern
from headrace.utils import device


def test_a_model_does_not_keep_the_states_of_its_last_batch():
    skip_if_missing("native")
    model, ids, cache = tiny.build("softmax-gla").float().eval(), tiny.tokens(2), HeadraceCache()
    with torch.no_grad():
        for token in (ids, ids[:, :1], ids[:, :1]):
            model(token, past_key_values=cache, use_cache=True)
        assert model.engine.find(model)[0].last, "the native program ran"
    memories = [weakref.ref(state.memory) for state in cache.states]
    del cache
    gc.collect()
    assert [memory() for memory in memories] == [None] * len(memories) != []


def test_a_full_table_of_prepared_calls_forgets_the_oldest_alone(monkeypatch):
    skip_if_missing("native")
    monkeypatch.setattr(prepared, "MANY", 3)
    prepared.TABLE.clear()
    for rows in range(1, 6):
        q = torch.randn(rows, 3, 4)
        step(q, q, q)
        assert len(prepared.TABLE) == min(rows, 3)
    shapes = [next(x for x in key if isinstance(x, torch.Size))[0] for key in prepared.TABLE]
    assert shapes == [3, 4, 5]


def test_a_scale_for_each_call_is_prepared_once():
    skip_if_missing("native")
    given = {name: torch.randn(2, 3, size) for name, size in (("q", 4), ("k", 4), ("v", 5))}
    given["state"] = torch.randn(2, 3, 4, 5)
    prepared.TABLE.clear()
    for scale in (1.0, 0.5, 2.0, -3.0, 0.0, 1.0):
        found = step(**given, scale=scale)
        torch.testing.assert_close(found, step(**given, scale=scale, backend="torch"))
    assert len(prepared.TABLE) == 1
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="scale="):
            step(**given, scale=wrong)
    torch.testing.assert_close(step(**given), step(**given, scale=0.5))  # 4^-1/2
    assert len(prepared.TABLE) == 2


CONSTANTS = rotary.fixed_frequencies, fixed_decays.slopes, fixed_decays.powers, decays.fixed_decay
DRAWS = Pattern(window=2, block=2, random=1)
KEPT = {
    "mask": lambda: decay.covered(3, torch.float32, torch.device("cpu"))[0],
    "identity": lambda: decay.identity(3, torch.float32, torch.device("cpu")),
    "draws": lambda: symmetric.draws(DRAWS, 3), "reservoir": lambda: attention.reservoir(DRAWS, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_tensors_without_values_are_not_kept(name):
    """Made first under a mode whose tensors have none, as PyTorch's estimates of memory use it."""
    for function in (decay.covered, decay.identity, symmetric.draws, attention.reservoir):
        function.forget()
    with FakeTensorMode():
        KEPT[name]()
    made = KEPT[name]()
    assert type(made) is torch.Tensor and KEPT[name]() is made


def test_tensors_of_a_device_are_not_kept():
    """They may lie in the memory of a CUDA graph."""
    constants = (decay.identity, decay.spanning, decay.straddling)
    for make in constants:
        assert make(3, torch.float32, torch.device("meta")) is not make(3, torch.float32, torch.device("meta"))
        assert make(3, torch.float32, torch.device("cpu")) is make(3, torch.float32, torch.device("cpu"))


@pytest.fixture
def make(monkeypatch):
    """A function whose results are kept, and a stand-in for a GPU, which captures no graph."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return device.kept(lambda n, where: torch.full((2,), n))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_constants_of_a_layer_are_kept(kind, make, monkeypatch):
    """But for those that a graph would write, or that are of a mode or transform."""
    where, found = torch.device(kind), []
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        found.append(make(1, where))
    with FakeTensorMode():
        found.append(make(1, where))
    torch.func.vmap(lambda x: found.append(make(1, where)) or x)(torch.zeros(2))
    torch.jit.trace(lambda x: found.append(make(1, where)) or x + 1, torch.zeros(2), check_trace=False)
    assert len({*found, make(1, where), make(2, where)}) == (6 if kind == "cuda" else 5)
    assert make(1, where) is make(1, where) and make(1, where) is not make(2, where)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert make(1, where) is make(1, where), "a graph reads what was made before"


def test_constants_of_other_devices_are_made_anew(make):
    assert make(1, torch.device("meta")) is not make(1, torch.device("meta"))


def test_constants_made_for_inference_serve_training():
    layer, x = Mixer("retnet(decay.kind=slopes)", hidden_size=12, num_heads=3), torch.randn(1, 4, 12)
    for function in CONSTANTS:
        function.values.clear()
    with torch.inference_mode():
        expected = layer(x)[0]
    y = layer(x)[0]
    y.sum().backward()
    assert y.equal(expected) and [len(function.values) for function in CONSTANTS] == [1, 1, 0, 0]


CONSTANT_DECAYS = "retnet", "retnet(decay.kind=slopes)", "xpos-retnet"


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.requires_grad_()], ids=["in place", "gradient"])
@pytest.mark.parametrize("name", CONSTANT_DECAYS[:2])  # PyTorch refuses to write the third, an expanded one
def test_what_a_hook_does_to_a_constant_lasts_for_its_call(name, write):
    layer, other = (Mixer(name, hidden_size=12, num_heads=3) for _ in range(2))
    x = torch.randn(1, 4, 12)
    for function in CONSTANTS:
        function.values.clear()
    expected = layer.decay(x).clone()
    hook = layer.decay.register_forward_hook(lambda module, given, found: write(found))
    twice = [layer.decay(x).detach().clone() for _ in range(2)]
    hook.remove()
    assert twice[0].equal(twice[1]) and all(each.decay(x).equal(expected) for each in (layer, other))
    assert not other.decay(x).requires_grad


@pytest.mark.parametrize("name", CONSTANT_DECAYS)
def test_selective_checkpointing_sees_the_same_operators_twice(name):
    """The first forward makes the constants, and the backward computes it again."""
    layer, x, found = Mixer(name, hidden_size=12, num_heads=3), torch.randn(1, 4, 12), []
    saved = [torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor]
    for save in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, saved)}):
        for function in CONSTANTS:
            function.values.clear()
        y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False, **save)
        found.append(torch.cat([d.flatten() for d in torch.autograd.grad(y.square().sum(), [*layer.parameters()])]))
    assert found[0].equal(found[1])


def test_bounds_are_found_while_another_thread_adds_its_own(monkeypatch):
    recent, bounds = deque(maxlen=4), torch.tensor([0, 2, 5])

    class Other:
        def __getitem__(self, at):
            recent.append((bounds, -1, None))  # as another thread does between two steps of the search
            return 7

    monkeypatch.setattr(packing, "_recent", recent)
    recent.append((bounds, bounds._version, SimpleNamespace(on_host=Other())))
    found = packing.packing(bounds, 5)
    assert found.on_host.tolist() == [0, 2, 5] and packing.packing(bounds, 5) is found


def test_bounds_on_the_host_are_there_whatever_the_default_device():
    with torch.device("meta"):
        found = packing.packing(torch.tensor([0, 2, 5], device="cpu"), 5)
    assert found.on_host.tolist() == [0, 2, 5]


@pytest.fixture
def captures(monkeypatch):
    """Stands in for torch.cuda. Returns [options, whether it failed] of each capture, of which the first fails."""
    made = []

    class Capture:
        def __init__(self, _, **options):
            made.append([options, not made])

        def __enter__(self):
            """Nothing is captured."""

        def __exit__(self, *_):
            if made[-1][1]:
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    for name in ("current_stream", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(wait_stream=lambda other: None, replay=None))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    return made


def test_a_capture_does_not_fail_by_the_calls_of_other_threads(captures):
    captures.append([{}, False])
    graph.captured(lambda: None, lambda: None, torch.device("cuda"))
    assert captures[1][0]["capture_error_mode"] == "thread_local"


def test_a_capture_succeeds_after_one_that_failed(captures):
    """PyTorch before 2.13 refuses random numbers until one does."""
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.captured(lambda: None, lambda: None, torch.device("cpu"))
    (first, failed), (second, again) = captures
    assert failed and not again and first["stream"] is not second["stream"]
    assert first["capture_error_mode"] == second["capture_error_mode"] == "thread_local"


NAMES = (  # mlstm and mamba3 ask for a value, not for lengths, and on a CPU alone: test_batched.py compiles both
    "softmax-gla", "gated-deltaproduct", "mesa", "log-linear-mamba2", "xpos-retnet", "residual-delta", "comba",
    "gated-deltanet-2",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_knows_whether_it_reads_lengths(name):
    """A mode without values says whether any is read, which would wait for a GPU."""
    layer = Mixer(name, hidden_size=32, num_heads=4)
    layer.backend = "torch"
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, mask = torch.randn(2, 6, 32), torch.ones(2, 6, dtype=torch.bool)
        if layer.static_shapes:
            padding_last(layer.run, x, None, mask)
        else:
            with pytest.raises(Exception, match=r"_local_scalar_dense|item"):
                padding_last(layer.run, x, None, mask)
