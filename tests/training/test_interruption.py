"""What a command leaves whom it was killed, told to stop, started twice, or had its files damaged."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("datasets", reason="the extra [train] is not installed")

import groups
import tiny
from damage import flip
from failing import sentences
from headrace import InputError, load
from headrace import data as data_module
from headrace.data import open_data
from headrace.files.processes import LOCK, Terminated, locked
from headrace.training import checkpoints
from headrace.training.history import History
from headrace.training.model import estimate
from headrace.training.parameters import optimizer, schedule
from headrace.utils.integrity import CHECKSUMS, record, write_json
from sharded import Run, ended, start_each
from trained import arguments, history, plain_loss, recipe, signalled, train

SHORT = {"tokens": 128 * 2, "evaluate_rows": 2}


# --- two in one folder -----------------------------------------------------------------------------------------------

COMMANDS = {
    "train": lambda data, folder: arguments(data, folder),
    "compare": lambda data, folder: ["compare", "--mixers", "gla", "--steps", 1, "--seeds", 1, "--output", folder],
    "bench": lambda data, folder: ["bench", "--mixers", "gla", "--output", folder],
    "eval": lambda data, folder: ["eval", "nowhere", "--suite", "recall", "--output", folder],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_in_use_is_refused(prepared, tmp_path, refusal, command):
    (tmp_path / "folder").mkdir()
    with locked(tmp_path / "folder"):
        said = refusal(*COMMANDS[command](prepared, tmp_path / "folder"))
    sentence = rf"^headrace: --output '.*folder' is in use by process {os.getpid()} on \S+ since \S+;"
    assert re.search(sentence, said, re.M) and not any((tmp_path / "folder").iterdir())


def test_a_folder_that_was_removed_is_an_error_at_the_end_too(tmp_path):
    with pytest.raises(InputError, match="was removed while the command wrote to it"), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir()  # as the last checkpoint does


MAKERS = {"prepare": [__file__], "convert": ["MODEL", "--to", "llama"], "retrofit": ["MODEL"],
          "inspect": ["MODEL", "--text", "1 times 1"]}  # fmt: skip


@pytest.mark.parametrize("command", MAKERS)
def test_output_being_written_is_refused(command, saved_model, tmp_path, refusal):
    words = [saved_model if word == "MODEL" else word for word in MAKERS[command]]
    with locked(tmp_path / "d", tmp_path / ".d.lock"):
        assert f"in use by process {os.getpid()}" in refusal(command, *words, "--output", tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.fixture
def listening():
    """A process that a shell has started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_command_leaves_no_folder(number, code, saved_model, tmp_path, run_command, monkeypatch):
    monkeypatch.setattr("pathlib.Path.rename", lambda *paths: os.kill(os.getpid(), number))
    ended, _, said = run_command("retrofit", saved_model, "--output", tmp_path / "d")
    assert ended == code and f"{tmp_path / 'd'} was not created" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["convert", "retrofit"])
