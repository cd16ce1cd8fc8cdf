"""Tokens that are split over processes give the outputs and gradients of one process."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch

from groups import run
from headrace import InputError, context_parallel, zoo
from headrace.ops.parallel import context
from ranks import OPS, H, K, V, check
from sharded import Run, train_all
from tiny import build, covering
from trained import train

pytestmark = pytest.mark.slow(seconds=25)

ERROR = 1e-10  # float64: the same sums in another order
# Recurrences of their own, maxima and angles that depend on earlier tokens, which are refused.
ALONE = ("residual-delta", "comba", "gated-deltanet-2", "mlstm", "mamba3", "mesa")
ALONE += ("log-linear-mamba2", "log-linear-gated-deltanet")
ALONE += ("lolcats",)  # whose window is longer than a part
MIXERS = covering([f"softmax-{name}" for name in zoo.LINEAR if name not in ALONE])  # gates are of one token
MIXERS += ["softmax-lolcats(window=3, kv_heads=1, decay.kind=sigmoid-head)"]
MIXERS += ["recurrent-softmax-rnn-norm(denominator=detached, numerator=relu, order=1, by_length=true)"]
MIXERS += ["recurrent-softmax-rnn-norm(denominator=input-length, numerator=cosine)"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of four processes, two of which have others before and after them; a training in two: test_sharding.py."""
    return run(4, tmp_path_factory.mktemp("ranks"), check, MIXERS)


def errors(results, name):
    return [rank[name] for rank in results]


@pytest.mark.parametrize("packed", ["rows", "packed"])
@pytest.mark.parametrize("kind", OPS)
def test_op_equals_one_process(results, kind, packed):
    assert max(errors(results, f"op, {kind}, {packed}")) < ERROR


@pytest.mark.parametrize("packed", ["rows", "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_every_linear_mixer_equals_one_process(results, name, packed):
    assert max(errors(results, f"layer, {name}, {packed}")) < ERROR


@pytest.mark.parametrize("name", MIXERS)
def test_nan_does_not_reach_other_sequences(results, name):
    assert max(errors(results, f"nan, {name}")) < ERROR


LARGEST = {
    "model": ERROR, "model that reads": 1e3,  # units in the last place
    "computed again": 1e-12, "one process without gradients": 1e-5,  # float32
}  # fmt: skip


@pytest.mark.parametrize("what", LARGEST)
def test_other_computations_equal_one_process(results, what):
    assert max(errors(results, what)) < LARGEST[what]


def test_only_state_and_transition_are_gathered(results):
    for rank in results:
        # The first call of a context begins with the lengths of the parts alone.
        assert rank["bytes"] == {"add": [0, H * K * (V + 1), H * K * V], "delta": [0, H * K * (V + K), H * K * V]}


REFUSED = {
    "transformer": "SoftmaxAttention", "mamba": "Mamba", "rwkv7": "RWKV7", "residual-delta": "LinearMixer",
    "padding": "mask", "uneven": "9 tokens", "unequal": "[8, 7", "no v": "v=None", "labels": "shift_labels",
    "unequal again": "[4, 8, 8, 8]", "another length": "[7, 8, 8, 8]", "on a GPU": "[4, 8, 8, 8]",
}  # fmt: skip


def test_what_cannot_be_split_is_refused_by_name(results):
    for rank in results:
        messages = rank["refused"]
        for what, named in REFUSED.items():
            assert named in messages[what], what
        assert messages["bounds"] == "cu_seqlens=[0, 8, 33]; expected 0 = c_0 ≤ … ≤ c_N = T = 32"


def test_training_with_shared_rows_equals_one_process(few, tmp_path):
    """Two rows at a time in four processes, documents apart, which stop in the second epoch and go on; one row in two
    processes: test_sharding.py."""
    settings = {"mixer": "softmax-gated-deltanet", "batch_tokens": 512, "tokens": 512 * 4, "warmup": 0.25}
    settings |= {"save_every": 4, "precision": "float32", "separate_documents": True}
    assert train_all([Run(tmp_path / "1", settings)], few) == [0]
    shared = settings | {"context_parallel": 2}
    stopped = Run(tmp_path / "2", shared, {1: (2, signal.SIGTERM)})
    assert train_all([stopped, Run(tmp_path / "2", shared)], few, 4) == [0] * 4
    assert (tmp_path / "2" / "checkpoint-3").exists()
    histories = [json.loads((tmp_path / name / "model" / "history.json").read_text()) for name in "12"]
    for name in ("loss", "grad_norm", "eval_loss", "final_loss"):
        one, shared = ([point[name] for point in history if name in point] for history in histories)
        assert one and shared == pytest.approx(one, rel=1e-4), name  # the log has four digits of a step's loss


def test_processes_that_cannot_share_rows_are_refused(data, tmp_path):
    with pytest.raises(InputError, match="context_parallel=2 with 1 process"):
        train(data, tmp_path, context_parallel=2)
    with pytest.raises(InputError, match="context_parallel=2 with compile=True; expected one of them"):
        train(data, tmp_path, context_parallel=2, compile=True)
    with pytest.raises(InputError, match="context_parallel=3; expected a divisor of length=32"):
        train(data, tmp_path, context_parallel=3)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_marks_of_a_part_are_refused_before_processes_communicate(name):
    """Those of one process may be invalid, or separate sequences, where those of another do not. No group is there."""
    ids, part = torch.ones(1, 8, dtype=int), SimpleNamespace(rank=0, size=2)
    with context.within(part), pytest.raises(InputError, match="position_ids or seq_idx under context_parallel"):
        build("gla")(ids, **{name: torch.arange(8)[None]})


def test_context_parallel_needs_a_process_group():
    with pytest.raises(InputError, match="init_process_group"), context_parallel():
        pass
