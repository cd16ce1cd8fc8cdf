"""The model on Hugging Face's interfaces: its states, generation, padding, packs and training."""

import re
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from transformers import DataCollatorWithFlattening, DynamicCache
from transformers.generation import stopping_criteria

from headrace import InputError, zoo
from headrace import Mixer as layer_of
from headrace.extra.moe import MixtureOfExperts
from headrace.hf import HeadraceCache, HeadraceForCausalLM, generation
from headrace.hf.cache import NAME
from headrace.history.models.encoder_decoder import valid_tokens
from headrace.layers.base import Mixer
from headrace.layers.blocks import stack
from tiny import MIXERS, SIZES, T, build, close, config, covering, tokens

# What depends on the kind of a cache's states and layers is asked of all models, what depends on a call of these.
SOME = ["softmax-gla", "hybrid", "sparse", "window", "experts"]


def of_all_and_some(first, others):
    """(model, case): the first case of all models, the others of some."""
    return [*((name, first) for name in MIXERS), *((name, x) for name in SOME for x in others if x != first)]


@pytest.fixture(params=MIXERS)
def model(request):
    return build(request.param)


# --- the state: traps 1 to 5 of other caches -----------------------------------------------------------------------


@torch.no_grad()
def test_decoding_equals_the_full_forward(model):
    ids, cache, steps = tokens(2), HeadraceCache(), []
    assert cache.get_seq_length() == 0
    for t, piece in enumerate(ids.split([4, 1, 1, 3], 1)):
        steps.append(model(piece, past_key_values=cache).logits)
        assert cache.get_seq_length() == sum([4, 1, 1, 3][: t + 1])
    full = model(ids).logits
    close(torch.cat(steps, 1), full)
    forgetful = model(ids[:, 4:5]).logits
    assert (forgetful - full[:, 4:5]).abs().max() > 1e-2, "the state does not matter: this test has no teeth"


PIECES = {  # masks of prompts that are read in pieces of 4 columns; in the last three a piece is padding in all rows
    "no padding": [[1] * 9, [1] * 9],
    "left and right": [[0] * 5 + [1] * 4, [1] * 6 + [0] * 3],
    "first piece": [[0] * 4 + [1] * 5, [0] * 5 + [1] * 4],
    "between": [[1, 1, 1, 0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0, 1]],
    "last piece": [[1] * 4 + [0] * 5, [1] * 2 + [0] * 7],
}


@pytest.mark.parametrize(("model", "padding"), of_all_and_some("between", PIECES), indirect=["model"])
@torch.no_grad()
def test_long_prompt_is_read_in_pieces(model, padding, monkeypatch):
    ids, mask = tokens(2), torch.tensor(PIECES[padding])
    whole = model(ids, attention_mask=mask)
    lengths = []
    model.model.backbone.layers[0].register_forward_hook(lambda layer, args, out: lengths.append(out.shape[1]))
    monkeypatch.setattr(stack, "PIECE", 4)
    pieces = model(ids, attention_mask=mask)
    layers = model.model.backbone.layers
    recurrent = all(isinstance(mixer, Mixer) for layer in layers for mixer in layer.mixers)
    whole_only = model.model.backbone.shared is not None or any(isinstance(x.mlp, MixtureOfExperts) for x in layers)
    assert lengths == ([4, 4, 1] if recurrent and not whole_only else [T])
    close(pieces.logits[mask > 0], whole.logits[mask > 0])
    assert pieces.logits.isfinite().all() and pieces.past_key_values.get_seq_length() == T
    after = [model(tokens(2, 1) * 0 + 3, past_key_values=x.past_key_values).logits for x in (pieces, whole)]
    close(*after)


