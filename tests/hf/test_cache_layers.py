"""The layers of a cache under transformers' names, and transformers' DynamicCache."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.generation import utils

from headrace import HeadraceCache, InputError, load_state, save_state, zoo
from headrace.hf.cache import NAME as CACHE
from headrace.spec.stack import Layer
from tiny import MIXERS, T, build, close, config, tokens

FULL = ["gqa", "fox", "mla", "gpt"]


@pytest.mark.parametrize("mixer", [*MIXERS, "rwkv7", "mla", "softmax-rnn-norm"])
@torch.no_grad()
def test_a_cache_has_an_object_for_each_layer(mixer):
    model, ids = build(mixer).eval(), tokens(2)
    cache = model(ids, use_cache=True).past_key_values
    held = {x.untyped_storage().data_ptr() for s in cache.states for x in s if isinstance(x, torch.Tensor)}
    assert len(cache.layers) == len(cache) == len(model.config.layer_types) == model.config.num_hidden_layers
    for i, (layer, kind) in enumerate(zip(cache.layers, model.config.layer_types, strict=True)):
        views = [getattr(layer, name) for name in ("keys", "values") if kind != "linear_attention"]
        if kind.startswith(("linear", "hybrid")):
            views += [*layer.recurrent_states.values(), *layer.conv_states.values()]
            assert all(x is None or x.shape[1] > x.shape[2] for x in layer.conv_states.values())  # channels, tokens
            assert cache.has_previous_state(i) and layer.number_of_states == len(layer.recurrent_states)
        else:
            assert layer.is_sliding == (kind == "sliding_attention") and layer.get_seq_length() == T
        views = [x for x in views if x is not None]
        assert views and all(len(x) == 2 and x.untyped_storage().data_ptr() in held for x in views)
    with pytest.raises(AttributeError):
        cache.layers[0].keys = None
    model(tokens(2, 1), past_key_values=cache)
    if model.config.layer_types[0] == "full_attention":
        assert cache.layers[0].keys.shape[2] == cache.layers[0].get_seq_length() == T + 1


def test_types_of_layers():
    parallel = [Layer(zoo.get("gla"), parallel=zoo.get(name)) for name in ("gqa", "sliding-window")]
    types = ["linear_attention", "full_attention", "sliding_attention", "hybrid", "hybrid_sliding"]
    assert config(["gla", "gqa", "sliding-window", *parallel], num_hidden_layers=5).layer_types == types


@pytest.mark.parametrize("mixer", FULL)
@torch.no_grad()
def test_a_model_of_full_attention_continues_a_dynamic_cache(mixer):
    model, ids = build(mixer).eval(), tokens(2)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for where in ({}, {"attention_mask": mask}):
        cache = DynamicCache(config=model.config)
        for start, end in ((0, 5), (5, 6), (6, T)):
            read = {name: x[:, :end] for name, x in where.items()}
            out = model(ids[:, start:end], past_key_values=cache, **read)
            assert out.past_key_values is cache and cache.get_seq_length() == end
            kept = mask[:, start:end].bool() if where else slice(None)
            close(out.logits[kept], model(ids, **where).logits[:, start:end][kept])
    caches = DynamicCache(), HeadraceCache()
    for cache in caches:
        model(ids[:, :2], past_key_values=cache)
    own, other = (model(ids[:, 2:], attention_mask=mask[:, :-2], past_key_values=each).logits for each in caches)
    close(own[:, 2:], other[:, 2:])
    for theirs, ours in zip(*(each.layers for each in caches), strict=True):
        assert torch.equal(ours.keys[1:], theirs.keys[1:]) and torch.equal(ours.values[1:], theirs.values[1:])
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **{CACHE: DynamicCache()}, **options), model.generate(ids, **options))


def test_gradients_reach_the_keys_of_a_prefix():
    model, ids = build("transformer").eval(), tokens(2)
    k, v = (torch.randn(2, 4, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    model(ids, past_key_values=DynamicCache([(k, v), (k, v)]), labels=ids).loss.backward()
    assert k.grad.any() and v.grad.any()


@pytest.mark.parametrize("mixer", ["gla", "sliding-window", "hybrid", "shared", "channel mixing"])
def test_other_models_refuse_a_dynamic_cache_by_name(mixer):
    model, ids = build(mixer), tokens(2)
    kind = next(kind for kind in model.config.layer_types if kind != "full_attention")
    with pytest.raises(InputError, match=f"is a DynamicCache, and layer . is of {kind}; expected a HeadraceCache"):
        model(ids, past_key_values=DynamicCache())


def test_other_caches_and_uses_are_refused():
    model, ids = build("transformer"), tokens(2)
    one = DynamicCache([(torch.zeros(2, 4, 3, 8, dtype=torch.float64),) * 2])
    with pytest.raises(InputError, match="past_key_values has 1 layers; expected 2"):
        model(ids, past_key_values=one)
    with pytest.raises(InputError, match="is a StaticCache; expected a HeadraceCache"):
        model(ids, past_key_values=StaticCache(model.config, max_cache_len=9))
    with pytest.raises(InputError, match="past_key_values is a tuple; expected a HeadraceCache"):
        model.generate(ids, **{CACHE: ((ids, ids),)}, max_new_tokens=1)
    with pytest.raises(InputError, match="is a DynamicCache; expected a HeadraceCache, which goes back"):
        model.generate(ids[:1], **{CACHE: DynamicCache()}, prompt_lookup_num_tokens=2, max_new_tokens=3)
    rnn, mask = build("softmax-rnn-norm"), torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(InputError, match="a mixer keeps no keys of padding"):
        rnn(ids, attention_mask=mask, past_key_values=DynamicCache())


def test_a_saved_state_has_layers(tmp_path):
    model, ids = build("hybrid").eval(), tokens(2)
    cache = model(ids, use_cache=True).past_key_values
    save_state(tmp_path / "state", cache, model)
    (restored, _) = load_state(tmp_path / "state", model)
    close(restored.layers[1].keys, cache.layers[1].keys)
    close(restored.layers[0].recurrent_states[0], cache.layers[0].recurrent_states[0])


def test_a_generation_whose_end_is_known_a_step_late_returns_its_cache(monkeypatch):
    """As on Apple's GPUs, where transformers crops the cache and then looks at its layers."""
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this version of transformers waits for each token")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    model, ids, options = build("gla"), tokens(1), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", lambda *_, **more: True)
    found = model.generate(ids, eos_token_id=int(new[3]), return_dict_in_generate=True, **options)
    cache = found[CACHE]
    assert (cache.columns, cache.pending > 0, cache.layers) == (found.sequences.shape[1] - 1, True, [])
    model.read_pending(cache)
    assert len(cache.layers) == len(model.model.layers)
