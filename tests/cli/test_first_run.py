"""What `headrace train` takes from the data, and what it says before, during and after a run."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import transformers.trainer

pytest.importorskip("datasets", reason="the extra [train] is not installed")

from safetensors.torch import load_file, save_file

from groups import refused
from headrace.cli import app
from headrace.data import Preparation, prepare
from headrace.layers.blocks.stack import PIECE
from headrace.training import card, recipes, run
from headrace.training.machine import REACHED, time_here
from headrace.training.model import build
from headrace.training.sharding import load_weights
from headrace.training.trainer import duration
from trained import TINY, arguments, recipe, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of the Trainer's own
OF_DATA = {"length": 4096, "vocab_size": 257}


@pytest.fixture
def headrace_(capsys, monkeypatch):
    """(exit code, standard output, standard error) of `headrace ARGUMENTS` in this process."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["headrace", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


# --- length and vocabulary -------------------------------------------------------------------------------------------


def test_a_laptop_recipe_takes_the_length_and_the_vocabulary_of_the_data():
    for name in ("laptop-1m", "laptop-5m"):
        one, _ = recipes.load(name, {}, OF_DATA)
        assert (one.length, one.vocab_size, one.share(1)) == (4096, 257, (2, 1))
    one, _ = recipes.load("laptop-5m", {"length": "1024", "vocab_size": "300"}, OF_DATA)
    assert (one.length, one.vocab_size) == (1024, 300)
    assert recipes.load("laptop-5m")[0].length == 512


def test_a_recipe_of_a_paper_keeps_its_length(data):
    for name, length in (("paper-340m", 4096), ("rnn-300m", 1024)):
        one, _ = recipes.load(name, {}, {"length": 32, "vocab_size": 257})
        assert (one.length, one.vocab_size) == (length, 32000)
        sentence = refused(lambda one=one: run.check_data(one, data))
        assert f"prepare data with --length {length}, or set length=32" in sentence