@pytest.mark.parametrize("name", covering(zoo.names()))
@torch.no_grad()
def test_offloaded_weights_give_the_same_outputs(name):
    """accelerate's hooks bring the weights of a module when it is called, and leave none beside."""
    plain, ids = build(name, num_hidden_layers=1), tokens(2)
    offloaded = cpu_offload(deepcopy(plain), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in offloaded.parameters())
    caches = None, None
    for piece in ids.split([7, 1, 1], 1):
        expected, actual = (m(piece, past_key_values=c) for m, c in zip((plain, offloaded), caches, strict=True))
        close(actual.logits, expected.logits)
        caches = expected.past_key_values, actual.past_key_values
    for m, cache in zip((plain, offloaded), caches, strict=True):
        cache.rewind(2)
        m.read_pending(cache)
    close(offloaded(piece, past_key_values=caches[1]).logits, plain(piece, past_key_values=caches[0]).logits)


@torch.no_grad()
def test_reading_a_prompt_in_pieces_does_not_change_its_embeddings(monkeypatch):
    """A hook may keep them, and an embedding of one's own may return a view of its weights."""
    monkeypatch.setattr(stack, "PIECE", 4)
    model, ids, kept = build("gla"), tokens(2), []
    given = model.get_input_embeddings()(ids)
    model.get_input_embeddings().register_forward_hook(lambda layer, args, out: kept.append(out))
    model(ids)
    assert torch.equal(kept[0], given)
    model(inputs_embeds=kept[0])
    assert torch.equal(kept[0], given)


@torch.no_grad()
def test_copies_of_a_cache_are_continued_separately(model):
    """A call may write into the states of its cache, as the native one of a token does in float32."""
    model.float()
    ids, cache = tokens(2, 1), model(tokens(2)).past_key_values
    copies = [deepcopy(cache) for _ in range(2)]
    first, *others = (model(ids, past_key_values=each).logits for each in (cache, *copies))
    assert cache.columns == copies[0].columns and all(torch.equal(first, other) for other in others)


def test_copy_of_a_cache_has_the_gradient_of_its_states(model):
    ids, cache = tokens(2), model(tokens(2), use_cache=True).past_key_values
    cache.snapshot()
    losses = [model(ids, past_key_values=each, labels=ids).loss for each in (deepcopy(cache), cache)]
    where = {"inputs": [*model.parameters()], "allow_unused": True, "retain_graph": True}
    own, expected = (torch.autograd.grad(loss, **where) for loss in losses)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(own, expected, strict=True))


@torch.no_grad()
def test_both_argument_names_of_the_cache_work():
    """transformers 5.24 calls past_key_values cache."""
    model, ids, results = build("softmax-gla"), tokens(2), []
    for name in ("past_key_values", "cache"):
        first = model(ids[:, :5])
        assert isinstance(getattr(first, NAME), HeadraceCache)
        results.append(model(ids[:, 5:], **{name: getattr(first, NAME)}).logits)
    assert torch.equal(*results)
    with pytest.raises(InputError, match="past_key_values and cache are both given; expected one"):
        model(ids, past_key_values=HeadraceCache(), cache=HeadraceCache())


def test_gradients_flow_through_the_cache(model):
    """In training a cache passed on is one computation, cut anywhere."""
    ids = tokens(2)
    gradients = []
    for cut in (T, 4):
        cache, logits = HeadraceCache(), []
        for piece in (ids[:, :cut], ids[:, cut:]):
            if piece.shape[1]:
                logits.append(model.train()(piece, past_key_values=cache).logits)
        model.zero_grad()
        torch.cat(logits, 1).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        close(parts, whole, 1e-8)


@torch.no_grad()
def test_cache_rows_are_reordered_together(model):
    ids, last = tokens(3), tokens(4, 1)
    operations = [("reorder_cache", [2, 0, 0, 1]), ("batch_select_indices", [1, 2, 0, 2])]
    operations += [(name, torch.tensor(rows)) for name, rows in operations]
    for name, rows in (*operations, ("batch_select_indices", torch.tensor(1))):
        cache = model(ids).past_key_values
        getattr(cache, name)(rows)
        chosen = ids[rows].view(-1, ids.shape[1])
        ends = last[: len(chosen)]
        close(model(ends, past_key_values=cache).logits[:, 0], model(torch.cat([chosen, ends], 1)).logits[:, -1])
    cache = model(ids[:2]).past_key_values
    cache.batch_repeat_interleave(2)
    twice = ids[[0, 0, 1, 1]]
    close(model(last, past_key_values=cache).logits[:, 0], model(torch.cat([twice, last], 1)).logits[:, -1])


