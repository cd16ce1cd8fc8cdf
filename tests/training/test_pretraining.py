"""A run: exact after whatever interrupted it, honest about what went wrong."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from groups import free_port
from headrace import HeadraceForCausalLM, InputError, load
from headrace.cli import train as cli_train
from headrace.convert import export_checkpoint
from headrace.convert.retrofit import retrofit
from headrace.data import open_data, tokenizer
from headrace.data.rows import order
from headrace.files.processes import Terminated
from headrace.files.results import short_names
from headrace.tasks import IGNORED, Mqar, Needle, Pair, Reverse, Text
from headrace.tasks import prepared as prepared_task
from headrace.tasks.base import generator
from headrace.training import card, checkpoints, processes, recipes, run
from headrace.training.loop import LOG_EVERY, Loop, Updates
from headrace.training.model import build, estimate
from headrace.training.parameters import gate_parameters, optimizer
from headrace.training.processes import Processes
from released import release
from sharded import Run, train_all
from trained import TINY, history, plain_loss, recipe, signalled, train


@pytest.mark.parametrize(
    ("task", "changes"),
    [(Mqar(vocabulary=48, pairs=3, length=32), {}), (Needle(length=800), {"length": 800, "batch_tokens": 1600})],
    ids=["no text", "bytes"],
)
def test_task_loss_covers_answers_only(task, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_task, "HELD_OUT", 8)
    manifest = prepared_task.prepare(task, task.name, 300, 0, 1, tmp_path / "data")
    data = open_data(str(tmp_path / "data"))
    first = task.sample(generator("training", 0, 0), 256)
    assert data.train[:256] == {name: values.tolist() for name, values in first.items()} and len(data.train) == 300
    trained, held_out = ({tuple(row) for row in part["input_ids"]} for part in (data.train, data.held_out))
    assert len(held_out) == 8 and not trained & held_out
    answers = sum(label != IGNORED for row in data.held_out["shift_labels"] for label in row)
    assert (manifest["held_out"]["rows"], manifest["held_out"]["tokens"]) == (8, answers)
    steps = 2 * changes.get("batch_tokens", 128)
    loop = train(data, tmp_path / "run", tokens=steps, warmup=0, save_every=2, evaluate_every=2, **changes)
    model = load(tmp_path / "run" / "model")
    written = (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    assert (data.tokenizer is None) == (task.name == "mqar") != written
    rows = {name: torch.tensor(data.held_out[:8][name]) for name in ("input_ids", "shift_labels")}
    labelled = rows["shift_labels"] != IGNORED
    logits = model(rows["input_ids"]).logits[labelled].double()
    expected = torch.nn.functional.cross_entropy(logits, rows["shift_labels"][labelled]).item()
    assert loop.evaluate(data.held_out.select(range(8))) == pytest.approx(expected, rel=1e-5)


def test_task_data_of_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_task, "HELD_OUT", 1)
    made = prepared_task.prepare(Mqar(vocabulary=48, pairs=3, length=32), "mqar", 1, 0, 1, tmp_path / "one")
    assert made["train"]["rows"] == len(open_data(tmp_path / "one").train) == 1


def test_rows_of_a_task_have_no_documents_to_separate(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_task, "HELD_OUT", 8)
    prepared_task.prepare(Mqar(vocabulary=48, pairs=3, length=32), "mqar", 8, 0, 1, tmp_path / "data")
    with pytest.raises(InputError, match="separate_documents=true, and a row of a task has no documents"):
        train(open_data(tmp_path / "data"), tmp_path / "run", separate_documents=True)


class Bare:
    """A task of the protocol alone: without `sample`."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        if name in ("task", "sample"):
            raise AttributeError(name)
        return getattr(self.task, name)


