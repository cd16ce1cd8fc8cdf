"""Tokens that are split over processes give the outputs and gradients of one process."""

import socket

import pytest

from headrace import InputError, context_parallel, zoo
from ranks import OPS, H, K, V, run

ERROR = 1e-10  # float64: the same sums in another order
MIXERS = [name for name in zoo.names() if name.removeprefix("softmax-") in zoo.LINEAR and "residual" not in name]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run(4, tmp_path_factory.mktemp("ranks"), free_port(), MIXERS)


@pytest.fixture(scope="module", params=[2, 4])
def found(request, four, tmp_path_factory):
    return four if request.param == 4 else run(2, tmp_path_factory.mktemp("ranks"), free_port(), [])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def errors(found, name):
    return [rank[name] for rank in found]


@pytest.mark.parametrize("packed", ["rows", "packed"])
@pytest.mark.parametrize("kind", OPS)
def test_the_op(found, kind, packed):
    assert max(errors(found, f"op, {kind}, {packed}")) < ERROR


@pytest.mark.parametrize("packed", ["rows", "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_every_linear_mixer(four, name, packed):
    assert max(errors(four, f"layer, {name}, {packed}")) < ERROR


def test_the_loss_and_the_gradients_of_a_model(found):
    assert max(errors(found, "model")) < ERROR


def test_a_process_without_gradients_does_not_stop_the_others(found):
    assert max(errors(found, "one process without gradients")) < 1e-5  # float32


def test_one_gather_of_the_state_and_its_transition(found):
    for rank in found:
        assert rank["bytes"] == {"add": [H * K * (V + 1), H * K * V], "delta": [H * K * (V + K), H * K * V]}


def test_what_cannot_be_split_is_refused_by_name(found):
    for rank in found:
        said = rank["refused"]
        assert "SoftmaxAttention" in said["transformer"] and "Mamba" in said["mamba"] and "RWKV7" in said["rwkv7"]
        assert "LinearMixer" in said["residual-delta"] and "mask" in said["padding"]
        assert "9 tokens" in said["uneven"] and "[8, 7" in said["unequal"] and "shift_labels" in said["labels"]


def test_a_group_is_needed():
    with pytest.raises(InputError, match="init_process_group"), context_parallel():
        pass
