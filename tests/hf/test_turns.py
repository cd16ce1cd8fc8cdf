"""A chat whose last turn is edited: only the new turn is read."""

import pytest
import torch

import tiny
from headrace import HeadraceCache, InputError
from headrace.hf.cache import NAME
from headrace.layers.blocks.stack import Backbone
from tiny import tokens

TURNS, NEW = (6, 4, 5), 3  # tokens of each question, and of each answer


@pytest.fixture
def read(monkeypatch):
    """Numbers of tokens that models read at once."""
    counts, prefill = [], Backbone.prefill
    counted = lambda self, x, *rest: counts.append(x.shape[1]) or prefill(self, x, *rest)  # noqa: E731
    monkeypatch.setattr(Backbone, "prefill", counted)
    return counts


def answered(model, ids, cache):
    mask = torch.ones_like(ids)  # an answer may have the token that `generate` takes for padding
    more = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **{NAME: cache}, **more)


def test_text_that_the_cache_has_is_refused():
    model, ids = tiny.build("gla"), tokens(1, 12)
    for text, options in ((ids, {}), (ids[:, :8], {}), (ids[:, 8:], {}), (ids, {"num_beams": 2})):
        cache = model(ids, use_cache=True).past_key_values
        columns = f"past_key_values has 12 columns and the text {text.shape[1]}; expected the whole text, longer"
        with pytest.raises(InputError, match=columns):
            model.generate(text, **{NAME: cache}, max_new_tokens=2, pad_token_id=0, **options)
        assert cache.columns == 12
    expected = answered(model, ids, HeadraceCache())
    for text in (ids, ids[:, 8:]):  # with a mask of the whole text
        cache = model(ids[:, :8], use_cache=True).past_key_values
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        found = model.generate(text, **{NAME: cache}, max_new_tokens=NEW, **options)
        assert torch.equal(found[:, -NEW:], expected[:, -NEW:])


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("mixer", tiny.MIXERS)
def test_edited_turn_is_answered_as_if_the_chat_began_with_it(mixer, read):
    model, cache, ids, starts = tiny.build(mixer), HeadraceCache(), tokens(1, 0), []
    for length in TURNS:
        before = ids
        starts.append(cache.snapshot())
        ids = answered(model, torch.cat([before, tokens(1, length)], 1), cache)
    assert read == [6, 1, 1, 1 + 4, 1, 1, 1 + 5, 1, 1]  # the last token of an answer with the next question
    assert starts == [0, 8, 15] and cache.snapshots.columns == starts
    read.clear()
    edited = torch.cat([before, tokens(1, 7)], 1)
    cache.rewind(cache.columns - starts[-1])
    again = answered(model, edited, cache)
    assert read == [1 + 7, 1, 1]
    read.clear()
    assert torch.equal(again, answered(model, edited, HeadraceCache())) and read == [edited.shape[1], 1, 1]