def test_a_task_of_the_protocol_is_prepared(tmp_path):
    task = Mqar(vocabulary=48, pairs=3, length=32)
    prepared_task.prepare(Bare(task), "bare", 300, 0, 1, tmp_path / "data")
    rows = task.training(0, 300)
    assert open_data(tmp_path / "data").train["input_ids"][:] == [rows[i]["input_ids"].tolist() for i in range(300)]


@pytest.mark.parametrize("task", [Pair(), Reverse(), Text()], ids=repr)
def test_unsupported_tasks_are_not_prepared(task, tmp_path):
    with pytest.raises(InputError, match=f"--task {task.name} cannot be prepared"):
        prepared_task.prepare(task, task.name, 300, 0, 1, tmp_path / "data")


@pytest.fixture(scope="module")
def ended(data, tmp_path_factory):
    """The folder of a run that has ended, with its curves, and its loop."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    return folder, run.train(*recipe(), data, folder, trackers="none")


def losses(folder):
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "final_loss", "eval_write_entropy_1")
    return [{k: v for k, v in point.items() if k in kept} for point in history(folder)]


@pytest.mark.parametrize(
    "changes", [{}, {"mixer": "transformer", "separate_documents": True}], ids=["softmax-gla", "transformer"]
)
def test_killed_run_resumes_bit_exactly(data, prepared, tmp_path, changes):
    train(data, tmp_path / "whole", **changes)
    for step in (3, 12, 19):
        cut = Run(tmp_path / "cut", changes, {0: (step, SIGKILL)}, log_every=LOG_EVERY)
        assert train_all([cut], prepared) == [-SIGKILL]
    half = tmp_path / "cut" / "checkpoint-20"  # cut off while it was written
    shutil.copytree(tmp_path / "cut" / "checkpoint-15", half)
    (half / checkpoints.MARKER).unlink()
    train(data, tmp_path / "cut", **changes)
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def test_run_killed_after_its_last_step_only_finishes(data, ended, tmp_path):
    """The card is written last: a job script may look for it."""
    shutil.copytree(ended[0], tmp_path / "run")
    before = load_file(tmp_path / "run" / "model" / "model.safetensors")
    shutil.rmtree(tmp_path / "run" / "model")
    with patch.object(run, "write_card", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "run")
    written, whole = ({file.name for file in (folder / "model").iterdir()} for folder in (tmp_path / "run", ended[0]))
    assert whole - written == {"README.md", "curves.png"}
    train(data, tmp_path / "run")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    with patch.object(run, "write_card", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "run")
    assert not (tmp_path / "run" / "model" / "README.md").exists()


def test_run_writes_model_card_curves_and_history(data, ended):
    folder, loop = ended
    points = losses(folder)
    final = next(point["final_loss"] for point in points if "final_loss" in point)
    assert final == pytest.approx(plain_loss(load(folder / "model"), data.held_out), rel=1e-5)
    assert points[0]["loss"] > final and [point["step"] for point in points if "loss" in point] == [5, 10, 15, 20, 24]
    card = (folder / "model" / "README.md").read_text("utf-8")
    assert f"{final:.4f} nats" in card and "micro_batch: 2" in card and "![Loss" in card
    assert "trust_remote_code=True" in card and (folder / "model" / "modeling_headrace.py").is_file()
    assert (folder / "model" / "curves.png").stat().st_size > 1000
    assert loop.skipped == 0 and loop.history.points == history(folder)
    (evaluated, *_) = (point for point in loop.history.points if "eval_loss" in point)
    for layer in range(TINY["layers"]):
        loads = [evaluated[f"eval_write_load_{layer}_{head}"] for head in range(TINY["heads"])]
        assert sum(loads) == pytest.approx(1, abs=1e-4) and min(loads) > 0
    counts = torch.tensor([token for row in data.held_out for token in row["input_ids"]]).bincount()
    frequencies = torch.distributions.Categorical(counts.double()).entropy()
    assert f"these tokens has {frequencies:.4f}" in card
    assert ("The model learnt nothing" in card) == (final >= frequencies)
    assert ModelCard(card).data.eval_results[0].metric_value == pytest.approx(final)


def test_trained_model_decodes_with_the_cache(ended):
    run, _ = ended
    assert json.loads((run / "model" / "config.json").read_text())["use_cache"] is True
    for folder in (run / "model", checkpoints.newest(run)):
        model, seen = load(folder), []
        model.model.backbone.layers[0].register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0].shape[1]))
        model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=4, eos_token_id=None)
        assert seen == [5, 1, 1, 1]


def test_curves_of_finished_and_running_runs(ended, tmp_path):
    shutil.copytree(ended[0], tmp_path / "ended")
    shutil.copytree(tmp_path / "ended", tmp_path / "at work")
    shutil.rmtree(tmp_path / "at work" / "model")
    (tmp_path / "at work" / "checkpoint-99").mkdir()
    runs = short_names([str(tmp_path / "ended"), str(tmp_path / "at work")], "run")
    points = {name: [p["loss"] for p in card.read_history(Path(run)) if "loss" in p] for name, run in runs.items()}
    assert list(points) == ["ended", "at work"] and points["ended"] == points["at work"]
    assert (tmp_path / "at work" / "checkpoint-99").exists()
    cli_train.curves([*map(Path, runs.values())], tmp_path / "new" / "both.png")
    assert (tmp_path / "new" / "both.png").stat().st_size > 5000
    with pytest.raises(InputError, match="holds neither"):
        card.read_history(tmp_path)
    with pytest.raises(InputError, match="a run is given twice; expected each run once"):
        cli_train.curves([tmp_path / "ended", tmp_path / "ended"], tmp_path / "twice.png")


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 4, "threads": 3}, {"separate_documents": True}], ids=repr)
def test_every_step_is_a_full_batch_of_the_rows_in_their_order(data, tmp_path, monkeypatch, changes):
    """13 rows are three steps of 4 in each epoch. Rows that fill no step are left to another epoch, where the order is
    another, as is the row that ends early. No step computes the logits of all tokens."""
    backward, seen, threads = Updates.backward, [], set()

    def note(self, batches):
        threads.add(torch.get_num_threads())
        seen.append([token for batch in batches for token in batch["input_ids"].flatten().tolist()])
        with monkeypatch.context() as during:
            during.setattr(HeadraceForCausalLM, "logits", None)
            return backward(self, batches)

    monkeypatch.setattr(Updates, "backward", note)
    rows = list(data.train.select(range(13)))
    changed = replace(data, train=Dataset.from_list([*rows, {"input_ids": rows[0]["input_ids"][:7], "starts": [0]}]))
    train(changed, tmp_path / "run", tokens=128 * 9, **changes)
    assert "threads" not in changes or threads == {changes["threads"]}
    taken = [[*order(range(13), 0, epoch)][4 * step : 4 * step + 4] for epoch in range(3) for step in range(3)]
    assert seen == [[token for i in step for token in rows[i]["input_ids"]] for step in taken]
    with pytest.raises(
        InputError, match="batch_tokens=448 is 14 rows per step, but the data have 13 full rows; expected at most 13"
    ):
        train(changed, tmp_path / "other", batch_tokens=14 * 32, tokens=14 * 32 * 2, **changes)


@pytest.mark.parametrize("trackers", ["tensorbord", "tensorboard,tensorbord"])
def test_unknown_tracker_is_refused(data, tmp_path, trackers):
    with pytest.raises(InputError, match=f"--trackers='{trackers}'; expected tensorboard"):
        run.train(*recipe(), data, tmp_path / "run", trackers=trackers)


def test_fewer_processes_than_requested_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launcher whose processes never met
    with pytest.raises(InputError, match=r"the processes cannot find each other .*; expected a start by torchrun"):
        train(data, tmp_path)


def test_a_process_that_never_starts_is_a_sentence(monkeypatch):
    where = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"^the processes cannot find each other \(.*1/2 .*\); expected"):
        run.connect(timeout=1)


def test_more_processes_than_devices_are_a_sentence(monkeypatch):
    """The GPUs are a stand-in."""
    error = RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors might be ...")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(processes, "present_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    said = "^LOCAL_RANK=3: .*invalid device ordinal; expected a device per process$"
    with patch.object(torch.accelerator, "set_device_index", side_effect=error), pytest.raises(InputError, match=said):
        run.connect(timeout=1)


@pytest.mark.parametrize("place", ["open_data", "build"])
def test_a_process_that_is_lost_before_the_first_step_is_a_sentence(place, prepared, tmp_path):
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with patch.object(run, place, side_effect=lost), pytest.raises(InputError, match="processes have lost each other"):
        train(prepared, tmp_path / "run")


def test_process_0_says_for_all_whether_a_run_is_finished(data, tmp_path):
    """Others may not see its files yet on a shared disk. Process 0 is a stand-in."""
    with patch.object(run, "gathered", lambda mine: [True, mine]):
        assert train(data, tmp_path / "run") is None


def test_processes_of_a_row_look_for_what_is_not_finite_in_the_same_batch(monkeypatch):
    """Of which this one's part is finite. The other process is a stand-in."""
    asked, losses = [], [torch.tensor(1.0)] * 3
    monkeypatch.setattr(Processes, "sum", lambda own, x: x + 1)
    monkeypatch.setattr(Processes, "sum_in_row", lambda own, x: x + torch.tensor([0, 0, 1]))
    parts = {"loss": lambda model, batch: asked.append(batch), "updates": SimpleNamespace(autocast=nullcontext)}
    loop = SimpleNamespace(processes=Processes("cpu"), loss_sum=torch.tensor(0.0), model=torch.nn.Identity(), **parts)
    Loop.count_losses(loop, losses, ["first", "second", "third"])
    assert asked == ["third"]


