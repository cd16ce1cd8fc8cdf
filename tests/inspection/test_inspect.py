"""What inspect shows is what the model computes: effective attention is exact, numbers survive packing, no text breaks
the page."""

import base64
import json
import math
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next
from typer.testing import CliRunner

from headrace import HeadraceForCausalLM, InputError, inspection, load, zoo
from headrace.cli import app as cli
from headrace.extra.specs.scan import ScanSpec
from headrace.inspection.page import compress_attention, describe_layer, pack, profile
from headrace.inspection.recorder import findings, of_beta, of_gate, of_weights, record
from headrace.layers.maps import weights
from headrace.spec.stack import Layer
from headrace.verification.verify import literal_op
from released import HYBRIDS, OTHERS, release
from tiny import build, close, config, covering, saved, tokens

T = 37
CASES = [
    *covering(zoo.names()),
    *("softmax-mamba2(competition.memories_per_head=3)", "softmax-gla(competition=paper, read.norm=none)"),
    *("softmax-residual-delta(competition.memories_per_head=2, heads.qk_groups=2, competition.write=beta)",),
    *("softmax-retnet(heads.qk_groups=2)", "softmax-kda(competition.top_k=2)"),
    *("mqa(null=true, buckets=8)", "longformer(pattern.window=7, pattern.first=2)"),
    "bigbird(pattern.block=4, pattern.window=8, pattern.first=0, kv_heads=2, null=true, buckets=8)",
]