@torch.no_grad()
def test_cache_interface():
    model = build("gla")
    cache = model(tokens(2)).past_key_values
    assert (len(cache), cache.batch_size, cache.is_initialized) == (2, 2, True) and not cache.is_compileable
    assert cache.is_croppable
    with pytest.raises(InputError, match="holds 2 sequences; expected 3"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(InputError, match=r"is a DynamicCache, and .*; expected a HeadraceCache"):
        model(tokens(2), past_key_values=DynamicCache())
    with pytest.raises(InputError, match="other=3; expected a HeadraceCache"):
        cache.append(3)
    ids = tokens(2)
    cache.reset()
    assert (len(cache), cache.batch_size, cache.is_initialized, cache.get_seq_length()) == (0, -1, False, 0)
    close(model(ids, past_key_values=cache).logits, model(ids).logits)
    frozen = model(tokens(2, 1), past_key_values=cache, use_cache=False)
    assert frozen.past_key_values is None and cache.get_seq_length() == T


# --- generate -------------------------------------------------------------------------------------------------------

STRATEGIES = {  # several answers, and beams that are sampled: test_beams.py
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 4},
}


def generate(model, ids, **options):
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize(("model", "strategy"), of_all_and_some("greedy", STRATEGIES), indirect=["model"])
def test_generation_with_and_without_cache_agree(model, strategy):
    ids = tokens(2)
    with_cache = generate(model, ids, **STRATEGIES[strategy])
    assert torch.equal(with_cache, generate(model, ids, use_cache=False, **STRATEGIES[strategy]))
    assert with_cache[:, T:].unique().numel() > 1


@pytest.mark.parametrize(("model", "strategy"), of_all_and_some("greedy", ["beams"]), indirect=["model"])
def test_padded_prompt_generates_the_same_as_alone(model, strategy):
    short, long = tokens(1, 3), tokens(1, 7)
    together = torch.cat([F.pad(short, (4, 0), value=5), long])
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
    out = generate(model, together, attention_mask=mask, **STRATEGIES[strategy])
    assert torch.equal(out[0, 7:], generate(model, short, **STRATEGIES[strategy])[0, 3:])
    assert torch.equal(out[1, 7:], generate(model, long, **STRATEGIES[strategy])[0, 7:])


def test_second_turn_continues_from_the_cache(model):
    """The cache of a padded first turn serves a second one; also when its rows are multiplied."""
    ids, mask = tokens(2), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    first = generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
    cache, so_far = first.past_key_values, first.sequences
    assert cache.get_seq_length() == so_far.shape[1] - 1
    ids = torch.cat([so_far, tokens(2, 4)], 1)
    mask = F.pad(mask, (0, ids.shape[1] - T), value=1)
    cache.batch_repeat_interleave(2)
    options = {"attention_mask": mask, **STRATEGIES["sampling"], "num_return_sequences": 2}
    continued = generate(model, ids, **{NAME: cache}, **options)
    assert torch.equal(continued, generate(model, ids, **options))


# --- padding and packs ------------------------------------------------------------------------------------------------

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 9],
    "middle": [[1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0, 0]],
}


@pytest.mark.parametrize(("model", "side"), of_all_and_some("middle", MASKS), indirect=["model"])
@torch.no_grad()
def test_padding_changes_nothing(model, side):
    """Logits and what comes after, in turns of 9, 2, 1 and 1 columns with padding: as each row's own tokens alone."""
    later = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]])
    mask, ids = torch.cat([torch.tensor(MASKS[side]), later], 1), tokens(2, T + 4)
    cache, logits, end = HeadraceCache(), [], 0
    for piece in ids.split([T, 2, 1, 1], 1):
        end += piece.shape[1]
        logits.append(model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits)
    for row, kept in enumerate(mask.bool()):
        close(torch.cat(logits, 1)[row, kept], model(ids[row, kept][None]).logits[0])


