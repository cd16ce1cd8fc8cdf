"""Laws on other libraries' layers and models: what holds for right ones, and what each fault breaks."""

import ast
import json
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
import transformers

import faulty_layers
import fresh
from faulty_layers import FAULTS
from headrace import InputError, layers, zoo
from headrace.files.quiet import quiet
from headrace.verification import foreign
from headrace.verification.foreign.check import Case, Verdict

FAULTY = Path(faulty_layers.__file__)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "verify"
LAYER_LAWS = ["left-padded = bare", "pieces = whole", "decoding = whole", "batch size"]


STORED = json.loads((RESULTS / "transformers-mamba.json").read_text("utf-8"))["environment"]["transformers"]
OF_STORED_VERSION = pytest.mark.skipif(
    transformers.__version__ != STORED, reason=f"verdicts are stored for transformers {STORED}"
)


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


def broken(verdicts):
    return {v.law for v in verdicts if v.verdict == "breaks"}


def ours(mixer):
    """The adapter of a layer of this library."""

    def forward(layer, x, state=None, mask=None, cu_seqlens=None):
        mask = None if mask is None else mask[:, -x.shape[1] :].bool()
        return layer(x, state, mask=mask, cu_seqlens=cu_seqlens)

    layer = layers.build(zoo.get(mixer), hidden_size=32, num_heads=4)
    # The other part of a state, of a convolution, is inputs of the last tokens.
    return {"module": layer, "width": 32, "forward": forward, "recurrent": lambda state: [state.memory]}


def test_a_right_layer_keeps_every_law_that_it_offers():
    verdicts = {v.law: v for v in foreign.verify(faulty_layers.adapter)}
    others = {law for law, v in verdicts.items() if v.verdict != "holds"}
    assert others == {"packed by positions", "cached = uncached"}
    assert verdicts["cached = uncached"] == Verdict("cached = uncached", "not offered", note="no use_cache")
    assert verdicts["state dtype"].note == "state in float32"


def test_laws_that_need_float64_are_not_offered_where_a_device_has_none(monkeypatch):
    """As on Apple's GPUs, for which this processor stands."""
    laws = ["causal", "gradients = float64", "gradients = differences"]
    monkeypatch.setattr("headrace.verification.foreign.check.WITHOUT_FLOAT64", ["cpu"])
    found = [(v.verdict, v.note) for v in foreign.verify(faulty_layers.adapter, laws)]
    assert found == [("holds", ""), *[("not offered", "no float64")] * 2]


@pytest.mark.parametrize("mixer", ["softmax-gla", "softmax-gated-deltanet"])
def test_our_layers_keep_every_law(mixer):
    verdicts = list(foreign.verify(partial(ours, mixer)))
    offered = [v for v in verdicts if v.verdict != "not offered"]
    assert len(offered) == 18 and all(v.verdict == "holds" for v in offered), offered


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_its_laws_and_no_others(fault):
    assert broken(foreign.verify(partial(faulty_layers.adapter, fault))) == FAULTS[fault]


def test_a_gradient_that_is_nan_breaks_the_laws_of_gradients():
    """Of the third parameter, by which the output does not change."""

    def forward(layers, x):
        return layers[0](x) + (0 * layers[1].weight).abs().sqrt().sum(), None

    parts = {"module": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), "forward": forward}
    laws = ["gradients = float64", "gradients = differences"]
    verdicts = foreign.verify(lambda: parts | {"width": 4}, laws)
    assert [(v.verdict, v.error) for v in verdicts] == [("breaks", float("inf"))] * 2


def test_a_file_with_an_adapter_may_have_dataclasses(tmp_path):
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    (tmp_path / "layer.py").write_text(f"{head}@dataclass\nclass A:\n  x: int\ndef adapter(): return A(3)\n")
    assert foreign.target(f"{tmp_path / 'layer.py'}:adapter").adapter().x == 3


