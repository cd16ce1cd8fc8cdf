"""Heads that are split over processes give the outputs and gradients of one process."""

import pytest
import torch

from groups import run
from headrace import InputError, tensor_parallel, zoo
from headrace.hf import HeadraceForCausalLM
from tiny import build
from tp_ranks import STACK, D, H, T, check

pytestmark = pytest.mark.slow(seconds=15)

ERROR = 1e-10  # float64: the same sums in another order
MIXERS = [f"softmax-{name}" for name in zoo.LINEAR]  # without competition: SHARED
GATES = [
    f"softmax-gated-deltanet(competition.source={source}, competition.activation={activation})"
    for source in ("hidden", "diag", "query") for activation in ("softmax", "null", "sigmoid")
]  # fmt: skip
GATES += [
    "softmax-gla(competition.activation=sigmoid)",
    "softmax-gla(competition.shuffle=true)",
    "softmax-gla(competition.top_k=2, competition.gradient=all, competition.freeze=true)",
]
RELEASED = [
    "mamba2(heads.qk_groups=2, read.norm=rms-groups, inputs.bias=true, read.bias=true)",
    "kda(decay.rank=full, decay.lower_bound=-5.0, read.gate_bias=false)",
    "retnet(decay.kind=slopes, decay.rate=0.5, inputs.value_map=silu, read.norm=rms-joint)",
]
SHARED = [
    "softmax-gla(competition.memories_per_head=2)", "softmax-mamba2(competition.source=query)",
    "gated-deltanet(heads.qk_groups=2)",
    "softmax-gated-deltanet(heads.qk_groups=2, competition.source=query)", "transformer(bias=true, buckets=8)", "gqa",
    "mqa", "fox(kv_heads=2)", "sliding-window", "longformer",
    "gqa(null=learned, gate=channel, qk_norm=head, head_dim=6, bias=qkv)",
    "recurrent-softmax-rnn-norm(denominator=layer, affine=true, order=1, gate=both, by_length=true)",
    "recurrent-softmax-rnn-norm(denominator=input-length, numerator=cosine)",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    build(STACK, num_hidden_layers=3).save_pretrained(folder)
    return run(4, tmp_path_factory.mktemp("ranks"), check, MIXERS + GATES + RELEASED + SHARED, SHARED, str(folder))


def errors(results, name):
    return [rank[name] for rank in results if name in rank]


@pytest.mark.parametrize("name", MIXERS + GATES + RELEASED + SHARED)
def test_every_mixer_in_two_processes_equals_one(results, name):
    assert len(errors(results, name)) == 2 and max(errors(results, name)) < ERROR


@pytest.mark.parametrize("name", SHARED)
def test_shared_key_heads_in_four_processes_equal_one(results, name):
    assert len(errors(results, f"{name} in four")) == 4 and max(errors(results, f"{name} in four")) < ERROR


def test_single_precision_equals_one_process(results):
    assert max(errors(results, "single precision")) < 1e-5


def test_model_loss_gradients_and_norm_equal_one_process(results):
    assert max(errors(results, "model") + errors(results, "norm")) < ERROR


def test_saved_model_generates_and_saves_in_four_processes(results):
    assert errors(results, "served") == [[True] * 4] * 4


def test_gates_only_communicate_query_scores(results):
    """A layer sums its output [B, T, D] forward and the gradient to its input backward, and then the gradients of what
    all processes hold: the norm's V weights, which the test does not count, and weights of scores."""
    for rank in results:
        n, x = H // len(results), ("sum", 2, T, D)
        reads_and_writes = 2
        forward = {
            "none": [], "hidden": [], "diag": [],
            "head": reads_and_writes * [("gather", 2, T, n)], "query": reads_and_writes * [("sum", 2, T, H)],
        }  # fmt: skip
        for source, gates in forward.items():
            sent, back = rank["bytes"][source]
            assert sent == [*gates, x]
            tokens = [numbers for numbers in back if len(numbers) > 3]
            assert sorted(tokens) == sorted([("sum", 2, T, H)] * len(gates) + [x])


def test_unsupported_layers_are_refused_by_name(results):
    for messages in (rank["refused"] for rank in results):
        kinds = {
            "mamba": "Mamba",
            "rwkv7": "RWKV7",
            "s4": "S4",
            "gla-outer": "GLAOuter",
            "softmax-rnn-norm": "SoftmaxRNN",
        }
        for name, kind in (kinds | {"experts": "MixtureOfExperts at '0'"}).items():
            assert f"cannot split {kind}" in messages[name]
        assert "num_heads=3" in messages["heads"] and "heads.qk_groups=3" in messages["groups"]
        assert "intermediate_size=17" in messages["width"] and "in_proj.weight" in messages["int8"]
        assert "competition.shuffle" in messages["shuffle"]
        assert "no mixer" in messages["other"] and "other weights" in messages["weights"]


def test_invalid_arguments_are_refused(tmp_path):
    model = build("gla")
    with pytest.raises(InputError, match="torchrun"):
        tensor_parallel(model)
    model.save_pretrained(tmp_path)
    wrong = {"tp_plan": "other", "tp_size": 2, "distributed_config": {}, "device_mesh": object()}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=name):
            HeadraceForCausalLM.from_pretrained(tmp_path, **{name: value})
    with pytest.raises(InputError, match="device_map"):
        HeadraceForCausalLM.from_pretrained(tmp_path, tp_plan="auto", device_map="auto")