@pytest.mark.parametrize("numbers", [[[1, 1, 1, 2, 2, 0]], [[0.0, 0.0, 0.0, 0.0, 0.0, -1e9]], [[1, 1, 1, 1, -1, 0]]])
@torch.no_grad()
def test_mask_values_other_than_0_and_1_are_refused(numbers):
    """The numbers of the sequences of a pack, and what is added to the logits of a softmax."""
    mask, ids = torch.tensor(numbers), tokens(1, 6)
    value = mask[(mask != 0) & (mask != 1)][0].item()
    sentence = rf"attention_mask has the value {value}; expected 0 for padding and 1 for tokens \(packed sequences"
    with pytest.raises(InputError, match=sentence):
        build("gla")(ids, attention_mask=mask)
    cache = build("gla")(ids).past_key_values
    with pytest.raises(InputError, match=sentence):
        build("gla")(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(InputError, match="attention_mask has the value"):
        valid_tokens(ids, mask)
    with pytest.raises(InputError, match=r"mask has dtype .*; expected torch.bool"):
        layer_of("gla", hidden_size=8)(torch.randn(1, 6, 8), mask=mask)


@torch.no_grad()
def test_mask_longer_than_the_tokens_is_refused():
    """Its last columns would be taken for those of the tokens."""
    model, ids, mask = build("gla"), tokens(2), torch.ones(2, T)
    with pytest.raises(InputError, match=rf"attention_mask has shape \[2, {T}\]; expected \[2, 5\]$"):
        model(ids[:, :5], attention_mask=mask)
    cache = model(ids[:, :2]).past_key_values
    with pytest.raises(InputError, match=rf"\[2, {T}\]; expected \[2, 5\] or, with the tokens before, \[2, 7\]"):
        model(ids[:, 2:7], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_packed_sequences_equal_separate_ones(model):
    lengths = [4, 1, 4]
    ids, last = tokens(1), tokens(3, 1)
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    packed = model(ids, cu_seqlens=ends)
    after = model(last, past_key_values=packed.past_key_values).logits
    pieces = zip(ids[0].split(lengths), packed.logits[0].split(lengths), last, after, strict=True)
    for sequence, logits, one_more, its_logits in pieces:
        alone = model(torch.cat([sequence, one_more])[None]).logits[0]
        close(torch.cat([logits, its_logits]), alone)


# --- training -----------------------------------------------------------------------------------------------------


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its successor's name is new
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(model, reentrant):
    ids = tokens(2)
    model.train()
    kept = gradients(model, ids)
    calls = []
    for layer in model.model.backbone.layers:
        layer.mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    if reentrant and model.config.sizes.style.experts:
        with pytest.raises(InputError, match="expected use_reentrant=False"):
            gradients(model, ids)
        return
    again = gradients(model, ids)
    assert len(calls) == 2 * len(model.model.backbone.layers), "nothing was computed again"
    for name, gradient in kept.items():
        if model.config.sizes.style.shared:  # what flows into the embeddings is summed in another order
            close(again[name], gradient, 1e-12)
        else:
            assert torch.equal(again[name], gradient), name


@torch.no_grad()
def test_marks_beside_bounds_are_compared_without_a_wait(monkeypatch):
    """As on a GPU and in a graph that is compiled."""
    monkeypatch.setattr("headrace.hf.inputs.avoid_sync", lambda x: True)
    model, ids, bounds = build("gla"), tokens(1), torch.tensor([0, 4, T])
    places = torch.cat([torch.arange(4), torch.arange(T - 4)])[None]
    numbers = (torch.arange(T) >= 4).long()[None] * 3
    expected = model(ids, cu_seqlens=bounds).logits
    assert torch.equal(model(ids, position_ids=places, seq_idx=numbers, cu_seqlens=bounds).logits, expected)
    for name, wrong in {"position_ids": torch.arange(T)[None], "seq_idx": numbers.flip(1)}.items():
        with pytest.raises(RuntimeError, match=f"{name} marks? other sequences; expected the sequences of cu_seqlens"):
            model(ids, cu_seqlens=bounds, **{name: wrong})
        with pytest.raises(InputError, match=f"{name} is not of shape"):
            model(ids, cu_seqlens=bounds, **{name: wrong[:, 1:]})


@pytest.mark.parametrize("mixer", [*MIXERS, "jamba", *covering(zoo.names())])
@pytest.mark.filterwarnings("ignore")  # of gates that cannot act
def test_what_is_kept_in_float32_is_in_the_model(mixer):
    with torch.device("meta"):
        model = HeadraceForCausalLM(config(mixer))
    for part in (model, model.model):
        kept = part._keep_in_fp32_modules_strict
        assert bool(kept) is any("router" in name for name, _ in part.named_parameters())
        assert all(any(each in name for name in part.state_dict()) for each in kept)


@pytest.mark.parametrize("mixer", MIXERS)
def test_half_precision_training_agrees(mixer):
    torch.manual_seed(4)
    model, ids = build(mixer), tokens(2)
    exact = model(ids, labels=ids).loss
    rounded = model.bfloat16().train()(ids, labels=ids).loss
    rounded.backward()
    assert abs(rounded / exact - 1) < 0.05 and all(p.grad.isfinite().all() for p in model.parameters())


def test_losses_equal_transformers():
    model, ids = build("gla"), tokens(2)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    close(out.loss, expected / count, 1e-6)
    for items in (7, torch.tensor(7), torch.tensor([7])):
        close(model(ids, labels=labels, num_items_in_batch=items).loss, expected / 7, 1e-6)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    close(model(ids, shift_labels=shifted).loss, out.loss)
    with pytest.raises(TypeError, match="unexpected argument 'label'"):
        model(ids, label=labels)


@pytest.mark.parametrize("mixer", ["softmax-gla", "hybrid", "experts", "mamba and s4"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 1), (2, 0)], ids=str)
@torch.no_grad()
def test_no_sequence_and_no_token_have_no_loss(mixer, shape):
    """In float32, in which native kernels compute."""
    model, ids = build(mixer).float(), torch.zeros(shape, dtype=torch.long)
    out = model(ids, labels=ids, use_cache=True)
    assert out.logits.shape == (*shape, model.config.vocab_size) and out.loss == 0
    for cache in (HeadraceCache(), out.past_key_values):
        assert model(ids, past_key_values=cache).logits.shape == out.logits.shape
        assert model(ids.new_zeros(shape[0], 1), past_key_values=cache).logits.shape[:2] == (shape[0], 1)
        mask = torch.ones(shape[0], cache.columns)
        assert model.train()(ids[:, :0], labels=ids[:, :0], attention_mask=mask, past_key_values=cache).loss == 0


@pytest.mark.parametrize("mixer", ["softmax-gla", "transformer", "mamba"])
@pytest.mark.parametrize("padding", [0, 3])
def test_hidden_states_have_gradients(mixer, padding):
    """Those of one block are what the next one reads, and hooks on blocks, whose outputs are tensors, and the norm find
    them under the names of transformers."""
    model, ids = build(mixer), torch.randint(1, SIZES["vocab_size"], (2, 9))
    mask = (torch.arange(9) >= torch.tensor([[0], [padding]])).long()
    seen, outputs = [], []
    hooks = [layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for layer in model.model.layers]
    hooks += [layer.register_forward_hook(lambda module, args, y: outputs.append(y)) for layer in model.model.layers]
    normed = model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for hook in (*hooks, normed):
        hook.remove()
    assert all(torch.equal(inside, given) for inside, given in zip(seen, hidden, strict=True))
    assert all(torch.equal(output, given) for output, given in zip(outputs[:-1], seen[1:-1], strict=True))
    for each in hidden:
        each.retain_grad()
    (model.lm_head(hidden[-1]).square().mean(2) * mask).sum().backward()
    assert all(each.grad is not None and (each.grad[1, padding:] != 0).any() for each in hidden)


def test_output_options_are_supported():
    model, ids = build("hybrid"), tokens(2)
    out = model(ids, output_hidden_states=True)
    assert [h.shape for h in out.hidden_states] == [(2, T, SIZES["hidden_size"])] * 3
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    for keep in (-3, "all", [1]):
        said = f"logits_to_keep={keep!r}; expected at least 0, or a tensor of positions"
        with pytest.raises(InputError, match=re.escape(said)):
            model(ids, logits_to_keep=keep)
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, out.logits)
    assert torch.equal(model(ids, return_dict=False)[0], out.logits) and model.train()(ids).past_key_values is None
    for got, wrong in {"neither": {}, "both": {"input_ids": ids, "inputs_embeds": out.hidden_states[0]}}.items():
        with pytest.raises(InputError, match=f"expected input_ids or inputs_embeds; got {got}"):
            model(**wrong)