def test_a_law_that_raises_is_named_and_the_others_go_on():
    verdicts = {v.law: v for v in foreign.verify(faulty_layers.raises, ["packed = separate", "batch size"])}
    raised = verdicts["packed = separate"]
    assert (raised.verdict, raised.note, raised.case.T) == ("raises", "RuntimeError: no such kernel", 67)
    assert verdicts["batch size"].verdict == "holds"


def test_an_operator_without_a_kernel_is_no_missing_offer():
    """PyTorch raises NotImplementedError for it, here at the second pass of the law."""
    missing = lambda m, x: (m(x) if x.shape[1] == 67 else m(x).bool().floor(), None)  # noqa: E731
    (verdict,) = foreign.verify(lambda: {"module": torch.nn.Linear(4, 4), "forward": missing, "width": 4}, ["causal"])
    assert (verdict.verdict, verdict.note.partition(":")[0]) == ("raises", "NotImplementedError")


def run_without_headrace(program, folder):
    """(exit code, output) of a program in a process where `import headrace` fails."""
    (folder / "program.py").write_text(program)
    code = "import runpy, sys; sys.modules['headrace'] = None; runpy.run_path('program.py', run_name='__main__')"
    done = fresh.run(code, folder=folder, before=fresh.TRANSFORMERS, HF_HUB_OFFLINE="1")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize(
    ("name", "law"),
    [
        (f"{FAULTY}:hidden", "copied state"),
        (f"{FAULTY}:bfloat16", "state dtype"),
        pytest.param("transformers:mamba", "pieces = whole", marks=OF_STORED_VERSION),
        pytest.param("transformers:mamba", "reordered state", marks=OF_STORED_VERSION),
    ],
)
def test_a_program_shows_the_smallest_failing_input_without_headrace(name, law, tmp_path):
    target = foreign.target(name)
    (verdict,) = foreign.verify(target.adapter, [law])
    assert verdict.verdict == "breaks" and verdict.case.T <= 3
    program = foreign.snippet(target, verdict, 0, "cpu", torch.float32)
    assert "headrace" not in program.replace(str(FAULTY), "")
    code, out = run_without_headrace(program, tmp_path)
    assert code == 1 and out.startswith("relative error"), out


@pytest.mark.parametrize("name", ["transformers:mamba", "transformers:Mamba2Mixer", f"{FAULTY}:hidden"])
def test_the_program_of_a_law_has_one_function_of_a_name(name):
    """The adapter's helpers stand beside the law."""
    target = foreign.target(name)
    for law in foreign.LAWS:
        program = foreign.snippet(target, Verdict(law, "breaks", 1.0, 1e-5, Case(1, 2, 1)), 0, "cpu", torch.float32)
        functions = [part.name for part in ast.parse(program).body if isinstance(part, ast.FunctionDef)]
        assert len(functions) == len(set(functions))


@OF_STORED_VERSION
@pytest.mark.parametrize(("layer", "broken"), [("Mamba2Mixer", []), ("MambaMixer", ["pieces = whole"])])
def test_a_layer_of_a_model(layer, broken):
    verdicts = list(foreign.verify(foreign.target(f"transformers:{layer}").adapter, LAYER_LAWS))
    assert [v.law for v in verdicts if v.verdict != "holds"] == broken


def test_a_layer_whose_state_is_no_cache_is_not_said_to_lose_it():
    """RWKV's layer has a state of its own form, which the adapter does not pass."""
    target = foreign.target("transformers:RwkvSelfAttention")
    verdicts = {v.law: v for v in foreign.verify(target.adapter, ["causal", "pieces = whole", "state dtype"])}
    assert [v.verdict for v in verdicts.values()] == ["holds", "not offered", "not offered"]


@OF_STORED_VERSION
@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_the_stored_verdicts_are_those_of_today(model_type):
    target = foreign.target(f"transformers:{model_type}")
    stored = json.loads((RESULTS / f"transformers-{model_type}.json").read_text("utf-8"))["laws"]
    laws = [law for law in foreign.LAWS if law not in ("gradients = differences", "compile = eager")]
    today = {v.law: v.verdict for v in foreign.verify(target.adapter, laws)}
    assert today == {row["law"]: row["verdict"] for row in stored if row["law"] in laws}