def test_output_folder_is_written_atomically(command, saved_model, tmp_path, refusal, succeeds, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    options = [command, saved_model, "--output", tmp_path / "d"]
    options += ["--to", "gla"] * (command == "convert")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy" if command == "convert" else "headrace.hf.model.seal", full)
        assert "No space left" in refusal(*options) and not list(tmp_path.iterdir())
    succeeds(*options)
    assert (tmp_path / "d" / CHECKSUMS).exists() and not list(tmp_path.glob(".d*"))


def killed_in(folder):
    with locked(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def test_lock_of_a_killed_process_is_released(tmp_path):
    process = groups.forked().Process(target=killed_in, args=(tmp_path / "d",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "d" / LOCK).exists()
    with locked(tmp_path / "d"):
        pass
    assert not (tmp_path / "d" / LOCK).exists()


def test_unwritable_folder_is_one_sentence(prepared, tmp_path, refusal):
    (tmp_path / "file").touch()
    for command in COMMANDS.values():
        said = refusal(*command(prepared, tmp_path / "file" / "folder"))
        assert "cannot be written: Not a directory" in said


# --- processes that outlive another ----------------------------------------------------------------------------------


def as_torchrun(run, data):
    """Begins two processes of a run, as its parent, and waits for them."""
    groups.begin()
    os.environ["TORCHELASTIC_RUN_ID"] = "one"
    ended(start_each([[run]] * 2, data, get_context("fork")))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans go on to their end")
@pytest.mark.parametrize("launcher", ["prepare", "torchrun"])
def test_children_of_a_killed_process_end(prepared, tmp_path, launcher):
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps({"text": "some words " * 200}) + "\n") * 20000)
    folder = tmp_path / "folder"
    if launcher == "prepare":
        process = groups.command(tmp_path, launcher, text, "--workers", "2", "--output", folder)
    else:
        process = groups.forked().Process(target=as_torchrun, args=(Run(folder, {"tokens": 1e9}), prepared))
        process.start()
    parent = psutil.Process(process.pid)
    begun = {"prepare": lambda: True, "torchrun": lambda: any(folder.glob("checkpoint-*"))}[launcher]
    groups.wait_for(lambda: len(parent.children(recursive=True)) > 1 and begun(), process)
    below = parent.children(recursive=True)
    if launcher == "prepare":
        time.sleep(1)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it was still at work"
    assert not psutil.wait_procs(below, timeout=60)[1]


# --- the same checkpoint for all -------------------------------------------------------------------------------------


def test_processes_with_different_folders_are_refused(prepared, tmp_path):
    group = start_each([[Run(tmp_path / f"run{rank}")] for rank in (0, 1)], prepared)
    assert any(ended(group))
    assert "process 1 does not see the folder" in "".join(file.read_text() for file in tmp_path.glob("run*.txt"))
    assert not list(tmp_path.glob("run*/checkpoint-*"))


@pytest.mark.slow
def test_failure_in_one_process_ends_all_with_one_sentence(prepared, tmp_path):
    damaged = shutil.copytree(prepared, tmp_path / "damaged")
    flip(damaged / "train.npy")
    first, second = groups.run(2, tmp_path, sentences, prepared, damaged, tmp_path)
    full, lost = "InputError: the disk is full at step 2", "TypeError: of a kind that nobody foresaw"
    begins = {
        "data": "InputError: --data .* is damaged: train.npy has another SHA-256", "choosing": lost, "card": lost,
        "building": "InputError: weights='x' has no config.json", "logging": full, "weights": full,
        "random state": full, "marking": full,
    }  # fmt: skip
    assert first == second and first.keys() == begins.keys()
    for place, sentence in begins.items():
        assert re.match(sentence, first[place]), (place, first[place])


# --- every held-out row, once ----------------------------------------------------------------------------------------


def final_loss(folder):
    return next(point["final_loss"] for point in history(folder) if "final_loss" in point)


@pytest.mark.parametrize("rows", [1, 7, 18])
def test_held_out_loss_covers_every_row(data, tmp_path, rows):
    """4 rows at a time: the last batch is not full, or none is."""
    changed = data_module.PackedData(data.train, data.held_out.select(range(rows)), data.tokenizer, data.manifest)
    train(changed, tmp_path / "run", micro_batch=4, tokens=128 * 2)
    model = load(tmp_path / "run" / "model")
    assert final_loss(tmp_path / "run") == pytest.approx(plain_loss(model, changed.held_out), rel=1e-5)


@pytest.mark.parametrize("mixer", ["mamba", "s4", "rwkv7", "residual-delta", "bigbird", "gpt", "jamba"])
def test_other_layers_can_be_trained(data, tmp_path, mixer):
    """What a run costs is counted on the meta device, which has no autocast and no lengths. Uneven loads cost in
    training alone."""
    changes = {"mixer": mixer, "layers": 8 if mixer == "jamba" else 2}
    assert estimate(recipe(**changes)[0])["flops_per_token"] > 0
    train(data, tmp_path / "run", tokens=128 * 2, **changes)
    model = load(tmp_path / "run" / "model")
    assert bool(model.balance) == (mixer == "jamba")
    assert final_loss(tmp_path / "run") == pytest.approx(plain_loss(model, data.held_out), rel=1e-5)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer/__0_0.distcp", "history.json"])
def test_flipped_bit_of_a_checkpoint_is_named(data, trained_model, tmp_path, name):
    shutil.copytree(trained_model.parent, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoint-2" / name)
    with pytest.raises(InputError, match=rf"checkpoint-2' is damaged: {name} has another SHA-256 than when it was"):
        train(data, tmp_path / "run", **SHORT)


def test_flipped_bit_of_the_data_is_named_by_one_process_per_machine(prepared, tmp_path, monkeypatch):
    """The others compare sizes."""
    folder = shutil.copytree(prepared, tmp_path / "d")
    for part in ("train.npy", "held_out.ends.npy", "tokenizer/tokenizer.json"):
        flip(folder / part)
        with pytest.raises(InputError, match=rf"--data .*d' is damaged: {part} has another SHA-256"):
            open_data(folder)
        flip(folder / part)
    flip(folder / "train.npy")
    monkeypatch.setenv("LOCAL_RANK", "1")
    open_data(folder)
    with (folder / "train.npy").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"--data .*d' is damaged: train.npy has \d+ bytes, not \d+"):
        open_data(folder)


@pytest.fixture(scope="module")
def trained_model(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(data, folder, **SHORT)
    return folder / "model"


READERS = {
    "generate": lambda model, tmp: ["generate", model, "--prompt", "1"],
    "eval": lambda model, tmp: ["eval", model, "--suite", "wikitext", "--data", tmp, "--output", tmp / "out"],
    "inspect": lambda model, tmp: ["inspect", model, "--text", "1 times 1", "--output", tmp / "inspect.html"],
    "retrofit": lambda model, tmp: ["retrofit", model, "--output", tmp / "out"],
    "convert": lambda model, tmp: ["convert", model, "--to", "gla", "--output", tmp / "out"],
    "serve": lambda model, tmp: ["serve", model, "--port", 0],
    "train": lambda model, tmp: arguments(tmp / "data", tmp / "out", weights=model),
}


@pytest.mark.parametrize("command", READERS)
def test_flipped_bit_of_a_model_is_refused(command, trained_model, prepared, tmp_path, refusal):
    model = shutil.copytree(trained_model, tmp_path / "model")
    (tmp_path / "data").symlink_to(prepared)
    (tmp_path / "wiki.test.raw").write_text(" = Sea = \n \n The sea is a thing . \n")
    flip(model / "model.safetensors")
    said = refusal(*READERS[command](model, tmp_path))
    assert "is damaged: model.safetensors has another SHA-256 than when it was written" in said


def test_converted_model_is_checked_when_read_back(tmp_path, succeeds, refusal):
    out = tmp_path / "theirs"
    tiny.build("gla").save_pretrained(tmp_path / "model")
    succeeds("convert", tmp_path / "model", "--to", "gla", "--output", out)
    flip(out / "model.safetensors")
    assert "is damaged: model.safetensors" in refusal("convert", out, "--output", tmp_path / "ours")


def test_model_saved_again_or_without_checksums_is_read(trained_model, tmp_path):
    model = shutil.copytree(trained_model, tmp_path / "model")
    changed = load(model)
    with torch.no_grad():
        changed.lm_head.weight.add_(1.0)
    changed.save_pretrained(model)
    load(model)
    flip(model / "model.safetensors")
    with pytest.raises(InputError, match=f"delete {CHECKSUMS} if"):
        load(model)
    (model / CHECKSUMS).unlink()
    load(model)


def test_an_interrupted_deletion_is_finished_by_the_next(tmp_path, monkeypatch):
    (old := tmp_path / "checkpoint-1" / "optimizer").mkdir(parents=True)
    for path in (old / "a", old / "b", old.parent / "c"):
        path.write_text("x")
    write_json(old.parent / checkpoints.MARKER, record(old.parent))
    unlink, calls = Path.unlink, []

    def interrupted(path, **how):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        unlink(path, **how)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", interrupted)
        checkpoints.delete(old.parent)
    checkpoints.delete(*checkpoints.complete_checkpoints(tmp_path))
    assert not any(tmp_path.iterdir())


def test_other_files_beside_checkpoints_are_kept(data, tmp_path):
    train(data, tmp_path / "run", tokens=128 * 6)
    for name in ("checkpoint-1", "checkpoint-9", "checkpoint-10", "checkpoint-99", "checkpoint-old", "checkpoint-6"):
        (tmp_path / "run" / name).mkdir(exist_ok=True)
        (tmp_path / "run" / name / "notes.txt").write_text("mine")
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(run_json.read_text().replace('"tokens": 768.0', '"tokens": 3072.0'))
    train(data, tmp_path / "run")
    assert len([path for path in (tmp_path / "run").rglob("notes.txt") if path.read_text() == "mine"]) == 6
    whole = sorted(path.parent.name for path in (tmp_path / "run").glob(f"*/{checkpoints.MARKER}"))
    assert whole == ["checkpoint-20", "checkpoint-24"]


# --- told to stop ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(data, folder)
    return folder


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_stopped_run_saves_and_resumes_bit_exactly(data, prepared, whole, tmp_path, run_command, number, code):
    while_it_reads = patch("torch.load", side_effect=lambda *given, **named: os.kill(os.getpid(), number))
    for stopped in (signalled(12, number), while_it_reads):
        with stopped:
            ended, _, said = run_command(*arguments(prepared, tmp_path / "cut"))
        assert ended == code and "the same command" in said and "Traceback" not in said
        assert checkpoints.newest(tmp_path / "cut").name == "checkpoint-13"
    train(data, tmp_path / "cut")
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (whole, tmp_path / "cut"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert final_loss(whole) == final_loss(tmp_path / "cut")


def test_a_stopped_run_saves_first_and_evaluates_when_it_goes_on(data, whole, tmp_path):
    """At step 10, after which an evaluation follows: it may take longer than the time until SIGKILL."""
    with signalled(9, signal.SIGTERM), pytest.raises(Terminated):
        train(data, tmp_path / "cut")
    saved = json.loads((tmp_path / "cut" / "checkpoint-10" / checkpoints.HISTORY).read_text())
    assert not any("eval_loss" in point for point in saved)
    train(data, tmp_path / "cut")
    runs = ([p for p in history(folder) if "eval_loss" in p] for folder in (whole, tmp_path / "cut"))
    expected, found = ([(p["step"], p["eval_loss"]) for p in points] for points in runs)
    assert found == expected and [step for step, _ in found] == [10, 20, 24]


@pytest.mark.parametrize(
    ("error", "said"), [(ConnectionError("refused\nby all"), "refused"), (TimeoutError(), "Timeout")]
)
def test_what_is_no_failure_of_a_checkpoint_is_not_said_to_be_one(error, said, data, tmp_path):
    expected = rf"^data cannot be read, or numbers not be logged \({said}\w*\) at step 5; the last .* is none"
    with patch.object(History, "add", side_effect=error), pytest.raises(InputError, match=expected):
        train(data, tmp_path / "run")


def test_full_disk_is_one_sentence(prepared, tmp_path):
    """Files may not grow beyond what a checkpoint's largest takes: safetensors, then torch.save, find no room."""
    processes = {}
    for kilobytes in (8, 40):
        said = tmp_path / f"said{kilobytes}"
        said.mkdir()
        words = arguments(prepared, tmp_path / f"run{kilobytes}", tokens=128 * 6)
        processes[said] = groups.command(said, *words, largest=kilobytes * 1024)
    for said, process in processes.items():
        process.join()
        errors = (said / "err").read_text()
        assert process.exitcode == 2 and "Traceback" not in errors, errors
        sentence = r"^headrace: a checkpoint cannot be written to .*/run\d+ \(.*\) at step 5; the last complete"
        assert re.search(sentence, errors, re.M), errors


def test_full_disk_while_text_is_prepared_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n" * 2000, "utf-8")
    words = ["prepare", tmp_path / "a.txt", "--length", 16, "--held-out", 0.1, "--output", tmp_path / "data"]
    (process := groups.command(tmp_path, *words, largest=16 * 1024)).join()
    errors = (tmp_path / "err").read_text()
    assert process.exitcode == 2 and "Traceback" not in errors and "File too large" in errors, errors
    assert not (tmp_path / "data").exists()


def test_a_parameter_without_a_gradient_yet_goes_on_as_one(tmp_path):
    """Its moments begin with its first gradient: after a checkpoint, as without one."""
    settings, x, made = recipe(warmup=0)[0], torch.ones(1, 2), []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
        adam = optimizer(model, settings)
        made.append((model, adam, schedule(adam, settings)))

    def step(model, adam, names):
        sum(model[name](x).sum() for name in names).backward()
        adam.step()
        adam.zero_grad()

    (whole, of_whole, _), (again, *_) = made
    step(whole, of_whole, "a")
    checkpoints.save_optimizer(tmp_path, *made[0])
    again.load_state_dict(whole.state_dict())
    checkpoints.load_optimizer(tmp_path, *made[1])
    for model, adam, _ in made:
        step(model, adam, "ab")
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)
