"""A chat whose last turn is edited: only the new turn is read."""

import pytest
import torch

import tiny
from headrace import HeadraceCache
from headrace.hf.cache import NAME
from headrace.layers.blocks.stack import Backbone
from tiny import tokens

TURNS, NEW = (6, 4, 5), 3  # tokens of each question, and of each answer


@pytest.fixture
def read(monkeypatch):
    """Numbers of tokens that models read at once."""
    counts, prefill = [], Backbone.prefill

    def counted(self, x, *rest):
        counts.append(x.shape[1])
        return prefill(self, x, *rest)

    monkeypatch.setattr(Backbone, "prefill", counted)
    return counts


def answered(model, ids, cache):
    mask = torch.ones_like(ids)  # an answer may have the token that `generate` takes for padding
    return model.generate(
        ids, attention_mask=mask, **{NAME: cache}, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )


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
    assert torch.equal(again, answered(model, edited, HeadraceCache()))
    assert read == [edited.shape[1], 1, 1]