def test_every_model_type_has_results():
    stored = {path.stem for path in RESULTS.glob("transformers-*.json")}
    assert stored >= {f"transformers-{name}" for name in foreign.MODELS}


def test_the_command(run_command, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.files.environment.present_device", lambda: torch.device("mps"))  # beside the CPU
    laws = "--laws", "packed = separate,batch size"
    broken = run_command("verify", f"{FAULTY}:packing", "--device", "cpu", *laws)
    assert broken.code == 1 and "B=1 T=2 at=1" in broken.out and "def packed(subject" in broken.out
    assert "1 of 2 laws hold on cpu in float32" in broken.out
    record = json.loads(run_command("verify", f"{FAULTY}:packing", "--device", "cpu", "--json", *laws).out)[0]
    assert [law["verdict"] for law in record["laws"]] == ["breaks", "holds"]
    assert record["environment"]["torch"] == torch.__version__ and "--json" in record["command"]
    assert record["environment"]["device"] == "cpu"
    code, _ = run_without_headrace(record["laws"][0]["snippet"], tmp_path)
    assert code == 1
    raised = run_command("verify", f"{FAULTY}:raises", "--device", "cpu", *laws)
    assert raised.code == 1 and "no such kernel" in raised.out
    assert run_command("verify", f"{FAULTY}:adapter", "--device", "cpu", *laws).code == 0


def test_the_option_laws_takes_every_law(succeeds):
    done = succeeds("verify", f"{FAULTY}:adapter", "--device", "cpu", "--laws", ",".join(foreign.LAWS))
    assert f" of {len(foreign.LAWS)} laws hold" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lama"], "target='lama'; expected transformers:MODEL_TYPE"),
        (["transformers:lama"], "; did you mean 'llama'?"),
        (["transformers:LlamaAttention"], "its forward needs position_embeddings"),
        (["transformers:JambaAttention"], "its forward needs attention_mask"),
        (["transformers:whisper"], "no small model of this type can be made"),
        (["fla:GatedLinearAttention"], "needs fla.layers, of the package flash-linear-attention"),
        (["nowhere.py:adapter"], "'nowhere.py' does not exist"),
        ([f"{FAULTY}:nothing"], "has no function 'nothing'"),
        ([f"{FAULTY}:adapter", "--laws", "unheard"], "--laws='unheard'; expected some of causal"),
        ([f"{FAULTY}:adapter", "--laws", "causal,"], "--laws=''; expected some of causal"),
        ([f"{FAULTY}:adapter", "--mixers", "gla"], "--mixers has no effect with a target"),
        ([f"{FAULTY}:adapter", "--dtype", "int8"], "--dtype='int8'; expected one of float64"),
        (["--json"], "--json has no effect without a target"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, refusal):
    if words[0].startswith("fla:") and any(each.name == "flash-linear-attention" for each in distributions()):
        pytest.skip("flash-linear-attention is installed")
    said = refusal("verify", *words)
    assert sentence in said and said.count("\n") == 1


def test_a_layer_is_looked_for_in_the_models_that_transformers_has(monkeypatch):
    monkeypatch.setitem(foreign.MODELS, "model_of_a_newer_version", {})
    with pytest.raises(InputError, match="target='transformers:NoLayer'; expected a model type, or a layer of"):
        foreign.target("transformers:NoLayer")


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (None, "the adapter returns NoneType; expected a dict"),
        ({"module": torch.nn.Linear(2, 2)}, "the adapter has no 'forward'"),
        ({"module": torch.nn.Linear(2, 2), "forward": lambda m, x: (m(x), None)}, "no 'vocabulary' and no 'width'"),
        (
            {"module": torch.nn.Linear(2, 2), "width": 3, "forward": lambda m, x: (m(x), None)},
            "the adapter's forward(module, x) cannot run",
        ),
    ],
)
def test_a_wrong_adapter_is_refused(parts, sentence):
    with pytest.raises(InputError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        list(foreign.verify(lambda: parts))
