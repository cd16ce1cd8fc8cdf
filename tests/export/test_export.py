"""Exported models in ONNX Runtime and in a browser compute what PyTorch computes."""

import functools
import html
import json
import os
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from groups import refused
from headrace import HeadraceForCausalLM, InputError, linear_attention, load, zoo
from headrace.cli.app import app
from headrace.data.tokenizer import byte_level
from headrace.export import writer
from headrace.export.onnx import (
    MAX_ERROR_RATIO,
    TOLERANCE,
    TRACED,
    Runtime,
    check_exportable,
    errors,
    export,
    quantize,
    standardize,
    states,
    trace,
)
from headrace.export.web import write_page
from headrace.extra.capped import CappedSpec
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.ops.reference import literal
from headrace.spec import AttentionSpec, Rope
from headrace.spec.stack import Layer
from released import release
from tiny import build, config, saved

onnx = pytest.importorskip("onnx", reason='needs pip install "headrace[onnx]"')
pytest.importorskip("onnxruntime", reason='needs pip install "headrace[onnx]"')
pytest.importorskip("onnxscript", reason='needs pip install "headrace[onnx]"')
import onnxruntime  # noqa: E402

pytestmark = pytest.mark.slow(seconds=40)  # first, so that one process makes the exported model for all
ROOT = Path(__file__).parents[2]
B, H, K, V = 2, 4, 3, 5
CHECKPOINT = ("gla", "gated-deltanet", "retnet")  # the first with competition
PROMPT, TOKENS = "It was", 200
# Error of a float32 result as a share of the largest number: 64 roundings of 2^-24, for the sums of a few layers.
ROUNDING = 64 * 2**-24


def decays(T):
    g = -torch.rand(B, T, H, K)
    return {"none": None, "fixed": g[0, 0, :, 0].clone(), "token": g[..., 0].clone(), "channel": g}


def arguments(T):
    """The op's tensors with two key heads for four heads, and every gate."""
    gates = {name: torch.rand(B, T, H) for name in ("beta", "read_gate", "write_gate")}
    qkv = torch.randn(B, T, 2, K), torch.rand(B, T, 2, K) / 2, torch.randn(B, T, H, V)
    return qkv, gates, decays(T), torch.randn(B, H, K, V)


def recurrences(op, qkv, gates, decays, state):
    """Every rule and every decay, with gates and an initial state and without; the bonus and the normalizer."""
    q, k, v = qkv
    for rule, names in (("add", ("none", "channel")), ("delta", ("fixed", "token"))):
        for name in names:
            yield from op(q, k, v, log_decay=decays[name], rule=rule, **gates, initial_state=state)
        yield from op(q, k, v, rule=rule)
    yield from op(q, k, v, **gates, log_decay=decays["channel"], initial_state=state, bonus=k[0, 0].repeat(2, 1).abs())
    yield from op(q.abs(), k, v, **gates, log_decay=decays["fixed"], normalize=True, scale=0.7)
    of_keys = {name: x if x is None else x[:, :, :2] for name, x in gates.items()} | {"read_gate": gates["read_gate"]}
    for rule in ("add", "delta"):  # grouped queries
        yield from op(q.repeat(1, 1, 2, 1), k, v[:, :, :2], **of_keys, log_decay=decays["token"][:, :, :2], rule=rule)


class Recurrences(nn.Module):
    def forward(self, qkv, gates, decays, state):
        return list(recurrences(linear_attention, qkv, gates, decays, state))


def wide(x):
    if isinstance(x, dict):
        return {name: wide(y) for name, y in x.items()}
    return tuple(map(wide, x)) if isinstance(x, tuple) else x if x is None else x.double()


def expected(qkv, *rest):
    q, k, v = qkv

    def grouped(q, k, v, **options):
        q, k = (x.repeat_interleave(2, 2) if x.shape[2] < v.shape[2] else x for x in (q, k))
        return literal(q, k, v, **options)

    return list(recurrences(grouped, *wide(((q, k, v), *rest))))


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own code
def test_exported_recurrences_equal_the_reference(tmp_path):
    torch.manual_seed(0)
    tokens = {1: "T"}
    varying = ((tokens,) * 3, dict.fromkeys(("beta", "read_gate", "write_gate"), tokens),
               {"none": None, "fixed": None, "token": tokens, "channel": tokens}, None)  # fmt: skip
    program = torch.onnx.export(Recurrences().eval(), arguments(6), dynamo=True, dynamic_shapes=varying, verbose=False)
    program.save(tmp_path / "ops.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "ops.onnx", providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    for T in (1, 2, 9):
        given = arguments(T)
        tensors = [*given[0], *given[1].values(), *(x for x in given[2].values() if x is not None), given[3]]
        actual = session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))
        for y, target in zip(actual, expected(*given), strict=True):
            assert abs(torch.from_numpy(y) - target).max() <= ROUNDING * target.abs().max(), T


