"""The table of backends: what it shows, and that a backend given by name computes what it is asked for or refuses."""

import pytest
import torch

import tiny
from equation import skip_if_missing
from headrace import InputError, backends, load, set_backend, step, zoo
from headrace.cli.verify import backends as list_backends
from headrace.files.environment import environment
from headrace.layers import LinearMixer, build
from headrace.ops.backends.base import OPERATIONS, Backend, Kernel
from headrace.ops.backends.native import library as native
from headrace.ops.dispatch import BACKENDS
from headrace.ops.reference import literal
from headrace.training import model, recipes
from headrace.verification.verify import relative, verify

D = 32


def layer(name="softmax-gated-deltanet"):
    return build(zoo.get(name), hidden_size=D, num_heads=4, layer_idx=1, num_layers=3)


def test_every_operation_of_every_backend_is_listed():
    table = backends()
    assert list(table) == list(BACKENDS) and all(tuple(row) == OPERATIONS for row in table.values())
    assert table["torch"] == dict.fromkeys(OPERATIONS)


MISTAKES = {
    "linear_attention has no argument 'decay'; did you mean 'log_decay'?": {"decay": 3},
    "rule='foo' is unknown": {"rule": "foo"}, "form='loop' is unknown": {"form": "loop"},
    "beta has shape [1]; expected [1, 3, 2]": {"beta": torch.ones(1)},
    "expected the shape of k, [1, 3, 2, 5]": {"k": torch.ones(1, 3, 2, 5)}, "backends needs q, k and v": {"k": None},
    "backend='onnx' cannot run here: it has no form='recurrent'": {"form": "recurrent", "backend": "onnx"},
}  # fmt: skip


@pytest.mark.parametrize("said", MISTAKES)
def test_backends_refuses_wrong_arguments(said):
    q = torch.ones(1, 3, 2, 4)
    with pytest.raises(InputError) as refused:
        backends(**({"q": q, "k": q, "v": q} | MISTAKES[said]))
    assert said in str(refused.value)


def test_backend_of_a_call_depends_on_its_form():
    x = torch.ones(1, 35, 2, 4)
    assert backends(x, x, x, form="recurrent") == "torch"
    assert backends(x, x, x, form="parallel") == "torch"  # a chunk of 35 tokens, which no other backend has
    assert backends(x, x, x, normalize=True) == backends(x, x, x, scale=1.0, check=True) == backends(x, x, x)


def test_missing_backend_lists_its_reason(monkeypatch):
    monkeypatch.setattr(native, "missing", "it is not here")
    assert set(backends()["native"].values()) == {"it is not here"}


@torch.no_grad()
def test_layer_on_the_torch_backend_uses_no_other(monkeypatch):
    mixer, x = layer(), torch.randn(2, 7, D)
    expected = mixer(x)[0]
    mixer.backend = "torch"
    rest = {name: backend for name, backend in BACKENDS.items() if name == "torch"}
    monkeypatch.setattr("headrace.ops.dispatch.BACKENDS", rest | {"native": BACKENDS["native"]._replace(missing=fail)})
    y, carried = mixer(x[:, :6])
    assert relative(torch.cat([y, mixer(x[:, 6:], carried, in_place=True)[0]], 1), expected.double()) < 1e-5


def fail():
    raise AssertionError("the backend was asked")


@torch.no_grad()
def test_layer_on_a_named_backend_refuses_unsupported_calls():
    skip_if_missing("native")
    mixer = layer().double()
    mixer.backend = "native"
    with pytest.raises(InputError, match=r"backend='native' cannot run here: .* v is torch.float64"):
        mixer(torch.randn(2, 7, D, dtype=torch.float64))
    mixer.backend = "cuda"
    with pytest.raises(InputError, match=f"backend='cuda' is unknown; expected one of auto, {', '.join(backends())}"):
        mixer(torch.randn(2, 7, D, dtype=torch.float64))


