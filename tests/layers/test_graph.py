"""Decoding with a CUDA graph, on a CPU: a stand-in records the calls of the library and replays them in the same
memory, without Python of ours."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation import stopping_criteria

from headrace import HeadraceCache, InputError, Mixer, linear_attention, set_backend
from headrace.hf import generation
from headrace.hf.cache import NAME as CACHE
from headrace.layers import graph
from headrace.layers.graph import GraphedStep, unsupported_reason
from headrace.layers.maps import asking
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


@pytest.fixture
def elsewhere(monkeypatch):
    """`generate` on a CPU as on a GPU."""
    real = generation.unsupported_reason
    reason = lambda *given: None if "on cpu" in str(real(*given)) else real(*given)  # noqa: E731
    monkeypatch.setattr(generation, "unsupported_reason", reason)
    monkeypatch.setattr(generation.Engine, "read", lambda *given: None)  # as of tokens on a GPU


def generated(model, ids, **options):
    torch.manual_seed(1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "top_k": 0} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


CASES = {
    "greedy": {}, "sampled": {"do_sample": True}, "top p": {"do_sample": True, "top_p": 0.8, "temperature": 0.7},
    "ends": {"eos_token_id": [3, 5, 7, 11, 13], "do_sample": True},
    "penalty": {"repetition_penalty": 1.5, "do_sample": True}, "strings": {"max_time": 1000.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"), [*((name, "sampled") for name in RECURRENT), *(("softmax-gla", case) for case in CASES)]
)
def test_graph_generates_the_same_tokens(name, case, recorded, elsewhere, monkeypatch):
    model, ids, options = build(name), tokens(2), CASES[case]
    found = [generated(model, ids, **options) for _ in range(2)]
    state = [HeadraceCache() for _ in range(2)]
    found.append(generated(model, ids, **options, **{CACHE: state[0]}))
    assert len(recorded) == 1 and model.engine.graph_refused is None
    assert (model.engine.graph.choice is None) == (case in ("penalty", "strings"))
    monkeypatch.setattr(generation, "changed_reason", lambda model: "transformers' loop is asked for")
    expected = generated(model, ids, **options, **{CACHE: state[1]})
    assert all(torch.equal(each, expected) for each in found)
    assert state[0].columns == state[1].columns == expected.shape[1] - 1
    for own, other in zip(state[0].states, state[1].states, strict=True):
        assert all(x is y is None or torch.allclose(x, y, rtol=1e-9) for x, y in zip(own, other, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_has_a_graph_of_its_own(sampled, recorded, elsewhere):
    model, draft, ids = build("softmax-gla"), build("gla"), tokens(1)
    found = generated(model, ids, assistant_model=draft, do_sample=sampled)
    assert draft.engine.graph.step is not None and len(recorded) == 1 and found.shape[1] == ids.shape[1] + 12
    if not sampled:
        assert torch.equal(found, generated(model, ids))


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


class Moved:
    """A model as on a GPU."""

    device = torch.device("cuda")

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("hybrid", "grows with the tokens"), ("softmax-rnn-norm", "the state of layer 0 grows"),
     ("experts", "layer 1 is a mixture of experts"), ("gpt", "positions are learned")],
)  # fmt: skip
def test_models_without_a_graph_say_why(name, message):
    assert unsupported_reason(Moved(build("gla"))) is None and message in unsupported_reason(Moved(build(name)))


def test_hooks_and_other_outputs_have_no_graph(elsewhere, recorded):
    model, ids = build("gla"), tokens(1)
    for options, reason in (
        ({"output_scores": True, "return_dict_in_generate": True}, "returned more than tokens"),
        ({"use_cache": False}, "had no cache"),
    ):
        generated(model, ids, **options)
        assert reason in model.engine.graph_refused
    with asking([]) as maps:
        generated(model, ids, max_new_tokens=3)
    assert len(maps) == 2 * 3 and "maps" in model.engine.graph_refused
    hook = model.model.backbone.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "layers.0.mlp has a hook" in unsupported_reason(Moved(model))
    hook.remove()
    with register_module_forward_pre_hook(lambda *_: None):
        assert "for all modules" in unsupported_reason(Moved(model))
    assert not recorded
    generated(model, ids)
    assert len(recorded) == 1 and model.engine.graph_refused is None


def as_tensor(linear):
    """Doubles a weight, which is no parameter then."""
    double = 2 * linear.weight
    del linear.weight
    linear.weight = double


def test_graph_is_captured_again_after_changes_alone(elsewhere, recorded):
    model, ids = build("softmax-gla"), tokens(2)
    block = model.model.backbone.layers[1]
    changes = {
        "numbers": (lambda: block.mlp.up_proj.weight.data.mul_(2), 0),
        "weight": (lambda: setattr(block.mlp.up_proj, "weight", nn.Parameter(block.mlp.up_proj.weight * 2)), 1),
        "tensor": (lambda: as_tensor(block.mlp.down_proj), 1),
        "tensor again": (lambda: as_tensor(block.mlp.down_proj), 1),
        "setting": (lambda: setattr(block.mixer_norm, "eps", 0.1), 1),
        "forward": (lambda: setattr(block.mlp, "forward", lambda x: x), 1),
        "op": (lambda: setattr(block.mixer, "op", lambda *given, **more: linear_attention(*given, **more)), 1),
        "backend": (lambda: set_backend(model, "torch"), 1),
        "dtype": (lambda: model.bfloat16(), 1),
    }
    generated(model, ids)
    for name, (change, more) in changes.items():
        before = len(recorded)
        with torch.no_grad():
            change()
        found = generated(model, ids)
        assert len(recorded) == before + more, name
        assert torch.equal(found, generated(copy.deepcopy(model), ids)), name
    generated(model, ids[:1])
    assert len(recorded) == before + more + 2  # one for the last copy


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # its old name, in peft
def test_graph_is_captured_again_for_another_adapter(elsewhere, recorded):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, ids = build("gla"), tokens(2)
    settings = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["up_proj"])
    peft.get_peft_model(model, settings, "one").add_adapter("two", settings)  # in the layers of the model itself
    adapted = model.model.backbone.layers[1].mlp.up_proj
    for change in (lambda: None, lambda: adapted.set_adapter("two"), lambda: adapted.scale_layer(9.0)):
        before = len(recorded)
        change()
        assert torch.equal(generated(model, ids), generated(copy.deepcopy(model), ids)) and len(recorded) == before + 2


def test_graph_is_shared_by_no_copy_and_ends_with_its_model(elsewhere, recorded):
    model, ids = build("gla"), tokens(1)
    generated(model, ids)
    assert copy.deepcopy(model).engine.graph is None and pickle.loads(pickle.dumps(model)).engine.graph is None
    gone = weakref.ref(model.engine.graph.step)
    recorded.clear()  # which stand for the graph, and hold what it would free
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_step_that_cannot_be_captured_is_reported(elsewhere, monkeypatch):
    def failing(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, ids = build("gla"), tokens(2)
    expected = generated(copy.deepcopy(model), ids)
    monkeypatch.setattr(graph, "captured", failing)
    with pytest.warns(UserWarning, match="without .* CUDA graph: the step cannot be captured: operation not permitted"):
        assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids), expected)  # not tried again, without a warning
    assert "cannot be captured" in model.engine.graph_refused
    with pytest.raises(InputError, match="expected a CUDA graph, and the step cannot be captured"):
        generated(model, ids, cache_implementation="static")


def test_kept_graph_ends_where_each_generation_does(elsewhere, recorded):
    model, ids = build("gla"), tokens(1)
    lengths = [generated(model, ids, max_new_tokens=n).shape[1] - ids.shape[1] for n in (4, 9, 2)]
    assert lengths == [4, 9, 2] and len(recorded) == 1


def test_capture_that_fails_after_its_warm_up_ends_no_row(elsewhere, monkeypatch):
    def failing(warm_up, *_):
        warm_up()
        raise RuntimeError("operation not permitted when stream is capturing")

    model, ids = build("gla"), tokens(2)
    chosen = generated(copy.deepcopy(model), ids)
    ends = [token for token in range(1, 29) if token not in chosen[:, ids.shape[1] :]]
    monkeypatch.setattr(graph, "captured", failing)
    with pytest.warns(UserWarning, match="without .* CUDA graph"):
        assert torch.equal(generated(model, ids, eos_token_id=ends), chosen)


def test_text_longer_than_the_longest_is_warned_of(elsewhere, recorded, monkeypatch):
    warned, ids = [], tokens(1)
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", warned.append)
    generated(build("gla", max_position_embeddings=ids.shape[1] + 11), ids)
    assert not warned
    generated(build("gla", max_position_embeddings=ids.shape[1] + 3), ids)
    assert "exceeded the model's predefined maximum length" in warned[0]


def test_precision_of_products_may_be_set_by_either_name(elsewhere, recorded, monkeypatch):
    def unreadable():
        raise RuntimeError("the precision was set by fp32_precision")

    model, ids = build("gla"), tokens(1)
    generated(model, ids)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", unreadable)
    generated(model, ids)
    assert len(recorded) == 1


def test_sampling_from_logits_that_are_no_numbers_fails(elsewhere):
    model, ids = build("gla"), tokens(2)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        generated(model, ids, do_sample=True)


def test_sampling_from_logits_that_are_no_numbers_fails_at_once_on_a_cpu():
    class Streamer(list):
        put, end = list.append, list.clear

    model, ids, seen = build("gla"), tokens(1), Streamer()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        model.generate(ids, do_sample=True, max_new_tokens=9, pad_token_id=0, streamer=seen)
    assert len(seen) <= 2  # the prompt, and a token


def test_graph_is_refused_on_a_cpu_and_with_beams():
    model, ids = build("gla"), tokens(1)
    with pytest.raises(InputError, match="asks for a CUDA graph, and the model is on cpu"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(InputError, match="'static' is not available for beam_search"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2, num_beams=2)
    with pytest.raises(InputError, match="'quantized' is not available"):
        model.generate(ids, cache_implementation="quantized", max_new_tokens=2)
