"""What `headrace train` takes from the data, and what it says before, during and after a run."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from groups import refused
from headrace.cli import app
from headrace.data import Preparation, prepare
from headrace.layers.blocks.stack import PIECE
from headrace.training import card, recipes, run
from headrace.training.history import duration
from headrace.training.machine import REACHED
from headrace.training.model import build
from headrace.training.sharding import load_weights
from trained import TINY, arguments, recipe, train

OF_DATA = {"length": 4096, "vocab_size": 257}


# --- length and vocabulary -------------------------------------------------------------------------------------------


def test_laptop_recipes_take_length_and_vocabulary_from_the_data():
    for name in ("laptop-1m", "laptop-5m"):
        one, _ = recipes.load(name, {}, OF_DATA)
        assert (one.length, one.vocab_size, one.share(1)) == (4096, 257, (2, 1))
    one, _ = recipes.load("laptop-5m", {"length": "1024", "vocab_size": "300"}, OF_DATA)
    assert (one.length, one.vocab_size) == (1024, 300) and recipes.load("laptop-5m")[0].length == 512


def test_paper_recipes_keep_their_length(data):
    for name, length in (("paper-340m", 4096), ("rnn-300m", 1024)):
        one, _ = recipes.load(name, {}, {"length": 32, "vocab_size": 257})
        assert (one.length, one.vocab_size) == (length, 32000)
        sentence = refused(lambda one=one: run.check_data(one, data))
        assert f"prepare data with --length {length}, or set length=32" in sentence


def test_user_recipes_keep_their_settings(tmp_path):
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


def test_mismatch_of_data_and_recipe_names_the_option(data):
    def output(**changes):
        return refused(lambda: run.check_data(recipe(**changes)[0], data))

    assert output(length=64).endswith("prepare data with --length 64, or set length=32")
    assert output(vocab_size=100).endswith("or set vocab_size=257")
    rows = len(run.full_rows(data.train, 32))
    assert output(batch_tokens=32 * 4096, tokens=32 * 8192).endswith(f"set batch_tokens={32 * (rows - rows % 2)}")
    assert refused(lambda: recipe(batch_tokens=100)).endswith("a multiple of length=32; set batch_tokens=64")


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 5, 4096])
def test_batch_tokens_that_an_error_names_can_be_shared(data, micro_batch):
    def advised(call):
        tokens = int(refused(call).rpartition("batch_tokens=")[2])
        one, _ = recipe(micro_batch=micro_batch, batch_tokens=tokens, tokens=tokens)
        one.share(1)
        return one

    advised(lambda: recipe(batch_tokens=1000, micro_batch=micro_batch))
    many, _ = recipe(batch_tokens=32 * 4096, tokens=32 * 8192, micro_batch=micro_batch)
    run.check_data(advised(lambda: run.check_data(many, data)), data)


@pytest.mark.parametrize(("processes", "needed"), [(1, 4), (3, 12)])
def test_rows_that_an_error_asks_for_can_be_shared(processes, needed):
    one, _ = recipe(batch_tokens=32 * 7, micro_batch=4)
    assert refused(lambda: one.share(processes)).endswith(f"expected a multiple of {needed} rows")
    for times in (1, 2):
        recipe(batch_tokens=32 * needed * times, micro_batch=4)[0].share(processes)
    split, _ = recipe(batch_tokens=32 * 7, context_parallel=2)
    assert refused(lambda: split.share(3)).endswith("expected a multiple of 2 processes")


def test_examples_of_prepare_and_train_are_compatible():
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


def test_run_prints_its_plan_and_the_next_command(ended, succeeds, data):
    words, folder = ended
    left = [word for word in words if not word.startswith(("length=", "vocab_size="))]
    output = succeeds(*left).out
    rows = len(run.full_rows(data.train, 32))
    parameters = sum(p.numel() for p in build(recipe()[0]).parameters())
    assert f"softmax-gla: 2 layers of width 16, {parameters / 1e6:,.2f} M parameters" in output
    assert f"1,024 tokens in 8 steps of 4 rows of 32: {32 / rows:,.3g} passes over the data" in output
    assert re.search(r"[\d.e-]+ s per step: about [\d.e-]+ \w+ for 2 more steps", output)
    point = card.read_history(folder)[-1]
    assert f"{folder}/model is the trained model: {point['final_loss']:.4f} nats per held-out token. " in output
    assert "a unigram model of these tokens has" in output
    assert output.rstrip().endswith(f"next: headrace generate '{folder}/model' --prompt 'It was'")

    # The same command once more.
    before = files(folder)
    output = succeeds(*left).out
    assert output.startswith(f"{folder} is finished, and nothing is left to do; next: headrace generate")
    assert files(folder) == before

    # A model that is not whole is made again.
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "is the trained model" in succeeds(*left).out and load_file(weights)


def test_rows_longer_than_a_prompt_piece_are_trained(tmp_path):
    """Rows of more tokens than a prompt is read in at a time; gate statistics are of whole rows."""
    (tmp_path / "text.txt").write_text("heads race for the water of one channel. " * 200)
    prepare(Preparation((str(tmp_path / "text.txt"),), length=PIECE + 76, held_out=0.2), tmp_path / "data")
    sizes = {"layers": 1, "length": PIECE + 76, "batch_tokens": PIECE + 76, "tokens": 2 * (PIECE + 76)}
    train(tmp_path / "data", tmp_path / "run", mixer="softmax-gla", **sizes, warmup=0)
    assert "final_write_entropy_0" in card.read_history(tmp_path / "run")[-1]


def test_finishing_a_run_writes_no_tracker_folder_elsewhere(data, tmp_path, monkeypatch):
    train(data, tmp_path / "run", tokens=128 * 2)
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.train(*recipe(tokens=128 * 2), data, tmp_path / "run", trackers="tensorboard")
    assert not any((tmp_path / "here").iterdir()) and (tmp_path / "run" / "model" / "README.md").is_file()


def test_resumed_run_says_so_without_warnings_of_missing_weights(data, tmp_path, capsys):
    train(data, tmp_path / "run", tokens=128 * 5)
    plan = tmp_path / "run" / "run.json"
    plan.write_text(plan.read_text().replace('"tokens": 640.0', '"tokens": 896.0'))
    train(data, tmp_path / "run", tokens=128 * 7)
    said = capsys.readouterr()
    assert "; it resumes from" in said.out and "missing" not in said.err


def test_missing_weights_of_a_checkpoint_are_named(tmp_path):
    model = build(recipe()[0])
    model.save_pretrained(tmp_path)
    load_weights(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.backbone.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "has no weights model.backbone.norm.weight" in refused(lambda: load_weights(model, tmp_path))


# --- the dry run -----------------------------------------------------------------------------------------------------


def test_dry_run_checks_the_data(prepared, succeeds, refusal):
    said = refusal("train", "paper-80m", "--dry-run", "--data", prepared)
    assert "prepare data with --length 4096, or set length=32" in said
    settings = [f"{name}={value}" for name, value in TINY.items() if name not in ("length", "vocab_size")]
    result = json.loads(succeeds("train", "laptop-1m", *settings, "--json", "--data", prepared).out)
    assert (result["recipe"]["length"], result["recipe"]["vocab_size"]) == (32, 257)
    here = result["here"]
    assert here["seconds"] == pytest.approx(result["flops"] / (here["flops_per_second"] * REACHED))


def test_durations_are_printed_in_a_readable_unit():
    printed = [duration(seconds) for seconds in (0.5, 100, 900, 9000, 300_000)]
    assert printed == ["0.5 s", "100 s", "15 min", "2.5 hours", "3.47 days"]
