"""Processes that share the weights train as one process does, and go on from the checkpoint of any number of them, also
in a later epoch than the first. Processes that share gradients alone (DDP) go on bit for bit, too."""

import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("datasets", reason="the extra [train] is not installed")

import groups
from headrace import InputError, load
from headrace.training import checkpoints
from headrace.training.model import build
from headrace.training.sharding import load_weights, shard
from sharded import Run, ended, start, train_all
from trained import history, recipe, train

pytestmark = pytest.mark.slow(seconds=70)

# 8 rows a step: 4 times 2 in one process, 2 times 2 in each of two processes. 44 full rows are an epoch of 5 steps. The
# norm of the gradient is above 1, the bound at which it is clipped.
RUN = {
    "batch_tokens": 256, "tokens": 256 * 8, "warmup": 1 / 8, "save_every": 6, "evaluate_every": 8,
    "precision": "float32",
}  # fmt: skip
CASES = {
    "softmax-gla": {},
    "mamba2": {"mixer": "mamba2", "tie": False, "clip": "none"},
    "zamba": {"mixer": "zamba", "layers": 6},  # a hybrid with attention, of which several layers share a block
    "context": {"mixer": "softmax-gated-deltanet", "recompute": True, "context_parallel": 2},
    "bfloat16": {"precision": "bfloat16"},
}
SHORT = {"tokens": 256 * 4, "save_every": 4, "evaluate_every": 4}  # all but the first
ERROR = 1e-5  # float32: the same sums in another order, over the steps of a run
# A weight of which the last bit of float32 differs can round to another bfloat16, which is 2^-8 away.
ERROR_BFLOAT16 = 2.0**-8
KILLED = dict.fromkeys((0, 1), (7, signal.SIGKILL))  # goes on at step 6, in the second epoch


def changes(name, **more):
    return RUN | ({} if name == "softmax-gla" else SHORT) | CASES[name] | more


@pytest.fixture(scope="module")
def stalled(prepared, tmp_path_factory):
    """The folder of a run of which process 1 stalls at step 3, and its processes."""
    folder = tmp_path_factory.mktemp("stalled") / "run"
    given = changes("softmax-gla", shard=2, save_every=2)
    group = start([Run(folder, given, {1: (3, signal.SIGSTOP)}, ("--timeout", "60"))], prepared, 2)
    yield folder, group
    ended(group)


@pytest.fixture(scope="module")
def runs(stalled, few, tmp_path_factory):
    """The folder with the runs of all cases in one process (NAME-1) and in two that share the weights (NAME-2), and of
    one in two that share gradients alone (ddp); with runs that were killed at step 7 (cut-1, cut-2, cut-ddp) and those
    that go on from them. Meanwhile `stalled` waits."""
    folder = tmp_path_factory.mktemp("runs")

    def one(name):
        return Run(folder / f"{name}-1", changes(name, context_parallel=1))

    def two(name):
        return Run(folder / f"{name}-2", changes(name, shard=2))

    alone = Run(folder / "cut-1", changes("softmax-gla"), KILLED)
    assert train_all([*map(one, CASES), alone], few) == [-signal.SIGKILL]
    cut = Run(folder / "cut-2", changes("softmax-gla", shard=2), KILLED)
    assert train_all([*map(two, CASES), cut], few, 2) == [-signal.SIGKILL] * 2
    ddp = [Run(folder / "ddp", changes("softmax-gla")), Run(folder / "cut-ddp", changes("softmax-gla"), KILLED)]
    assert train_all(ddp, few, 2) == [-signal.SIGKILL] * 2
    for name, begun in (*BEGUN.items(), ("2-1", "cut-2")):
        shutil.copytree(folder / begun, folder / name)
    again = [Run(folder / name, changes("softmax-gla", shard=shard)) for name, shard in GO_ON_IN_TWO.items()]
    assert train_all(again, few, 2) == [0, 0]
    assert all((folder / begun / "checkpoint-6").exists() for begun in BEGUN.values())
    assert train_all([Run(folder / "2-1", changes("softmax-gla"))], few) == [0]
    return folder


