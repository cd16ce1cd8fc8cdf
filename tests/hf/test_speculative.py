"""Speculative decoding: a draft changes how fast tokens come, and not which."""

import copy
import itertools
import math

import pytest
import torch

import tiny
from headrace import HeadraceCache, InputError
from headrace.hf.cache import NAME
from headrace.hf.generation import CARRY

NEW, PROPOSED = 24, 5
TARGETS = ["softmax-gated-deltanet", "mamba and s4", "hybrid", "transformer", "gpt", "sparse", "rwkv6", "experts"]


def near(model, size):
    """A model that often predicts the same."""
    other = tiny.perturbed(copy.deepcopy(model), size)
    other.generation_config.num_assistant_tokens = PROPOSED
    return other


def generate(model, ids, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, **settings | options)


def columns(model, monkeypatch):
    """The columns of each call of the model's layers, from now on."""
    counts, read = [], model.model._read
    monkeypatch.setattr(model.model, "_read", lambda x, *rest: counts.append(x.shape[1]) or read(x, *rest))
    return counts


@pytest.mark.parametrize(
    ("draft", "name"),
    [*(("near", name) for name in TARGETS), ("itself", "softmax-gated-deltanet"), ("gla", "hybrid"),
     ("transformer", "rwkv6")],
)  # fmt: skip
def test_greedy_tokens_are_the_same(name, draft, monkeypatch):
    """In float64, where no tie decides."""
    model = tiny.build(name)
    of_model = {"itself": (model, 0), "near": (model, 0.01)}
    other = near(*of_model[draft]) if draft in of_model else near(tiny.build(draft), 0)
    for length in (1, 90):
        ids, cache = tiny.tokens(1, length), HeadraceCache()
        expected = generate(model, ids)
        passes, steps = columns(model, monkeypatch), columns(other, monkeypatch)
        assert torch.equal(generate(model, ids, assistant_model=other, **{NAME: cache}), expected)
        accepted = sum(right for _, right in cache.drafts)
        assert accepted + len(cache.drafts) == NEW
        if draft == "itself":
            assert accepted == sum(proposed for proposed, _ in cache.drafts)
        # No verification reads the prompt again, nor more than what is carried, the last token and the proposed ones.
        of_prompt = [length - 1] if length > 1 else []
        assert passes[: len(of_prompt)] == of_prompt and max(passes[len(of_prompt) :]) <= CARRY + PROPOSED + 2
        # The draft carries at most CARRY tokens into a round, in which it reads two and all but the last it proposes.
        assert max(steps[2:]) <= CARRY + PROPOSED + 1
        monkeypatch.undo()


@pytest.mark.parametrize("name", TARGETS)
def test_prompt_lookup_gives_the_same_tokens(name):
    """Of a padded prompt."""
    model, cache = tiny.build(name), HeadraceCache()
    ids = tiny.tokens(1, 6).repeat(1, 3)
    where = {"attention_mask": (torch.arange(18) > 1).long()[None]}
    expected = generate(model, ids, **where)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4, **{NAME: cache}, **where), expected)
    assert sum(right for _, right in cache.drafts) + len(cache.drafts) == NEW


def test_maps_are_returned_beside_the_same_tokens():
    model, ids = tiny.build("transformer"), tiny.tokens(1, 6)
    options, new = {"output_attentions": True, "return_dict_in_generate": True}, {"max_new_tokens": 8}
    for ways in ({"assistant_model": near(model, 0)}, {"prompt_lookup_num_tokens": 4}):
        out = generate(model, ids, **options, **ways, **new)
        assert torch.equal(out.sequences, generate(model, ids, **new))
        assert [(*maps[0].shape[-2:],) for maps in out.attentions] == [(6, 6), *((1, L) for L in range(7, 14))]


def test_hidden_states_and_embeddings_of_the_prompt():
    model, ids = tiny.build("gla"), tiny.tokens(1, 6)
    out = generate(model, ids, prompt_lookup_num_tokens=4, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generate(model, ids))
    assert [states[-1].shape[1] for states in out.hidden_states] == [6] + [1] * (NEW - 1)
    x = model.get_input_embeddings()(ids)
    expected = generate(model, None, inputs_embeds=x)
    assert torch.equal(generate(model, None, inputs_embeds=x, prompt_lookup_num_tokens=4), expected)


def statistic(counts, chances, samples):
    """Pearson's, over all outcomes."""
    return sum((counts.get(k, 0) - samples * p) ** 2 / (samples * p) for k, p in chances.items())


@torch.no_grad()
def chances(model, ids, new):
    """The probability of each continuation."""
    found = {}
    for tokens in itertools.product(range(model.config.vocab_size), repeat=new):
        row = torch.cat([ids, torch.tensor([tokens])], 1)
        logs = model(row).logits[0].log_softmax(-1)
        found[tokens] = math.exp(sum(logs[ids.shape[1] - 1 + i, t] for i, t in enumerate(tokens)))
    return found


@pytest.mark.parametrize("way", ["draft", "lookup"])
def test_sampled_tokens_have_the_models_distribution(way):
    """Of 27 continuations. Pearson's statistic of n outcomes is that of a χ² of d = n − 1 degrees of freedom, which is
    above d + 2 √(d t) + 2 t with a probability of at most e^−t (Laurent and Massart, 2000, lemma 1); t = 14."""
    model = tiny.build("gla", vocab_size=3, num_hidden_layers=1)
    draft = near(tiny.build("mamba2", vocab_size=3, num_hidden_layers=1), 0)
    draft.generation_config.num_assistant_tokens = 2
    with torch.no_grad():
        for each in (model, draft):
            each.lm_head.weight.mul_(0.2)  # no outcome is rare
    ids, samples, counts = torch.tensor([[1, 2, 1, 1, 2]]), 300, {}
    options = {"assistant_model": draft} if way == "draft" else {"prompt_lookup_num_tokens": 2}
    torch.manual_seed(1)
    for _ in range(samples):
        out = generate(model, ids, do_sample=True, max_new_tokens=3, top_k=0, **options)
        key = tuple(out[0, ids.shape[1] :].tolist())
        counts[key] = counts.get(key, 0) + 1
    exact, d, t = chances(model, ids, 3), 26, 14
    assert min(exact.values()) * samples > 1
    limit = d + 2 * math.sqrt(d * t) + 2 * t
    assert statistic(counts, exact, samples) < limit
    assert statistic(counts, chances(draft, ids, 3), samples) > limit  # it tells the models apart


def test_refusals():
    model, ids = tiny.build("gla"), tiny.tokens(1, 6)
    filled = HeadraceCache()
    with torch.no_grad():
        model(ids[:, :3], past_key_values=filled)
    with pytest.raises(InputError, match="past_key_values has 3 columns; expected an empty cache with a draft model"):
        generate(model, ids, prompt_lookup_num_tokens=2, **{NAME: filled})
    with pytest.raises(InputError, match="use_cache=False with a draft model or prompt lookup; expected a cache"):
        generate(model, ids, prompt_lookup_num_tokens=2, use_cache=False)
