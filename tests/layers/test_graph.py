"""Decoding with a CUDA graph, on a CPU: a stand-in records the calls of the library and replays them in the same
memory, without Python of ours."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace import Mixer
from headrace.hf import decoding
from headrace.hf.generate import generate
from headrace.layers import graph
from headrace.layers.graph import GraphedStep
from headrace.utils.errors import InputError
from tiny import build, tokens

RECURRENT = ["retnet", "gla", "mamba2", "rwkv6", "gated-deltanet", "softmax-gla", "mamba and s4", "rwkv4 and s4d"]


class Recording(TorchDispatchMode):
    """Records calls, which `replay` makes again with the same tensors, into the memory of their first results."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.given = [], [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not any(x is y for y in self.made):
                self.given.setdefault(id(x), (x, x.clone()))
        result = function(*args, **kwargs)
        self.made += tree_leaves(result)
        self.calls.append((function, args, kwargs, tree_leaves(result)))
        return result

    def restore(self):
        """Undoes what the recorded calls wrote, since a capture executes nothing."""
        for x, before in self.given.values():
            x.copy_(before)

    def replay(self):
        for function, args, kwargs, before in self.calls:
            for old, new in zip(before, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(new, torch.Tensor) and new is not old:
                    old.copy_(new)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Stands in for `captured`. Returns the recordings."""
    recordings = []

    def captured(warm_up, run, device):
        warm_up()
        with Recording() as recording:
            result = run()
        recording.restore()
        recordings.append(recording)
        return result, recording.replay

    monkeypatch.setattr(graph, "captured", captured)
    return recordings


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_graph_generates_the_same_tokens(name, sampled, recorded, monkeypatch):
    monkeypatch.setattr(decoding, "check_graph", lambda *_: None)
    monkeypatch.setattr("headrace.hf.generation.check_graph", lambda *_: None)
    model, ids, results = build(name), tokens(2), []
    for kind in (None, "static"):
        torch.manual_seed(1)
        options = {"max_new_tokens": 12, "do_sample": sampled, "pad_token_id": 0, "cache_implementation": kind}
        results.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    assert torch.equal(*results) and results[0].shape == (2, ids.shape[1] + 12)
    assert len(recorded) == 1


@torch.no_grad()
def test_graphed_step_updates_states_in_place():
    mixer = Mixer("softmax-gated-deltanet", hidden_size=16, num_heads=2).double()
    x = torch.randn(2, 9, 16).double()
    exact, final = mixer(x)
    _, state = mixer(x[:, :5])
    before = [y.clone() for y in state if y is not None]
    step = GraphedStep(lambda token, states: _alone(mixer(token, states[0], in_place=True)), x[:, :1], [state])
    for y, z in zip(before, (y for y in state if y is not None), strict=True):
        assert torch.equal(y, z)
    places = [y.data_ptr() for y in state if y is not None]
    for t in range(5, 9):
        assert torch.allclose(step(x[:, t : t + 1]), exact[:, t : t + 1], rtol=1e-10, atol=1e-12)
    assert [y.data_ptr() for y in step.states[0] if y is not None] == places
    for y, z in zip(step.states[0], final, strict=True):
        assert y is z is None or torch.allclose(y, z.to(y.dtype), rtol=1e-10, atol=1e-12)


def _alone(result):
    y, state = result
    return y, [state]


@torch.no_grad()
def test_growing_state_is_refused():
    mixer, x = Mixer("transformer", hidden_size=16, num_heads=2), torch.randn(1, 3, 16)
    _, state = mixer(x)
    with pytest.raises(InputError, match=r"a state of shape \[1, 3, .*\] has shape \[1, 4, .* expected the same"):
        GraphedStep(lambda token, states: _alone(mixer(token, states[0])), x[:, :1], [state])


class Elsewhere:
    """A model that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, name):
        self.model = build(name).model


@pytest.mark.parametrize(
    ("name", "is_plain", "message"),
    [("gla", False, "expected an empty cache"), ("hybrid", True, "without attention"),
     ("softmax-rnn-norm", True, "without attention"),
     ("experts", True, "without attention, experts"), ("gpt", True, "learned positions")],
)  # fmt: skip
def test_models_without_a_graph_are_refused(name, is_plain, message):
    decoding.check_graph(Elsewhere("gla"), True)
    with pytest.raises(InputError, match=message):
        decoding.check_graph(Elsewhere(name), is_plain)


def test_graph_is_refused_on_a_cpu_and_with_beams(tmp_path):
    model, ids = build("gla"), tokens(1)
    with pytest.raises(InputError, match="and the model is on cpu; expected cuda"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(InputError, match="'static' is not available for beam_search"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2, num_beams=2)
    with pytest.raises(InputError, match="'quantized' is not available"):
        model.generate(ids, cache_implementation="quantized", max_new_tokens=2)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="--cuda-graph with --device='cpu'; expected a GPU"):
        generate(tmp_path, "a", None, False, "cpu", cache_implementation="static")