GO_ON_IN_TWO = {"2-2": 2, "1-2": 2, "2-ddp": 1, "ddp-ddp": 1}  # {run: processes that share the weights}
BEGUN = {"2-2": "cut-2", "1-2": "cut-1", "2-ddp": "cut-2", "ddp-ddp": "cut-ddp"}  # {run: the killed one}


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def difference(folder, other):
    """The largest relative difference of any loss, norm of the gradient, or weight."""
    differences = []
    for name in ("loss", "grad_norm", "eval_loss", "final_loss"):
        a, b = ([point[name] for point in history(each) if name in point] for each in (folder, other))
        assert a and len(a) == len(b), name
        differences += [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    a, b = weights(folder), weights(other)
    assert a.keys() == b.keys()
    return max(differences + [((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-12)).item() for name in a])


@pytest.mark.parametrize("name", CASES)
def test_sharded_training_equals_one_process(runs, name):
    tolerance = ERROR_BFLOAT16 if name == "bfloat16" else ERROR
    assert difference(runs / f"{name}-2", runs / f"{name}-1") < tolerance
    load(runs / f"{name}-2" / "model")  # an ordinary checkpoint


def test_two_copies_of_sharded_weights_equal_one_process(runs, few, tmp_path):
    """In four processes. Each copy is shared by two of them, which also share the tokens of their rows."""
    assert train_all([Run(tmp_path / "four", changes("context", shard=2))], few, 4) == [0] * 4
    assert difference(tmp_path / "four", runs / "context-1") < ERROR


@pytest.mark.parametrize("name", ["2-1", "1-2", "2-ddp"])
def test_killed_run_resumes_in_another_number_of_processes(runs, name):
    assert difference(runs / name, runs / "softmax-gla-1") < ERROR


@pytest.mark.parametrize(("resumed", "uninterrupted"), [("2-2", "softmax-gla-2"), ("ddp-ddp", "ddp")])
def test_killed_run_resumes_bit_exactly_in_the_same_processes(runs, resumed, uninterrupted):
    again, whole = weights(runs / resumed), weights(runs / uninterrupted)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)
    again, whole = history(runs / resumed), history(runs / uninterrupted)
    for name in ("step", "loss", "grad_norm", "eval_loss", "final_loss"):
        assert [point.get(name) for point in again] == [point.get(name) for point in whole]
    log = (runs.joinpath(f"{resumed}-0.txt")).read_text()
    assert "checkpoint-6" in log, "it went on from a checkpoint"


def test_each_process_writes_its_part_of_the_moments(runs):
    stored = FileSystemReader(runs / "mamba2-2" / "checkpoint-4" / checkpoints.OPTIMIZER).read_metadata()
    moments = [x for name, x in stored.state_dict_metadata.items() if name.endswith((".exp_avg", ".exp_avg_sq"))]
    sizes = {half: sum(c.sizes.numel() for x in moments for c in x.chunks if any(c.offsets) == half) for half in (0, 1)}
    assert sum(sizes.values()) == 2 * sum(weight.numel() for weight in weights(runs / "mamba2-2").values())
    assert sizes[1] > 0.45 * sum(sizes.values())  # rows of a matrix: one of 257 has 129 in the first process


def test_signal_to_one_process_stops_all_with_a_checkpoint(prepared, tmp_path):
    stopped = Run(tmp_path / "run", changes("softmax-gla", shard=2), {1: (3, signal.SIGTERM)})
    assert train_all([stopped], prepared, 2) == [0, 0]
    assert checkpoints.newest(tmp_path / "run").name == "checkpoint-4" and not (tmp_path / "run" / "model").exists()
    for rank in (0, 1):
        assert "terminated: " in (tmp_path / f"run-{rank}.txt").read_text()


def test_stalled_process_ends_the_run_with_a_sentence(stalled):
    folder, group = stalled
    group[0].join(900)
    group[1].kill()  # it is stopped, and would not end
    assert ended(group) == [2, -signal.SIGKILL]
    log = (folder.parent / "run-0.txt").read_text()
    _, found, sentence = log.partition("headrace: process 1 has not answered for 60 s")
    assert found and "at step 3; the last" in sentence and "checkpoint-2" in sentence and "Traceback" not in log


def loaded(folder):
    model = build(recipe()[0])
    shard(model, init_device_mesh("cpu", (2,)))
    try:
        load_weights(model, folder)
    except InputError as error:
        return str(error)


def test_a_missing_weight_is_named_by_all_processes(tmp_path):
    build(recipe()[0]).save_pretrained(tmp_path)
    assert groups.run(2, tmp_path, loaded, tmp_path) == [None, None]
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.backbone.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for said in groups.run(2, tmp_path, loaded, tmp_path):
        assert "has no weights model.backbone.norm.weight" in said


def test_invalid_sharding_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="shard=2 with 1 process; expected a start by torchrun with a multiple of 2"):
        train(data, tmp_path, shard=2)
    with pytest.raises(InputError, match="shard=2 with compile=True; expected one of them"):
        train(data, tmp_path, shard=2, compile=True)
