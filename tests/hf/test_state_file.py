"""States as files: the same bits in another process, and a refusal of every file that is not a state of the model."""

from copy import deepcopy

import pytest
import torch

import tiny
from headrace import HeadraceCache, HeadraceForCausalLM, InputError, load, load_state, quantize, save_state, zoo
from headrace.files.state import model_digest
from headrace.hf.cache import NAME
from headrace.utils import plugins
from plugged import folder
from tiny import T, tokens

__all__ = ["folder"]  # a fixture


@torch.no_grad()
def read(model, ids, mask=None):
    return getattr(model(ids, attention_mask=mask, use_cache=True), NAME)


def assert_same_bits(cache, other):
    assert other.columns == cache.columns and len(other) == len(cache)
    for a, b in zip(cache.states, other.states, strict=True):
        assert type(a) is type(b)
        for name, x, y in zip(a._fields, a, b, strict=True) if a is not None else ():
            if isinstance(x, torch.Tensor):
                assert torch.equal(x, y) and x.dtype is y.dtype, name
            else:
                assert x == y or name == "room", name  # which other memory has


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixer", [*tiny.MIXERS, *tiny.by_state(zoo.names())])
def test_states_return_with_the_same_bits(mixer, tmp_path):
    """Of a padded batch, after a token, which attention appends in memory with room; and what follows is the same."""
    model = HeadraceForCausalLM(tiny.config(mixer)).eval()
    ids, mask = tokens(2), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    cache = read(model, ids, mask)
    with torch.no_grad():
        model(ids[:, :1], **{NAME: cache})
    seen = torch.cat([ids, ids[:, :1]], 1)
    save_state(tmp_path / "state", cache, model, seen)
    other, read_tokens = load_state(tmp_path / "state", model)
    assert torch.equal(read_tokens, seen)
    assert_same_bits(cache, other)
    with torch.no_grad():
        following = (model(ids, **{NAME: each}).logits for each in (cache, other))
    assert torch.equal(*following)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["softmax-gla", "hybrid", "gpt", "mamba and s4", "softmax-rnn-norm"])
@pytest.mark.parametrize("end", [9, 4, 2])
def test_restored_cache_goes_back(mixer, end, tmp_path):
    """Behind, to and before a snapshot, over padding: like the cache that was saved."""
    model, ids, mask = tiny.build(mixer), tokens(2, 7), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    cache = read(model, ids[:, :4], mask[:, :4])
    cache.snapshot()
    model(ids, **{NAME: cache})
    cache.snapshot()
    save_state(tmp_path / "state", cache, model)
    other, _ = load_state(tmp_path / "state", model)
    assert other.snapshots.columns == cache.snapshots.columns == [0, 4, 11]
    assert other.snapshots.nbytes == cache.snapshots.nbytes
    for each in (cache, other):
        each.rewind(11 - end)
        model.read_pending(each)
    assert_same_bits(cache, other)
    again = read(model, torch.cat([ids[:, :4], ids], 1)[:, :end], mask[:, :end])
    following = (model(ids, **{NAME: each}).logits for each in (other, again))
    tiny.close(*following)


@torch.no_grad()
@pytest.mark.parametrize("last", [True, False])
def test_restored_snapshot_is_as_temporary_as_it_was(last, tmp_path):
    model, cache = tiny.build("gla"), HeadraceCache()
    for temporary in (not last, last):
        model(tokens(1, 4), **{NAME: cache})
        cache.snapshot(temporary=temporary)
    save_state(tmp_path / "state", cache, model)
    for each in (cache, load_state(tmp_path / "state", model)[0]):
        model(tokens(1, 2), **{NAME: each})
        each.snapshot(temporary=True)
        assert each.snapshots.columns == [0, 4 if last else 8, 10]


@torch.no_grad()
def test_restored_cache_goes_back_to_states_that_were_set(tmp_path):
    model, cache = tiny.build("gla"), HeadraceCache()
    cache.states = read(model, tokens(2, 4)).states
    model(tokens(2, 3), **{NAME: cache})
    save_state(tmp_path / "state", cache, model)
    other, _ = load_state(tmp_path / "state", model)
    for each in (cache, other):
        each.rewind(3)
    assert_same_bits(cache, other)
    assert cache.columns == 0 and cache.states is not None


def test_pending_tokens_are_read_before(tmp_path):
    model, ids = HeadraceForCausalLM(tiny.config("gla")).eval(), tokens(1)
    cache = read(model, ids)
    cache.rewind(3)
    save_state(tmp_path / "state", cache, model)
    other, kept = load_state(tmp_path / "state", model)
    assert torch.equal(kept, ids[:, :-3])
    assert_same_bits(cache, other)


def embedded(model, ids):
    """A cache that has not kept tokens."""
    with torch.no_grad():
        return getattr(model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True), NAME)


def test_cache_without_tokens_does_not_go_back(tmp_path):
    model, ids = HeadraceForCausalLM(tiny.config("gla")).eval(), tokens(1)
    save_state(tmp_path / "state", embedded(model, ids), model, ids)
    other, _ = load_state(tmp_path / "state", model)
    with pytest.raises(InputError, match=r"columns 0 to 8 were read before the state was saved"):
        other.rewind(1)