def test_linear_mixers_are_exported_exactly(tmp_path):
    """In one model without MLPs, as tracing takes seconds per layer: what is more than a function of one number,
    beside the checkpoint below. A convolution, gates and a decay per channel under several steps of the delta rule;
    step sizes with a token shift and a bonus; features and their sum; positions; softmax attention as Qwen3.5,
    Gemma 2, Hunyuan, nanochat and Ministral 3 have it; and latent attention."""
    torch.manual_seed(0)
    mixers = (
        "softmax-kda(write.steps=2, read.norm=group)", "mamba2(inputs.shift=ddlerp, read.bonus=true)",
        "taylor-softmax", "xpos-retnet",
    )  # fmt: skip
    attention = "gqa(kv_heads=2, gate=channel, qk_norm=head)", "mla"
    layers = [Layer(zoo.get(name), "none") for name in (*mixers, *attention)]
    more = CappedSpec(2, cap=1.0), LateNormSpec(2), LateNormSpec(2, weights=False), GrowingSpec(2, period=3)
    layers += [Layer(spec, "none") for spec in more]
    model = build(layers, num_hidden_layers=len(layers)).float()
    trace(model).save(tmp_path / "model.onnx")
    result, own = errors(tmp_path / "model.onnx", model)
    assert result <= max(TOLERANCE, MAX_ERROR_RATIO * own)


def test_errors_of_logits_that_are_all_zero(tmp_path):
    """Are no shares of the largest."""
    model = build("gla", num_hidden_layers=1).float()
    torch.nn.init.zeros_(model.lm_head.weight)
    trace(model).save(tmp_path / "model.onnx")
    assert errors(tmp_path / "model.onnx", model) == (0, 0)


def test_head_count_may_equal_the_traced_batch(tmp_path, monkeypatch):
    """The number of rows stays a variable. Of the backends, only ONNX's makes the recurrence a node."""
    monkeypatch.setenv("HEADRACE_BACKEND", "native")
    heads = TRACED["batch"]
    build("gla", num_hidden_layers=1, num_heads=heads, hidden_size=8 * heads).float().save_pretrained(tmp_path)
    (tmp_path / "onnx").mkdir()
    assert "its logits differ from float64's by" in export(tmp_path, tmp_path / "onnx")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    mixers = [f"softmax-{CHECKPOINT[0]}", *CHECKPOINT[1:]]
    model = HeadraceForCausalLM(config(mixers, num_hidden_layers=3, vocab_size=257))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return saved(model, folder)


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    done = CliRunner().invoke(app, ["export", str(checkpoint), "--to", "onnx", "--output", str(folder)])
    assert done.exit_code == 0, done.exception
    assert re.search(r"model\.onnx of [\d.]+ MB; its logits differ from float64's by [\d.]+e-0[6-9]", done.output)
    return folder


@torch.no_grad()
def test_wrong_graph_is_refused(checkpoint, exported, tmp_path, monkeypatch):
    """That of a model in which one matrix was a thousandth smaller."""
    changed = load(checkpoint)
    changed.model.backbone.layers[1].mixer.o_proj.weight.mul_(1.001)
    saved(changed, tmp_path / "changed")
    graph = SimpleNamespace(save=lambda path: shutil.copy(exported / "model.onnx", path))
    monkeypatch.setattr("headrace.export.onnx.trace", lambda model: graph)
    command = ["export", str(tmp_path / "changed"), "--to", "onnx", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, InputError) and not (tmp_path / "out").exists()
    assert re.fullmatch(
        r"the logits of model\.onnx are wrong by [1-9]\.\de-0[345] of the largest, those of PyTorch by .*e-0[678]",
        str(done.exception),
    )


@torch.no_grad()
def test_a_model_that_diverged_is_named_and_not_its_graph(checkpoint, tmp_path):
    diverged = load(checkpoint)
    diverged.model.backbone.layers[1].mixer.o_proj.weight.fill_(torch.nan)
    folder = saved(diverged, tmp_path / "diverged")
    done = CliRunner().invoke(app, ["export", str(folder), "--to", "onnx", "--output", str(tmp_path / "out")])
    assert isinstance(done.exception, InputError) and not (tmp_path / "out").exists()
    assert str(done.exception) == f"checkpoint {str(folder)!r} gives NaN or infinite logits; expected finite"