def test_environment_variable_chooses_the_backend_of_layers(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    assert layer().backend == environment()["backend"] == "torch"
    list_backends()
    assert "HEADRACE_BACKEND=torch: layers use this backend" in capsys.readouterr().out
    monkeypatch.setenv("HEADRACE_BACKEND", "cuda")
    with pytest.raises(InputError, match="HEADRACE_BACKEND='cuda' is unknown; expected one of auto, onnx, native"):
        layer()
    monkeypatch.delenv("HEADRACE_BACKEND")
    assert layer().backend == environment()["backend"] == "auto"
    list_backends()
    assert "HEADRACE_BACKEND" not in capsys.readouterr().out


COMPUTES = {
    "generate": lambda module, path: module("headrace.cli.generate").generate(path, "a", None, False, "cpu"),
    "serve": lambda module, path: module("headrace.serving.routes").application(path, device="cpu"),
    "eval": lambda module, path: module("headrace.evaluation.checkpoint").read_model(str(path)),
}


@pytest.mark.parametrize("command", COMPUTES)
def test_commands_refuse_an_unavailable_backend_of_the_environment(command, monkeypatch, tmp_path):
    tiny.build("gla").save_pretrained(tmp_path)
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(missing=lambda: "no GPU"))
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")
    load(tmp_path)  # as other commands do, which compute nothing or choose a backend themselves
    for name, sentence in (("triton", "cannot run here: no GPU"), ("cuda", "is unknown")):
        monkeypatch.setenv("HEADRACE_BACKEND", name)
        with pytest.raises(InputError, match=f"^HEADRACE_BACKEND={name!r} {sentence}"):
            COMPUTES[command](pytest.importorskip, tmp_path)
    with pytest.raises(InputError, match=r"^HEADRACE_BACKEND='cuda' is unknown"):
        load(tmp_path)


def test_verify_checks_all_backends_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("HEADRACE_BACKEND", "fla")
    rows = verify(["softmax-gla"])
    assert all(row.holds for row in rows) and any("torch" in row.law for row in rows)


def test_model_on_one_backend():
    model = tiny.build("softmax-gla")
    set_backend(model, "native")
    layers = [layer for layer in model.modules() if isinstance(layer, LinearMixer)]
    assert len(layers) == tiny.SIZES["num_hidden_layers"] and {x.backend for x in layers} == {"native"}
    set_backend(model, "auto")
    assert {x.backend for x in layers} == {"auto"}
    with pytest.raises(InputError, match="backend='cuda' is unknown; expected one of auto, onnx, native"):
        set_backend(model, "cuda")


def test_layers_that_use_the_op_have_a_backend():
    """docs/layer.md lists the others."""
    without = {name for table in zoo.TABLES.values() for name in table if not hasattr(layer(name), "backend")}
    assert without == {*zoo.SCANS, *zoo.ATTENTION, *zoo.OTHERS, "rwkv7", "gla-outer"}


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_estimated_costs_do_not_depend_on_the_environment(backend, monkeypatch):
    recipe, _ = recipes.load("laptop-1m", {"mixer": "softmax-gla"})
    expected = model.estimate(recipe)
    model._counted.cache_clear()
    monkeypatch.setenv("HEADRACE_BACKEND", backend)
    assert model.estimate(recipe) == expected


@torch.no_grad()
def test_step_on_a_named_backend():
    skip_if_missing("native")
    q, v = torch.rand(2, 4, 6), torch.randn(2, 4, 5)
    for options in ({"normalize": True}, {"bonus": torch.rand(4, 6)}):
        found = {name: step(q, q, v, **options, backend=name)[0] for name in ("native", "torch", "auto")}
        assert torch.equal(found["native"], found["auto"]) and relative(found["native"], found["torch"].double()) < 1e-6


@torch.no_grad()
def test_backend_with_the_recurrence_alone_serves_a_layer(monkeypatch):
    """What it does not have is PyTorch's, and asking for it by name is refused."""
    calls = []

    def run(call):
        calls.append(call)
        shared = call.v.shape[2] // call.k.shape[2]
        q, k = (x.repeat_interleave(shared, 2) for x in (call.q, call.k))
        names = ("log_decay", "beta", "write_gate", "read_gate", "initial_state", "scale")
        given = {name: getattr(call, name) for name in names}
        return literal(q, k, call.v, rule="delta" if call.delta else "add", **given)

    loop = Backend(lambda: None, lambda: "the loop", Kernel(run, lambda call: None))
    monkeypatch.setitem(BACKENDS, "loop", loop)
    mixer, x = layer(), torch.randn(2, 7, D)
    expected = mixer(x)[0]
    mixer.backend = "loop"
    y, state = mixer(x[:, :6])
    assert len(calls) == 1
    assert relative(torch.cat([y, mixer(x[:, 6:], state, in_place=True)[0]], 1), expected.double()) < 1e-5
    with pytest.raises(InputError, match="backend='loop' cannot run here: it has no step"):
        step(x, x, x, backend="loop")
