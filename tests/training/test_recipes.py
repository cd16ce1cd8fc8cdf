"""Recipes: what is shipped, and what is refused."""

import pytest
import torch
import yaml

import tiny
from headrace.training import recipes
from headrace.training.model import build, count, estimate, meta_model
from headrace.training.processes import connect
from headrace.training.recipes import Dumper, read_yaml
from headrace.utils.errors import InputError

# Body, tied and untied, in millions, of GLA at table 5's layers and widths (arXiv 2602.01744), vocabulary 32,000.
GLA = {"paper-80m": (81.5, 102.0, 122.5), "paper-110m": (91.7, 112.2, 132.7), "paper-170m": (170.4, 194.9, 219.5)}
GLA |= {"paper-340m": (308.9, 341.7, 374.5)}
LLAMA = {"rnn-300m": (209.8, 242.5, 275.3), "rnn-2b": (1887.6, 1985.9, 2084.2)}


@pytest.mark.parametrize(("name", "mixer"), [*((n, "gla") for n in GLA), *((n, "transformer") for n in LLAMA)])
def test_parameter_counts_equal_the_papers(name, mixer):
    actual = count(meta_model(recipes.load(name, {"mixer": mixer})[0]))
    expected = (GLA | LLAMA)[name]
    assert [round(actual[part] / 1e6, 1) for part in ("body", "tied", "untied")] == list(expected)


def test_competition_parameters_equal_the_paper():
    """0.05M at 24 layers and 4 heads of 256 key dimensions."""
    recipe, _ = recipes.load("paper-340m", {"mixer": "softmax-gla(heads.expand_k=1)"})
    assert count(meta_model(recipe))["competition"] == 24 * 2 * 4 * 256 == 49152


def test_estimate_counts_the_built_model():
    for mixer in ("softmax-gla", "gated-deltanet", "transformer"):
        recipe, _ = recipes.load("laptop-1m", {"mixer": mixer})
        model, result = build(recipe), estimate(recipe)
        assert count(model) == result["parameters"]
        assert sum(p.numel() for p in model.parameters()) == result["parameters"]["tied"]


def test_shipped_recipes_load_with_their_steps():
    steps = {name: recipes.load(name)[0].steps for name in recipes.names()}
    assert steps["paper-340m"] == 28610 and steps["rnn-300m"] == steps["rnn-300m-4k"] == 100_000
    names = "paper-80m paper-110m paper-170m paper-340m paper-1b rnn-300m rnn-300m-4k rnn-2b laptop-1m laptop-5m"
    assert {*names.split()} <= {*steps}
    recipe, about = recipes.load("paper-340m")
    assert recipe.lr == 1e-3 and recipe.clips == 1.0 and "batch_tokens" in about.assumed and "lr" not in about.assumed


GATED = {
    "softmax-rnn-gate": True, "softmax-rnn-gate(gate=input)": True, "softmax-rnn-norm": False,
    "softmax-rnn-gate(gate=none)": False, "softmax-rnn-norm(denominator=detached)": False,
    "softmax-rnn-norm(denominator=input-length, numerator=cosine)": False, "softmax-rnn-norm+softmax-rnn-gate": True,
    "gla": True, "linear-attention": False, "softmax-linear-attention": True, "transformer": False, "retnet": True,
    "mamba": True, "rwkv7": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ["rnn-300m", "rnn-300m-4k", "rnn-2b"])
def test_gradients_are_clipped_for_gated_models_alone(name):
    """Appendix D of arXiv 2507.23632: 1.0 for gated models, none for all others."""
    clips = {mixer: recipes.load(name, {"mixer": mixer})[0].clips for mixer in GATED}
    assert clips == {mixer: 1.0 if gated else None for mixer, gated in GATED.items()}


def test_recipe_survives_yaml(tmp_path):
    (tmp_path / "r.yaml").write_text("base: laptop-1m\nlr: 1e-4\nbetas: [0.9, 0.99]\nclip: none\nassumed: [lr]\n")
    recipe, about = recipes.load(str(tmp_path / "r.yaml"))
    assert (recipe.lr, recipe.betas, recipe.clip, recipe.layers) == (1e-4, (0.9, 0.99), None, 4)
    (tmp_path / "s.yaml").write_text(recipes.to_yaml(recipe, about))
    assert recipes.load(str(tmp_path / "s.yaml")) == (recipe, about)


@pytest.mark.parametrize("number", ["1e-3", "1E-3", ".1e-2", "1.e-3", "+1.0e-3", "0.001"])
def test_a_number_with_an_exponent_is_a_number(number, tmp_path):
    """PyYAML alone reads 1e-3 as a string, as YAML 1.1 does."""
    (tmp_path / "r.yaml").write_text(f"lr: {number}\nname: '{number}'\ndate: 2026-01-01")
    assert read_yaml(tmp_path / "r.yaml") == {"lr": 1e-3, "name": number, "date": "2026-01-01"}


