"""Beam search and several answers to a prompt, which is read once for all of them."""

import pytest
import torch

import tiny
from headrace.hf.cache import NAME
from headrace.hf.generation import HeadraceGenerationMixin
from headrace.layers.blocks.stack import Backbone
from headrace.utils.errors import InputError
from tiny import T, tokens

STRATEGIES = {
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several of the beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
ALL = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}


def generate(model, ids, mask=None, **options):
    torch.manual_seed(1)
    return model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0, **options)


@pytest.fixture
def read_by_each(monkeypatch):
    """Runs a function with transformers' own prefill, which reads the prompt once for each beam."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.delattr(HeadraceGenerationMixin, "_prefill")
            return function()

    return run


@pytest.fixture
def prompts(monkeypatch):
    """The shapes [B, T] of what models read at once."""
    shapes, prefill = [], Backbone.prefill
    noted = lambda self, x, *rest: shapes.append(x.shape[:2]) or prefill(self, x, *rest)  # noqa: E731
    monkeypatch.setattr(Backbone, "prefill", noted)
    return shapes


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("mixer", tiny.MIXERS)
def test_prompt_is_read_once_for_the_same_tokens(mixer, prompts, read_by_each):
    """Of a left-padded batch. Every output under every strategy is that of one model below."""
    model, ids, mask = tiny.build(mixer), tokens(2), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    for options in (STRATEGIES["beams"], STRATEGIES["several"]):
        prompts.clear()
        together = generate(model, ids, mask, **options)
        assert [shape for shape in prompts if shape[1] > 1] == [(2, T)]
        prompts.clear()
        assert torch.equal(together, read_by_each(lambda given=options: generate(model, ids, mask, **given)))
        assert prompts[0] == (6, T)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_answers_go_on_from_a_cache_of_the_prompt(strategy):
    """That of a first turn, which is repeated too."""
    model, ids = tiny.build("hybrid"), tokens(2)
    first = generate(model, ids, return_dict_in_generate=True, do_sample=False)
    cache, ids = getattr(first, NAME), torch.cat([first.sequences, tokens(2, 3)], 1)
    options = STRATEGIES[strategy]
    assert torch.equal(generate(model, ids, **{NAME: cache}, **options), generate(model, ids, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_output_has_a_row_for_each_beam(strategy, read_by_each):
    model, ids, options = tiny.build("gla"), tokens(2), {**STRATEGIES[strategy], **ALL}
    once, each = generate(model, ids, **options), read_by_each(lambda: generate(model, ids, **options))
    for name in ("logits", "hidden_states"):
        tiny.close(once[name], each[name])
    assert torch.equal(once.sequences, each.sequences)


@pytest.mark.parametrize("options", [STRATEGIES["beams"], {"do_sample": False}])
def test_embeddings_pieces_and_no_cache(options):
    model, ids = tiny.build("hybrid"), tokens(2)
    expected = generate(model, ids, **options)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4, **options), expected)
    assert torch.equal(generate(model, ids, use_cache=False, **options), expected)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, None, inputs_embeds=embedded, **options), expected[:, T:])
    # transformers divides the ids alone, so each chunk of them would read all embeddings again
    with pytest.raises(InputError, match="prefill_chunk_size=2 with inputs_embeds"):
        generate(model, ids, prefill_chunk_size=2, inputs_embeds=embedded, **options)
