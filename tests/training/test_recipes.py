"""Recipes: what is shipped, and what is refused."""

from pathlib import Path

import pytest
import torch

import tiny
from headrace.training import recipes
from headrace.training.model import blank, build, count, estimate
from headrace.utils.errors import InputError
from headrace.utils.settings import assignments

# Body, tied and untied, in millions, of GLA at table 5's layers and widths (arXiv 2602.01744), vocabulary 32,000.
GLA = {"paper-80m": (81.5, 102.0, 122.5), "paper-110m": (91.7, 112.2, 132.7), "paper-170m": (170.4, 194.9, 219.5)}
GLA |= {"paper-340m": (308.9, 341.7, 374.5)}
LLAMA = {"rnn-300m": (209.8, 242.5, 275.3), "rnn-2b": (1887.6, 1985.9, 2084.2)}


@pytest.mark.parametrize(("name", "mixer"), [*((n, "gla") for n in GLA), *((n, "transformer") for n in LLAMA)])
def test_parameters_are_those_of_the_papers(name, mixer):
    found = count(blank(recipes.load(name, {"mixer": mixer})[0]))
    expected = (GLA | LLAMA)[name]
    assert [round(found[part] / 1e6, 1) for part in ("body", "tied", "untied")] == list(expected)


@pytest.mark.parametrize("row", ["laptop-5m | softmax-gla", "paper-80m | mamba2", "paper-110m-h8 | softmax-retnet"])
def test_the_table_of_parameters_is_of_today(row):
    name, mixer = row.split(" | ")
    counted = count(blank(recipes.load(name, {"mixer": mixer})[0]))
    numbers = " | ".join(f"{counted[part] / 1e6:,.2f}" for part in ("body", "competition", "tied", "untied"))
    assert f"| {row} | {numbers} |" in (Path(__file__).parents[2] / "docs" / "appendix.md").read_text("utf-8")


def test_competition_adds_as_many_as_the_paper_says():
    """0.05M at 24 layers and 4 heads of 256 key dimensions."""
    recipe, _ = recipes.load("paper-340m", {"mixer": "softmax-gla(heads.expand_k=1)"})
    assert count(blank(recipe))["competition"] == 24 * 2 * 4 * 256 == 49152


def test_an_estimate_counts_what_is_built():
    for mixer in ("softmax-gla", "gated-deltanet", "transformer"):
        recipe, _ = recipes.load("laptop-1m", {"mixer": mixer})
        model, found = build(recipe), estimate(recipe)
        assert count(model) == found["parameters"]
        assert sum(p.numel() for p in model.parameters()) == found["parameters"]["tied"]


def test_every_shipped_recipe_loads_and_steps_as_it_says():
    steps = {name: recipes.load(name)[0].steps for name in recipes.names()}
    assert steps["paper-340m"] == 28610 and steps["rnn-300m"] == steps["rnn-300m-4k"] == 100_000
    names = "paper-80m paper-110m paper-170m paper-340m paper-1b rnn-300m rnn-300m-4k rnn-2b laptop-1m laptop-5m"
    assert {*names.split()} <= {*steps}
    recipe, about = recipes.load("paper-340m")
    assert recipe.lr == 1e-3 and recipe.clips == 1.0 and "batch_tokens" in about.assumed and "lr" not in about.assumed


def test_the_rnn_recipe_clips_gated_models_alone():
    assert recipes.load("rnn-300m")[0].clips is None
    assert recipes.load("rnn-300m", {"mixer": "gla"})[0].clips == 1.0
    assert recipes.load("rnn-300m", {"mixer": "softmax-linear-attention"})[0].clips == 1.0
    assert recipes.load("rnn-300m", {"mixer": "linear-attention"})[0].clips is None


def test_what_a_recipe_does_not_say():
    default = recipes.Recipe()
    assert (default.lr, default.min_lr, default.betas, default.eps) == (1e-3, 0.1, (0.9, 0.95), 1e-8)
    assert (default.weight_decay, default.clip, default.gate_lr, default.gate_std) == (0.1, 1.0, 1.0, 0.0)
    assert (default.length, default.batch_tokens, default.tokens, default.warmup_tokens) == (4096, 2**19, 15e9, 0.0)
    assert (default.hidden_size, default.layers, default.heads, default.vocab_size) == (1024, 24, 4, 32000)