def passed(mixer, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(mixer, **changes)
    ids = tokens(1, T)
    with torch.no_grad():
        return model, ids, *record(model, ids)


@torch.no_grad()
def read_by_weights(reading):
    """The weights of a reading, which give the values that the mixer read."""
    A = weights(reading)[0]
    v = reading.values.repeat_interleave(len(A) // reading.values.shape[2], 2)
    close(torch.einsum("hts,bshv->bthv", A, v), reading.out)
    return A


@pytest.mark.parametrize("mixer", CASES)
def test_weights_of_values_are_what_the_mixer_read(mixer):
    _, _, _, layers = passed(mixer)
    assert len(layers) == 2
    for recorded in layers:
        without = "deltaproduct" in mixer or isinstance(zoo.get(mixer), ScanSpec) or mixer == "gla-outer"
        assert (recorded.reading is None) == without
        if not without:
            A = read_by_weights(recorded.reading)
            assert A.shape == (8 if "fast-weights" in mixer else 4, T, T) and not A.triu(1).any()


@pytest.mark.parametrize("kind", [*HYBRIDS, *OTHERS])
@torch.no_grad()
def test_weights_of_a_released_model_are_what_its_mixers_read(kind, tmp_path):
    _, layers = record(load(release(kind, tmp_path)).double(), tokens(1, T))
    assert [read_by_weights(recorded.reading) for recorded in layers if recorded.reading is not None]


@torch.no_grad()
def test_several_memories_of_a_head_are_shown_as_their_mean():
    """Of equal scores the gate is 1, whatever the number of memories; their β are 1/4 and 3/4."""
    model = HeadraceForCausalLM(config("softmax-gated-deltanet(competition.memories_per_head=2)")).eval()
    for layer in model.model.backbone.layers:
        layer.mixer.part("beta").zero_()
    (_, (recorded, _)) = record(model, tokens(1, T))
    for gate in recorded.gates.values():
        torch.testing.assert_close(gate, torch.ones(T, 4))
    beta = recorded.operand("beta")
    beta.copy_(torch.tensor([0.25, 0.75]).repeat(beta.shape[-1] // 2).expand_as(beta))
    torch.testing.assert_close(recorded.beta, torch.full((T, 4), 0.5))


@pytest.mark.parametrize(
    "mixer", ["linear-attention", "rwkv6", "softmax-kda", "softmax-mamba2(competition.memories_per_head=3)"]
)
def test_weights_are_those_of_the_literal_equation(mixer):
    _, _, _, layers = passed(mixer)
    for recorded in layers:
        with torch.no_grad():
            A = weights(recorded.reading)[0]
            recorded.mixer.op = literal_op
            close(A, weights(recorded.reading)[0])


def unrolled(q, k, decay, beta):
    """q, k [T, H, K], decay and beta [T, H] -> the weights of a gated delta rule [H, T, T]: what is left in the memory
    of the value that each token wrote, read by every later token."""
    T, H, K = k.shape
    A, written = torch.zeros(H, T, T).double(), torch.zeros(H, T, K).double()  # the key under which a value is stored
    for t in range(T):
        written = decay[t, :, None, None] * written
        overwritten = torch.einsum("hsk,hk->hs", written, k[t])[..., None] * k[t, :, None]
        written = written - beta[t, :, None, None] * overwritten
        written[:, t] = beta[t, :, None] * k[t]
        A[:, t] = torch.einsum("hsk,hk->hs", written, q[t])
    return A


@torch.no_grad()
def test_weights_of_a_released_model_are_those_of_transformers(tmp_path):
    """Of Qwen3-Next, whose softmax attention has an output gate, norms of q and k, and channels without rotation."""
    path, rule, ids = release("qwen3_next", tmp_path), "torch_chunk_gated_delta_rule", tokens(1, T)
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    theirs = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    with mock.patch.object(modeling_qwen3_next, rule, wraps=getattr(modeling_qwen3_next, rule)) as called:
        attentions = theirs(ids, output_attentions=True, return_dict=True).attentions
    (q, k, _), operands = called.call_args
    q, k = (x[0].double().repeat_interleave(2, 1) for x in (q, k))  # a head of q and k has two of v
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay, beta = operands["g"][0].double().exp(), operands["beta"][0].double()
    linear, softmax = (weights(recorded.reading)[0] for recorded in record(load(path).double(), ids)[1])
    close(softmax, attentions[-1][0].double(), 1e-6)  # theirs is a softmax in float32
    close(linear, unrolled(q / q.shape[-1] ** 0.5, k, decay, beta), 1e-6)
    assert len(inspection.inspect(path, "one two three")) > 10_000


@pytest.mark.parametrize("mixer", ["softmax-gla", "transformer", "rwkv7", "jamba", "zamba"])
def test_recording_changes_nothing(mixer):
    layers = {"jamba": 8, "zamba": 6}.get(mixer, 2)
    model, ids, hidden, records = passed(mixer, num_hidden_layers=layers)
    with torch.no_grad():
        assert torch.equal(model.model(ids, use_cache=False).last_hidden_state, hidden)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [r.layer for r in records if not r.place] == list(range(layers))
    assert [r.layer for r in records if r.place == "shared"] == ([2] if mixer == "zamba" else [])


def test_two_mixers_of_a_layer_have_names_of_their_own():
    records = passed([Layer(zoo.get("gla"), parallel=zoo.get("mamba2"))])[-1]
    names = [describe_layer(recorded, 2, 32)[0]["name"] for recorded in records]
    assert names == ["layer 0", "layer 0, parallel", "layer 1", "layer 1, parallel"]


def test_gates_horizon_and_beta():
    _, _, _, (recorded, _) = passed("softmax-gated-deltanet")
    assert {gate: g.shape for gate, g in recorded.gates.items()} == {"write": (T, 4), "read": (T, 4)}
    close(recorded.gates["write"].sum(-1), torch.full((T,), 4.0, dtype=torch.float64))  # 1 where all are alike
    arguments = recorded.calls[0][0]
    close(recorded.horizon, -1 / arguments["log_decay"][0])
    close(recorded.beta, arguments["beta"][0])
    _, _, _, (vector, _) = passed("gla")
    close(vector.horizon, (-1 / vector.calls[0][0]["log_decay"][0]).median(-1).values)
    _, _, _, (fixed, _) = passed("retnet")
    close(fixed.horizon[:, 0], torch.full((T,), -1 / math.log(1 - 2**-5), dtype=torch.float64))
    _, _, _, (matrix, _) = passed("rwkv7")
    close(matrix.horizon, (-1 / matrix.operand("log_decay")[0]).median(-1).values)
    assert matrix.horizon.shape == (T, 4)
    _, _, _, (scan, _) = passed("mamba")
    assert scan.horizon is None and scan.beta is None and not scan.gates
    recorded.calls[0][0]["log_decay"] = torch.zeros(1, T, 4)  # an underflow: no decay
    del recorded.call
    assert (recorded.horizon == torch.inf).all()


# --- numbers ---------------------------------------------------------------------------------------------------------


def unpack(packed):
    raw = np.frombuffer(base64.b64decode(packed["data"]), f"<u{packed['bits'] // 8}")
    if packed.get("raw"):
        return raw
    levels = 2 ** packed["bits"] - 2
    x = packed["low"] + raw.astype(float) * (packed["high"] - packed["low"]) / levels
    x[raw > levels] = np.nan
    return np.exp(x) if packed["log"] else x


@pytest.mark.parametrize("bits", [8, 16])
def test_packing_keeps_numbers_to_half_a_step(bits):
    x = torch.randn(1000).double()
    x[7] = torch.nan
    back, step = unpack(pack(x, bits)), (x[x.isfinite()].max() - x[x.isfinite()].min()) / (2**bits - 2)
    assert np.isnan(back[7]) and np.nanmax(np.abs(back - x.numpy())) <= step / 2 * 1.001
    assert unpack(pack(torch.full((3,), 5.0)))[1] == 5 and np.isnan(unpack(pack(torch.tensor([torch.nan])))).all()
    wide = torch.logspace(-3, 9, 50)
    assert np.abs(unpack(pack(wide, log=True)) / wide.numpy() - 1).max() < 3e-4


def test_gates_of_a_mixer_without_weights_are_those_of_its_heads():
    _, _, _, (recorded, _) = passed("softmax-gated-deltaproduct")
    layer, A = describe_layer(recorded, 4, 16)
    assert A is None and layer["heads"] == 4
    for name, expected in (("horizon", recorded.horizon), ("beta", recorded.beta)):
        found = unpack(layer[name]).reshape(T, layer["heads"])
        assert np.abs(found / expected.detach().numpy() - 1).max() < 1e-3
    assert len(unpack(layer["gates"]["write"])) == T * layer["heads"]


def test_compressed_attention_keeps_the_largest_weights():
    A = torch.randn(2, 40, 40).double().tril()
    kept, share = compress_attention(A, 5, 16), A / A.abs().sum(-1, keepdim=True)
    best = share.abs().topk(5, -1)
    places = unpack(kept["places"]).reshape(2, 40, 5)
    assert (np.sort(places[:, 5:]) == np.sort(best.indices.numpy()[:, 5:])).all()
    found = unpack(kept["shares"]).reshape(2, 40, 5)
    assert np.abs(found - np.take_along_axis(share.numpy(), places.astype(int), -1)).max() < 2e-5
    assert np.abs(unpack(kept["covered"]).reshape(2, 40) - best.values.sum(-1).numpy()).max() < 2e-5
    assert kept["block"] == 3 and kept["side"] == 14 and len(unpack(kept["picture"])) == 2 * 14 * 14 + 2
    distance = torch.arange(40)[:, None] - torch.arange(40)
    by_distance = profile(share.abs(), distance)
    close(by_distance.sum(1), torch.ones(2, 40, dtype=torch.float64))
    close(by_distance[:, 0], share.diagonal(dim1=1, dim2=2).abs())
    close(by_distance[0, 2, 9], share[0, 9, 6:8].abs().sum())


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "failed", "sentence", "sound"),
    [
        # of two heads: entropies 0.9991 and 0.9988 of log 2; mean shares; 0.01 of an even share is 0.005
        (of_gate, [0.518, 0.482], "the  gate is uniform: its entropy is 0.9991 of log(heads)", [0.52, 0.48]),
        (of_gate, [0.96, 0.04], "the  gate has collapsed: the mean share of head 0 is 96.0%", [0.94, 0.06]),
        (of_gate, [0.9951, 0.0049], "head 1 is dead: its mean share of the  gate is 0.005", [0.9949, 0.0051]),
        (of_beta, [0.5, 0.009], "head 1 is dead: β is at most 0.009, so nothing is written", [0.5, 0.011]),
        (of_weights, [0.995], "head 0 is dead as a memory: 99.5% of its attention is on the present token", [0.985]),
    ],
)
def test_inspect_failures_of_a_head_are_sentences(rule, failed, sentence, sound):
    def found(heads):
        """Of every token the same heads; of weights: that share is the token's own, the rest of the one before."""
        x = torch.tensor([heads, heads], dtype=torch.float64)
        if rule is of_weights:
            x = torch.tensor([[[0.0, 0.0], [1 - heads[0], heads[0]]]], dtype=torch.float64)
        if rule is of_beta:
            x[1] = 0.0
        return "\n".join(of_gate("", x) if rule is of_gate else rule(x))

    assert sentence in found(failed) and sentence.split(":")[0] not in found(sound)


@pytest.mark.parametrize(("mixer", "dead"), [("gated-deltanet", 8), ("mamba2", 0), ("mlstm", 0)])
def test_a_small_step_size_or_exponential_is_no_dead_head(mixer, dead):
    for recorded in passed(mixer)[3]:
        recorded.operand("beta").fill_(0.004)
        assert len(findings("", recorded, None)) == dead // 2


def test_a_layer_that_gives_zero_is_dead_and_a_head_that_one_token_uses_is_not():
    assert list(of_weights(torch.zeros(1, 9, 9))) == ["head 0 is dead: its output is zero at every token"]
    assert not list(of_gate("read", torch.tensor([[1.0, 0.0], [0.2, 0.8]])))
    assert not list(of_gate("write", torch.ones(9, 1))), "of a single head"


# --- the page --------------------------------------------------------------------------------------------------------

HOSTILE = (
    "</script><script>boom()</script><!-- {{ 7 }} {% x %} \u2028 & \"'\\ <img src=x onerror=boom()>"
    "\n\n\t 😀é\u200d\0 end"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    return saved(build("hybrid", vocab_size=257).float(), tmp_path_factory.mktemp("model"))


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


NODE, SCRIPTS = shutil.which("node"), Path(inspection.__file__).parent
# Enough of a browser's document for the functions of the page.
DOCUMENT = """
class Element {
  children = []; dataset = {}; classList = { add() {}, remove() {} };
  get style() { return { setProperty() {} }; }
  set style(text) {}
  setAttribute() {}
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  get text() { return this.children.map((each) => each.text ?? each).join(""); }
}
const elements = {};
globalThis.document = { createElement: () => new Element(), getElementById: (id) => (elements[id] ??= new Element()) };
document.getElementById("data").textContent = DATA;
"""


def evaluated(data, expression):
    """The value of an expression in the scripts of a page, but for those of its events and its start."""
    parts = [(SCRIPTS / f"{name}.js").read_text("utf-8") for name in ("numbers", "pictures", "panels", "page")]
    parts[-1] = parts[-1].partition("const KEYS")[0]
    begin = DOCUMENT.replace("DATA", json.dumps(json.dumps(data)))
    script = "\n".join([begin, *parts, f"console.log(JSON.stringify({expression}))"])
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, encoding="utf-8", timeout=600, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
def test_numbers_and_words_of_a_page(checkpoint):
    """A small probability is not 0, a letter whose small form is longer moves no match, and no decay is called so."""
    page = inspection.inspect(checkpoint, "İİİ two")
    shown = evaluated(data_of(page), "[Math.exp(-8.5), 0.01234, 0, -0.5, 1240.3, 2e5].map((x) => digits(x))")
    assert shown == ["2.0e-4", "0.0123", "0", "-0.5", "1,240", "2.0e+5"] and "toPrecision" not in page
    assert evaluated(data_of(page), '($("find").value = "TWO", search(), view.matches)') == [9]
    data = data_of(page)
    data["layers"][0]["horizon"] = pack(torch.full((len(data["ids"]), 4), 1e9), log=True)
    assert "no decay" in evaluated(data, '(view.token = 1, token(), $("token").text)')


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
def test_legend_of_no_distance_share_that_is_no_number_and_last_part_of_a_block():
    """301 tokens that read themselves alone; their matrix has 151 blocks of two."""
    T, layer = 301, {"heads": 1, "gates": {}, "attention": compress_attention(torch.eye(301)[None].double(), 4, 256)}
    data = {"ids": [0] * T, "labels": ["a"] * T, "layers": [layer], "loss": pack(torch.zeros(T))}
    chosen = 'Object.assign(view, { by: "reach", head: 0, near: false }), colour()'
    said = evaluated(data, f'({chosen}, [$("legend").text, percent(NaN), percent(-0.5), spread().count])')
    assert said == ["0 tokens0 tokens", "–", "−50 %", 302]


def test_hostile_text_does_not_break_the_page(checkpoint):
    page = inspection.inspect(checkpoint, HOSTILE)
    assert page.count("</script") == 2 and "<img" not in page and "boom()</script>" not in page
    data = data_of(page)
    assert "".join(data["labels"]) == HOSTILE and len(data["labels"]) == len(HOSTILE.encode())
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import|fetch\(|\.innerHTML""", page)


def test_a_page_is_computed_in_float64_whatever_the_environment_says(checkpoint, monkeypatch):
    expected = data_of(inspection.inspect(checkpoint, "Call me Ishmael."))
    monkeypatch.setenv("HEADRACE_BACKEND", "native")
    assert data_of(inspection.inspect(checkpoint, "Call me Ishmael.")) == expected


def test_losses_and_layers_are_the_models(checkpoint):
    data = data_of(inspection.inspect(checkpoint, "Call me Ishmael. " * 4, tokens=30))
    assert len(data["ids"]) == 30 and data["cut"] == 38
    ids = torch.tensor([data["ids"]])
    with torch.no_grad():
        logits = load(checkpoint).double()(ids, use_cache=False).logits[0]
    loss = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    found = unpack(data["loss"])
    assert np.isnan(found[0]) and np.abs(found[1:] - loss.numpy()).max() < 1e-3
    assert abs(data["mean"] - float(loss.mean())) < 1e-10
    assert [row[0] for row in data["guesses"][1:]] == logits[:-1].argmax(-1).tolist()
    assert [layer["mixer"] for layer in data["layers"]] == ["softmax-gated-deltanet", "transformer"]
    assert data["layers"][0]["gates"].keys() == {"write", "read"} and not data["layers"][1]["gates"]
    assert data["layers"][0]["beta"] and data["layers"][0]["horizon"] and data["layers"][1]["horizon"] is None


def test_page_of_a_nan_model_is_valid_json(tmp_path):
    model = build("gla", vocab_size=257)
    model.lm_head.weight.data[0, 0] = torch.nan
    page = inspection.inspect(saved(model, tmp_path), "some text")
    data = json.loads(re.search(r'<script id="data".*?>(.*?)</script>', page, re.DOTALL)[1], parse_constant=pytest.fail)
    assert data["mean"] is None and data["not_finite"] == {"/mean": "nan"}
    if NODE is not None:
        said = evaluated(data, '[0, 1].map((t) => { view.token = t; token(); return $("token").text; })')
        assert "the first token has no loss" in said[0] and "the loss is not finite" in said[1]


def test_a_mixer_without_weights_says_so(tmp_path):
    path = saved(build("mamba", vocab_size=257), tmp_path)
    layer = data_of(inspection.inspect(path, "some text"))["layers"][0]
    assert layer["attention"] is None and layer["none"].startswith("This mixer has no effective attention")


@pytest.mark.parametrize(
    "text, tokens, said",
    [
        ("", None, "the text is 0 tokens long; expected at least 2"),
        ("x", None, "the text is 1 token long; expected at least 2"),
        ("x" * 2001, None, "the text is 2,001 tokens long; expected at most 2,000, or --tokens to cut the text"),
        ("xyz", 1, "--tokens=1; expected 2 to 2,000"),
        ("xyz", 2001, "--tokens=2001; expected 2 to 2,000"),
    ],
)
def test_bad_inspect_input_is_one_sentence(checkpoint, text, tokens, said):
    with pytest.raises(InputError, match=re.escape(said)):
        inspection.inspect(checkpoint, text, tokens)


def test_a_checkpoint_without_its_tokenizer_is_refused(tmp_path):
    model = build("gla", vocab_size=99)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no readable tokenizer; expected a tokenizer\.json"):
        inspection.inspect(tmp_path, "a b")
    saved(model, tmp_path)
    with pytest.raises(InputError, match="the prompt has the token 220; the model has 99: its tokenizer is another"):
        inspection.inspect(tmp_path, "a b")


def test_the_command_reads_text_a_file_or_standard_input(checkpoint, tmp_path):
    (tmp_path / "text").write_text("from a file")
    page = tmp_path / "new" / "page.html"
    command = ["inspect", str(checkpoint), "--output", str(page)]
    for more, given, expected in (
        (["--prompt", "given"], None, "given"),
        (["--text", "given"], None, "given"),  # the former name of --prompt
        (["--file", str(tmp_path / "text")], None, "from a file"),
        ([], "piped", "piped"),
    ):
        done = CliRunner().invoke(cli.app, [*command, *more], input=given)
        assert done.exit_code == 0 and "page.html: 0." in done.stdout
        assert "".join(data_of(page.read_text("utf-8"))["labels"]) == expected
    error = CliRunner().invoke(cli.app, [*command, "--text", "some", "--output", "/proc/none/page.html"]).exception
    assert isinstance(error, InputError) and "cannot be written" in str(error)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_browser_shows_it_without_an_error(checkpoint, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(inspection.inspect(checkpoint, HOSTILE), "utf-8")
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", f"file://{page}#token=9&layer=1&head=2&by=reach",
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    shown = re.search(r"<html[^>]*>", done.stdout)[0]
    assert "CONSOLE" not in done.stderr and "data-error" not in shown
    assert f'data-tokens="{len(HOSTILE.encode())}"' in shown and re.search(r'data-ready="\d+"', shown)
    assert 'class="t now"' in done.stdout and "layer 1, head 2" in done.stdout and "<img" not in done.stdout