@pytest.mark.slow
def test_two_processes_train_like_one(data, prepared, tmp_path):
    """The losses are those of one process with twice the rows. Started by the file of docs/training.md."""
    few = {"tokens": 128 * 6}
    train(data, tmp_path / "1", micro_batch=4, **few)
    settings = [f"{name}={value}" for name, value in (TINY | few).items()]
    launch = Path(__file__).parents[2] / "docs" / "launch" / "torchrun.sh"
    there = {"DEVICES": "2", "RECIPE": "laptop-1m", "DATA": str(prepared), "OUTPUT": str(tmp_path / "2")}
    there |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = ["sh", str(launch), *settings, "--trackers", "none"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | there)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = ([point["loss"] for point in losses(tmp_path / name) if "loss" in point] for name in "12")
    assert two == pytest.approx(one, rel=1e-5)


def test_blocks_are_compiled_where_the_recipe_says_so(data, tmp_path):
    """That compiled blocks compute the same is tested in tests/layers/test_compiled_models.py."""
    for compiled in (False, True):
        settings = recipe(compile=compiled)[0]
        loop = run.make_loop(settings, data, tmp_path, Processes(torch.device("cpu")))
        assert {block._compiled_call_impl is not None for block in loop.model.model.backbone.layers} == {compiled}