def test_a_recipe_of_a_user_keeps_what_it_sets(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, expected in (
        ("base: laptop-5m\nlength: 1024\n", (1024, 257)),
        ("base: laptop-5m\n", (4096, 257)),
        ("hidden_size: 64\n", (4096, 257)),
        ("vocab_size: 300\n", (4096, 300)),
    ):
        path.write_text(text)
        one, _ = recipes.load(str(path), {}, OF_DATA)
        assert (one.length, one.vocab_size) == expected, text
    path.write_text("from_data: [lenght]\n")
    assert "did you mean 'length'" in refused(lambda: recipes.load(str(path)))


def test_what_data_and_recipe_have_apart_names_the_option(data):
    def said(**changes):
        return refused(lambda: run.check_data(recipe(**changes)[0], data))

    assert said(length=64).endswith("prepare data with --length 64, or set length=32")
    assert said(vocab_size=100).endswith("or set vocab_size=257")
    rows = len(run.full_rows(data.train, 32))
    assert said(batch_tokens=32 * 4096, tokens=32 * 8192).endswith(f"set batch_tokens={32 * rows}")
    assert refused(lambda: recipe(batch_tokens=100)).endswith("a multiple of length=32; set batch_tokens=96")


def test_the_examples_of_prepare_and_train_fit_together():
    (prepared, _), (trained, _) = (app.GROUPS["Train"][name].examples for name in ("prepare", "train"))
    assert "--length" not in prepared  # so that it is the default
    name, *rest = trained.split()
    changes = {"mixer": rest[rest.index("--mixer") + 1]}
    one, _ = recipes.load(name, changes, {"length": 4096, "vocab_size": 4096})
    assert one.steps == recipes.load(name)[0].steps


# --- the run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(prepared, tmp_path_factory):
    """The words of a command, and the folder of the run that it has made."""
    folder = tmp_path_factory.mktemp("ended") / "a run"
    return arguments(prepared, folder, tokens=128 * 8), folder


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_run_says_what_it_does_and_what_comes_next(ended, headrace_, data):
    words, folder = ended
    left = [word for word in words if not word.startswith(("length=", "vocab_size="))]
    code, said, _ = headrace_(*left)
    assert code == 0
    rows = len(run.full_rows(data.train, 32))
    parameters = sum(p.numel() for p in build(recipe()[0]).parameters())
    assert f"softmax-gla: 2 layers of width 16, {parameters / 1e6:,.2f} M parameters" in said
    assert f"1,024 tokens in 8 steps of 4 rows of 32: {32 / rows:,.3g} passes over the data" in said
    assert re.search(r"[\d.e-]+ s per step: about [\d.e-]+ \w+ for 2 more steps", said)
    point = card.read_history(folder)[-1]
    assert f"{folder}/model is the trained model: {point['final_loss']:.4f} nats per held-out token. " in said
    assert "a unigram model of these tokens has" in said
    assert said.rstrip().endswith(f"next: headrace generate '{folder}/model' --prompt 'It was'")

    # The same command once more.
    before = files(folder)
    code, said, _ = headrace_(*left)
    assert code == 0 and said.startswith(f"{folder} is finished, and nothing is left to do; next: headrace generate")
    assert files(folder) == before

    # A model that is not whole is made again.
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    code, said, _ = headrace_(*left)
    assert code == 0 and "is the trained model" in said and load_file(weights)


def test_competing_heads_are_trained_on_long_rows_to_the_end(tmp_path):
    """Rows of more tokens than a prompt is read in at a time; gate statistics are of whole rows."""
    (tmp_path / "text.txt").write_text("heads race for the water of one channel. " * 200)
    prepare(Preparation((str(tmp_path / "text.txt"),), length=PIECE + 76, held_out=0.2), tmp_path / "data")
    sizes = {"layers": 1, "length": PIECE + 76, "batch_tokens": PIECE + 76, "tokens": 2 * (PIECE + 76)}
    train(tmp_path / "data", tmp_path / "run", mixer="softmax-gla", **sizes, warmup_tokens=0)
    assert "final_write_entropy_0" in card.read_history(tmp_path / "run")[-1]


def test_a_run_that_only_finishes_leaves_no_folder_of_a_tracker_elsewhere(data, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    train(data, tmp_path / "run", tokens=128 * 2)
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.train(*recipe(tokens=128 * 2), data, tmp_path / "run", trackers="tensorboard")
    assert not any((tmp_path / "here").iterdir()) and (tmp_path / "run" / "model" / "README.md").is_file()


def test_a_resumed_run_says_so_and_nothing_of_missing_weights(data, tmp_path, monkeypatch, capsys):
    train(data, tmp_path / "run", tokens=128 * 5)
    plan = tmp_path / "run" / "run.json"
    plan.write_text(plan.read_text().replace('"tokens": 640.0', '"tokens": 896.0'))
    warnings = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", lambda text, *more: warnings.append(text))
    train(data, tmp_path / "run", tokens=128 * 7)
    assert "; it resumes from" in capsys.readouterr().out
    assert not [text for text in warnings if "missing keys" in text]


def test_weights_that_a_checkpoint_does_not_have_are_named(tmp_path):
    model = build(recipe()[0])
    model.save_pretrained(tmp_path)
    load_weights(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.backbone.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "has no weights model.backbone.norm.weight" in refused(lambda: load_weights(model, tmp_path))


# --- the dry run -----------------------------------------------------------------------------------------------------


def test_a_dry_run_looks_at_the_data(prepared, headrace_):
    code, _, said = headrace_("train", "laptop-1m", "--dry-run", "--data", "NOT-THERE")
    assert code == 2 and "--data 'NOT-THERE' is not a folder written by `headrace prepare`" in said
    code, _, said = headrace_("train", "paper-80m", "--dry-run", "--data", prepared)
    assert code == 2 and "prepare data with --length 4096, or set length=32" in said
    settings = [f"{name}={value}" for name, value in TINY.items() if name not in ("length", "vocab_size")]
    code, said, _ = headrace_("train", "laptop-1m", *settings, "--json", "--data", prepared)
    found = json.loads(said)
    assert (found["recipe"]["length"], found["recipe"]["vocab_size"]) == (32, 257)
    here = found["here"]
    assert here["seconds"] == pytest.approx(found["flops"] / (here["flops_per_second"] * REACHED))


def test_the_time_of_a_dry_run_is_an_assumption_on_the_measured_rate(monkeypatch):
    monkeypatch.setattr("headrace.training.machine.matrix_rate", lambda device, dtype: 1e9)
    one = replace(recipe()[0])
    assert time_here(one, 7e9)["seconds"] == pytest.approx(7e9 / (REACHED * 1e9))
    assert [duration(s) for s in (0.5, 100, 900, 9000, 300_000)] == [
        "0.5 s",
        "100 s",
        "15 min",
        "2.5 hours",
        "3.47 days",
    ]