@torch.no_grad()
def test_exported_model_generates_the_same_200_tokens(checkpoint, exported):
    model = load(checkpoint)
    ids = torch.tensor(byte_level()([PROMPT, "Nobody"]).input_ids)
    expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=256)
    truth = model.double()(expected).logits
    run = Runtime(exported / "model.onnx", states(model), batch=2)
    logits, result = [run(ids)], ids
    for _ in range(TOKENS):
        result = torch.cat([result, logits[-1][:, -1:].argmax(-1)], 1)
        logits.append(run(result[:, -1:]))
    assert result.tolist() == expected.tolist()
    assert (torch.cat(logits, 1) - truth).abs().max() <= 1e-5 * truth.abs().max()


def test_documented_example_runs_without_headrace(checkpoint, exported, monkeypatch, capsys):
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "headrace" not in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    monkeypatch.chdir(exported)
    exec(compile(code, "serving.md", "exec"), {})
    ids = byte_level()(PROMPT, return_tensors="pt").input_ids
    expected = load(checkpoint).generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=256)
    assert capsys.readouterr().out.rstrip("\n") == byte_level().decode(expected[0])
    about = json.loads((exported / "headrace.json").read_text("utf-8"))
    assert (about["vocab_size"], about["opset"], about["weights"]) == (257, 23, "float32") and about["made_by"]


def test_int8_export_is_smaller_and_close(checkpoint, exported, tmp_path):
    """With the weights in the file, and in a file beside it, as weights of more than 2 GB are."""
    results = {}
    for name, where in {"one": {}, "two": {"save_as_external_data": True, "size_threshold": 0}}.items():
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.onnx"
        onnx.save(onnx.load(exported / "model.onnx"), path, location="model.onnx.data" if where else None, **where)
        before = sum(file.stat().st_size for file in path.parent.iterdir())
        quantize(path)
        assert sum(file.stat().st_size for file in path.parent.iterdir()) < 0.8 * before  # the embedding stays float32
        results[name], own = errors(path, load(checkpoint))
    assert results["one"] == results["two"] and own < 1e-5 < results["one"] < 0.2