@pytest.mark.filterwarnings("error::FutureWarning")  # of a name that transformers will remove
def test_recomputed_blocks_are_trained_the_same(data, tmp_path):
    kept, again = (train(data, tmp_path / str(on), tokens=128 * 2, recompute=on) for on in (False, True))
    assert [block.gradient_checkpointing for block in again.model.model.backbone.layers] == [True, True]
    assert not any(block.gradient_checkpointing for block in kept.model.model.backbone.layers)
    for expected, parameter in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_run_starts_from_a_checkpoint(data, prepared, tmp_path):
    train(data, tmp_path / "first", tokens=128 * 8, mixer="gla")
    first = tmp_path / "first" / "model"
    again = build(recipe(mixer="gla", weights=str(first), length=64)[0])
    torch.testing.assert_close(again.state_dict(), load(first).state_dict(), rtol=0, atol=0)
    tuned, end = retrofit(first), data.tokenizer.eos_token_id
    tuned.generation_config.update(eos_token_id=[7, end], do_sample=True, temperature=0.6)
    tuned.save_pretrained(tmp_path / "competing")
    weights = str(tmp_path / "competing")
    loop = train(data, tmp_path / "second", tokens=128 * 8, mixer="softmax-gla", weights=weights)
    assert loop.history.points[-1]["final_loss"] < history(first.parent)[-1]["final_loss"]
    kept = load(tmp_path / "second" / "model").generation_config
    assert (kept.eos_token_id, kept.do_sample, kept.temperature) == ([7, end], True, 0.6)
    known = {(None, None): None, (None, 3): 3, (3, 3): 3, (3, None): 3, (7, 3): [7, 3]}
    assert {each: run.ends(*each) for each in known} == known and run.ends([7, 3], 3) == [7, 3]