def test_every_value_that_is_written_reads_back(tmp_path):
    strings = ["1e3", "1.0", "yes", "null", "", "2026-01-01", "a: b", "# no comment", "gla(heads.count=2)", "ä\n"]
    data = {"strings": strings, "numbers": [1e-8, 1e22, 3, -0.5], "none": None, "true": True, "nested": {"a": [1]}}
    (tmp_path / "r.yaml").write_text(yaml.dump(data, Dumper=Dumper, allow_unicode=True), "utf-8")
    assert read_yaml(tmp_path / "r.yaml") == data
    (tmp_path / "r.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "r.yaml") == {}


@pytest.mark.parametrize(
    ("name", "steps"), [("laptop-1m", 24), ("laptop-5m", 24), ("paper-340m", 954), ("paper-1b", 954)]
)
def test_warm_up_is_a_share_of_the_tokens(name, steps):
    whole, _ = recipes.load(name)
    tenth, _ = recipes.load(name, {"tokens": whole.tokens / 10})
    assert whole.warmup_steps == steps and tenth.warmup_steps == round(steps / 10)
    recipes.load("laptop-5m", {"tokens": 1e5})


MISTAKES = {
    "lr=1e-3; layers=2; lr=1e-4": "'lr' is set twice", "lrr=1": "no field 'lrr'; did you mean 'lr'?",
    "learning_rate=1e-3": "no field 'learning_rate'; did you mean 'lr'?",
    "lr=high": "recipe.lr='high' is not allowed; expected finite float", "lr=0": "recipe.lr=0; expected more than 0",
    "lr=-1": "recipe.lr=-1; expected more than 0", "threads=1000000": "recipe.threads=1000000; expected 1 to 1024",
    "layers=1.5": "recipe.layers=1.5 is not allowed; expected int",
    "schedule=flat": "recipe.schedule='flat' is not allowed; expected one of cosine, linear",
    "schedule=linear": "min_lr=0.1 with schedule='linear'", "betas=0.9": "betas=(0.9,); expected 2 numbers",
    "betas=0.9,1": "betas=(0.9, 1.0); expected 2 numbers from 0 to less than 1",
    "length=100": "expected a multiple of length=100", "warmup=1": "warmup=1; expected less than 1",
    "mixer=glaa": "mixer 'glaa' is unknown", "heads=7": "num_heads=7 does not divide",
    "lr": "'lr' is not of the form FIELD=VALUE", "mixer=checkpoint; weights=5": "checkpoint '5' has no config.json",
    "mixer=checkpoint; weights=a,b": "checkpoint 'a,b' has no config.json",
    "warmup=nan": "recipe.warmup=nan is not allowed; expected finite float",
    "tokens=inf": "recipe.tokens=inf is not allowed; expected finite float",
    "mixer=gla(heads.count=2, heads.count=4)": "sets 'heads.count' twice",
}  # fmt: skip


@pytest.mark.parametrize("setting", MISTAKES)
def test_user_errors_are_refused(setting):
    with pytest.raises(InputError) as refused:
        recipes.load("paper-80m", recipes.assignments(setting.split("; ")))
    assert MISTAKES[setting] in str(refused.value)


def test_invalid_recipe_files_are_refused(tmp_path):
    for text, message in (
        ("- a", "is not a YAML mapping"), ("a: [", "is not YAML"), ("base: nowhere", "neither"),
        ("<<: {lr: 1e-3}\nbase: laptop-1m\nlayer: 1e-4", "has no field 'layer'"),
        ("lr: 1e-3\nlr: 1e-4", "duplicate key lr, line 2"), ("x:\n  a: 1\n  a: 2", "duplicate key a, line 3"),
        ("3", "is not a YAML mapping"), ("a: 0b_", "is not YAML: invalid literal"),
        ("a: !!python/object:os.system x", "is not YAML: could not determine a constructor"),
        ("[" * 5000, "is not YAML"), ("base: laptop-1m\non: 3", "has no field 'True'"),
        ("base: laptop-1m\nassumed:", "r.yaml': 'assumed' is null, not a list"),
        ("base: laptop-1m\nassumed: [lr, 3]", "item 1 of 'assumed' is 3, not a text"),
        ("from_data: 3", "'from_data' is 3, not a list"),
        ("from_data: [length, lr]", "has from_data: lr; expected some of length, vocab_size"),
        ("weights: old\ngate_std: 0.1", "gate_std=0.1 with weights, which have those of the gates; expected gate"),
        ("gate_init: orthogonal", "gate_init='orthogonal' with gate_std=0, which leaves the weights at 0"),
        ("base: laptop-1m\nmixer: checkpoint\nweights: 5", "recipe.weights=5 is not allowed; expected one of str"),
        ("source:", "'source' is null, not a text"),
        ("base: laptop-1m\nbatch_tokens: 1024\ntokens: 512", "tokens=512; expected more than half of a step"),
    ):  # fmt: skip
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(InputError, match=message):
            recipes.load(str(tmp_path / "r.yaml"))
    (tmp_path / "loop.yaml").write_text(f"base: {tmp_path / 'loop.yaml'}")
    with pytest.raises(InputError, match="is its own base"):
        recipes.load(str(tmp_path / "loop.yaml"))


@torch.no_grad()
def test_model_from_a_checkpoint_equals_it(tmp_path):
    """Also in what no recipe has a field for."""
    style = {"mlp": "geglu", "order": "pre", "bias": True, "head_bias": True}
    theirs = tiny.build("transformer", rope_theta=50.0, norm_eps=0.3, style=style, intermediate_size=None)
    theirs.save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "vocab_size": 29, "length": 16, "batch_tokens": 64}
    recipe, _ = recipes.load("laptop-1m", sizes | {"mixer": "transformer", "weights": str(tmp_path)})
    ids = tiny.tokens(2)
    assert torch.equal(build(recipe).double().eval()(ids).logits, theirs(ids).logits)
    assert estimate(recipe)["parameters"]["tied"] == theirs.num_parameters()


@pytest.mark.parametrize("seconds", [0, 2**31])
def test_seconds_that_no_process_can_wait_are_refused(seconds):
    with pytest.raises(InputError, match=f"--timeout={seconds}; expected a positive number of seconds"):
        connect(seconds)