def test_opset_27_uses_the_standard_node(checkpoint, exported, tmp_path):
    """Computed by the reference evaluator of onnx, as ONNX Runtime does not enable the opset."""
    from onnx.reference import ReferenceEvaluator

    path, model = tmp_path / "model.onnx", load(checkpoint)
    shutil.copy(exported / "model.onnx", path)
    standardize(path)
    graph = onnx.load(path)
    onnx.checker.check_model(graph)
    assert {(x.domain, x.version) for x in graph.opset_import} >= {("", 27)}
    assert {node.domain for node in graph.graph.node} == {""}
    ids = torch.randint(257, (2, 5))
    past = {f"past.{state.name}": state.zeros(batch=2, past=0).numpy() for state in states(model)}
    logits = torch.from_numpy(ReferenceEvaluator(graph).run(None, {"input_ids": ids.numpy(), **past})[0])
    with torch.no_grad():
        expected = model.double()(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_released_hybrid_is_exported(tmp_path):
    """With norms of the branches' outputs: `export` compares the logits with PyTorch's."""
    (tmp_path / "onnx").mkdir()
    path = release("olmo_hybrid", tmp_path / "theirs")
    assert "its logits differ from float64's by" in export(path, tmp_path / "onnx")


REFUSED = {
    "residual-delta": r"layer 0 of the model: its write strength β \(write.residual_chunk\) is computed in a loop",
    "log-linear-mamba2": "its mixer is LogLinearMixer, without nodes in ONNX",
    "mamba": "layer 0 of the model: its mixer is Mamba, without nodes in ONNX",
    "rwkv7": "its mixer is RWKV7",
    "sliding-window": "its softmax attention is sparse or tiled",
    "fox": r"its softmax attention forgets \(forget=True\)",
    AttentionSpec(
        rope=Rope("dynamic", factor=2.0, original=8)
    ): r"its rotary frequencies \(rope.kind='dynamic'\) depend",
    "gpt": "a model with absolute positions",
    "zamba": "its mixer is Mamba",
    "qwen3-next": "layer 1 of the model: it has a mixture of experts",
}


@pytest.mark.parametrize("mixer", REFUSED)
def test_unsupported_models_are_refused_by_name(mixer):
    changes = {"num_hidden_layers": 3} if mixer == "zamba" else {}
    with pytest.raises(InputError, match=REFUSED[mixer]):
        check_exportable(HeadraceForCausalLM(config(mixer, **changes)))


@pytest.mark.parametrize(
    ("to", "options", "sentence"),
    [
        ("pdf", {}, "--to 'pdf' is unknown; expected one of onnx, web"),
        ("onnx", {"libraries": "x"}, "--libraries has no effect with --to onnx; its options are --weights, --opset"),
        ("web", {"libraries": "nowhere"}, "--libraries has no 'nowhere/onnxruntime-web/dist/ort.wasm.min.mjs'"),
        ("onnx", {"weights": "int3"}, "--weights int3; expected"),
        ("onnx", {"opset": 26}, "--opset 26; expected"),
    ],
)
def test_user_errors_are_one_sentence(checkpoint, to, options, sentence, tmp_path):
    assert sentence in refused(lambda: writer(to, options)(checkpoint, tmp_path))


def test_float64_is_not_rounded_in_silence(tmp_path):
    build("gla", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="the weights are float64, which --to onnx would round to float32"):
        export(tmp_path / "model", tmp_path)


LIBRARIES = os.environ.get("HEADRACE_NODE_MODULES", "node_modules")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.skipif(
    not Path(LIBRARIES, "onnxruntime-web").is_dir(),
    reason="needs npm install onnxruntime-web@1.30.0 @huggingface/tokenizers@0.2.0, HEADRACE_NODE_MODULES its folder",
)
def test_web_page_generates_the_same_text(checkpoint, exported, tmp_path):
    folder = tmp_path / "page"
    shutil.copytree(exported, folder)
    write_page(folder, LIBRARIES)
    ids = byte_level()(PROMPT, return_tensors="pt").input_ids
    expected = byte_level().decode(load(checkpoint).generate(ids, max_new_tokens=40, pad_token_id=256)[0])
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/?" + urlencode({"prompt": PROMPT, "tokens": 40})
    assert CHROMIUM is not None
    try:
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=600000", "--dump-dom", address],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    shown = dict(re.findall(r'<(?:pre|p) id="(\w+)">(.*?)</(?:pre|p)>', done.stdout, re.DOTALL))
    assert html.unescape(shown["text"]) == expected, (shown, done.stderr[-2000:])
    assert shown["status"].startswith("40 tokens, ")


# Enough of a browser for the page to load its model: prints the options of the session.
BROWSER = """
import { readFileSync } from "node:fs";
globalThis.document = { querySelector: () => ({}) };
globalThis.location = { search: "" };
globalThis.fetch = async (file) => ({ json: () => JSON.parse(readFileSync(file, "utf-8")) });
await import("./generate.js");
"""
LIBRARY = """
export const env = { wasm: {} };
export class Tokenizer {}
export class InferenceSession { static create = (...asked) => console.log(JSON.stringify(asked)); }
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
@pytest.mark.parametrize("beside", [True, False])
def test_web_page_loads_weights_beside_the_graph(checkpoint, exported, tmp_path, monkeypatch, beside):
    """Such as those of more than 1.6 GB; others are in the graph."""
    where = {"save_as_external_data": beside, "location": "model.onnx.data"}
    graph = SimpleNamespace(save=lambda path: onnx.save(onnx.load(exported / "model.onnx"), path, **where))
    monkeypatch.setattr("headrace.export.onnx.trace", lambda model: graph)
    writer("web", {})(checkpoint, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / file, tmp_path)
    for name in ("onnxruntime-web", "@huggingface/tokenizers"):
        (tmp_path / "node_modules" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / name / "index.mjs").write_text(LIBRARY)
        (tmp_path / "node_modules" / name / "package.json").write_text('{"exports": "./index.mjs"}')
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "browser.js").write_text(BROWSER)
    done = subprocess.run(["node", "browser.js"], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=600)
    files = ["model.onnx.data"] * beside
    assert [(tmp_path / file).is_file() for file in files] == [True] * beside
    assert json.loads(done.stdout) == ["model.onnx", {"executionProviders": ["wasm"], "externalData": files}]
    monkeypatch.setattr("headrace.export.web.MOST", 10_000)
    assert "GB of weights; expected less than 0.0 GB" in refused(lambda: writer("web", {})(checkpoint, tmp_path))


def test_web_page_pins_library_versions(tmp_path):
    write_page(tmp_path, "https://mirror.example/npm")
    imports = json.loads(re.findall(r'"importmap">(.*?)</script>', (tmp_path / "index.html").read_text())[0])["imports"]
    assert imports["onnxruntime-web"] == "https://mirror.example/npm/onnxruntime-web@1.30.0/dist/ort.wasm.min.mjs"