def test_settings_of_generation_without_effect_are_saved(first, data, tmp_path):
    """As Vicuna's, which transformers saves only as it has read them: the end tokens of the data are added."""
    weights = shutil.copytree(first, tmp_path / "weights")
    settings = {"temperature": 0.6, "eos_token_id": 7, "use_cache": True}
    (weights / "generation_config.json").write_text(json.dumps(settings))
    loop = run.make_loop(recipe(mixer="gla", weights=str(weights))[0], data, tmp_path, Processes(torch.device("cpu")))
    loop.save_model(tmp_path / "saved")
    kept = load(tmp_path / "saved").generation_config
    assert (kept.temperature, kept.eos_token_id) == (0.6, [7, data.tokenizer.eos_token_id])
    load(tmp_path / "saved").save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_run_trains_a_released_model(kind, data, tmp_path):
    """With gates over its heads or without, which the format of the checkpoint can represent."""
    path = release(kind, tmp_path / "released")
    retrofit(path).save_pretrained(tmp_path / "competing")
    changes = {name: value for name, value in TINY.items() if name not in recipes.SIZES.values()}
    for name in ("released", "competing"):
        own = {"mixer": "checkpoint", "weights": str(tmp_path / name), "tokens": 128 * 4}
        settings, about = recipes.load("laptop-1m", changes | own)
        assert estimate(settings)["parameters"]["untied"] == load(tmp_path / name).num_parameters()
        run.train(settings, about, data, tmp_path / f"{name} run", trackers="none")
    gates = [*gate_parameters(load(tmp_path / "competing run" / "model"))]
    assert gates and all(p.any() for p in gates)
    export_checkpoint(load(tmp_path / "released run" / "model"), kind, tmp_path / "back")
    assert load(tmp_path / "back").num_parameters() == load(path).num_parameters()


def test_released_model_is_counted_on_the_meta_device(tmp_path):
    """Whose format computes a factor in bfloat16, which no tensor of the meta device has."""
    path = release("recurrent_gemma", tmp_path)
    settings, _ = recipes.load("laptop-1m", {"mixer": "checkpoint", "weights": str(path)})
    assert settings.tie and estimate(settings)["parameters"]["tied"] == load(path).num_parameters()


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    train(data, folder, tokens=128 * 2, mixer="gla")
    return folder / "model"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixer": "softmax-gla"}, "has other layers than mixer=softmax-gla; set mixer=checkpoint, or the mixer"),
        ({"mixer": "checkpoint", "layers": 3}, "has num_hidden_layers=2; the recipe has 3; set layers=2"),
        ({"layers": 3}, "has num_hidden_layers=2; the recipe has 3; set layers=2"),
        ({"mixer": "checkpoint", "weights": None}, "mixer='checkpoint' without weights; expected weights=FOLDER"),
        ({"hidden_size": 32}, "hidden_size=16; the recipe has 32"),
        ({"weights": "nowhere"}, "'nowhere' has no config.json"),
    ],
)
def test_weights_of_another_model_are_refused(first, changes, sentence):
    expected = {"mixer": "gla", "weights": str(first)} | changes
    with pytest.raises(InputError, match=sentence):
        build(recipe(**expected)[0])