def test_state_of_a_plugin_is_of_the_class_of_its_module(folder):
    plugins.load(["leaky.py"])
    model = HeadraceForCausalLM(tiny.config("leaky")).eval()
    ids = tokens(2)
    cache = read(model, ids)
    save_state("state", cache, model, ids)
    assert_same_bits(cache, load_state("state", model)[0])


@pytest.fixture
def saved(tmp_path):
    """A model, and the file of a state of it."""
    model, ids = HeadraceForCausalLM(tiny.config("hybrid")).eval(), tokens(1)
    save_state(tmp_path / "state", read(model, ids), model, ids)
    return model, tmp_path / "state"


def test_every_change_of_a_file_is_refused(saved):
    model, path = saved
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 7), *range(header, len(content), 97)]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(InputError, match=r"^state '.*' (cannot be read: |is damaged: |has the format )"):
            load_state(path, model)
    for length in range(0, len(content), 499):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"^state '.*' cannot be read: "):
            load_state(path, model)


def test_files_that_are_no_states_are_refused(saved):
    model, path = saved
    model.save_pretrained(path.parent)
    with pytest.raises(InputError, match=r"has the format 'pt'; expected 'headrace state, version 1'"):
        load_state(path.parent / "model.safetensors", model)
    path.write_text("Once upon a time")
    for wrong in (path, path.parent, path.parent / "missing"):
        with pytest.raises(InputError, match=r"^state '.*' cannot be read: "):
            load_state(wrong, model)


OTHERS = {
    "digest": lambda model: model.lm_head.weight[3].mul_(1 + 1e-6),
    "digest of": lambda model: setattr(model.config, "norm_eps", 1e-5),
    "digest is": lambda model: quantize(model),
    "dtype is float32, and this model's is bfloat16": lambda model: model.bfloat16(),
    "vocabulary is 29, and this model's is 31": lambda model: model.resize_token_embeddings(31),
}


@torch.no_grad()
@pytest.mark.parametrize("what", OTHERS)
def test_state_of_another_model_is_refused(saved, what):
    model, path = saved
    load_state(path, deepcopy(model))
    OTHERS[what](model)
    with pytest.raises(InputError, match=f"is of another model: its {what.split(' of')[0]}"):
        load_state(path, model)


def test_digest_is_that_of_the_weights_wherever_they_are(saved):
    model, path = saved
    model.save_pretrained(path.parent, max_shard_size="5KB")
    assert len([*path.parent.glob("*.safetensors")]) > 1
    loaded = load(path.parent)
    assert model_digest(loaded) == model_digest(model)
    load_state(path, loaded)


def test_what_cannot_be_saved_is_refused(saved, tmp_path):
    model, path = saved
    ids, compiled = tokens(2), torch.compile(model, backend="eager")
    cache, new = read(model, ids), tmp_path / "new"
    for words, arguments in {
        "exists; expected the name of a new file": (path, cache, model, ids),
        "path=None; expected the name of a file": (None, cache, model, ids),
        "cache=None; expected a HeadraceCache": (new, None, model, ids),
        "cache=HeadraceForCausalLM.{,70}; expected a HeadraceCache": (new, model, cache, ids),
        "model='m'; expected a HeadraceForCausalLM": (new, cache, "m", ids),
        "model=OptimizedModule.{,70}; expected a HeadraceForCausalLM": (new, cache, compiled, ids),
        "the cache is empty": (new, HeadraceCache(), model, ids),
        r"tokens has shape \[1, 9\]; expected \[2, 9\]": (new, cache, model, ids[:1]),
        r"tokens has shape \[2, 8\]; expected \[2, 9\]": (new, cache, model, ids[:, 1:]),
        "is of another model: 0.tokens is missing": (new, cache, HeadraceForCausalLM(tiny.config("gpt")), ids),
        r"0.conv has the sizes \[3, 96\] for \[3, 192\]": (
            new, cache, HeadraceForCausalLM(tiny.config("hybrid", hidden_size=64)), ids,
        ),
        r"0.memory has the sizes \[4, 4, 8\] for \[2, 4, 8\]": (
            new, read(HeadraceForCausalLM(tiny.config("gla")).eval(), ids),
            HeadraceForCausalLM(tiny.config("gla", hidden_size=16, num_heads=2)), ids,
        ),
        "tokens differs from what the cache has read": (new, cache, model, ids.flip(1)),
        "tokens is None, and the cache has not kept what it read": (new, embedded(model, ids), model),
        r"tokens=\[\[1, 2\]\]; expected a tensor": (new, cache, model, [[1, 2]]),
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=words):
            save_state(*arguments)
    assert not new.exists()
    with pytest.raises(InputError, match="path=None; expected the name of a file"):
        load_state(None, model)
    with pytest.raises(InputError, match=r"path=HeadraceForCausalLM.{,70}; expected the name of a file"):
        load_state(model, path)
    with pytest.raises(InputError, match=r"model='m'; expected a HeadraceForCausalLM"):
        load_state(path, "m")


def test_failed_write_leaves_the_old_file_and_no_other(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: 1 / 0)
    ids = tokens(1)
    with pytest.raises(ZeroDivisionError):
        save_state(path, read(model, ids), model, ids, replace=True)
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]
    monkeypatch.undo()
    save_state(path, read(model, ids), model, ids, replace=True)
    assert torch.equal(load_state(path, model)[1], ids)