@pytest.mark.parametrize("mixer", ["softmax-gated-deltanet", "retnet", "transformer", "mamba"])
def test_short_loop_generates_the_tokens_of_transformers(mixer, monkeypatch):
    """The short loop against the long one: greedy and sampled, with processors, ends within a batch and padding."""
    model = build(mixer).float().eval()
    ids = torch.randint(3, SIZES["vocab_size"], (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    settings = [
        {}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
        {"eos_token_id": list(range(20)), "do_sample": True, "pad_token_id": 1},
        {"num_return_sequences": 2, "do_sample": True},
    ]  # fmt: skip

    def tokens():
        torch.manual_seed(0)
        return [
            model.generate(ids, attention_mask=mask, **{"max_new_tokens": 12, "pad_token_id": 0} | s) for s in settings
        ]

    short = []
    monkeypatch.setattr(generation, "loop", _noted(generation.loop, short))
    result = tokens()
    assert len(short) == len(settings)
    monkeypatch.setattr(generation, "special_reason", lambda *_: "a test of it")
    assert all(torch.equal(x, y) for x, y in zip(result, tokens(), strict=True)) and len(short) == len(settings)


def test_generation_from_no_token_is_refused():
    for shape in ([2, 0], [1, 0], [0, 3], [3]):
        with pytest.raises(InputError, match=f"input_ids has shape {re.escape(str(shape))}; expected "):
            build("gla").generate(torch.ones(shape, dtype=torch.long), max_new_tokens=2, pad_token_id=0)
    with pytest.raises(InputError, match=r"input_ids=\[\[1\]\]; expected a tensor"):
        build("gla").generate([[1]], max_new_tokens=2)


def test_short_loop_says_that_a_text_is_longer_than_the_longest(monkeypatch):
    model, told = build("gla", max_position_embeddings=T + 2).float().eval(), []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", told.append)
    model.generate(tokens(1), max_new_tokens=6, pad_token_id=0, eos_token_id=None)
    assert any(f"predefined maximum length ({T + 2})" in line for line in told)


def test_tokens_on_another_device_take_the_loop_of_transformers(monkeypatch):
    """It moves them to the model for each call, but compares those of a draft where they are."""
    model, ids = build("gla").float().eval(), tokens(1)
    monkeypatch.setattr(HeadraceForCausalLM, "device", torch.device("meta"))  # in place of a GPU
    model.generate(ids, max_new_tokens=2, pad_token_id=0, attention_mask=torch.ones_like(ids))
    assert model.engine.graph_refused == "the last generation had its tokens on another device"
    with pytest.raises(InputError, match="input_ids is on cpu; expected meta, the model's device"):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=2, pad_token_id=0)


def _noted(function, calls):
    return lambda *args: (calls.append(1), function(*args))[1]


def test_hooks_and_outputs_use_the_loop_of_transformers():
    model, ids = build("gla").eval(), torch.randint(3, SIZES["vocab_size"], (1, 5))
    seen = []
    handle = model.model.register_forward_hook(lambda *_: seen.append(1))
    model.generate(ids, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
    assert len(seen) == 6
    handle.remove()
    result = model.generate(
        ids, max_new_tokens=6, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    assert len(result.logits) == 6


# --- positions and labels ---------------------------------------------------------------------------------------------

PACK = [[0, 1, 2, 3, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(("model", "rows"), of_all_and_some(2, [1]), indirect=["model"])
@torch.no_grad()
def test_restarting_positions_are_packed_sequences(model, rows):
    ids, positions = tokens(rows), torch.tensor(PACK * rows)
    if rows == 2:
        positions[1] = torch.tensor([0, 1, 0, 1, 2, 3, 4, 5, 6])
    given = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    packed = model(**given)
    starts = (positions.flatten() == 0).nonzero()[1:, 0].tolist()
    pieces = ids.flatten().tensor_split(starts)
    alone = [model(piece[None]).logits[0] for piece in pieces]
    close(packed.logits.flatten(0, 1), torch.cat(alone))
    if not model.config.sizes.style.experts:  # whose balance is that of all tokens
        close(packed.loss, summed(alone, pieces) / (positions != 0).sum(), 1e-6)


def summed(logits, pieces):
    """The loss of sequences that do not see each other."""
    pairs = zip(logits, pieces, strict=True)
    return sum(F.cross_entropy(x[:-1].float(), piece[1:], reduction="sum") for x, piece in pairs)


def test_flattening_collator_batches_are_packed_sequences():
    model, documents = build("softmax-gla"), tokens(1)[0].split([4, 1, 4])
    expected = summed([model(x[None]).logits[0] for x in documents], documents) / 6
    for flash in (False, True):
        collator = DataCollatorWithFlattening(return_position_ids=not flash, return_flash_attn_kwargs=flash)
        batch = collator([{"input_ids": x.tolist()} for x in documents])
        assert ("cu_seq_lens_q" in batch) == flash != ("position_ids" in batch)
        close(model(**batch).loss, expected, 1e-6)
        batch.pop("labels")
        last = model.model(**batch).last_hidden_state[0, -4:]  # a trainer may call the base model alone
        close(last, model.model(documents[2][None]).last_hidden_state[0])
    both = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": x.tolist()} for x in documents])
    close(model(**both).loss, expected, 1e-6)


@torch.no_grad()
def test_ordinary_positions_change_nothing(model):
    ids, counted = tokens(2), torch.arange(T).expand(2, T)
    expected = model(ids).logits
    for positions in (counted, counted[:1]):
        assert torch.equal(model(ids, position_ids=positions).logits, expected)
    mask = torch.tensor(MASKS["left"])
    padded = model(ids, attention_mask=mask).logits
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, padded)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    for columns, more in ((4, {}), (6, {"attention_mask": torch.ones(2, 2)})):  # of these tokens alone
        some = slice(columns, columns + 2)
        after = model(ids[:, some], past_key_values=cache, position_ids=counted[:, some], **more).logits
        close(after, expected[:, some])


@pytest.mark.parametrize("seq_idx", [[[0, 0, 0, 0, 3, 3, 4, 4, 4]], [[0] * 4 + [1] * 5, [5] * 2 + [6] * 7]])
def test_seq_idx_is_packed_sequences(seq_idx):
    seq_idx = torch.tensor(seq_idx, dtype=torch.int32)
    model, ids = build("softmax-gla"), tokens(9)[:1].expand(seq_idx.shape).contiguous()
    logits = model(ids, seq_idx=seq_idx).logits
    for row, numbers in enumerate(seq_idx.tolist()):
        for number in set(numbers):
            own = seq_idx[row] == number
            close(logits[row, own], model(ids[row, own][None]).logits[0])


def test_seq_idx_and_positions_agree():
    model, ids = build("gla"), tokens(9)[:1]
    batch = DataCollatorWithFlattening(return_seq_idx=True)([{"input_ids": ids[0, :4]}, {"input_ids": ids[0, 4:]}])
    both, one = model(**batch), model(**{name: x for name, x in batch.items() if name != "seq_idx"})
    close(both.loss, one.loss)


ENDS, OTHER = torch.tensor([0, 4, 9]), torch.zeros(1, 9, dtype=torch.int32)
WRONG_PLACES = {
    r"seq_idx has shape \[1, 8\]; expected \[1, 9\]": {"seq_idx": [[0] * 8]},
    "seq_idx of row 0 falls from 0 to -1": {"seq_idx": [[0] * 8 + [-1]]},
    "seq_idx of row 0 begins with -1": {"seq_idx": [[-1] * 9]},
    "seq_idx has dtype torch.float32; expected integers": {"seq_idx": [[0.0] * 9]},
    "position_ids of row 0 go from 3 to 5": {"position_ids": [[0, 1, 2, 3, 5, 6, 7, 8, 9]]},
    "position_ids of row 0 begin with 4": {"position_ids": [[4, 5, 6, 7, 8, 9, 10, 11, 12]]},
    r"position_ids has shape \[1, 3\]; expected \[1, 9\]": {"position_ids": [[0, 1, 2]]},
    "seq_idx marks other sequences than position_ids": {"seq_idx": OTHER, "position_ids": PACK},
    "position_ids or seq_idx mark other sequences than cu_seqlens": {"position_ids": PACK, "cu_seqlens": ENDS},
    "seq_idx mark other sequences than cu_seqlens": {"seq_idx": OTHER, "cu_seqlens": ENDS},
    "cu_seq_lens_k differs from cu_seq_lens_q": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": [0, 5, 9]},
}


@pytest.mark.parametrize("sentence", WRONG_PLACES)
def test_wrong_places_are_refused(sentence):
    given = {name: torch.as_tensor(x) for name, x in WRONG_PLACES[sentence].items()}
    model, ids = build("gla"), tokens(1)
    with pytest.raises(InputError, match=sentence):
        model(ids, **given)


def test_positions_go_on_behind_a_cache():
    model, ids = build("gla"), tokens(1)
    cache = model(ids).past_key_values
    with pytest.raises(InputError, match="position_ids of row 0 begin with 0; expected 9"):
        model(ids, position_ids=torch.tensor(PACK), past_key_values=cache)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_wrong_shape_are_refused(training, name):
    model, ids = build("gla").train(training), torch.randint(1, SIZES["vocab_size"], (2, 64))
    cache = HeadraceCache()
    for shape in ((2, 3), (1, 64), (128,)):
        with pytest.raises(InputError, match=rf"{name} has shape .*; expected \[2, 64\]"):
            model(ids, past_key_values=cache, **{name: torch.ones(shape, dtype=torch.long)})
    with pytest.raises(InputError, match="logits_to_keep=-1; expected at least 0"):
        model(ids, past_key_values=cache, logits_to_keep=-1)
    assert not cache.is_initialized  # what is refused is not read


@pytest.mark.parametrize(
    "name", ["input_ids", "inputs_embeds", "attention_mask", "labels", "shift_labels", "position_ids", "seq_idx"]
)
def test_lists_are_refused_where_the_model_takes_tensors(name):
    model, ids = build("gla"), tokens(1)
    given = {} if name == "inputs_embeds" else {"input_ids": ids}
    with pytest.raises(InputError, match=rf"{name}=\[1, 2\]; expected a tensor"):
        model(**given | {name: [1, 2]})
    with torch.no_grad(), pytest.raises(InputError, match="attention_mask"):
        model(ids[:, -1:], past_key_values=model(ids).past_key_values, attention_mask=[1])
    with pytest.raises(InputError, match=r"cu_seq_lens_q=\[0, 9\]; expected a tensor"):
        model(ids, cu_seq_lens_q=[0, 9], cu_seq_lens_k=[0, 9])
    model, cache = build("transformer"), DynamicCache()
    model(ids, past_key_values=cache)
    with pytest.raises(InputError, match=r"attention_mask=\[1\]; expected a tensor"):
        model(ids[:, -1:], past_key_values=cache, attention_mask=[1])