def test_a_refused_run_leaves_its_folder_to_a_corrected_one(data, first, tmp_path):
    for changes, sentence in (
        ({"mixer": "softmax-gla", "weights": str(first)}, "set mixer=checkpoint"),
        ({"vocab_size": 300, "teacher": str(first)}, "vocab_size=257; expected that of the model, 300"),
    ):
        with pytest.raises(InputError, match=sentence):
            train(data, tmp_path, **changes)
        assert not (tmp_path / "run.json").exists()
    for error in (torch.OutOfMemoryError, KeyboardInterrupt):
        with patch.object(Loop, "run", side_effect=error), pytest.raises(error):
            train(data, tmp_path, micro_batch=4)
        assert not (tmp_path / "run.json").exists()
    train(data, tmp_path, tokens=128, weights=str(first), mixer="checkpoint")


def test_data_of_another_tokenizer_name_that_of_the_weights(data, first, tmp_path):
    """Not a vocab_size to set, which the weights would refuse."""
    other = tokenizer.train_bpe(["It was the best of times. " * 9], 270)
    larger = replace(data, manifest=data.manifest | {"vocab_size": 270}, tokenizer=other)
    with pytest.raises(InputError, match="another tokenizer than the data; prepare the data with --tokenizer"):
        train(larger, tmp_path, mixer="checkpoint", weights=str(first))


def test_weights_with_another_tokenizer_are_refused(data, first, tmp_path):
    path = shutil.copytree(first, tmp_path / "first") / "tokenizer.json"
    tokenizer_json = json.loads(path.read_text("utf-8"))
    ids = tokenizer_json["model"]["vocab"]
    (a, one), (b, other) = list(ids.items())[10:12]
    ids[a], ids[b] = other, one
    path.write_text(json.dumps(tokenizer_json))
    with pytest.raises(InputError, match="another tokenizer"):
        train(data, tmp_path / "second", mixer="gla", weights=str(path.parent))


def test_folder_belongs_to_one_recipe_and_one_data_set(data, tmp_path):
    run.begin(tmp_path / "run", recipe()[0], data)
    again = replace(data, manifest=data.manifest | {"seconds": 99.0, "files": {}})
    run.begin(tmp_path / "run", recipe()[0], again)
    with pytest.raises(InputError, match=r"holds another run \(lr is 0.003 there and 0.5 here\)"):
        run.begin(tmp_path / "run", recipe(lr=0.5)[0], data)
    with pytest.raises(InputError, match=r"holds another run \(seed is 0 there and 5 here\)"):
        run.begin(tmp_path / "run", recipe()[0], replace(data, manifest=data.manifest | {"seed": 5}))


def test_nonfinite_updates_are_skipped_then_end_the_run(data, tmp_path, monkeypatch, capsys):
    clip, norms = Loop.check_gradient, {7: torch.nan, **dict.fromkeys(range(14, 30), torch.inf)}
    monkeypatch.setattr(
        Loop, "check_gradient", lambda self, norm: clip(self, norm.new_tensor(norms.get(self.step, norm.item())))
    )
    with pytest.raises(InputError, match=r"was stopped at step 19; the last complete checkpoint is .*checkpoint-10"):
        train(data, tmp_path / "run", save_every=10)
    message = capsys.readouterr().err
    assert "step 8: the gradient is not finite; the update is skipped" in message
    assert "5 consecutive gradients were not finite" in message