def test_what_is_written_reads_back(tmp_path):
    (tmp_path / "r.yaml").write_text("base: laptop-1m\nlr: 1e-4\nbetas: [0.9, 0.99]\nclip: none\nassumed: [lr]\n")
    recipe, about = recipes.load(str(tmp_path / "r.yaml"))
    assert (recipe.lr, recipe.betas, recipe.clip, recipe.layers) == (1e-4, (0.9, 0.99), None, 4)
    (tmp_path / "s.yaml").write_text(recipes.to_yaml(recipe, about))
    assert recipes.load(str(tmp_path / "s.yaml")) == (recipe, about)


MISTAKES = {
    "lrr=1": "no field 'lrr'; did you mean 'lr'?",
    "learning_rate=1e-3": "no field 'learning_rate'; did you mean 'lr'?",
    "lr=high": "recipe.lr='high' is not allowed; expected finite float",
    "lr=0": "recipe.lr=0; expected more than 0",
    "lr=-1": "recipe.lr=-1; expected more than 0",
    "layers=1.5": "recipe.layers=1.5 is not allowed; expected int",
    "schedule=flat": "recipe.schedule='flat' is not allowed; expected one of cosine, linear",
    "schedule=linear": "min_lr=0.1 with schedule='linear'",
    "betas=0.9": "betas=(0.9,); expected 2 numbers",
    "length=100": "expected a multiple of length=100",
    "warmup_tokens=1e12": "expected fewer than tokens",
    "mixer=glaa": "mixer 'glaa' is unknown",
    "heads=7": "num_heads=7 does not divide",
    "lr": "'lr' is not of the form FIELD=VALUE",
    "warmup_tokens=nan": "recipe.warmup_tokens=nan is not allowed; expected finite float",
    "tokens=inf": "recipe.tokens=inf is not allowed; expected finite float",
    "mixer=gla(heads.count=2, heads.count=4)": "sets 'heads.count' twice",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_mistakes(setting):
    with pytest.raises(InputError) as refused:
        recipes.load("paper-80m", assignments([setting]))
    assert MISTAKES[setting] in str(refused.value)


def test_files_that_are_no_recipes(tmp_path):
    for text, message in (
        ("- a", "is not a YAML mapping"),
        ("a: [", "is not YAML"),
        ("base: nowhere", "neither"),
        ("<<: {lr: 1e-3}\nbase: laptop-1m\nlayer: 1e-4", "has no field 'layer'"),
        ("lr: 1e-3\nlr: 1e-4", "duplicate key lr, line 2"),
        ("lr: ${eps}", "Interpolation key 'eps' not found"),
        ("3", "is not YAML"),
        ("base: laptop-1m\non: 3", "has no field 'True'"),
    ):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(InputError, match=message):
            recipes.load(str(tmp_path / "r.yaml"))
    (tmp_path / "loop.yaml").write_text(f"base: {tmp_path / 'loop.yaml'}")
    with pytest.raises(InputError, match="is its own base"):
        recipes.load(str(tmp_path / "loop.yaml"))


def test_a_field_that_is_set_twice_is_refused():
    with pytest.raises(InputError, match="'lr' is set twice"):
        assignments(["lr=1e-3", "layers=2", "lr=1e-4"])


@torch.no_grad()
def test_a_model_begun_from_a_checkpoint_is_the_checkpoint(tmp_path):
    """Also in what no recipe has a field for."""
    style = {"mlp": "geglu", "order": "pre"}
    theirs = tiny.build("transformer", rope_theta=50.0, norm_eps=0.3, style=style, intermediate_size=None)
    theirs.save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "vocab_size": 29, "length": 16, "batch_tokens": 64}
    recipe, _ = recipes.load("laptop-1m", sizes | {"mixer": "transformer", "weights": str(tmp_path)})
    ids = tiny.tokens(2)
    assert torch.equal(build(recipe).double().eval()(ids).logits, theirs(ids).logits)
