"""Plug-ins: what the page of plug-ins shows works in every command and process, and what is wrong with one is said."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import headrace
from headrace import InputError, layers, zoo
from headrace.hf import HeadraceForCausalLM, load
from headrace.layers.module import examined
from headrace.spec import from_json, to_json
from headrace.spec.serialise import TYPES
from headrace.studies.compare.defaults import DEFAULTS
from headrace.tasks import TASKS
from headrace.utils import plugins
from headrace.utils.errors import PluginWarning
from headrace.utils.plugins import FILE, VARIABLE
from served import connect, save, serving
from tiny import build

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
FILES = dict(re.findall(r"%%writefile (\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^headrace (.*)$", PAGE, re.MULTILINE)
NEW = (zoo.TABLES, *zoo.TABLES.values(), zoo.MODELS, TASKS, DEFAULTS, TYPES, plugins.LOADED, os.environ)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the plug-ins of the page, which is the current one. What they register is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        for table in NEW:
            stack.enter_context(patch.dict(table))
        stack.enter_context(patch.object(plugins, "REGISTERED", []))
        yield tmp_path
        forget()


def forget():
    """Makes this process like one that has loaded no plug-in."""
    for name in [name for name in sys.modules if name.startswith(FILE)]:
        del sys.modules[name]
    for table in (TYPES, *zoo.TABLES.values(), zoo.MODELS, TASKS, DEFAULTS):
        for name in ("module:leaky", "leaky", "fading-delta", "fading-hybrid", "parity", "mine"):
            table.pop(name, None)
    plugins.LOADED.clear()
    plugins.REGISTERED.clear()
    os.environ.pop(VARIABLE, None)


def checkpoint(folder, mixer):
    """The folder of a small model, of whose plug-ins this process then knows nothing."""
    plugins.load(["leaky.py", "fading.py"])
    save(folder / mixer, 257, mixer=mixer, num_hidden_layers=1)
    forget()
    return folder / mixer


SMALL = ("hidden_size=16", "layers=1", "heads=2", "vocab_size=257", "intermediate_size=16", "length=32")
BENCH = ("--layers", 1, "--hidden-size", 16, "--lengths", 16, "--batch-sizes", 1, "--contexts", 16, "--rounds", 1)


@pytest.mark.parametrize(
    "words",
    [
        ("zoo", "--json"),
        ("verify", "--mixers", "leaky"),
        ("recipes", "--mixers", "fading-hybrid"),
        ("train", "laptop-5m", "--mixer", "leaky(slowest=0.9)", "--dry-run", *SMALL),
        ("prepare", "--task", "parity(length=12)", "--rows", 40, "--output", "rows"),
        ("bench", "--mixers", "leaky", "--what", "training,prefill,decoding", *BENCH),
        ("reproduce",),
    ],
    ids=lambda words: words[0],
)
def test_commands_know_names_of_plug_ins(folder, run_command, words):
    command, *options = words
    result = run_command(command, "--plugin", "leaky.py", "--plugin", "fading.py", "--plugin", "parity.py", *options)
    assert result.code == 0, result.err
    if command == "zoo":
        rows = json.loads(result.out)
        assert (
            rows["leaky"]["bytes"] == 4 * 1024 and rows["softmax-fading-delta"]["competes"] and "fading-hybrid" in rows
        )
    if command == "bench":
        made = json.loads((folder / "runs" / "bench" / "made-by.json").read_text("utf-8"))
        assert made[-1]["plugin leaky.py"] == f"sha256 {plugins.LOADED[str(folder / 'leaky.py')].sha256[:12]}"
        assert "plugin leaky.py sha256" in (folder / "runs" / "bench" / "report.html").read_text("utf-8")


REFUSED = {
    "export": (("--to", "onnx", "--output", "out"), "its mixer is ModuleMixer, whose recurrence has no node in ONNX"),
    "convert": (("--to", "gla", "--output", "out"), "not all its mixers are MixerSpec"),
    "retrofit": (("--output", "out"), "has no layer of linear attention"),
}
TAKEN = {
    "generate": ("--prompt", "It", "--tokens", 3),
    "inspect": ("--file", "leaky.py", "--tokens", 9, "--output", "out"),
}


@pytest.mark.parametrize("command", [*TAKEN, *REFUSED, "eval", "serve"])
def test_commands_take_the_checkpoint_of_a_plug_in_and_name_it_if_it_is_missing(folder, run_command, command):
    model = checkpoint(folder, "leaky")
    arguments, refusal = REFUSED.get(command, (TAKEN.get(command, ()), ""))
    if command == "eval":
        pytest.importorskip("lm_eval")
        (folder / "wiki.test.raw").write_text(" = A = \n \n It is . It is . It is . \n")
        (folder / "lambada_openai.jsonl").write_text('{"text": "she saw the sea"}\n')
        arguments = ("--suite", "wikitext", "--data", ".", "--max-length", 16)
    sha256 = plugins.sha256(folder / "leaky.py")[:12]
    result = run_command(command, model, *arguments)
    assert result.code == 2 and result.err.count("mixer 'leaky' is of the plug-in") == 1, result.err
    assert f"leaky.py (sha256 {sha256}), and the loaded plug-ins are none; expected --plugin" in result.err
    if command == "serve":  # which would not end
        plugins.load(["leaky.py"])
        with serving(str(model)) as base:
            answers = [connect(base).completions.create(model=str(model), prompt=["It", "was it"], max_tokens=4)]
        assert len(answers[0].choices) == 2
        return
    result = run_command(command, "--plugin", "leaky.py", model, *arguments)
    assert result.code == (2 if refusal else 0) and refusal in result.err and "plug-in" not in result.err, result.err


def test_checkpoint_of_a_spec_needs_no_plug_in(folder, run_command):
    model = checkpoint(folder, "softmax-fading-delta")
    assert run_command("generate", model, "--prompt", "It", "--tokens", 3).code == 0
    assert run_command("export", model, "--to", "onnx", "--output", "onnx").code == 0


def test_loaded_model_computes_the_same_and_a_changed_file_is_said(folder):
    plugins.load(["leaky.py"])
    model = build("leaky(slowest=0.7)").float()
    model.save_pretrained("model")
    ids = torch.arange(24).view(2, 12)
    expected = model(ids).logits
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 16)
    forget()
    (folder / "leaky.py").write_text("import math\n" + FILES["leaky.py"], "utf-8")
    with (
        patch.dict(os.environ, {VARIABLE: "leaky.py"}),
        pytest.warns(PluginWarning, match="is of leaky.py .* now runs"),
    ):
        again = load("model")
    assert torch.equal(again(ids).logits, expected)


def test_weights_are_those_of_the_constructor_and_buffers_come_back(folder):
    class Buffered(nn.Linear):
        def __init__(self, hidden_size, wide: bool = False):
            super().__init__(hidden_size, hidden_size)
            nn.init.constant_(self.weight, 0.25)
            self.register_buffer("rates", torch.linspace(0, 1, hidden_size), persistent=False)

        def forward(self, x, state=None):
            return super().forward(x) * self.rates, None

    headrace.register_mixer("mine", Buffered)
    model = HeadraceForCausalLM(build("mine").config)
    module = model.model.backbone.layers[0].mixer.module
    assert (module.weight == 0.25).all() and zoo.get("mine").state_bytes(32, 4) == 0
    with torch.no_grad():
        module.weight.fill_(3.0)
    model.save_pretrained("model")
    module = load("model").model.backbone.layers[0].mixer.module
    assert (module.weight == 3).all() and torch.equal(module.rates, torch.linspace(0, 1, 32))


def test_padding_and_packs_of_a_module_equal_its_rows(folder):
    """With an empty row, whose state stays as it was, or is zeros at the beginning."""
    plugins.load(["leaky.py"])
    layer = layers.Mixer("leaky", hidden_size=8).double()
    x, mask = torch.randn(4, 7, 8, dtype=torch.float64), torch.ones(4, 7, dtype=torch.bool)
    mask[0, :3] = mask[1, 5:] = mask[2] = False
    y, state = layer(x, mask=mask)
    assert not y[~mask].any() and not state.state[2].any()
    again, later = layer(x, state, mask=mask)
    assert torch.equal(later.state[2], state.state[2])
    for i in (0, 1, 3):
        own, first = layer(x[i : i + 1][:, mask[i]])
        torch.testing.assert_close(y[i][mask[i]], own[0])
        torch.testing.assert_close(again[i][mask[i]], layer(x[i : i + 1][:, mask[i]], first)[0][0])
    packed, _ = layer(x[3:, :7], cu_seqlens=torch.tensor([0, 2, 2, 7]))
    torch.testing.assert_close(packed, torch.cat([layer(x[3:, :2])[0], layer(x[3:, 2:])[0]], 1))


def test_expressions_set_settings_of_a_module(folder):
    plugins.load(["leaky.py"])
    spec = zoo.get("leaky(slowest=0.5)")
    assert spec.settings == {"slowest": 0.5} and from_json(to_json(spec)) == spec != zoo.get("leaky")
    assert layers.Mixer(spec, hidden_size=4).module.a.max() == 0.5
    for wrong, sentence in {
        "leaky(slowest=fast)": "expected finite float",
        "leaky(speed=1)": "has no field 'speed'",
    }.items():
        with pytest.raises(InputError, match=sentence):
            zoo.get(wrong)
    with pytest.raises(InputError, match=r"'softmax-leaky' does not exist, because leaky is a module"):
        zoo.get("softmax-leaky")


@pytest.mark.slow(seconds=30)
def test_comparison_of_the_page_in_new_processes(folder):
    """As a command of its own with two new workers, named by the environment."""
    comparison = next(words for words in COMMANDS if words.startswith("compare"))
    words = [word for word in comparison.replace("--workers 1", "--workers 2").split() if not word.endswith(".py")]
    words = [word for word in words if word != "--plugin"] + ["--hidden-size", "16", "--steps", "4"]
    words.remove("20"), words.remove("--steps")
    named = os.pathsep.join(FILES)
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words], env=os.environ | {VARIABLE: named}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = (folder / "parity" / "report.html").read_text("utf-8")
    assert "Whether the number of ones so far is odd." in report and "Uniform guesses score 50.0 %." in report
    assert re.search(r"input  ( [01]){16}\nanswer ( [01]){16}", report)
    assert all(f"plugin {name} sha256 {plugins.sha256(folder / name)[:12]}" in report for name in FILES)


@pytest.mark.slow(seconds=30)
def test_processes_of_torchrun_know_plug_ins(folder, prepared):
    words = ["train", "laptop-5m", "--plugin", "leaky.py", "--mixer", "leaky", "--data", prepared, "--output", "run"]
    settings = [*SMALL, "tokens=128", "batch_tokens=64", "micro_batch=1", "warmup_tokens=0", "evaluate_rows=2"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "headrace"]
    done = subprocess.run([*run, *map(str, words), *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "plugin leaky.py sha256" in (folder / "run" / "model" / "README.md").read_text("utf-8")
    mixer = json.loads((folder / "run" / "model" / "config.json").read_text("utf-8"))["mixer"]
    assert (mixer["type"], mixer["plugin"], len(mixer["sha256"])) == ("module:leaky", "leaky.py", 64)


def test_results_of_a_changed_plug_in_do_not_mix(folder, run_command):
    words = ("bench", "--plugin", "leaky.py", "--mixers", "gla", "--what", "prefill", *BENCH, "--output", "out")
    assert run_command(*words).code == 0
    forget()
    (folder / "leaky.py").write_text(FILES["leaky.py"] + "\n", "utf-8")
    error = run_command(*words).err
    assert re.search(
        r"made by plugin leaky.py sha256 \w{12}; now runs plugin leaky.py sha256 \w{12}; name another", error
    )


def test_installed_plug_ins_load_by_their_entry_points(folder, run_command, monkeypatch):
    (folder / "site" / "my_package").mkdir(parents=True)
    (folder / "site" / "my_package" / "__init__.py").write_text("from .mixers import register\n\nregister()\n")
    body = "".join(f"    {line}\n" for line in FILES["leaky.py"].splitlines())
    (folder / "site" / "my_package" / "mixers.py").write_text(f"def register():\n{body}")
    about = folder / "site" / "my_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[headrace.plugins]\nmine = my_package\n")
    monkeypatch.syspath_prepend(folder / "site")
    assert layers.Mixer("leaky", hidden_size=8).spec.plugin == "my_package"
    assert list(plugins.LOADED) == ["my_package"]
    (folder / "site" / "my_package" / "mixers.py").write_text("register = int\n")
    forget()
    for name in ("my_package", "my_package.mixers"):
        del sys.modules[name]
    error = run_command("zoo").err
    assert (
        "plug-in 'my_package' (entry point 'mine' of headrace.plugins) cannot be loaded: it registers nothing" in error
    )


# --- what is wrong with a plug-in ------------------------------------------------------------------------------------
BAD = {
    "x = 1\n\nraise_me()\n": "cannot be loaded: NameError: name 'raise_me' is not defined (line 3)",
    "def f(:\n": "cannot be loaded: SyntaxError: invalid syntax (line 1)",
    "import nowhere\n": "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' (line 1)",
    "import sys; sys.exit()\n": "cannot be loaded: SystemExit (line 1)",
    "x = 1\n": "cannot be loaded: it registers nothing; expected a call of register_mixer, register_model or register_task",
    "import headrace\nheadrace.register_mixer('gla', 'gla')\n": "mixer 'gla' exists already; expected another name (line 2)",
    "import headrace\nheadrace.register_mixer('rnn-norm', 'gla')\n": "'softmax-rnn-norm' exists already",
    "import headrace\nheadrace.register_model('my-hybrid', 'gla')\n": "is the mixer of one layer; expected a whole model",
    "import headrace\nheadrace.register_mixer('hybrid', 'gla+gla')\n": "is a whole model; expected a mixer, or register_model",
    "import headrace\nheadrace.register_mixer('a(b)', 'gla')\n": "mixer 'a(b)' has no name for expressions",
    "import headrace\nheadrace.register_mixer('mine', 7)\n": "mixer=7; expected a name of the zoo",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_plug_in_is_one_sentence(folder, run_command, text):
    (folder / "mine.py").write_text(text)
    code, out, error = run_command("zoo", "--plugin", "mine.py")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("headrace: plug-in 'mine.py' (--plugin) cannot be loaded: ") and BAD[text] in error


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "nowhere.py": "does not exist; expected a Python file or a module",
        "no_such_module": "is no module that Python finds",
        "no.such.module": "cannot be loaded: ModuleNotFoundError: No module named 'no'",
        "json": "cannot be loaded: it registers nothing",
        "other/leaky.py": "another plug-in is called leaky.py too; expected different names",
    }.items(),
)
def test_missing_plug_in_is_one_sentence(folder, run_command, name, sentence):
    (folder / "other").mkdir()
    shutil.copy(folder / "leaky.py", folder / "other")
    code, _, error = run_command("verify", "--plugin", "leaky.py", "--plugin", name, "--mixers", "nothing")
    assert code == 2 and error.startswith(f"headrace: plug-in {name!r} (--plugin)") and sentence in error


class Right(nn.Module):
    """Remembers the mean of all tokens, without a parameter."""

    def __init__(self, hidden_size):
        super().__init__()

    def forward(self, x, state=None):
        state = x.sum(1) if state is None else state + x.sum(1)
        return x, state


class WrongShape(Right):
    def forward(self, x, state=None):
        return x[..., :-1], x[:, 0]


class NoState(Right):
    def forward(self, x, state=None):
        return x


class ListState(Right):
    def forward(self, x, state=None):
        return x, [x[:, 0]]


class OneState(Right):
    def forward(self, x, state=None):
        return x, x.sum((0, 1))[None]


class Growing(Right):
    def forward(self, x, state=None):
        return x, x if state is None else torch.cat([state, x], 1)


class Forgetful(Right):
    def forward(self, x, state=None):
        return x.cumsum(1), x.sum(1)


class Looking(Right):
    def forward(self, x, state=None):
        return x + x.mean(0), x[:, 0]


class Biased(Right):
    def forward(self, x, state=None):
        y = (1 if state is None else state[:, None]) + x.cumsum(1)
        return y, y[:, -1]


class Failing(Right):
    def forward(self, x, state=None):
        return x @ torch.ones(3), None


class Unbuilt(Right):
    def __init__(self, hidden_size):
        raise ValueError("no luck")


WRONG = {
    WrongShape: r"returns y of shape \[3, 7, 7\] for x of shape \[3, 7, 8\]; expected the shape of x",
    NoState: r"returns a Tensor; expected a tuple \(y, state\)",
    ListState: "returns a list as its state; expected a tensor, a NamedTuple of tensors, or None",
    OneState: r"has a state with torch.float32 of shape \[1, 8\] for 3 sequences",
    Growing: r"has a state of \[\(7, 8\)\] after 7 tokens of 3 sequences, \[\(4, 8\)\] after 4 tokens",
    Forgetful: "gives another y for x in two calls, the second with the state of the first than for x at once",
    Looking: "gives another y for a sequence without the others",
    Biased: "gives another y for x after a state of zeros, which is that before the first token",
    Failing: r"cannot run on x \[3, 7, 8\]: size mismatch",
    Unbuilt: r"cannot be built: Unbuilt\(hidden_size=8\) fails: no luck",
}


@pytest.mark.parametrize("module", WRONG, ids=lambda module: module.__name__)
def test_module_that_breaks_the_protocol_is_refused_before_it_is_built(folder, module):
    headrace.register_mixer("mine", module)
    with pytest.raises(InputError, match=f"^mixer 'mine' {WRONG[module]}"):
        layers.Mixer("mine", hidden_size=8)


def test_module_that_takes_packs_gets_them(folder):
    class Packs(Right):
        def forward(self, x, state=None, cu_seqlens=None):
            if cu_seqlens is None:
                return x.cumsum(1), x.sum(1)
            return torch.cat([part.cumsum(1) for part in x.split(cu_seqlens.diff().tolist(), 1)], 1), x[
                0, cu_seqlens[:-1]
            ]

    class Forgets(Packs):
        def forward(self, x, state=None, cu_seqlens=None):
            return x.cumsum(1) + (0 if state is None else state[:, None]), x.sum(1) + (0 if state is None else state)

    headrace.register_mixer("mine", Forgets)
    with pytest.raises(InputError, match="gives another y for packed sequences"):
        examined(zoo.get("mine"), 8, 1)


def test_constructor_without_the_protocol_is_refused(folder):
    class NoSize(Right):
        def __init__(self, width=3):
            super().__init__(width)

    class NoDefault(Right):
        def __init__(self, hidden_size, layout: dict):
            super().__init__(hidden_size)

    for module, sentence in {
        NoSize: r"expected __init__\(hidden_size, ...\)",
        NoDefault: "cannot be a setting",
    }.items():
        with pytest.raises(InputError, match=sentence):
            headrace.register_mixer("mine", module)


# --- what is wrong with a task ---------------------------------------------------------------------------------------
WRONG_TASKS = {
    ('    """Whether the number of ones so far is odd."""\n', ""): "has no description; expected a docstring of its class",
    ("vocab_size = 2", "vocab_size = 0"): "has vocab_size=0; expected a positive integer",
    ("    vocab_size = 2\n", ""): "has no 'vocab_size'; expected the members of headrace.tasks.Task",
    ("randint(2, (", "randint(3, ("): "rows with input_ids from 0 to 2; expected 0 to 1, below vocab_size",
    ("self.length), gen", "self.length + 1), gen"): "rows with input_ids [1024, 17] and shift_labels [1024, 17]; expected",
    (", generator=generator", ""): "gives other rows at the second call of sample",
    ("bits.cumsum(1) % 2", "bits * 0 - 100"): "rows with no label; expected a label in each row",
    ("bits.cumsum(1) % 2", "bits"): None,
    ('{"input_ids": bits, ', '{"ids": bits, '): "cannot be used: KeyError: 'input_ids'",
    ("@dataclass(frozen=True)\n", ""): "expected an instance of a frozen dataclass",
    ("frozen=True", "frozen=False"): "cannot be used: TypeError: unhashable type",
    ("length: int = 16", "length: int = 1"): "has too few different rows to hold some out",
    ('"parity", Parity', '"copy", Parity'): "task 'copy' exists already",
    ("steps=60", "stepz=60"): "the task parity has no field 'stepz'; the nearest is 'steps'",
    ("    def draw", "    def held_out(self, rows, part='held-out'):\n        return self.sample(torch.Generator().manual_seed(0), "
     "rows)\n\n    def draw"): "rows in other parts; expected different rows",
    ("    def draw", "    def scores(self, answers):\n        return {'loss': answers.loss}\n\n    def draw"): "has the scores",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG_TASKS, ids=lambda change: change[0].strip()[:12])
def test_wrong_task_is_refused_before_training(folder, run_command, change):
    (folder / "mine.py").write_text(FILES["parity.py"].replace(*change), "utf-8")
    code, _, error = run_command("recipes", "--plugin", "mine.py")
    sentence = WRONG_TASKS[change]
    assert (code, error) == (0, "") if sentence is None else code == 2 and sentence in error and error.count("\n") == 1


def test_every_task_of_headrace_has_what_a_task_needs():
    from headrace.tasks.check import check_task, description

    for name, plan in DEFAULTS.items():
        if name in ("text", "masked", "spans", "needle", "digits"):  # which read data, or have no second part
            continue
        check_task(name, plan.task)
        assert all(description(plan.task)[:2])