def test_batches_without_labels_are_counted_and_harmless(tmp_path, monkeypatch, capsys):
    """Of the 32 batches of the run, which is cut and goes on; whole steps are without labels."""
    rows = Mqar(vocabulary=48, pairs=3, length=32).sample(generator("training", 0, 0), 32)
    rows["shift_labels"][2:29] = IGNORED
    monkeypatch.setattr(prepared_task, "HELD_OUT", 8)
    prepared_task.prepare(Mqar(vocabulary=48, pairs=3, length=32), "mqar", 8, 0, 1, tmp_path / "data")
    train_rows = Dataset.from_dict({name: values.tolist() for name, values in rows.items()})
    data = replace(open_data(tmp_path / "data"), train=train_rows)
    settings = {"micro_batch": 1, "tokens": 128 * 8, "save_every": 2}
    with signalled(5, SIGTERM), pytest.raises(Terminated):
        train(data, tmp_path / "run", **settings)
    loop = train(data, tmp_path / "run", **settings)
    assert "batches without any label: 27; their loss and gradients were 0" in capsys.readouterr().err
    counts = [p["batches_without_labels"] for p in history(tmp_path / "run") if "batches_without_labels" in p]
    assert counts == sorted(counts) and counts[-1] == 27
    assert loop.skipped == 0 and all(p.isfinite().all() for p in loop.model.parameters())


def strict(text):
    """What every JSON parser reads, which knows neither NaN nor Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_nonfinite_numbers_are_null_and_marked(data, tmp_path, monkeypatch):
    """The loss of step 13, the gradient of step 20, the evaluation after step 10 and the last one."""
    backward, held_out, steps = Updates.backward, Loop.held_out_loss, count()

    def broken(self, batches):
        weight, step = next(iter(self.model.parameters())), next(steps)
        kept = weight.data.clone()
        weight.data *= torch.nan if step == 12 else 1
        losses = backward(self, batches)
        weight.data.copy_(kept)
        if step == 19:
            weight.grad[0, 0] = torch.inf
        return losses

    def unknown(self, rows):
        total, gates = held_out(self, rows)
        return total * (torch.nan if self.step == 10 or rows is not self.held_out else 1), gates

    monkeypatch.setattr(Updates, "backward", broken)
    monkeypatch.setattr(Loop, "held_out_loss", unknown)
    folder, more = tmp_path / "run", {"evaluate_every": 5}
    pytest.importorskip("tensorboard")
    run.train(*recipe(**more), data, folder, trackers="tensorboard")
    monkeypatch.undo()
    train(data, folder, **more)  # the same command says that the run has ended
    points = strict((folder / "model" / "history.json").read_text("utf-8"))
    for file in folder.glob("checkpoint-*/history.json"):
        strict(file.read_text("utf-8"))
    losses = {point["step"]: point["loss"] for point in points if "loss" in point}
    assert list(losses) == [5, 10, 15, 20, 24] and losses.pop(15) is None and min(losses.values()) > 0
    marks = {(point["step"], place) for point in points for place in point.get("not_finite", ())}
    scores = ("loss", "perplexity", "bits_per_byte")
    evaluated = {(step, f"/{kind}_{name}") for step, kind in ((10, "eval"), (24, "final")) for name in scores}
    assert marks == {(15, "/loss"), (20, "/grad_norm")} | evaluated
    (again,) = (point for point in card.read_history(folder) if point.get("step") == 15 and "loss" in point)
    assert again["loss"] != again["loss"] and "not_finite" not in again
    assert all(weight.isfinite().all() for weight in load_file(folder / "model" / "model.safetensors").values())


def test_trackers_show_the_numbers_of_the_history(data, tmp_path, monkeypatch):
    """TensorBoard, and a stand-in for Weights & Biases, whose functions are those of Trackio."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wandb, sent = ModuleType("wandb"), []
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **given: sent.append(given["name"])
    wandb.log = lambda numbers, step: sent.append((step, numbers))
    wandb.finish = lambda: sent.append("finished")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    loop = run.train(*recipe(tokens=128 * 10), data, tmp_path / "run", trackers="tensorboard,wandb")
    assert (sent[0], sent[-1]) == ("run", "finished")
    shown = {(step, name): value for step, numbers in sent[1:-1] for name, value in numbers.items()}
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    board = EventAccumulator(str(folder)).Reload()
    drawn = {(p.step, name): p.value for name in board.Tags()["scalars"] for p in board.Scalars(name)}
    assert drawn.keys() == shown.keys() and all(drawn[key] == pytest.approx(shown[key], rel=1e-6) for key in shown)
    for point in loop.history.points:
        for name, chart in (("loss", "train/loss"), ("eval_loss", "eval/loss"), ("final_loss", "train/final_loss")):
            assert point.get(name) in (None, shown.get((point["step"], chart)))


def test_card_and_curves_name_nonfinite_losses(data, tmp_path, monkeypatch):
    chosen, about = recipe()
    lost = {"loss": torch.nan, "perplexity": torch.nan, "bits_per_byte": torch.nan}
    points = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": torch.inf}]
    points += [{"step": 2, **{f"{kind}_{name}": value for name, value in lost.items()}} for kind in ("eval", "final")]
    settings = pytest.importorskip("matplotlib").rcParams
    monkeypatch.setitem(settings, "backend", "svg")  # as a notebook has one of its own
    card.write_card(tmp_path, chosen, about, data.manifest, points, 1.0)
    assert settings["backend"] == "svg"
    readme = (tmp_path / "README.md").read_text("utf-8")
    assert "After 3,072 tokens, the loss on held-out text is not finite. The model learnt nothing" in readme
    assert "| 2 | not finite | not finite | not finite |" in readme and "nan" not in readme
    assert not ModelCard(readme).data.eval_results and (tmp_path / "curves.png").stat().st_size > 1000


def test_nonfinite_loss_names_its_layer(data, tmp_path, capsys):
    model = build(recipe()[0])
    model.model.backbone.layers[1].mixer.o_proj.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(InputError, match="was stopped at step 5"):
        train(data, tmp_path / "run", weights=str(tmp_path / "broken"))
    assert "step 1: the loss is nan, first in layer 1" in capsys.readouterr().err


@pytest.mark.parametrize("mixer", ["softmax-gla", "softmax-gla(competition.memories_per_head=2)"])
def test_gates_have_their_own_learning_rate_and_no_decay(mixer):
    chosen = recipe(gate_lr=3.0, gate_std=0.5, mixer=mixer)[0]
    model = build(chosen)
    groups = optimizer(model, chosen).param_groups
    gates = list(gate_parameters(model))
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in gates}
    assert groups[-1]["lr"] == 3 * chosen.lr and groups[-1]["weight_decay"] == 0
    scores = [p for name, p in model.named_parameters() if "_competition" in name]
    assert scores and all(p.std() > 0.2 for p in scores)
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])


def test_gates_can_start_orthogonal():
    model = build(recipe(gate_std=0.5, gate_init="orthogonal", mixer="softmax-gla", hidden_size=32)[0])
    scores = [weight for name, weight in model.named_parameters() if "_competition" in name]
    assert scores
    for weight in scores:
        torch.testing.assert_close(weight @ weight.T, 0.25 * weight.shape[1] * torch.eye(len(weight)))


def test_dropped_gradient_changes_nothing():
    layer = torch.nn.Linear(3, 1, bias=False)
    updates = Updates(layer, recipe(warmup=0)[0], None, Processes(torch.device("cpu")))
    before = layer.weight.clone()
    layer.weight.grad = torch.tensor([[1.0, torch.inf, 1.0]])
    updates.drop()
    first = updates.step()
    assert torch.equal(layer.weight, before) and not updates.optimizer.state
    layer.weight.grad = torch.ones(1, 3)
    assert updates.step() < first  # the learning rate goes on
    assert (layer.weight != before).all()
